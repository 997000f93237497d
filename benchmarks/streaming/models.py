"""Measure every model of `benchmarks.exports` on one device, and write docs/research/models.md.

    python -m benchmarks.streaming.models --zoo DIR --device pocl [--models NAME...] [--missing] [--export PYTHON]

DIR contains models that `benchmarks.exports` wrote, each in a folder of its name, with its inputs.npz and export.json. With
`--export PYTHON` missing models are exported first, one at a time, by the interpreter PYTHON, which has PyTorch. A
model's row is written to `--rows` (docs/research/models.json) after its measurement, and the page `--page`
(docs/research/models.md) is written from all rows. Rows of other models and other devices stay. So a run can be interrupted;
`--missing` continues with the models that have no row for this device.

For each model:

- facts of the file and its plan: parameters, multiply-adds, layers (kernel launches), distinct kernels, weights;
- the smallest budget that works: the planner names it when it refuses a smaller one. Planning at that budget and at one byte
  less confirms it;
- runs within a budget: `--budget-ratio` of the weights, at least the smallest that works; GPT-Neo-2.7B within 600 MB. Medians
  of `--runs` fresh processes with the weights in the page cache and as many without, fewer if they take longer than `--seconds`
  together. A run before these fills the program cache. Later runs are in the processes with cached weights;
- the largest error against ONNX Runtime, in a separate process, as a fraction of the range of that output.

Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.exports.export import INPUTS, NOTES
from benchmarks.exports.models import names, tiny_names
from benchmarks.processes import Row, run_bundle, run_worker, weights_of
from benchmarks.streaming.models_page import page
from flashmem.base.errors import BudgetError, UserError
from flashmem.base.files import written_whole
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import device_here
from flashmem.tools.verify import compare

BUDGETS = {"gptneo-2.7b": 600_000_000}
"""Budgets of single models, instead of a fraction of the weights."""

_UNPACKED_BYTES = 4 << 30  # of weights: above that, ONNX Runtime reads them in place without a second copy
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


class Measured:
    """One model on one device; `scratch` is a folder for its bundle, which is as large as its weights."""

    def __init__(self, name: str, model: Path, scratch: Path, args: argparse.Namespace) -> None:
        self.name, self.model, self.scratch, self.args = name, model, scratch, args
        given = model.parent / INPUTS
        self.inputs = ("--inputs", str(given)) if given.is_file() else ()

    def row(self) -> Row:
        """The data of the model on the page."""
        smallest, weights = self.smallest_budget()
        budget = max(smallest, BUDGETS.get(self.name, int(self.args.budget_ratio * weights)))
        bundle = flashmem.compile(self.model, self.scratch / "model.flashmem", device=self.args.device, budget=budget)
        launches = bundle.program.launches
        return {
            "model": self.name,
            **self.origin(),
            "parameters": parameters(self.model),
            "macs": sum(launch.macs for launch in launches),
            "layers": len(launches),
            "kernels": len({launch.kernel for launch in launches}),
            "weights": weights,
            "smallest": smallest,
            "budget": budget,
            "preload": bundle.plan.preload_ratio,
            **self.timed(bundle),
        }

    def origin(self) -> Row:
        """When and where it was measured, and what was exported with which packages."""
        device = device_here(self.args.device)
        runtime = device.platform_version.partition(",")[0].split()
        runtime += [device.driver_version] if device.kind == "gpu" else []  # a platform of GPUs has its own version
        notes = self.model.parent / NOTES
        said = json.loads(notes.read_text()) if notes.is_file() else {}
        return {
            "device": device.descriptor_name,
            "machine": f"{device.name if device.kind == 'gpu' else 'CPU'}, {os.cpu_count()} cores, {' '.join(runtime)}",
            "date": datetime.now(UTC).date().isoformat(),
            "flashmem": flashmem.__version__,
            "size": said.get("size"),
            "exporter": said.get("exporter"),
            "versions": said.get("versions", {}),
        }

    def smallest_budget(self) -> tuple[int, int]:
        """The smallest budget and the weights, in bytes; by planning alone: packs no weight and runs nothing."""
        graph = read_graph(self.model, resolve(BundleRequest(device=self.args.device)))
        weights = named = 0

        def works(budget: int) -> bool:
            nonlocal weights, named
            try:
                generated, _ = plan_graph(graph, resolve(BundleRequest(budget=budget, device=self.args.device)))
            except BudgetError as error:
                named = error.smallest_bytes
                return False
            weights = sum(part.nbytes for part in generated.program.slices)
            return True

        low, high = 0, 1
        while not works(high):
            low, high = high, max(named, high + 1)
        probe = high - 1  # the named budget is the smallest, so this is the last question
        while high - low > 1:
            if works(probe):
                high = probe
            else:
                low = probe
            probe = (low + high) // 2
        return high, weights

    def timed(self, bundle: Bundle) -> Row:
        """Median times, the peak memory, and the error."""
        outputs = self.scratch / "outputs.npz"
        first = self.run(bundle, "--outputs", str(outputs))  # fills the program cache
        peak = first["ledger_peak"]
        begun = time.monotonic()
        rows: dict[bool, list[Row]] = {True: [], False: []}
        for _ in range(self.args.runs):
            for cold in (False, True):
                rows[cold].append(self.run(bundle, *(() if cold else ("--repeat", "4")), cold=cold))
                peak = max(peak, rows[cold][-1]["ledger_peak"])
            if time.monotonic() - begun > self.args.seconds:
                break
        return {
            "cold": statistics.median(row["integrated"] for row in rows[True]),
            "cached": statistics.median(row["integrated"] for row in rows[False]),
            "later": statistics.median(row["later"] for row in rows[False]),
            "rounds": len(rows[True]),
            "peak": peak,
            "error": self.error(outputs, bundle),
        }

    def run(self, bundle: Bundle, *extra: str, cold: bool = False) -> Row:
        """Run one fresh process."""
        return run_bundle(bundle.path, self.args.device, *self.inputs, *extra, cold=cold)

    def error(self, outputs: Path, bundle: Bundle) -> float | None:
        """The error as `flashmem run --verify` computes it; None if it is not finite."""
        reference = self.scratch / "reference.npz"
        how = ("--mapped",) if weights_of(bundle) > _UNPACKED_BYTES else ()
        run_worker("onnxruntime", "--model", str(self.model), "--outputs", str(reference), *self.inputs, *how)
        with np.load(outputs) as ours, np.load(reference) as theirs:
            pairs = [ours[key] for key in ours.files], [theirs[key] for key in theirs.files]
        found = compare(*pairs, "fp32").relative_error
        return found if np.isfinite(found) else None


def parameters(model: Path) -> int:
    """The number of floating point values in the file; a head tied to a table counts once if it is stored once."""
    graph = onnx.load(model, load_external_data=False).graph
    constants = [attribute.t for node in graph.node if node.op_type == "Constant" for attribute in node.attribute]
    stored = [tensor for tensor in (*graph.initializer, *constants) if tensor.data_type in _FLOATS]
    return sum(int(np.prod(tensor.dims, dtype=np.int64)) for tensor in stored)


def export_missing(name: str, zoo: Path, python: str) -> None:
    """Write `zoo/NAME` with the interpreter `python`, in a new process, whose memory is freed at its end."""
    if not (zoo / name / "model.onnx").is_file():
        print(f"{name}: exporting", file=sys.stderr, flush=True)
        subprocess.run(
            [python, "-m", "benchmarks.exports", name, str(zoo / name), "--notes"], check=True, stdout=subprocess.DEVNULL
        )


def keep(row: Row, path: Path) -> list[Row]:
    """Replace the row of the same model and device in the file `path` by `row`; returns all rows."""
    rows: list[Row] = json.loads(path.read_text()) if path.is_file() else []
    same = [at for at, old in enumerate(rows) if (old["model"], old["device"]) == (row["model"], row["device"])]
    if same:
        rows[same[0]] = row
    else:
        rows.append(row)
    with written_whole(path) as file:
        file.write((json.dumps(rows, indent=1) + "\n").encode())
    return rows


def show(rows: list[Row], path: Path) -> None:
    """Write the page."""
    with written_whole(path) as file:
        file.write(page(rows, [*names(), *tiny_names()]).encode())


def main() -> None:
    """Measure every named model that exists or can be exported."""
    docs = Path(__file__).parents[2] / "docs" / "research"
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--models", nargs="*", default=list(names()), choices=(*names(), *tiny_names()), metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="leave out models that have a row for this device")
    parser.add_argument("--export", metavar="PYTHON", help="export models that are not in DIR, with this interpreter")
    parser.add_argument("--budget-ratio", type=float, default=0.25, help="of the weights")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120, help="no more rounds of runs once a model took so long")
    parser.add_argument("--rows", type=Path, default=docs / "models.json")
    parser.add_argument("--page", type=Path, default=docs / "models.md")
    parser.add_argument(
        "--scratch", type=Path, help="where bundles are written, one at a time (default: where temporary files are)"
    )
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.export:
        parser.models_in(args.zoo, args.models)  # at least one
    known = json.loads(args.rows.read_text()) if args.rows.is_file() else []
    here = device_here(args.device).descriptor_name
    done = {row["model"] for row in known if row["device"] == here} if args.missing else set()
    failed: dict[str, Any] = {}
    for name in (name for name in args.models if name not in done):
        begun = time.monotonic()
        try:
            if args.export:
                export_missing(name, args.zoo, args.export)
            model = args.zoo / name / "model.onnx"
            if not model.is_file():
                failed[name] = (
                    f"{model} is not there; export it with `python -m benchmarks.exports {name} {model.parent} --notes`"
                )
                continue
            with tempfile.TemporaryDirectory(prefix="flashmem-models-", dir=args.scratch) as scratch:
                row = Measured(name, model, Path(scratch), args).row()
        except (UserError, SystemExit, subprocess.CalledProcessError) as error:  # an error of one model; the others continue
            failed[name] = error
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        show(keep(row, args.rows), args.page)
        print(f"{name}: {time.monotonic() - begun:.0f} s, error {row['error']:.2g}" if row["error"] is not None else
              f"{name}: the answer is not finite where ONNX Runtime's is", flush=True)  # fmt: skip
    if failed:
        raise SystemExit("no row for: " + "; ".join(f"{name} ({error})" for name, error in failed.items()))


if __name__ == "__main__":
    run_command(main)
