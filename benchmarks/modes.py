"""Every transfer mode of a device on one memory path beside preloading: latency, memory, and whether the answer holds.

    python -m benchmarks.modes --zoo DIR --device nvidia --memory-path texture [--budget-ratio 0.5] [--runs 5]

DIR holds models as `flashmem zoo export` writes them. The budget is `--budget-ratio` of the weights, at least what the
plan needs. Medians of fresh processes; the first run of each kind, which compiles the kernels, is not counted. The answer is
compared with ONNX Runtime's, and the modes with each other bit by bit. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from flashmem.errors import BudgetError

MIB = 1 << 20


def worker(*arguments: str, outputs: Path) -> dict[str, Any]:
    """One fresh process."""
    command = [sys.executable, "-m", "benchmarks.worker", *arguments, "--outputs", str(outputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    """The outputs a worker wrote."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def compiled(model: Path, output: Path, args: argparse.Namespace, mode: str) -> flashmem.Bundle:
    """The bundle for one mode, within the budget or the smallest one that works."""
    options = {"device": args.device, "memory_path": args.memory_path, "precision": args.precision, "mode": mode}
    budget = int(args.budget_ratio * sum(p.stat().st_size for p in model.parent.iterdir()))
    try:
        return flashmem.compile(model, output, budget=budget, **options)
    except BudgetError as error:
        return flashmem.compile(model, output, budget=error.smallest_bytes, **options)


def measure(model: Path, folder: Path, args: argparse.Namespace) -> None:
    """One model's table."""
    reference = folder / "reference.npz"
    worker("onnxruntime", "--model", str(model), outputs=reference)
    expected = arrays(reference)
    first: list[np.ndarray[Any, Any]] | None = None
    print(f"\n### {model.parent.name}, {args.memory_path}, {args.precision}\n")
    print("| run | budget, MB | integrated, ms | second run, ms | ledger peak, MB | error / range | same bits |")
    print("|---|---|---|---|---|---|---|")
    kinds = [("stream", mode) for mode in args.modes] + [("preload", mode) for mode in args.modes[:1]]
    for strategy, mode in kinds:
        bundle = compiled(model, folder / f"{mode}.flashmem", args, mode)
        out = folder / "outputs.npz"
        common = ["flashmem", "--bundle", str(bundle.path), "--device", args.device, "--mode", mode, "--strategy", strategy]
        rows = [worker(*common, "--repeat", "4", outputs=out) for _ in range(args.runs + 1)][1:]
        outputs = arrays(out)
        error = max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in zip(outputs, expected, strict=True))
        first = first or outputs
        same = all(np.array_equal(a, b) for a, b in zip(outputs, first, strict=True))
        middle = {key: statistics.median(row[key] for row in rows) for key in ("integrated", "warm", "ledger_peak")}
        budget = f"{(bundle.budget_bytes or 0) / 1e6:.0f}" if strategy == "stream" else "none"
        print(
            f"| {strategy}, {mode} | {budget} | {1e3 * middle['integrated']:.1f} | {1e3 * middle['warm']:.1f} "
            f"| {middle['ledger_peak'] / 1e6:.0f} | {error:.1e} | {'yes' if same else 'NO'} |",
            flush=True,
        )


def main() -> None:
    """Measure every model found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-path", default="texture", choices=("texture", "buffer"))
    parser.add_argument("--modes", nargs="*", default=["dma", "interleave"])
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--budget-ratio", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=["resnet50", "vit-b16", "gptneo-125m"])
    args = parser.parse_args()
    for model in sorted(path for path in args.zoo.glob("*/model.onnx") if path.parent.name in args.models):
        with tempfile.TemporaryDirectory() as folder:
            measure(model, Path(folder), args)


if __name__ == "__main__":
    main()
