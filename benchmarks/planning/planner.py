"""Quality, proofs and solver time of plans: tables for docs/reference/internals/planner.md. Needs no device.

    python -m benchmarks.planning.planner solve [--zoo DIR] [--models ...] [--devices ...] [--objectives ...]
    python -m benchmarks.planning.planner serial | front | quality | chunks

`solve`: status, gap, seconds and the share of W at M_peak 500 MB and the lambda of each objective. `serial`: whether execution
is longer than the work of the busiest resource, simulated, at a quarter of the weights. `front`: latency and average memory as
lambda grows, simulated, compared with what a weighted sum of the two reaches. `quality`: the plan without a solver over the
solved one, over its bound, and compared with strategy next-operator, its simplest rival. Only "paper" is solved; the solver
starts from the other plan, and so its plan is never worse. The models are the eleven of Table 6. `chunks`: the share of W by
the size S of a chunk.

Models are architectures (`zoo:NAME`) or files that `benchmarks.exports` wrote under DIR; no weight is read. Seconds are
processor time of this process, including solver threads, so that other work on the machine does not increase them.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.command import Arguments, run_command
from flashmem.base.errors import BudgetError, UserError
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.planning.baselines import Baseline, operators_of
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.latency.first_answer import forced_preload
from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.planner import completed, plan_instance, planning_instance
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.simulation.scenario import Disk, describe
from flashmem.tools.simulation.simulator import simulate
from flashmem.tools.zoo.graphs import check_architecture, zoo_graph

TABLE_4 = {
    "gptneo-125m": "OPTIMAL, 45 s", "gptneo-1.3b": "FEASIBLE, 121 s", "gptneo-2.7b": "FEASIBLE, 121 s",
    "vit-8b": "FEASIBLE, 121 s", "llama2-13b": "FEASIBLE, 121 s", "llama2-70b": "FEASIBLE, 121 s",
}  # fmt: skip
"""FlashMem (ASPLOS 2026), Table 4: its solver's status and seconds."""

ELEVEN = (
    "gptneo-125m", "gptneo-1.3b", "gptneo-2.7b", "resnet50", "sam2-large", "vit-103m", "deepvit-204m", "sd15-unet",
    "whisper-medium-text", "depthanything-s", "depthanything-l",
)  # fmt: skip

QUARTERS = ("gptneo-125m", "vit-b16", "resnet50")
ZOO = [Path()]


@cache
def graph_of(name: str) -> Graph:
    """The graph of an export in the zoo folder, or of an architecture."""
    file = ZOO[0] / name / "model.onnx"
    try:
        check_architecture(name)
    except UserError:
        return read_graph(file, resolve(BundleRequest(device="adreno750")))
    return prepare(zoo_graph(name))


@dataclass(frozen=True)
class Planned:
    """A model's program and plan, the options they were made for, and processor seconds from the graph to the plan."""

    program: Program
    plan: OverlapPlan
    options: Options
    seconds: float


def planned(name: str, device: str, *, mode: str = "auto", **limits: Any) -> Planned:
    """The whole pipeline from the graph to the checked plan."""
    graph = graph_of(name)
    options = resolve(BundleRequest(**limits, device=device, mode=mode))
    gc.collect()
    gc.disable()
    begun = time.process_time()
    try:
        generated, plan = plan_graph(graph, options)
    finally:
        gc.enable()
    return Planned(generated.program, plan, options, time.process_time() - begun)


def show(*cells: object) -> None:
    """Print a row of a table immediately."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells: str) -> None:
    """Print the first two rows of a table."""
    show(*cells)
    show(*["---"] * len(cells))


def solve_table(models: Sequence[str], devices: Sequence[str], objectives: Sequence[str]) -> None:
    """Print Table 4."""
    head(
        "model",
        "device",
        "objective",
        "layers",
        "slices",
        "S",
        "status for that objective",
        "gap",
        "in W",
        "seconds of planning",
        "in all",
        "Table 4",
    )
    for name in models or list(TABLE_4):
        for device in devices or ["nvidia", "adreno750", "pocl"]:
            for objective in objectives or ["paper", "first"]:
                made = planned(name, device, objective=objective, m_peak="500MB")
                plan = made.plan
                show(
                    name, device, objective, len(plan.capacities), len(plan.weights), f"{plan.chunk_bytes >> 10} KiB",
                    plan.status, f"{plan.gap:.2%}", f"{plan.preload_ratio:.1%}", f"{plan.solve_seconds:.2f}",
                    f"{made.seconds:.1f}", TABLE_4.get(name, ""),
                )  # fmt: skip


def weights_of(name: str, device: str) -> int:
    """Bytes of all slices."""
    return sum(part.nbytes for part in planned(name, device, unfusion=False).program.slices)


def serial_table(models: Sequence[str], devices: Sequence[str], objectives: Sequence[str]) -> None:
    """Print execution over the busiest resource, and over a proven bound within the same memory."""
    head("model", "device", "mode", "objective", "file", "disk", "read", "copy", "compute", "execution", "over the busiest",
         "over the bound", "in W", "gap")  # fmt: skip
    for name in models or QUARTERS:
        for device in devices or ["nvidia", "adreno750"]:
            descriptor = load_descriptor(device)
            quarter = weights_of(name, device) // 4
            for mode in ("interleave", "dma", "alias"):
                if mode not in descriptor.modes[descriptor.memory_paths[0]]:
                    continue
                for objective in objectives or ["paper", "first"]:
                    try:
                        made = planned(name, device, mode=mode, objective=objective, m_peak=str(quarter))
                    except BudgetError as error:
                        show(name, device, mode, objective, str(error))
                        continue
                    for disk in ("cold", "cached"):
                        show(name, device, mode, objective, disk, *serial_row(made, disk))


def serial_row(made: Planned, disk: Disk) -> Iterator[str]:
    """Milliseconds of each resource and of execution, and their ratios."""
    options, plan = made.options, with_layouts(made.program, made.plan, [made.options.mode])
    scenario = describe(made.program, plan, options.descriptor, options.mode, disk=disk)
    played = simulate(scenario)
    execution = played.report.latency.exec
    busiest = max(played.busy.get(each, 0.0) for each in ("disk", "read", "copy", "compute"))
    instance = planning_instance(made.program, options.descriptor, options.mode, options.request)
    instance = replace(instance, m_peak=plan.m_peak)
    chosen = forced_preload(instance, {w.name for w in plan.weights if w.preload})
    read = instance if disk == "cold" else replace(instance, load_bandwidth=math.inf)
    bound = fastest_seconds(read, chosen) - instance.opening_seconds
    for each in ("disk", "read", "copy", "compute"):
        yield f"{1e3 * played.busy.get(each, 0.0):.1f}"
    yield f"{1e3 * execution:.1f}"
    yield f"{execution / busiest:.2f}"
    yield f"{execution / bound:.2f}" if bound > 0 else ""
    yield f"{plan.preload_ratio:.0%}"
    yield f"{plan.gap:.2%}"


def front_table(models: Sequence[str], devices: Sequence[str], objectives: Sequence[str]) -> None:
    """Print latency against average memory as lambda grows, for one program without other limits."""
    head("model", "device", "lambda", "first answer, ms", "average, MB", "peak, MB", "reached by a weighted sum")
    for name in models or ["gptneo-125m", "vit-b16", "resnet50"]:
        for device in devices or ["nvidia", "adreno750", "pocl"]:
            made = planned(name, device, m_peak="1TB", unfusion=False)
            options = made.options
            rows = []
            for step in range(11):
                limits = options.request.replace(lambda_=step / 10)
                instance = replace(planning_instance(made.program, options.descriptor, options.mode, limits), w_may_grow=True)
                plan = plan_instance(instance, made.program, options.mode, limits, complete=False)
                plan = with_layouts(made.program, plan, [options.mode])
                played = simulate(describe(made.program, plan, options.descriptor, options.mode, disk="cold")).report
                rows.append((step / 10, played.latency.integrated, played.memory.average_bytes, played.memory.peak_bytes))
            reached = by_weighted_sum([(latency, average) for _, latency, average, _ in rows])
            for row, (lambda_, latency, average, peak) in enumerate(rows):
                show(name, device, lambda_, f"{1e3 * latency:.1f}", f"{average / 1e6:.1f}", f"{peak / 1e6:.1f}",
                     "yes" if row in reached else "no")  # fmt: skip


def by_weighted_sum(points: Sequence[tuple[float, float]]) -> set[int]:
    """The `points` that minimise a weighted sum of both coordinates, each over its largest, for some weight between 0 and 1."""
    most = [max(each) for each in zip(*points, strict=True)]
    found = set()
    for step in range(1001):
        weight = step / 1000
        costs = [(1 - weight) * latency / most[0] + weight * average / most[1] for latency, average in points]
        found.add(min(range(len(points)), key=costs.__getitem__))
    return found


def quality_table(models: Sequence[str], devices: Sequence[str], objectives: Sequence[str]) -> None:
    """Print the plan without a solver over the solved one, for the same program within the same M_peak."""
    head(
        "model", "device", "objective", "slices", "without a solver", "its seconds", "next-operator over it", "over the bound",
        "solved", "ratio", "gap of the solved",
    )  # fmt: skip
    ratios: dict[str, list[float]] = {}
    for objective in objectives or ["first", "paper"]:
        for name in models or ELEVEN:
            for device in devices or ["nvidia", "adreno750"]:
                options = resolve(BundleRequest(objective=objective, unfusion=False, device=device))
                program = planned(name, device, objective=objective, unfusion=False).program
                quarter = sum(part.nbytes for part in program.slices) // 4
                options = options.changed(m_peak=quarter)
                free, solved, seconds = both(program, options)
                if free is None or solved is None:
                    show(name, device, objective, len(program.slices), "does not fit")
                    continue
                ratio = free.objective / solved.objective if solved.objective else 1.0
                ratios.setdefault(f"{objective}", []).append(ratio)
                rival = f"{next_operator(program, options) / free.objective:.3f}" if objective == "first" else ""
                over = f"{free.objective / free.bound:.4f}" if free.bound else ""
                show(name, device, objective, len(program.slices), f"{free.objective:.5g}", f"{seconds:.2f}", rival, over,
                     f"{solved.objective:.5g}", f"{ratio:.4f}", f"{solved.gap:.2%}")  # fmt: skip
    for objective, found in ratios.items():
        print(f"\n{objective}: geometric mean of {len(found)}: {geometric_mean(found):.4f}, most {max(found):.4f}")


def next_operator(program: Program, options: Options) -> float:
    """Predicted first answer of strategy next-operator within the same M_peak; infinite if it does not fit."""
    instance = planning_instance(program, options.descriptor, options.mode, options.request)
    try:
        return Baseline("next-operator", operators_of(program)).plan(instance).objective
    except BudgetError:
        return math.inf


def both(program: Program, options: Options) -> tuple[OverlapPlan | None, OverlapPlan | None, float]:
    """The plan without a solver, the solved one, and processor seconds of the former."""
    limits, mode = options.request, options.mode
    instance = replace(planning_instance(program, options.descriptor, mode, limits), w_may_grow=True)
    had = "ortools" in sys.modules
    begun = time.process_time()
    try:
        if limits.objective == "first":
            free = plan_instance(instance, program, mode, limits, complete=False)
        else:
            free = solve(instance, units="share", workers=0)
    except BudgetError:
        return None, None, 0.0
    seconds = time.process_time() - begun
    assert had or "ortools" not in sys.modules
    if limits.objective == "first":
        return free, completed(instance, free, program, mode, limits), seconds
    return free, solve(instance, units="share"), seconds


def chunk_table(models: Sequence[str], devices: Sequence[str], objectives: Sequence[str]) -> None:
    """Print the share of W at M_peak 500 MB by S; the default S is the first row."""
    sizes = ["auto", "16KiB", "32KiB", "64KiB", "128KiB", "256KiB", "512KiB", "1MiB"]
    head("model", "device", "S chosen", *["chosen", *sizes[1:]])
    for name in models or ["gptneo-125m", "gptneo-1.3b", "vit-8b"]:
        for device in devices or ["nvidia", "adreno750", "pocl"]:
            plans = [planned(name, device, objective="paper", m_peak="500MB", lambda_=0.9, chunk=size).plan for size in sizes]
            show(name, device, f"{plans[0].chunk_bytes >> 10} KiB", *[f"{plan.preload_ratio:.1%}" for plan in plans])


TABLES: dict[str, Callable[[Sequence[str], Sequence[str], Sequence[str]], None]] = {
    "solve": solve_table, "serial": serial_table, "front": front_table, "quality": quality_table, "chunks": chunk_table,
}  # fmt: skip


def main() -> None:
    """Print one table."""
    parser = Arguments(__doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--zoo", type=Path, default=Path())
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--devices", nargs="*", default=[])
    parser.add_argument("--objectives", nargs="*", default=[])
    args = parser.parse_args()
    ZOO[0] = args.zoo
    TABLES[args.table](args.models, args.devices, args.objectives)


if __name__ == "__main__":
    run_command(main)
