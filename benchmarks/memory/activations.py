"""Models at their smallest budgets: latency, error, and memory use over time.

    python -m benchmarks.memory.activations --zoo DIR --device pocl [--models NAME...] [--precisions fp32 fp16] [--runs 3]

DIR contains models that `benchmarks.exports` wrote, each in a folder of its name, with its inputs.npz. Each measured row is
written to `--rows` (docs/research/activations.json) at once, and the page `--page` (docs/research/activations.md) is written
from all rows. Rows of this device that exist are not measured again, so that an interrupted run can continue (`--again`
measures all). A model that fails gets a row with the error, and the next call tries it again. For each model and precision:

- the smallest budget that the planner names, and the bytes of activations in the arena at that budget;
- the peak bytes needed at once, a lower bound of every arena;
- the first answer of a session at that budget, within twice of it, and without a limit;
- the average memory of the plan within twice the smallest budget, compared with the paper's (Table 8, a phone);
- the largest error against ONNX Runtime at the smallest budget, as a fraction of the range of that output;
- a plot of memory over one traced run at the smallest budget (`--pictures`): weights, live activations, the rest of the arena,
  constants, staging, copied outputs.

First answers are medians of `--runs` fresh processes, which alternate if the disk has room for three bundles. The file is in
the page cache, and kernels are in the program cache. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import traceback
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.exports.export import INPUTS
from benchmarks.exports.models import names, tiny_names
from benchmarks.memory.activations_page import draw, page
from benchmarks.memory.budgets import TABLE_8, Precision, Row, compiled_at_smallest, keep, read_rows, why
from benchmarks.processes import run_bundle, run_worker, take_turns, weights_of
from flashmem.base.files import written_whole
from flashmem.bundle.bundle import Bundle
from flashmem.program.launches import first_and_last
from flashmem.program.program import Program
from flashmem.runtime.request.options import device_here
from flashmem.tools.verify import compare

_MAPPED_BYTES = 4 << 30  # of weights: above that, ONNX Runtime reads them in place without a second copy
_KEY = ("model", "precision", "device")


def alive(program: Program) -> list[int]:
    """Bytes of the arena that a later launch, or the user, still reads: before the first launch, and at each launch."""
    layers = len(program.launches)
    lives = first_and_last(program.launches, "tensor")
    for name in (
        *(port.tensor for port in program.inputs),
        *(gather.tensor for gather in program.host_embeddings),
        program.status,
    ):
        if name is not None:
            lives[name] = (0, lives.get(name, (0, 0))[1])
    for name, end in (*((port.tensor, port.ready) for port in program.outputs), (program.status, None)):
        if name is not None:
            lives[name] = (lives.get(name, (0, 0))[0], layers if end is None else end)
    tensors = {tensor.name: tensor for tensor in program.tensors}
    return [
        _covered([(tensors[n].offset, tensors[n].offset + tensors[n].nbytes) for n, (a, b) in lives.items() if a <= layer <= b])
        for layer in range(layers + 1)
    ]


def _covered(spans: list[tuple[int, int]]) -> int:
    """Bytes inside at least one span."""
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Measured:
    """One model in one precision; `scratch` is a folder for its bundles, each as large as the weights."""

    def __init__(self, name: str, model: Path, precision: Precision, scratch: Path, args: argparse.Namespace) -> None:
        self.name, self.model, self.precision, self.scratch, self.args = name, model, precision, scratch, args
        given = model.parent / INPUTS
        self.inputs = ("--inputs", str(given)) if given.is_file() else ()

    def row(self) -> Row:
        """The data of the model on the page. Draws the plot."""
        smallest, tight = compiled_at_smallest(self.model, self.scratch / "tight.flashmem", self.args.device, self.precision)
        program = tight.program
        trace, outputs = self.scratch / "trace.json", self.scratch / "outputs.npz"
        self.run(tight, "--outputs", str(outputs))
        error = self.error(outputs, tight)
        self.run(tight, "--trace", str(trace))
        picture = self.args.pictures / f"{self.name}-{self.precision}.png"
        draw(json.loads(trace.read_text()), alive(program), program.arena_bytes, f"{self.name}, {self.precision}", picture)
        runs = self.in_turns(tight, {"twice": 2 * smallest, "unlimited": None})
        return {
            "runs": self.args.runs,
            "weights": weights_of(tight),
            "smallest": smallest,
            "arena": program.arena_bytes,
            "alive": program.live_bytes,
            "peak": max(row["ledger_peak"] for row in runs["smallest"]),
            "above_bare": max(row["above_bare"] for row in runs["smallest"]),
            "average_twice": statistics.median(row["ledger_average"] for row in runs["twice"]),
            "paper": TABLE_8.get(self.name),
            "first": {what: statistics.median(row["integrated"] for row in rows) for what, rows in runs.items()},
            "error": error,
        }

    def in_turns(self, tight: Bundle, others: dict[str, int | None]) -> dict[str, list[Row]]:
        """Rows of runs within the smallest budget and the `others`. They alternate if the disk has room for all bundles."""
        weights = tight.program.weights_bytes
        if shutil.disk_usage(self.scratch).free > 1.1 * len(others) * weights:
            bundles = {"smallest": tight, **{what: self.compiled(budget) for what, budget in others.items()}}
            return take_turns({what: partial(self.run, bundle) for what, bundle in bundles.items()}, self.args.runs)
        rows = {"smallest": [self.run(tight) for _ in range(self.args.runs)]}
        shutil.rmtree(tight.path)
        for what, budget in others.items():
            bundle = self.compiled(budget)
            rows[what] = [self.run(bundle) for _ in range(self.args.runs)]
            shutil.rmtree(bundle.path)
        return rows

    def compiled(self, budget: int | None) -> Bundle:
        """A new bundle, with its kernels in the cache."""
        path = self.scratch / f"{budget}.flashmem"
        return flashmem.compile(self.model, path, device=self.args.device, precision=self.precision, budget=budget)

    def run(self, bundle: Bundle, *extra: str) -> Row:
        """Run one fresh process."""
        return run_bundle(bundle.path, self.args.device, *self.inputs, *extra)

    def error(self, outputs: Path, bundle: Bundle) -> float | None:
        """The error as `flashmem run --verify` computes it; None if it is not finite."""
        reference = self.scratch / "reference.npz"
        how = ("--mapped",) if weights_of(bundle) > _MAPPED_BYTES else ()
        run_worker("onnxruntime", "--model", str(self.model), "--outputs", str(reference), *self.inputs, *how)
        with np.load(outputs) as ours, np.load(reference) as theirs:
            found = compare([ours[key] for key in ours.files], [theirs[key] for key in theirs.files], "fp32").relative_error
        return found if np.isfinite(found) else None


def main() -> None:
    """Measure every named model that exists."""
    docs = Path(__file__).parents[2] / "docs" / "research"
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--models", nargs="*", default=list(TABLE_8), choices=(*names(), *tiny_names()), metavar="NAME")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "fp16"], choices=("fp32", "fp16"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure those that have a row for this device, too")
    parser.add_argument("--rows", type=Path, default=docs / "activations.json")
    parser.add_argument("--page", type=Path, default=docs / "activations.md")
    parser.add_argument("--pictures", type=Path, default=docs / "activations", help="the folder that pictures are written to")
    parser.add_argument("--scratch", type=Path, help="where bundles are written, three at a time (default: temporary files)")
    args = parser.parse_args()
    parser.check_device(args.device)
    parser.models_in(args.zoo, args.models)  # at least one
    here = device_here(args.device).descriptor_name
    done = set() if args.again else {tuple(row[name] for name in _KEY) for row in read_rows(args.rows) if "failed" not in row}
    args.pictures.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name, precision in ((name, precision) for name in args.models for precision in args.precisions):
        if (name, precision, here) in done:
            continue
        row = measured(name, precision, args)
        rows = keep(row, args.rows, _KEY)
        with written_whole(args.page) as file:
            file.write(page(rows, args.pictures.name).encode())
        said = row.get("failed") or f"{row['smallest'] / 1e6:.1f} MB, error {row['error']}"
        print(f"{name} {precision}: {said}", file=sys.stderr, flush=True)
        failed += [f"{name} {precision}"] if "failed" in row else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def measured(name: str, precision: Precision, args: argparse.Namespace) -> Row:
    """A model's row; for a failed model, the error."""
    model = args.zoo / name / "model.onnx"
    device = device_here(args.device)
    key = {
        "model": name,
        "precision": precision,
        "device": device.descriptor_name,
        "runtime": f"{device.platform} {device.driver_version}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not model.is_file():
        return {
            **key,
            "failed": f"{model} is not there; export it with `python -m benchmarks.exports {name} {model.parent} --notes`",
        }
    try:
        with tempfile.TemporaryDirectory(prefix="flashmem-activations-", dir=args.scratch) as scratch:
            return {**key, **Measured(name, model, precision, Path(scratch), args).row()}
    except (Exception, SystemExit) as error:  # an error of one model; the others continue
        traceback.print_exception(error)
        return {**key, "failed": why(error)}


if __name__ == "__main__":
    run_command(main)
