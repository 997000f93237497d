"""From a graph to a program and its checked plan: the middle of the pipeline.

docs/reference/internals/architecture.md shows the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.compiler.adaptive.granularity import first_attempt
from flashmem.compiler.adaptive.pipeline import Attempt, Pipeline, Watch
from flashmem.compiler.adaptive.tiling import fitting_patches
from flashmem.compiler.adaptive.unfusion import may_refine, refine
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.program import NOTHING_RESERVED, Generated, Reserved
from flashmem.compiler.options import Options
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.weights.sharing import NOTHING_STORED, StoredWeights
from flashmem.compiler.weights.slicing import Slicing
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.planner import make_plan
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


def _ignore(generated: Generated) -> None:
    """Does nothing with a program."""


def plan_graph(
    graph: Graph,
    options: Options,
    watch: Watch = lambda step: nullcontext(),
    final: Callable[[Generated], None] = _ignore,
    *,
    lowest_order: bool = True,
    patches: bool = True,
    earlier: StoredWeights = NOTHING_STORED,
    least: Reserved = NOTHING_RESERVED,
) -> tuple[Generated, OverlapPlan]:
    """The middle of the pipeline: fuse operators, generate the program, and make its checked plan, without layouts.

    Slices are the largest that the limits permit and that are fast; adaptive unfusion splits fusion groups where that improves
    the plan. If the budget is too small even so, chains of operators are computed in patches (patch-based tiling).

    `watch(step)` is entered for each "fuse", "generate" and "plan_and_check", however often they repeat, and for "patches".
    `final` is called with the program before planning if the plan cannot change it: without limits on memory, and without
    unfusion. `lowest_order`: order launches for the lowest peak memory. `patches`: permit patch-based tiling. `earlier`:
    weights that a program for other shapes has placed. `least`: memory that the program reserves at least.

    Raises:
        UserError: the limits must change; a BudgetError names the smallest that work.
    """
    try:
        return _plan(graph, options, watch, final, lowest_order=lowest_order, earlier=earlier, least=least)
    except BudgetError as refused:
        if options.request.budget is None or not patches:
            raise

        def sliced(tiled: Graph, slicing: Slicing) -> tuple[Generated, OverlapPlan]:
            return _plan(tiled, options, watch, slicing=slicing, earlier=earlier, least=least)

        tiled, note = fitting_patches(graph, options, refused, sliced, watch)
    generated, plan = _plan(tiled, options, watch, earlier=earlier, least=least)
    return generated, replace(plan, notes=(*plan.notes, note))


def _plan(
    graph: Graph,
    options: Options,
    watch: Watch,
    final: Callable[[Generated], None] = _ignore,
    *,
    slicing: Slicing | None = None,
    lowest_order: bool = True,
    earlier: StoredWeights = NOTHING_STORED,
    least: Reserved = NOTHING_RESERVED,
) -> tuple[Generated, OverlapPlan]:
    """Generate and plan `graph`, with the slices that are best under the limits.

    `slicing`: use this, and split no fusion group. `lowest_order`, `earlier`, `least`: see `plan_graph`.
    """
    limits, mode = options.request, options.mode
    limited = limits.budget is not None or limits.m_peak is not None
    pipeline = Pipeline(
        graph,
        options,
        KernelSelector(options.descriptor, options.request.optimize, limited=limited, refused=frozenset(options.refused)),
        watch=watch,
        final=_ignore if limited or may_refine(limits, mode) else final,  # else another program may be planned
        lowest_order=lowest_order,
        earlier=earlier,
        least=least,
    )
    if slicing is not None:
        attempt = replace(pipeline, slicing=slicing).attempt(frozenset())
        return attempt.generated, attempt.plan
    pipeline, first = first_attempt(pipeline, limits)
    generated, made = refine(graph, pipeline, first, limits, mode)
    made = pipeline.completed(Attempt(generated, pipeline.instance(generated.program), made))
    notes = (f"{' and '.join(graph.widened)} of the model computed in float32",) if graph.widened else ()
    return generated, replace(made, notes=(*made.notes, *notes, *_notes_of_refused(options, pipeline.selector, generated)))


def _notes_of_refused(options: Options, selector: KernelSelector, generated: Generated) -> list[str]:
    """What became of the kernels that the device's driver miscompiles."""
    used = {name: "is compiled without optimisation" for name in generated.source.kernels if name in options.refused}
    left_out = {name: "is left out for a kernel of another config" for name in selector.left_out}
    return [
        f"{name} {what}, because the driver miscompiles it: {options.refused[name]}" for name, what in (left_out | used).items()
    ]


def refusal(
    graph: Graph,
    options: Options,
    *,
    lowest_order: bool = True,
    patches: bool = True,
    least: Reserved = NOTHING_RESERVED,
) -> BudgetError:
    """The error of a budget that is too small for `graph`, which names the smallest; arguments as for `plan_graph`.

    Memory limits in `options` are ignored.
    """
    asked = options.changed(budget=1, m_peak=None)
    try:
        plan_graph(graph, asked, lowest_order=lowest_order, patches=patches, least=least)
    except BudgetError as refused:
        return refused
    raise AssertionError("a session holds more than a byte")


def plan_program(program: Program, options: Options) -> OverlapPlan:
    """The overlap plan of an unchanged program, with the layouts of every transfer mode of its memory path."""
    plan = make_plan(program, options.descriptor, options.mode, options.request)
    return with_layouts(program, plan, options.descriptor.modes[program.memory_path])


def with_layouts(program: Program, plan: OverlapPlan, modes: Sequence[TransferMode]) -> OverlapPlan:
    """`plan` with the layouts of `modes`."""
    return replace(plan, layouts=lay_out_pools(program.slices, plan, modes, page_bytes=program.page_bytes))
