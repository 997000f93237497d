"""Ablation: the contribution of each part of the method to latency and memory (FlashMem, Figure 7).

    python -m benchmarks.paper.ablation --zoo DIR --device pocl [--budget-ratio 0.25] [--disk cold] [--runs 5] [--json a.json]
    python -m benchmarks.paper.ablation --zoo DIR --device adreno750 --simulated --precision fp16 --models vit-103m gptneo-1.3b

One device, one memory path, one budget (a fraction of the weights, plus the memory that a session holds under any plan). Each
step changes one switch:

1. preload: everything resident before the first launch, as in other engines.
2. + OPG: streamed on the plan of LC-OPG (`--objective paper`: C_l is a constraint; `first`: C_l as far as possible), with
   maximal fusion groups and kernels that only compute.
3. + adaptive unfusion: the same, and fusion groups split where that improves the plan (`unfusion` of `flashmem.compile`).
4. + kernel rewriting: the bundle of step 3; kernels copy the next weights between their own steps (`Session(lanes=True)`).

*Kernels copy* is transfer mode `interleave`, which uses no copy engine. Weights are read into staging, and the compute queue
copies them to where kernels read them, as x_{w,l} of the plan say. In steps 2 and 3 every copy is a launch between two kernels
on the same queue, so it delays the following launches. In step 4 kernels copy while they compute. A further row has kernel
rewriting without unfusion, because the two parts depend on each other. A split makes room for copies inside kernels, and a copy
by its own launch takes the same time anywhere. *Copy engine* is mode `dma`, if a device has it natively: only steps 2 and 3,
because there is nothing to rewrite. A device with another native mode (`map`, `alias`: kernels read the file's bytes in place)
has a row for it.

Measured: plans of one program must give the same bits, which is checked. Memory is the ledger's peak and its average over time,
and the peak of the process above its memory before the model is opened. Medians of fresh processes that alternate. Needs the
`bench` extra. Simulated: on any descriptor; only shapes are read from models' files; needs the `compile` extra.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.processes import median, run_bundle, same_bits, take_turns, weights_of
from benchmarks.zoo import MODELS, planned_again, within
from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate

SEPARATE, REWRITTEN = "kernels copy: + adaptive unfusion", "kernels copy: + kernel rewriting"
WHOLE_SEPARATE, WHOLE_REWRITTEN = "kernels copy: + OPG", "kernels copy: kernel rewriting without unfusion"
REWRITING_BAR = 0.10


@dataclass(frozen=True)
class Step:
    """One row with streaming: how its bundle is compiled and run."""

    name: str
    mode: TransferMode
    unfusion: bool
    lanes: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments for `benchmarks.worker`."""
        return ("--mode", self.mode, *(() if self.lanes else ("--no-lanes",)))


def steps_of(own_mode: TransferMode) -> list[Step]:
    """The rows below preload, for a device with native transfer mode `own_mode`."""
    steps = [
        Step(WHOLE_SEPARATE, "interleave", unfusion=False, lanes=False),
        Step(SEPARATE, "interleave", unfusion=True, lanes=False),
        Step(REWRITTEN, "interleave", unfusion=True, lanes=True),
        Step(WHOLE_REWRITTEN, "interleave", unfusion=False, lanes=True),
    ]
    if own_mode == "dma":
        engine = [
            Step("copy engine: + OPG", "dma", unfusion=False, lanes=True),
            Step("copy engine: + adaptive unfusion", "dma", unfusion=True, lanes=True),
        ]
        return engine + steps
    if own_mode != "interleave":
        steps.append(Step(f"the device's own mode, {own_mode}", own_mode, unfusion=False, lanes=True))
    return steps


def measure(name: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model: a row for each step."""
    common = {"device": args.device, "memory_path": args.memory_path, "precision": args.precision}
    whole = flashmem.compile(model, folder / "whole.flashmem", **common, unfusion=False)
    path, weights = whole.program.memory_path, weights_of(whole)
    steps = steps_of(whole.descriptor.modes[path][0])
    budget = int(args.budget_ratio * weights) + fixed_bytes(whole.program)
    made = {}
    for mode, unfusion in dict.fromkeys((step.mode, step.unfusion) for step in steps):
        output = folder / f"{mode}-{unfusion}.flashmem"
        planned = {"mode": mode, "objective": args.objective}
        split = partial(flashmem.compile, model, output, **common, **planned)
        made[mode, unfusion] = within(budget, split if unfusion else partial(planned_again, whole, output, **planned))
    bundles = {step.name: made[step.mode, step.unfusion] for step in steps}
    runs: dict[str, tuple[Path, tuple[str, ...]]] = {"preload": (whole.path, ("--strategy", "preload"))}
    runs |= {step.name: (bundles[step.name].path, step.flags) for step in steps}
    answers = {}
    for number, (key, (where, extra)) in enumerate(runs.items()):  # fills the program cache
        answers[key] = folder / f"{number}.npz"
        run_bundle(where, args.device, *extra, "--repeat", "2", "--outputs", str(answers[key]))
    rows = take_turns(
        {
            key: partial(run_bundle, where, args.device, *extra, "--repeat", "3", cold=args.disk == "cold")
            for key, (where, extra) in runs.items()
        },
        args.runs,
    )
    fields = ("integrated", "warm", "ledger_peak", "ledger_average", "above_bare")
    table: dict[str, dict[str, Any]] = {key: {f: median(found, f) for f in fields} for key, found in rows.items()}
    programs = {"preload": whole.program.launches}
    for step, bundle in bundles.items():
        table[step] |= about(bundle.program, bundle.plan, bundle.budget_bytes)
        # Another partition into launches rounds differently, so only plans of one program must agree to the bit.
        twin = next((other for other, launches in programs.items() if launches == bundle.program.launches), None)
        table[step]["same bits"] = None if twin is None else same_bits([answers[twin], answers[step]])
        programs[step] = bundle.program.launches
    return {"model": name, "weights": weights, "disk": args.disk, "path": path, "steps": table}


def simulated(name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same rows, simulated."""
    descriptor = load_descriptor(args.device)
    path = descriptor.memory_paths[0]
    steps = steps_of(descriptor.modes[path][0])

    def options(mode: TransferMode, budget: int | None, *, unfusion: bool) -> Options:
        return Options(
            descriptor,
            mode,
            BundleRequest(budget=budget, objective=args.objective, unfusion=unfusion, precision=args.precision),
        )

    graph = read_graph(model, options(choose_mode(descriptor), None, unfusion=False))
    program, plan = _planned(graph, Options(descriptor, "interleave", BundleRequest(unfusion=False, precision=args.precision)))
    weights = sum(part.nbytes for part in program.slices)
    budget = int(args.budget_ratio * weights) + fixed_bytes(program)
    table = {"preload": _played(program, plan, descriptor, "dma", args.disk, preload=True)}
    made: dict[tuple[TransferMode, bool], tuple[Program, OverlapPlan, int]] = {}
    for step in steps:
        key = step.mode, step.unfusion
        if key not in made:
            taken = budget
            try:
                made[key] = *_planned(graph, options(step.mode, taken, unfusion=step.unfusion)), taken
            except BudgetError as error:
                taken = error.smallest_bytes
                made[key] = *_planned(graph, options(step.mode, taken, unfusion=step.unfusion)), taken
        program, plan, taken = made[key]
        table[step.name] = _played(program, plan, descriptor, step.mode, args.disk, lanes=step.lanes)
        table[step.name] |= about(program, plan, taken)
    return {"model": name, "weights": weights, "disk": args.disk, "path": path, "steps": table}


def _planned(graph: Graph, options: Options) -> tuple[Program, OverlapPlan]:
    generated, plan = plan_graph(graph, options)
    return generated.program, with_layouts(generated.program, plan, [options.mode])


def _played(
    program: Program,
    plan: OverlapPlan,
    descriptor: DeviceDescriptor,
    mode: TransferMode,
    disk: Any,
    *,
    preload: bool = False,
    lanes: bool = True,
) -> dict[str, Any]:
    strategy = "preload" if preload else "stream"
    prediction = simulate(describe(program, plan, descriptor, mode, disk=disk, strategy=strategy, lanes=lanes))
    memory = prediction.report.memory
    return {
        "integrated": prediction.report.latency.integrated,
        "warm": prediction.later,
        "ledger_peak": memory.peak_bytes,
        "ledger_average": memory.average_bytes,
        "busy": prediction.busy,
    }


def about(program: Program, plan: OverlapPlan, budget: int | None) -> dict[str, Any]:
    """The description of a row's plan."""
    return {
        "budget": budget,
        "layers": len(program.launches),
        "preloaded": plan.preload_ratio,
        "notes": [note for note in plan.notes if "unfusion" in note or "objective" in note],
    }


def show(result: dict[str, Any]) -> None:
    """Print one table; factors are relative to preload."""
    steps: dict[str, dict[str, Any]] = result["steps"]
    base = steps["preload"]
    print(
        f"\n### {result['model']}, {result['weights'] / 1e6:.0f} MB of weights, {result['path']} path, file {result['disk']}\n"
    )
    print(
        "| step | budget, MB | layers | W | first answer, s | faster | later, s | most held / average, MB | less on average "
        "| process, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for key, row in steps.items():
        budget = f"{row['budget'] / 1e6:.0f}" if row.get("budget") else "none"
        held = f"{row['ledger_peak'] / 1e6:.0f} / {row['ledger_average'] / 1e6:.0f}"
        process = f"{row['above_bare'] / 1e6:.0f}" if "above_bare" in row else ""
        print(
            f"| {key} | {budget} | {row.get('layers', '')} | {row.get('preloaded', 1):.0%} | {row['integrated']:.3f} "
            f"| {base['integrated'] / row['integrated']:.2f} x | {row['warm']:.3f} | {held} "
            f"| {base['ledger_average'] / row['ledger_average']:.1f} x | {process} |"
        )
    for separate, rewritten, what in ((SEPARATE, REWRITTEN, ""), (WHOLE_SEPARATE, WHOLE_REWRITTEN, ", layers whole")):
        gains = [1 - steps[rewritten][field] / steps[separate][field] for field in ("integrated", "warm")]
        met = "met" if max(gains) >= REWRITING_BAR else "missed"
        print(
            f"\nkernel rewriting over separate copies{what}: first answer {gains[0]:+.1%}, later runs {gains[1]:+.1%} of the "
            f"time saved (bar {REWRITING_BAR:.0%}: {met})"
        )
    for key, row in steps.items():
        for note in row.get("notes", ()):
            print(f"\n{key}: {note}")
        if row.get("same bits") is False:
            print(f"\n{key}: DIFFERENT BITS from another plan of the same program")
    print(flush=True)


def main() -> None:
    """Measure or simulate every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--budget-ratio", type=float, default=0.25, help="of the weights")
    parser.add_argument("--objective", default="paper", choices=("first", "paper"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--simulated", action="store_true", help="on the descriptor that --device names")
    parser.add_argument("--disk", default="cold", choices=("cached", "cold"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.simulated:
        parser.check_device(args.device)
    found = parser.models_in(args.zoo, args.models)
    results = []
    for name, model in found.items():
        if args.simulated:
            results.append(simulated(name, model, args))
        else:
            with tempfile.TemporaryDirectory(prefix="flashmem-ablation-") as folder:
                results.append(measure(name, model, Path(folder), args))
        show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_command(main)
