"""The shape variants of a model: their graphs, the memory that all of them reserve, their programs and plans.

A session changes between variants in the same memory, so each stores its weights as the one with the largest inputs does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from flashmem.base.errors import BudgetError, UserError
from flashmem.bundle.shape_variants import Shapes, shapes_text
from flashmem.compiler.adaptive.plan_graph import plan_grouped, refusal
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.generated import NOTHING_RESERVED, Generated, Reserved, stored_by
from flashmem.compiler.options import Options
from flashmem.compiler.passes.quantised_caches import quantised_states
from flashmem.compiler.stages.pipeline import GroupedGraph, Pipeline
from flashmem.compiler.stages.planned import CompiledVariant
from flashmem.compiler.stages.stages import INSTRUCTION_SETS, LAY_OUT, STEADY
from flashmem.compiler.weights.sharing import NOTHING_STORED
from flashmem.planning.variants import planned_together
from flashmem.schedule.plan import OverlapPlan


@dataclass(frozen=True)
class Variants:
    """The options and the graph of each variant, and drafts of their programs.

    `drafts`: the program of each variant before it is planned, by its number, in the order of planning; where variants share
    states, and none otherwise.
    """

    options: tuple[Options, ...]
    graphs: tuple[GroupedGraph, ...]
    drafts: Mapping[int, Generated]

    @classmethod
    def of(cls, options: Sequence[Options], graphs: Sequence[Graph]) -> Variants:
        """The variants with these graphs."""
        return cls.grouped(options, [GroupedGraph.of(graph, each) for graph, each in zip(graphs, options, strict=True)])

    @classmethod
    def grouped(cls, options: Sequence[Options], graphs: Sequence[GroupedGraph]) -> Variants:
        """The variants with these graphs, which are fused."""
        return cls(tuple(options), tuple(graphs), _drafts(graphs, options))

    @property
    def least(self) -> Reserved:
        """What all variants of a model with states reserve: the most of each. So a session alternates in the same memory."""
        if not self.drafts:
            return NOTHING_RESERVED
        drafts = self.drafts.values()
        return Reserved(max(made.program.arena_bytes for made in drafts), max(made.constants.nbytes for made in drafts))

    def first(self, count: int) -> Variants:
        """The first `count` variants."""
        return self if count == len(self.options) else Variants.grouped(self.options[:count], self.graphs[:count])

    def refusal(self, index: int) -> BudgetError:
        """Why a budget below the smallest one of a variant is refused; it names that budget."""
        return refusal(self.graphs[index], self.options[index], least=self.least)


def read_graphs(variants: Sequence[Options], read: Callable[[Options], Graph]) -> list[Graph]:
    """The graph of each variant, by `read`.

    Raises:
        UserError: two variants have the same shapes, or states that differ.
    """
    graphs: list[Graph] = []
    seen: list[Shapes] = []
    for options in variants:
        graphs.append(read(options))
        shapes = {port.name: port.value.shape for port in graphs[-1].inputs}
        if shapes in seen:
            raise UserError(f"two of the requested variants are {shapes_text(shapes)}; leave one out")
        if quantised_states(graphs[-1]) != quantised_states(graphs[0]):
            raise UserError(
                "one of the requested variants can store other states in int8 than another, and variants share their states; "
                "use --state-precision fp16"
            )
        for state, _ in graphs[0].states:
            if seen and shapes[state] != seen[0][state]:
                raise UserError(
                    f"the state {state!r} has the shapes {seen[0][state]} and {shapes[state]} in two of the requested "
                    f"variants, which share their states; give it one shape"
                )
        seen.append(shapes)
    if len(graphs) > 1:
        gc.collect()  # models are cycles, and it may be long before the next collection (`base.garbage`)
    return graphs


def _drafts(graphs: Sequence[GroupedGraph], variants: Sequence[Options]) -> dict[int, Generated]:
    """The drafts of variants that share states, each over the weights of those before it."""
    drafts: dict[int, Generated] = {}
    if len(graphs) == 1 or not graphs[0].graph.states:
        return drafts
    earlier = NOTHING_STORED
    for index in _largest_first(graphs):
        drafts[index] = Pipeline.of(graphs[index], variants[index], earlier=earlier).drafted()
        earlier = stored_by(drafts[index], earlier)
    return drafts


def _largest_first(graphs: Sequence[GroupedGraph]) -> list[int]:
    """The indices of a model's variants, the largest inputs first: that variant determines the layout of the weights."""

    def elements(index: int) -> int:
        return sum(port.value.size for port in graphs[index].graph.inputs)

    return sorted(range(len(graphs)), key=lambda index: (-elements(index), index))


def plan_variants(
    read: Variants, progress: Callable[[str, float], None], begin: Callable[[Generated, OverlapPlan | None], None]
) -> dict[int, CompiledVariant]:
    """Plan each variant; by its number, in the order of planning. `begin` is called with each program, first without its plan.

    Raises:
        BudgetError: a variant does not fit the budget. It names the smallest budget that works for all.
    """
    graphs = read.graphs
    variants = read.options
    least = read.least
    earlier = NOTHING_STORED
    drafts = dict(read.drafts)
    options = variants[0]
    made: dict[int, CompiledVariant] = {}
    for index in _largest_first(graphs):
        progress("plan", len(made) / len(graphs))
        try:
            with adding(before=_among(variants, index)):
                generated, plan = plan_grouped(
                    graphs[index],
                    variants[index],
                    final=lambda each: begin(each, None),
                    earlier=earlier,
                    least=least,
                    draft=drafts.get(index),
                )
        except BudgetError as refused:
            others = [each for each in range(len(graphs)) if each not in (*made, index)]
            raise _most_needed(refused, read, others) from refused
        elsewhere = INSTRUCTION_SETS(generated, options.descriptor.instruction_set)
        generated = STEADY(generated)
        begin(generated, plan)
        made[index] = LAY_OUT(CompiledVariant(generated, plan, elsewhere), options)
        if index in drafts and generated.placements is not drafts[index].placements:
            drafts.clear()  # later ones are over other weights
        if len(graphs) > 1 and not drafts:
            earlier = stored_by(generated, earlier)
    return _keeping_the_same(made, options) if len(graphs) > 1 else made


def _keeping_the_same(made: Mapping[int, CompiledVariant], options: Options) -> dict[int, CompiledVariant]:
    """The variants, planned together where that lets a session change between them without loading weights again."""
    descriptor = options.descriptor
    mode = options.mode
    programs = [(each.generated.program, each.plan) for each in made.values()]
    found = {}
    for (index, each), plan in zip(made.items(), planned_together(programs, descriptor, mode, options.request), strict=True):
        found[index] = each if plan is each.plan else LAY_OUT(replace(each, plan=plan), options)
    return found


def _among(variants: Sequence[Options], index: int) -> str:
    """The beginning of a message about one of several variants."""
    return f"for the shapes {shapes_text(variants[index].shapes)}: " if len(variants) > 1 else ""


def _most_needed(refused: BudgetError, read: Variants, others: Sequence[int]) -> BudgetError:
    """Of one variant's refusal and those of `others`, that with the largest need: all variants need it."""
    for index in others:
        if read.refusal(index).smallest_bytes > refused.smallest_bytes:
            try:
                with adding(before=_among(read.options, index)):
                    plan_grouped(read.graphs[index], read.options[index], least=read.least)
            except BudgetError as larger:
                refused = larger
    return refused


@contextmanager
def adding(*, before: str = "", after: str = "") -> Iterator[None]:
    """Add text to the message of a BudgetError."""
    try:
        yield
    except BudgetError as error:
        raise BudgetError(
            f"{before}{error}{after}",
            smallest_bytes=error.smallest_bytes,
            binding=error.binding,
            without_patches=error.without_patches,
        ) from error
