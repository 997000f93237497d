"""Tiled chains: read weights again for each tile, compared with keeping them from first to last tile.

    python -m benchmarks.memory.rereading --zoo DIR [--device pocl] [--models NAME...] [--precisions fp32 fp16]

DIR contains models that `benchmarks.exports` wrote. Nothing runs: programs are planned, and the planner predicts their
latency. A weight that is read again is one slice for each launch that uses it, all of the same bytes in the file. Chains are
selected as in compilation, and as if weights used no memory, for a few limits. The table shows, kept / read again:

- the smallest budget;
- the predicted first answer at the smallest budget with weights kept, and at 1.5 times it;
- the bytes read, each at its smallest budget;
- the predicted first answer at the smallest budget with weights read again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.exports.models import names, tiny_names
from benchmarks.memory.budgets import Precision
from flashmem.base.errors import BudgetError
from flashmem.compiler.adaptive.tiling import Patches
from flashmem.compiler.memory.launch_order import in_lowest_order
from flashmem.compiler.options import Options
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.compiler.tiling.choice import PatchChoice
from flashmem.compiler.tiling.patches import Chain, in_patches
from flashmem.options import resolve
from flashmem.planning.planner import plan_instance, planning_instance
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.program.tensors import Slice
from flashmem.request.request import BundleRequest
from flashmem.schedule.plan import OverlapPlan

MODELS = (
    "sam2-large", "sam2-tiny", "sd15-unet", "whisper-medium-encoder", "whisper-medium-decoder", "depthanything-l",
    "depthanything-s",
)  # fmt: skip
TIMES = 1.5
LIMITS = (1.75, 1.2, 0.0)
"""Limits of live activations, over the least peak with any chains; 0: as little as possible."""


def read_again(program: Program) -> Program:
    """`program` with a separate slice for each launch that uses a weight; the bytes in the file are the same."""
    parts = {part.name: part for part in program.slices}
    slices: dict[str, Slice] = {}

    def own(layer: int, launch: Launch) -> Iterator[Arg]:
        for arg in launch.args:
            if arg.kind == "slice":
                part = replace(parts[str(arg.value)], name=f"{arg.value}@{layer}")
                slices[part.name] = part
                arg = replace(arg, value=part.name)
            yield arg

    launches = tuple(replace(launch, args=tuple(own(layer, launch))) for layer, launch in enumerate(program.launches, start=1))
    return replace(program, launches=launches, slices=tuple(slices.values()))


def programs(model: Path, options: Options) -> list[Program]:
    """The program without patches, and those with the chains for each limit, with weights counted or not."""
    graph = read_graph(model, options)
    fused = fuse(graph)
    patches = Patches(fused, options.descriptor, options.request.precision)
    found: dict[tuple[Chain, ...], None] = {(): None}
    least = patches.choose(0)[1]
    for memory in (patches.memory, replace(patches.memory, weight_bytes=lambda value: 0)):
        for limit in (int(least * step) for step in LIMITS):
            found[tuple(PatchChoice(graph, patches.groups, patches.aliases, memory).chains(limit)[0])] = None
    made = []
    for chains in found:
        tiled = fuse(in_patches(fused, chains)) if chains else fused
        ordered = in_lowest_order(tiled, half=options.request.precision == "fp16")
        made.append(generate(ordered, options.descriptor, precision=options.request.precision).program)
    return made


def planned(program: Program, options: Options, budget: int) -> OverlapPlan:
    """The plan with the earliest first answer. Raises BudgetError."""
    limits = options.request.replace(budget=budget)
    instance = planning_instance(program, options.descriptor, options.mode, limits)
    return plan_instance(instance, program, options.mode, limits, complete=False)


def smallest(program: Program, options: Options) -> int:
    """The smallest budget of an unchanged program."""
    try:
        planned(program, options, 1)
    except BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("a session holds more than a byte")


def soonest(variants: list[tuple[int, Program]], options: Options, budget: int) -> tuple[float, int]:
    """Predicted seconds of the best variant that fits, and the bytes it reads. `variants` have their smallest budgets."""
    fitting = [program for least, program in variants if least <= budget]
    plans = [(planned(program, options, budget).objective, sum(part.nbytes for part in program.slices)) for program in fitting]
    return min(plans, default=(float("inf"), 0))


def row(name: str, model: Path, device: str, precision: Precision) -> str:
    """One line of the table."""
    options = resolve(BundleRequest(device=device, precision=precision))
    made = programs(model, options)
    kept = [(smallest(program, options), program) for program in made]
    again = [(smallest(program, options), program) for program in map(read_again, made)]
    least = min(nbytes for nbytes, _ in kept)
    lower = min(nbytes for nbytes, _ in again)
    first = {budget: [soonest(each, options, budget) for each in (kept, again)] for budget in (least, int(TIMES * least))}
    lowest = soonest(again, options, lower)
    cells = (
        name,
        precision,
        f"{least / 1e6:.1f} / {lower / 1e6:.1f}",
        *(" / ".join(f"{seconds:.3f}" for seconds, _ in each) for each in first.values()),
        f"{first[least][0][1] / 1e6:.0f} / {lowest[1] / 1e6:.0f}",
        f"{lowest[0]:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a line for each model and precision."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device("pocl")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=(*names(), *tiny_names()), metavar="NAME")
    parser.add_argument("--precisions", nargs="*", default=["fp32", "fp16"], choices=("fp32", "fp16"))
    args = parser.parse_args()
    parser.check_device(args.device)
    parser.models_in(args.zoo, args.models)  # at least one
    print(
        "| model | precision | smallest budget, MB | first answer there, s | at 1.5 times it, s | MB read | at the lower, s |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.models:
        model = args.zoo / name / "model.onnx"
        if not model.is_file():
            print(
                f"{model} is not there; export it with `python -m benchmarks.exports {name} {model.parent} --notes`",
                file=sys.stderr,
            )
            continue
        for precision in args.precisions:
            print(row(name, model, args.device, precision), flush=True)


if __name__ == "__main__":
    run_command(main)
