"""From a graph to a program and its checked plan: the middle of the pipeline.

docs/reference/internals/architecture.md shows the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.base.garbage import collecting_seldom
from flashmem.compiler.adaptive.granularity import first_attempt
from flashmem.compiler.adaptive.tiling import fitting_patches
from flashmem.compiler.adaptive.unfusion import may_refine, refine
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.generated import NOTHING_RESERVED, Generated, Reserved
from flashmem.compiler.options import Options
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.stages.pipeline import GroupedGraph, Pipeline, Watch
from flashmem.compiler.stages.planned import Attempt, with_layouts
from flashmem.compiler.weights.sharing import NOTHING_STORED, StoredWeights
from flashmem.planning.planner import make_plan
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


def _ignore(generated: Generated) -> None:
    """Does nothing with a program."""


def plan_graph(graph: Graph, options: Options, watch: Watch = lambda step: nullcontext()) -> tuple[Generated, OverlapPlan]:
    """The program of `graph` and its checked plan, without layouts. See `plan_grouped`.

    Raises:
        UserError: the limits must change; a BudgetError names the smallest that work.
    """
    with watch("fuse"):
        grouped = GroupedGraph.of(graph, options)
    return plan_grouped(grouped, options, watch)


@collecting_seldom()
def plan_grouped(
    grouped: GroupedGraph,
    options: Options,
    watch: Watch = lambda step: nullcontext(),
    final: Callable[[Generated], None] = _ignore,
    *,
    patches: bool = True,
    earlier: StoredWeights = NOTHING_STORED,
    least: Reserved = NOTHING_RESERVED,
    draft: Generated | None = None,
) -> tuple[Generated, OverlapPlan]:
    """The program of a fused graph and its checked plan, without layouts.

    Slices are the largest that the limits permit and that are fast; adaptive unfusion splits fusion groups where that improves
    the plan. If the budget is too small even so, chains of operators are computed in patches (patch-based tiling).

    `watch(step)` is entered for each "fuse", "generate" and "plan_and_check", however often they repeat, and for "patches".
    `final` is called with the program before planning if the plan cannot change it: without limits on memory, and without
    unfusion. `patches`: permit patch-based tiling. `earlier`: weights that a program for other shapes has placed. `least`:
    memory that the program reserves at least. `draft`: what `Pipeline.drafted` made of the graph over the weights of the
    programs before it, which then are `earlier`.

    Raises:
        UserError: the limits must change; a BudgetError names the smallest that work.
    """
    limits = options.request
    limited = limits.budget is not None or limits.m_peak is not None
    told = _ignore if limited or may_refine(limits, options.mode) else final  # else another program may be planned

    def pipeline_of(graph: GroupedGraph) -> Pipeline:
        return replace(Pipeline.of(graph, options, earlier=earlier), watch=watch, least=least)

    try:
        pipeline = replace(pipeline_of(grouped), final=told)
        made = _best(pipeline if draft is None or limited else pipeline.begun_with(draft))
    except BudgetError as refused:
        if limits.budget is None or not patches:
            raise
        tiled, note = fitting_patches(
            grouped, options, refused, lambda graph, slicing: replace(pipeline_of(graph), slicing=slicing).attempt(), watch
        )
        made = _best(pipeline_of(tiled))
        made = replace(made, plan=replace(made.plan, notes=(*made.plan.notes, note)))
    return made.generated, made.plan


def _best(pipeline: Pipeline) -> Attempt:
    """The attempt with the slices and splits that are best under the limits, and its completed plan."""
    limits = pipeline.options.request
    graph = pipeline.grouped.graph
    pipeline, first = first_attempt(pipeline, limits)
    best = refine(pipeline, first, limits, pipeline.options.mode)
    best = replace(best, plan=pipeline.completed(replace(best, instance=pipeline.instance(best.generated.program))))
    notes = (f"{' and '.join(graph.widened)} of the model computed in float32",) if graph.widened else ()
    refused = _notes_of_refused(pipeline.options, pipeline.selector, best.generated)
    return replace(best, plan=replace(best.plan, notes=(*best.plan.notes, *notes, *refused)))


def _notes_of_refused(options: Options, selector: KernelSelector, generated: Generated) -> list[str]:
    """What became of the kernels that the device's driver miscompiles."""
    used = {name: "is compiled without optimisation" for name in generated.source.kernels if name in options.refused}
    left_out = {name: "is left out for a kernel of another config" for name in selector.left_out}
    return [
        f"{name} {what}, because the driver miscompiles it: {options.refused[name].wrong}"
        for name, what in (left_out | used).items()
    ]


def refusal(
    grouped: GroupedGraph, options: Options, *, patches: bool = True, least: Reserved = NOTHING_RESERVED
) -> BudgetError:
    """The error of a budget that is too small for a graph, which names the smallest; arguments as for `plan_grouped`.

    Memory limits in `options` are ignored.
    """
    asked = options.changed(budget=1, m_peak=None)
    try:
        plan_grouped(grouped, asked, patches=patches, least=least)
    except BudgetError as refused:
        return refused
    raise AssertionError("a session holds more than a byte")


def plan_program(program: Program, options: Options) -> OverlapPlan:
    """The overlap plan of an unchanged program, with the layouts of every transfer mode of its memory path."""
    plan = make_plan(program, options.descriptor, options.mode, options.request)
    return with_layouts(program, plan, options.descriptor.modes[program.memory_path])
