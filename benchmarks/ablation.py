"""What each part of the method brings (FlashMem Figure 7): latency and memory, one part added at a time.

    python -m benchmarks.ablation --zoo DIR --device pocl [--budget-ratio 0.25] [--disk cold] [--runs 5] [--json a.json]

The steps, each on top of the one before, on one memory path of one device:

1. preload: everything resident before the first layer, as engines do.
2. + OPG: streamed on the planner's plan inside the budget, layers as fused as they can be, kernels that only compute. Weights
   travel by a copy of their own: `dma`, the mode that leaves every kernel as it is.
3. + adaptive unfusion: the same, and fused layers split where the plan gains.
4. + kernel rewriting: the transfer becomes part of how kernels take their weights. The paper knows one form of it, kernels that
   move the next weights between their own steps (`interleave`), for GPUs without a copy engine. Here it is the mode that the
   device's descriptor puts first: with `map` and `alias` the packing is such that kernels read the file's bytes in place and
   nothing is moved. `interleave` is always shown as well. A device whose first mode is `dma` gains nothing from rewriting.

Memory is what the session's ledger counted, at most and on average over time, and the process above itself before the model is
opened. In modes where C_l has no part in the latency nothing is split, so step 3 equals step 2 in the latency objective; with
`--objective paper` it does not. Medians of fresh processes that take turns. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.processes import median, run_bundle, same_bits, take_turns, weights_of
from flashmem.errors import BudgetError

MODELS = ("resnet50", "vit-b16", "gptneo-125m", "gptneo-1.3b")


def steps_of(descriptor: Any, path: str) -> list[tuple[str, str, bool]]:
    """(name, transfer mode, unfusion) of each streaming step."""
    best = descriptor.modes[path][0]
    steps = [("+ OPG", "dma", False), ("+ adaptive unfusion", "dma", True), (f"+ kernel rewriting ({best})", best, True)]
    if best != "interleave":
        steps.append(("+ kernel rewriting (interleave)", "interleave", True))
    return steps


def compiled(model: Path, output: Path, budget: int, options: dict[str, Any]) -> flashmem.Bundle:
    """The bundle within the budget or the smallest one that works."""
    try:
        return flashmem.compile(model, output, budget=budget, **options)
    except BudgetError as error:
        return flashmem.compile(model, output, budget=error.smallest_bytes, **options)


def measure(name: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One model: a row for each step."""
    whole = flashmem.compile(model, folder / "whole.flashmem", device=args.device, memory_path=args.memory_path)
    path, weights = whole.program.memory_path, weights_of(whole)
    bundles = {
        step: compiled(
            model, folder / f"{number}.flashmem", int(args.budget_ratio * weights),
            {"device": args.device, "memory_path": path, "mode": mode, "unfusion": unfusion, "objective": args.objective,
             "chunk": args.chunk},
        )
        for number, (step, mode, unfusion) in enumerate(steps_of(whole.descriptor, path))
    }  # fmt: skip
    runs: dict[str, tuple[Path, tuple[str, ...]]] = {"preload": (whole.path, ("--strategy", "preload"))}
    runs |= {step: (bundle.path, ("--mode", str(bundle.meta["mode"]))) for step, bundle in bundles.items()}
    answers = {}
    for number, (key, (where, extra)) in enumerate(runs.items()):  # fills the program cache
        answers[key] = folder / f"{number}.npz"
        run_bundle(where, args.device, *extra, "--repeat", "2", "--outputs", str(answers[key]))
    rows = take_turns(
        {
            key: partial(run_bundle, where, args.device, *extra, cold=args.disk == "cold")
            for key, (where, extra) in runs.items()
        },
        args.runs,
    )
    fields = ("integrated", "ledger_peak", "ledger_average", "above_bare")
    table: dict[str, dict[str, Any]] = {key: {f: median(found, f) for f in fields} for key, found in rows.items()}
    for step, bundle in bundles.items():
        table[step]["budget"] = bundle.budget_bytes
        table[step]["layers"] = len(bundle.program.launches)
        table[step]["unfusion"] = [note for note in bundle.plan.notes if "unfusion" in note]
        # Another cut rounds differently, so only plans of one program must agree to the bit.
        table[step]["same bits as preload"] = (
            same_bits([answers["preload"], answers[step]]) if bundle.program.launches == whole.program.launches else None
        )
    return {"model": name, "weights": weights, "disk": args.disk, "path": path, "steps": table}


def show(result: dict[str, Any]) -> None:
    """One table; factors are against preload."""
    base = result["steps"]["preload"]
    print(
        f"\n### {result['model']}, {result['weights'] / 1e6:.0f} MB of weights, {result['path']} path, file {result['disk']}\n"
    )
    print("| step | budget, MB | layers | first answer, s | faster | most held / average, MB | less on average | process, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for key, row in result["steps"].items():
        budget = f"{row['budget'] / 1e6:.0f}" if row.get("budget") else "none"
        held = f"{row['ledger_peak'] / 1e6:.0f} / {row['ledger_average'] / 1e6:.0f}"
        print(
            f"| {key} | {budget} | {row.get('layers', '')} | {row['integrated']:.3f} "
            f"| {base['integrated'] / row['integrated']:.2f} x | {held} "
            f"| {base['ledger_average'] / row['ledger_average']:.1f} x | {row['above_bare'] / 1e6:.0f} |"
        )
    for key, row in result["steps"].items():
        for note in row.get("unfusion", ()):
            print(f"\n{key}: {note}")
        if row.get("same bits as preload") is False:
            print(f"\n{key}: DIFFERENT BITS from preload")
    print(flush=True)


def main() -> None:
    """Measure every model found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--budget-ratio", type=float, default=0.25, help="of the weights")
    parser.add_argument("--objective", default="auto", choices=("auto", "latency", "paper"))
    parser.add_argument("--chunk", default="1MiB")
    parser.add_argument("--disk", default="cold", choices=("cached", "cold"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {name: args.zoo / name / "model.onnx" for name in args.models if (args.zoo / name / "model.onnx").is_file()}
    if not found:
        parser.error(f"none of {', '.join(args.models)} is in {args.zoo}; export one with `flashmem zoo export`")
    results = []
    for name, model in found.items():
        with tempfile.TemporaryDirectory(prefix="flashmem-ablation-") as folder:
            results.append(measure(name, model, Path(folder), args))
            show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
