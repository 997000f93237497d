"""Gain of planning: all strategies simulated with disks slower and faster than the device.

    python -m benchmarks.planning.overlap --zoo DIR --devices adreno750 nvidia [--budget-ratio 0.5] [--plot o.png]
    python -m benchmarks.planning.overlap --zoo DIR --own --precision fp16 --models gptneo-125m ... [--mode interleave]

A device descriptor (see `flashmem simulate`) gets disks that load all weights in 1/4 to 4 times the computing time of the
launches. Each strategy plans for that disk inside the same budget, and the simulator runs the plans with a cold file. The cost
of opening a session is excluded: it is the same for all strategies and hides nothing. For the descriptor's own disk rate the
whole first answer is printed too, and with `--own` nothing else, model by model. The budget is a fraction of the weights plus
the memory that a session holds under any plan. A budget that some strategy cannot satisfy is raised to the smallest that all
can. All strategies run the program that the compiler generates for that budget. Only shapes are read from the models' files; no
device is needed. Needs the `compile` extra, `--plot` matplotlib.

Flashmem's plan reads as soon as a place is free, the baselines after their release times (`flashmem/schedule/residency.py`).
"held" is flashmem's plan with reads after its release times too, which shows the gain of that rule alone. In mode `map` both
wait for release times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_args

from benchmarks.command import Arguments, run_command
from benchmarks.zoo import MODELS
from flashmem.base.errors import BudgetError
from flashmem.compiler.adaptive.plan_graph import plan_graph, plan_program
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.planning.planner import planning_instance
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode
from flashmem.schedule.plan import OverlapPlan, Strategy
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RATIOS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
"""Time to load all weights over time to compute all launches."""

HELD = "held"
"""Flashmem's plan with reads after its release times."""


def plans(program: Program, options: Options) -> dict[Strategy, OverlapPlan]:
    """The plan of every strategy inside the budget, or inside the smallest budget that all can satisfy."""
    while True:
        try:
            return {strategy: plan_program(program, options.changed(strategy=strategy)) for strategy in STRATEGIES}
        except BudgetError as error:
            options = options.changed(budget=error.smallest_bytes)


def within(graph: Graph, options: Options) -> tuple[Program, Options]:
    """The program for the budget, or for the smallest one that works, and the options with that budget."""
    try:
        return plan_graph(graph, options)[0].program, options
    except BudgetError as error:
        return within(graph, options.changed(budget=error.smallest_bytes))


def with_disk(options: Options, bandwidth: float) -> Options:
    """The same device with a disk of `bandwidth` bytes per second."""
    rates = replace(options.descriptor.rates, disk_bandwidth=bandwidth)
    return replace(options, descriptor=replace(options.descriptor, rates=rates))


def seconds(program: Program, options: Options, *, opening: bool) -> dict[str, float]:
    """Simulated integrated latency of each strategy on a cold file, with or without opening the session."""
    found: dict[str, float] = {}
    made: dict[str, tuple[Strategy, OverlapPlan]] = {name: (name, plan) for name, plan in plans(program, options).items()}
    made[HELD] = "stream", replace(made["stream"][1], strategy="next-operator")  # any whose reads wait for their release
    for name, (strategy, plan) in made.items():
        scenario = describe(program, plan, options.descriptor, options.mode, disk="cold", strategy=strategy)
        if not opening:
            scenario = replace(scenario, context_seconds=0.0, kernel_seconds=0.0, announced=0)
        found[name] = simulate(scenario).report.latency.integrated
    return found


def measure(name: str, model: Path, descriptor: DeviceDescriptor, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model on one device: seconds by strategy, at each ratio and with the descriptor's own disk."""
    options = Options(descriptor, choose_mode(descriptor, args.mode), BundleRequest(unfusion=False, precision=args.precision))
    graph = read_graph(model, options)
    whole = generate(fuse(graph), descriptor, precision=args.precision).program
    weights = sum(part.nbytes for part in whole.slices)
    budget = int(args.budget_ratio * weights) + fixed_bytes(whole)
    options = options.changed(budget=budget)
    program, options = within(graph, options)
    instance = planning_instance(program, descriptor, options.mode, options.request)
    compute = sum(layer.seconds for layer in instance.layers)
    ratios = () if args.own else RATIOS
    return {
        "model": name,
        "device": descriptor.name,
        "mode": options.mode,
        "weights": weights,
        "budget": options.request.budget,
        "own ratio": weights / descriptor.rates.disk_bandwidth / compute,
        "own": seconds(program, options, opening=True),
        "by ratio": {ratio: seconds(program, with_disk(options, weights / compute / ratio), opening=False) for ratio in ratios},
    }


def over_ours(rows: Iterable[dict[str, float]], strategy: str) -> float:
    """Geometric mean of a strategy's seconds over flashmem's."""
    return geometric_mean([row[strategy] / row["stream"] for row in rows])


def show(results: list[dict[str, Any]]) -> None:
    """Print one table for each device by ratio, and one with its own disk by model."""
    for device in dict.fromkeys(result["device"] for result in results):
        found = [result for result in results if result["device"] == device]
        title = f"{device}, mode {found[0]['mode']}: seconds of each strategy over ours"
        ratios = list(found[0]["by ratio"])
        if ratios:
            print(f"\n### {title}, geometric mean of {', '.join(result['model'] for result in found)}\n")
            _head("loading / computing")
        for ratio in ratios:
            _line(ratio, [result["by ratio"][ratio] for result in found])
        print(f"\n### {title}, its own disk, opening included\n")
        _head("model (loading / computing)")
        for result in found:
            _line(f"{result['model']} ({result['own ratio']:.1f})", [result["own"]])
        own = [result["own"] for result in found]
        _line("geometric mean", own)
        best = geometric_mean([row["stream"] / min(row[s] for s in STRATEGIES[1:]) for row in own])
        held = geometric_mean([row[HELD] / min(row[s] for s in STRATEGIES[1:]) for row in own])
        print(f"\nours / best baseline {best:.3f} (held {held:.3f}), always-next / ours {over_ours(own, 'always-next'):.2f}")


def _head(first: str) -> None:
    columns = (first, *STRATEGIES[1:], HELD)
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")


def _line(first: object, rows: list[dict[str, float]]) -> None:
    print(f"| {first} | " + " | ".join(f"{over_ours(rows, s):.2f}" for s in (*STRATEGIES[1:], HELD)) + " |")


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Plot a strategy's seconds over flashmem's against the ratio: one plot for each device, one line for each strategy."""
    from flashmem.tools.plots.figure import COLOURS, MARKERS, figure, legend_below, plain_axes

    devices = list(dict.fromkeys(result["device"] for result in results))
    with figure(path, columns=len(devices), size=(4.6 * len(devices), 3.8), sharey=True, squeeze=False) as (drawn, axes):
        for axis, device in zip(axes[0], devices, strict=True):
            found = [result for result in results if result["device"] == device]
            for strategy, colour, marker in zip(STRATEGIES[1:], COLOURS, MARKERS, strict=False):
                means = [over_ours([result["by ratio"][ratio] for result in found], strategy) for ratio in RATIOS]
                axis.plot(RATIOS, means, color=colour, marker=marker, markersize=4, label=strategy)
            axis.set_xscale("log", base=2)
            axis.set_xticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", "1", "2", "4"])
            axis.set_title(f"{device}, {found[0]['mode']}", loc="left", fontsize=10)
            axis.set_xlabel("time to load / time to compute")
            plain_axes(axis)
        axes[0][0].set_ylabel("first answer over ours (geometric mean)")
        legend_below(drawn, axes[0][0], columns=len(STRATEGIES) - 1)
    print(f"\nwrote {path}")


def main() -> None:
    """Simulate every model in the folder on every named device."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_argument("--devices", nargs="+", default=["adreno750", "mali-g710", "nvidia"])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--budget-ratio", type=float, default=0.5)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--own", action="store_true", help="only with the disk that the descriptor states")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = parser.models_in(args.zoo, args.models)
    results = []
    for device in args.devices:
        for name, model in found.items():
            results.append(measure(name, model, load_descriptor(device), args))
            print(f"{device}: {name}", file=sys.stderr)
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot and not args.own:
        plot(args.plot, results)


if __name__ == "__main__":
    run_command(main)
