"""One file, by ONNX Runtime and by flashmem with two budgets; prints one JSON object.

    python -m benchmarks.packages.one NAME FILE [--device D] [--runs N] [--plain]

NAME is the file's in files.toml, or that of its original. `answers.py` runs it in a new process for each file, and says what
the numbers are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashmem
from benchmarks.packages.files import shipped
from benchmarks.packages.reference import Reference
from flashmem.base.errors import BudgetError, UserError

SHARE = 0.4  # of the weights: the second budget


def main() -> None:
    """Run ONNX Runtime, then flashmem without a budget and with the second one; print the row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--plain", action="store_true", help="ONNX Runtime without graph optimisations")
    args = parser.parse_args()
    drawn = shipped()[args.name].inputs
    try:
        reference = Reference(args.file, drawn, args.runs, args.plain)
    except Exception as error:  # it has an exception class for each kind of failure
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        print(json.dumps({"unreadable": str(error).splitlines()[0].replace(str(args.file), args.file.name)[:300]}))
        return
    inputs = reference.inputs
    row: dict[str, Any] = {"first": reference.first, "later": reference.later, "spread": reference.spread, "own": reference.own}
    row["flashmem"], weights = answered(args, inputs, reference, budget=None)
    if weights is not None:
        wanted = int(SHARE * weights)
        row["weights"], row["wanted_budget"] = weights, wanted
        row["budgeted"], _ = answered(args, inputs, reference, budget=wanted)
        if (smallest := row["budgeted"].pop("smallest", None)) is not None:
            row["budgeted"], _ = answered(args, inputs, reference, budget=smallest)
    print(json.dumps(row))


def answered(
    args: argparse.Namespace, inputs: dict[str, NDArray[Any]], reference: Reference, budget: int | None
) -> tuple[dict[str, Any], int | None]:
    """What flashmem answers within `budget`, or why it refuses; and the bytes of its weights."""
    drawn = shipped()[args.name].inputs
    constants = {name: how.constant for name, how in drawn.items() if how.constant is not None and name in inputs}
    given = {name: array for name, array in inputs.items() if name not in constants}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        try:
            bundle = flashmem.compile(
                args.file, Path(folder) / "m.flashmem", device=args.device, budget=budget, constants=constants or None,
                shapes={name: array.shape for name, array in given.items()},
            )  # fmt: skip
        except BudgetError as error:
            return {"refused": str(error), "smallest": error.smallest_bytes}, None
        except UserError as error:
            return {"refused": str(error)}, None
        compiled = time.perf_counter() - begun
        begun = time.perf_counter()
        with flashmem.Session(bundle, device=args.device) as session:
            answer = session.run(reference.names, given)
            first = time.perf_counter() - begun
            assert session.last_run is not None
            peak = session.last_run.memory.peak_bytes
            later = []
            for _ in range(args.runs):
                begun = time.perf_counter()
                again = session.run(reference.names, given)
                later.append(time.perf_counter() - begun)
        if any(not np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(answer, again, strict=True)):
            raise SystemExit("two runs of one session differ")
        verdict = reference.verdict(answer)
        if budget is not None and peak > budget:
            verdict |= {"right": False, "why": f"it held {peak} bytes"}
        times = {"compile": compiled, "first": first, "later": statistics.median(later)}
        return {**verdict, **times, "peak": peak, "budget": budget}, bundle.program.weights_bytes


if __name__ == "__main__":
    main()
