"""Where planning ahead pays: every strategy against ours, simulated, as the disk is made faster or slower than the device.

    python -m benchmarks.overlap --zoo DIR --devices adreno750 nvidia [--budget-ratio 0.5] [--json o.json] [--plot o.png]

A described device (see `flashmem simulate`) gets disks that take 1/4 to 4 times as long to bring in all weights as the layers
take to compute. Each strategy plans for that disk inside the same budget, and the simulator plays the plans on a cold file.
What opening a session costs is left out: it is the same for all of them and hides nothing. With a disk of the descriptor's own
rate the whole first answer is printed as well. The models' files are read for their shapes only; no device is needed. Needs
the `compile` extra, `--plot` matplotlib.
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

from benchmarks.zoo import MODELS, models_in
from flashmem.codegen.program import generate
from flashmem.compile import plan_program, read_graph
from flashmem.device import DeviceDescriptor, load_descriptor
from flashmem.errors import BudgetError
from flashmem.graph.fusion import fuse
from flashmem.planning.limits import Limits
from flashmem.planning.plan import OverlapPlan, Strategy
from flashmem.planning.planner import planning_problem
from flashmem.program import Program
from flashmem.request import Options, choose_mode
from flashmem.simulation.scenario import describe
from flashmem.simulation.simulator import simulate

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
RATIOS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 2.8, 4.0)
"""Time to load all weights over time to compute all layers."""


def plans(program: Program, options: Options) -> dict[Strategy, OverlapPlan]:
    """The plan of every strategy inside the budget, or inside the smallest budget that all of them can keep to."""
    while True:
        try:
            return {
                strategy: plan_program(program, replace(options, limits=replace(options.limits, strategy=strategy)))
                for strategy in STRATEGIES
            }
        except BudgetError as error:
            options = replace(options, limits=replace(options.limits, budget=error.smallest_bytes))


def with_disk(options: Options, bandwidth: float) -> Options:
    """The same device with a disk of `bandwidth` bytes per second."""
    rates = replace(options.descriptor.rates, disk_bandwidth=bandwidth)
    return replace(options, descriptor=replace(options.descriptor, rates=rates))


def seconds(program: Program, options: Options, *, opening: bool) -> dict[str, float]:
    """Simulated integrated latency of each strategy on a cold file, with or without opening the session."""
    found: dict[str, float] = {}
    for strategy, plan in plans(program, options).items():
        scenario = describe(program, plan, options.descriptor, options.mode, disk="cold", strategy=strategy)
        if not opening:
            scenario = replace(scenario, context_seconds=0.0, kernel_seconds=0.0, announced=0)
        found[strategy] = simulate(scenario).report.latency.integrated
    return found


def measure(name: str, model: Path, descriptor: DeviceDescriptor, budget_ratio: float) -> dict[str, Any]:
    """One model on one device: seconds by strategy, at each ratio and at the descriptor's own disk."""
    options = Options(descriptor, choose_mode(descriptor, "auto"), Limits(chunk=1 << 20))
    graph = read_graph(model, options)
    program = generate(graph, fuse(graph), descriptor).program
    options = replace(options, limits=replace(options.limits, budget=int(budget_ratio * program.weights_bytes)))
    problem = planning_problem(program, descriptor, options.mode, options.limits)
    compute = sum(layer.seconds for layer in problem.layers)
    weights = sum(w.nbytes for w in problem.weights)
    return {
        "model": name,
        "device": descriptor.name,
        "mode": options.mode,
        "own ratio": weights / descriptor.rates.disk_bandwidth / compute,
        "own": seconds(program, options, opening=True),
        "by ratio": {ratio: seconds(program, with_disk(options, weights / compute / ratio), opening=False) for ratio in RATIOS},
    }


def over_ours(rows: Iterable[dict[str, float]], strategy: str) -> float:
    """Geometric mean of a strategy's seconds over ours."""
    return geometric_mean([row[strategy] / row["stream"] for row in rows])


def show(results: list[dict[str, Any]]) -> None:
    """One table for each device."""
    for device in dict.fromkeys(result["device"] for result in results):
        found = [result for result in results if result["device"] == device]
        models = ", ".join(result["model"] for result in found)
        print(f"\n### {device}, mode {found[0]['mode']}: seconds of each strategy over ours, geometric mean of {models}\n")
        print("| loading / computing | " + " | ".join(STRATEGIES[1:]) + " |\n" + "|---" * len(STRATEGIES) + "|")
        for ratio in RATIOS:
            rows = [result["by ratio"][ratio] for result in found]
            print(f"| {ratio} | " + " | ".join(f"{over_ours(rows, s):.2f}" for s in STRATEGIES[1:]) + " |")
        print("| its own disk, opening included | " + " | ".join(
            f"{over_ours([result['own'] for result in found], s):.2f}" for s in STRATEGIES[1:]
        ) + " |")  # fmt: skip
        print("\nits own disk: loading / computing " + ", ".join(f"{r['model']} {r['own ratio']:.1f}" for r in found))


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """A strategy's seconds over ours against the ratio: a panel for each device, a line for each strategy."""
    from flashmem.plots.figure import COLOURS, MARKERS, figure, legend_below, plain_axes

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
    """Simulate every model found on every device named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--devices", nargs="+", default=["adreno750", "mali-g710", "nvidia"])
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--budget-ratio", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    found = models_in(args.zoo, args.models, parser)
    results = []
    for device in args.devices:
        for name, model in found.items():
            results.append(measure(name, model, load_descriptor(device), args.budget_ratio))
            print(f"{device}: {name}", file=sys.stderr)
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(args.plot, results)


if __name__ == "__main__":
    main()
