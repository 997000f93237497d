"""Run every model at its smallest budget under a memory cgroup, and ONNX Runtime under the same limit.

    python -m benchmarks.memory.hard_limit --zoo DIR [--device pocl] [--models NAME...] [--rows FILE] [--page FILE]

DIR contains models that `benchmarks.exports` wrote, each in a folder of its name. The limit of the memory cgroup is the sum
of: a bare process (interpreter, numpy, pyopencl, the driver and the device's context; resident memory), the smallest budget
that the planner names, and 48 MiB. A process that needs more is killed. Kernels are built before, without a limit. With
`--rows` each model's row is saved after its measurement. Models with a row for this device are not measured again, except those
that failed. Needs root, and the `bench` extra.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.exports.export import INPUTS
from benchmarks.exports.models import names, tiny_names
from benchmarks.memory.budgets import TABLE_8, Row, compiled_at_smallest, keep, read_rows, why
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from benchmarks.processes import run_worker
from flashmem.runtime.request.options import device_here

ABOVE = 48 << 20
_MIB = 1 << 20


def limited(limit: int, *arguments: str) -> Row:
    """The row of one process of `benchmarks.worker` within `limit` bytes, or how the process ended."""
    with HardLimit(limit) as group:
        done = group.run([sys.executable, "-m", "benchmarks.worker", *arguments])
    if done.returncode == 0:
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return {"ended": "finishes", **row}
    last = (done.stderr.strip().splitlines() or [""])[-1]
    killed = done.returncode < 0 or "bad_alloc" in last or "MemoryError" in last
    return {"ended": "killed" if killed else f"failed: {last}"}


def measure(name: str, model: Path, device: str, bare: int, scratch: Path) -> Row:
    """One row; for a failed model, the error."""
    key = {"model": name, "device": device_here(device).descriptor_name}
    if not model.is_file():
        return {
            **key,
            "failed": f"{model} is not there; export it with `python -m benchmarks.exports {name} {model.parent} --notes`",
        }
    try:
        return {**key, **_measured(model, device, bare, scratch)}
    except (Exception, SystemExit) as error:  # an error of one model; the others continue
        traceback.print_exception(error)
        return {**key, "failed": why(error)}


def _measured(model: Path, device: str, bare: int, scratch: Path) -> Row:
    budget, bundle = compiled_at_smallest(model, scratch / "model.flashmem", device)
    limit = bare + budget + ABOVE
    given = model.parent / INPUTS
    inputs = ("--inputs", str(given)) if given.is_file() else ()
    ours = limited(limit, "flashmem", "--bundle", str(bundle.path), "--device", device, *inputs)
    theirs = limited(limit, "onnxruntime", "--model", str(model), *inputs)
    return {
        "budget": budget,
        "weights": sum(part.nbytes for part in bundle.program.slices),
        "bare": bare,
        "limit": limit,
        "flashmem": ours,
        "onnxruntime": theirs,
    }


def page(rows: list[Row]) -> str:
    """The table."""
    lines = [
        "| model | device | weights, MB | budget, MB | limit, MiB | flashmem | its peak above bare, MiB | ONNX Runtime |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if "failed" not in row):
        above = row["flashmem"].get("above_bare")
        sizes = f"{row['weights'] / 1e6:.0f}", f"{row['budget'] / 1e6:.1f}", f"{row['limit'] / _MIB:.0f}"
        cells = (
            row["model"], row["device"], *sizes,
            row["flashmem"]["ended"], "" if above is None else f"{above / _MIB:.0f}", row["onnxruntime"]["ended"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    failed = [f"- {row['model']}, {row['device']}, failed: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([*lines, *([""] if failed else []), *failed]) + "\n"


def main() -> None:
    """Measure every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--models", nargs="*", default=list(TABLE_8), choices=(*names(), *tiny_names()), metavar="NAME")
    parser.add_argument("--rows", type=Path, help="a JSON file that rows are kept in")
    parser.add_argument("--page", type=Path, help="a file that the table is written to as well")
    args = parser.parse_args()
    no_limit = why_no_limit()
    if no_limit is not None:
        raise SystemExit(f"no hard limit can be set here ({no_limit}); it needs root and a memory cgroup that can be written")
    parser.check_device(args.device)
    parser.models_in(args.zoo, args.models)  # at least one
    here = device_here(args.device).descriptor_name
    rows = read_rows(args.rows)
    done = {row["model"] for row in rows if row["device"] == here and "failed" not in row}
    bare = run_worker("bare", "--device", args.device)["bare"]
    for name in (name for name in args.models if name not in done):
        with tempfile.TemporaryDirectory(prefix="flashmem-limit-") as scratch:
            row = measure(name, args.zoo / name / "model.onnx", args.device, bare, Path(scratch))
        rows = keep(row, args.rows, ("model", "device")) if args.rows else [*rows, row]
        said = row.get("failed") or f"{row['flashmem']['ended']}; ONNX Runtime {row['onnxruntime']['ended']}"
        print(f"{name}: {said}", file=sys.stderr, flush=True)
        if args.page:
            args.page.write_text(page(rows))
    print(page(rows), end="")
    unfinished = [row["model"] for row in rows if "failed" in row or row["flashmem"]["ended"] != "finishes"]
    if unfinished:
        raise SystemExit(f"not finished: {', '.join(unfinished)}")


if __name__ == "__main__":
    run_command(main)
