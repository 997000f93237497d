"""Plans of flashmem compared with simpler strategies in one budget, and with preloading (Figure 9).

    python -m benchmarks.paper.strategies --zoo DIR --device pocl [--budgets 64MB 128MB] [--disk cold] [--runs 5]

DIR contains models that `benchmarks.exports` wrote. Every strategy is a plan of the same program, run by the same runtime with
the same kernels in the same transfer mode. That program is the one that the compiler generates for the smallest of the budgets.
Medians of fresh processes that alternate; the program cache is filled first. Budgets are given, or fractions of the weights
(`--ratios`). A budget that some strategy cannot satisfy is raised to 2 % more than the smallest that all can. Answers are
compared bit by bit. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_args

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.processes import median, run_bundle, same_bits, take_turns, weights_of
from benchmarks.zoo import MODELS, planned_again, within
from flashmem.base.errors import BudgetError
from flashmem.base.units import parse_size
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.schedule.plan import Strategy

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
BASELINES = STRATEGIES[1:]


ABOVE = 1.02
"""Factor over the smallest budget of a strategy, with which staging is as small as possible, and slow."""


def planned(whole: flashmem.Bundle, folder: Path, budget: int) -> tuple[dict[str, flashmem.Bundle], int]:
    """The bundle of each strategy within `budget`, or within 2 % more than the smallest that all can satisfy; and that budget.

    They share the weights of `whole`.
    """
    bundles: dict[str, flashmem.Bundle] = {}
    while len(bundles) < len(STRATEGIES):
        try:
            for strategy in STRATEGIES:
                bundles[strategy] = planned_again(whole, folder / f"{strategy}.flashmem", budget=budget, strategy=strategy)
        except BudgetError as error:
            budget, bundles = int(error.smallest_bytes * ABOVE), {}
    return bundles, budget


def streamed_bytes(model: Path, asked: dict[str, Any]) -> int:
    """Bytes of the packed weights, computed without reading any."""
    options = resolve(BundleRequest(**asked))
    graph = read_graph(model, options)
    return sum(part.nbytes for part in generate(fuse(graph), options.descriptor).program.slices)


def measure(
    name: str, bundles: dict[str, flashmem.Bundle], budget: int, folder: Path, disk: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one model at one budget: seconds and memory by strategy."""
    runs: dict[str, tuple[Path, tuple[str, ...]]] = {s: (bundle.path, ("--strategy", s)) for s, bundle in bundles.items()}
    runs["preload"] = (bundles["stream"].path, ("--strategy", "preload"))
    answers = []
    for key, (path, extra) in runs.items():  # fills the program cache
        answers.append(folder / f"{key}.npz")
        run_bundle(path, args.device, *extra, "--repeat", "2", "--outputs", str(answers[-1]))
    repeat = ("--repeat", str(1 + args.later))
    rows = take_turns(
        {
            key: partial(run_bundle, path, args.device, *extra, *repeat, cold=disk == "cold")
            for key, (path, extra) in runs.items()
        },
        args.runs,
    )
    table = {
        key: {field: median(found, field) for field in ("integrated", "warm", "ledger_peak", "above_bare") if found[0][field]}
        for key, found in rows.items()
    }
    for key, bundle in bundles.items():
        table[key]["predicted"] = bundle.plan.objective
    ours = table["stream"]["integrated"]
    best = min(BASELINES, key=lambda key: table[key]["integrated"])
    return {
        "model": name,
        "budget": budget,
        "weights": weights_of(bundles["stream"]),
        "disk": disk,
        "strategies": table,
        "best baseline": best,
        "ours / best baseline": ours / table[best]["integrated"],
        "always-next / ours": table["always-next"]["integrated"] / ours,
        "preload / ours": table["preload"]["integrated"] / ours,
        "same bits": same_bits(answers),
    }


def show(result: dict[str, Any]) -> None:
    """Print one table."""
    budget, weights = result["budget"] / 1e6, result["weights"] / 1e6
    print(f"\n### {result['model']}, {weights:.0f} MB of weights, budget {budget:.0f} MB, file {result['disk']}\n")
    print("| strategy | first answer, s | predicted, s | later, s | most held, MB | process above bare, MB |")
    print("|---|---|---|---|---|---|")
    for key, row in result["strategies"].items():
        predicted = f"{row['predicted']:.3f}" if "predicted" in row else ""
        memory = f"{row['ledger_peak'] / 1e6:.0f} | {row['above_bare'] / 1e6:.0f}"
        later = f"{row['warm']:.3f}" if "warm" in row else ""
        print(f"| {key} | {row['integrated']:.3f} | {predicted} | {later} | {memory} |")
    print(
        f"\nours / best baseline ({result['best baseline']}) {result['ours / best baseline']:.2f}, "
        f"always-next / ours {result['always-next / ours']:.2f}, preload without a budget / ours "
        f"{result['preload / ours']:.2f}, same bits: {'yes' if result['same bits'] else 'NO'}",
        flush=True,
    )


def summarise(results: list[dict[str, Any]]) -> None:
    """Print geometric means over all measurements, by state of the file."""
    for disk in dict.fromkeys(result["disk"] for result in results):
        rows = [result for result in results if result["disk"] == disk]
        print(f"\nfile {disk}, geometric mean of {len(rows)}: " + ", ".join(
            f"{key} {geometric_mean([row[key] for row in rows]):.2f}"
            for key in ("ours / best baseline", "always-next / ours", "preload / ours")
        ))  # fmt: skip
        over = {key: geometric_mean([seconds_of(row, key) / seconds_of(row, "stream") for row in rows]) for key in BASELINES}
        print("over ours: " + ", ".join(f"{key} {ratio:.2f}" for key, ratio in over.items()))


def seconds_of(result: dict[str, Any], strategy: str) -> float:
    """Seconds of the first answer."""
    return float(result["strategies"][strategy]["integrated"])


def main() -> None:
    """Measure every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--budgets", nargs="*", default=[], help="for instance 128MB; default: parts of the weights")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5], help="which parts")
    parser.add_argument("--later", type=int, default=2, help="later runs of each process")
    parser.add_argument("--disk", nargs="*", default=["cached", "cold"], choices=("cached", "cold"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parser.check_device(args.device)
    found = parser.models_in(args.zoo, args.models)
    print(f"flashmem {flashmem.__version__}, device {args.device}, medians of {args.runs} fresh processes")
    results = []
    for name, model in found.items():
        with tempfile.TemporaryDirectory(prefix="flashmem-strategies-") as folder:
            # Without adaptive unfusion, which is for flashmem's plans only: all strategies must run the same program.
            asked = {"device": args.device, "memory_path": args.memory_path, "mode": args.mode}
            weights = streamed_bytes(model, asked)
            budgets = [parse_size(text) for text in args.budgets] or [int(ratio * weights) for ratio in args.ratios]
            make = partial(flashmem.compile, model, Path(folder) / "whole.flashmem", unfusion=False, **asked)
            whole = within(min(budgets), make)
            measured: set[int] = set()
            for wanted in budgets:
                bundles, budget = planned(whole, Path(folder), wanted)
                if budget not in measured:  # two budgets may be raised to the same value
                    for disk in args.disk:
                        results.append(measure(name, bundles, budget, Path(folder), disk, args))
                        show(results[-1])
                measured.add(budget)
    summarise(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_command(main)
