"""Every transfer mode of a device on one memory path, compared with preloading: latency, memory, error.

    python -m benchmarks.streaming.modes --zoo DIR --device nvidia --memory-path texture [--budget-ratio 0.5] [--runs 5]

DIR contains models that `benchmarks.exports` wrote. The budget is `--budget-ratio` of the weights, at least the plan's
minimum. Medians of fresh processes; the first run of each kind, which compiles the kernels, is not counted. The answer is
compared with ONNX Runtime's, and the modes with each other bit by bit. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.processes import median, run_bundle, run_worker, weights_of
from benchmarks.zoo import within


def arrays(path: Path) -> list[np.ndarray[Any, Any]]:
    """The outputs in a worker's file."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def measure(model: Path, folder: Path, args: argparse.Namespace) -> None:
    """Print one model's table."""
    reference = folder / "reference.npz"
    run_worker("onnxruntime", "--model", str(model), "--outputs", str(reference))
    expected = arrays(reference)
    first: list[np.ndarray[Any, Any]] | None = None
    print(f"\n### {model.parent.name}, {args.memory_path}, {args.precision}\n")
    print("| run | budget, MB | integrated, ms | second run, ms | ledger peak, MB | error / range | same bits |")
    print("|---|---|---|---|---|---|---|")
    options = {"device": args.device, "memory_path": args.memory_path, "precision": args.precision}
    whole = flashmem.compile(model, folder / "whole.flashmem", unfusion=False, **options)
    budget = int(args.budget_ratio * weights_of(whole))
    kinds = [("stream", mode) for mode in args.modes] + [("preload", mode) for mode in args.modes[:1]]
    for strategy, mode in kinds:
        bundle = within(budget, partial(flashmem.compile, model, folder / f"{mode}.flashmem", mode=mode, **options))
        out = folder / "outputs.npz"
        extra = ("--mode", mode, "--strategy", strategy, "--repeat", "4", "--outputs", str(out))
        rows = [run_bundle(bundle.path, args.device, *extra) for _ in range(args.runs + 1)][1:]
        outputs = arrays(out)
        error = max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in zip(outputs, expected, strict=True))
        first = first or outputs
        same = all(np.array_equal(a, b) for a, b in zip(outputs, first, strict=True))
        within_bytes = f"{(bundle.budget_bytes or 0) / 1e6:.0f}" if strategy == "stream" else "none"
        integrated, warm, peak = (median(rows, key) for key in ("integrated", "warm", "ledger_peak"))
        print(
            f"| {strategy}, {mode} | {within_bytes} | {1e3 * integrated:.1f} | {1e3 * warm:.1f} | {peak / 1e6:.0f} "
            f"| {error:.1e} | {'yes' if same else 'NO'} |",
            flush=True,
        )


def main() -> None:
    """Measure every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--memory-path", default="texture", choices=("texture", "buffer"))
    parser.add_argument("--modes", nargs="*", default=["dma", "interleave"])
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--budget-ratio", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=["resnet50", "vit-b16", "gptneo-125m"])
    args = parser.parse_args()
    parser.check_device(args.device)
    for model in parser.models_in(args.zoo, args.models).values():
        with tempfile.TemporaryDirectory() as folder:
            measure(model, Path(folder), args)


if __name__ == "__main__":
    run_command(main)
