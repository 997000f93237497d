"""From a fused graph to a checked plan, by the stages in between; searches repeat it with other parameters of these."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

from flashmem.base.types import Precision
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.lowering.generated import NOTHING_RESERVED, Generated, Lowering, Reserved
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.fusion import split
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.stages.planned import Attempt
from flashmem.compiler.stages.stages import FUSE, JOIN, LOWER, ORDER, PLACE, PLAN
from flashmem.compiler.weights.sharing import NOTHING_STORED, StoredWeights
from flashmem.compiler.weights.slicing import DEFAULT, WHOLE, Slicing
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.planner import completed, planning_instance
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

Cuts = frozenset[Node]
"""Nodes before which a fusion group is split."""

Watch = Callable[[str], AbstractContextManager[None]]
"""Entered for each step of the pipeline, with the name of the step."""


class GroupedGraph:
    """A fused graph, whose groups are ordered, placed and joined once for all programs with the same cuts.

    `lowest_order`: whether launches are put into the order with the lowest peak of activations.
    """

    def __init__(self, fused: FusedGraph, precision: Precision, *, lowest_order: bool = True) -> None:
        self.fused = fused
        self._precision = precision
        self._lowest_order = lowest_order
        self.placed = lru_cache(_KEPT)(self._placed)

    @classmethod
    def of(cls, graph: Graph, options: Options) -> GroupedGraph:
        """`graph`, fused, in the precision of `options`."""
        return cls(FUSE(graph), options.request.precision)

    @property
    def graph(self) -> Graph:
        """The graph itself."""
        return self.fused.graph

    def as_given(self) -> GroupedGraph:
        """The same, launched in the order of the model's nodes."""
        return GroupedGraph(self.fused, self._precision, lowest_order=False)

    def _placed(self, cuts: Cuts) -> PlacedGraph:
        """The groups that `cuts` leave, in their order, in memory."""
        fused = split(self.fused, cuts)
        if self._lowest_order:
            fused = ORDER(fused, half=self._precision == "fp16")
        return JOIN(PLACE(fused, self._precision))


_KEPT = 4
"""The cuts for which placed groups are kept: those of the best attempt, and of a few others."""


def generate(
    fused: FusedGraph,
    descriptor: DeviceDescriptor,
    *,
    precision: Precision = "fp32",
    slicing: Slicing = DEFAULT,
    earlier: StoredWeights = NOTHING_STORED,
) -> Generated:
    """The program of `fused` with the fastest configs, without a plan, for those who measure or compare programs."""
    lowering = Lowering(descriptor, KernelSelector(descriptor), slicing, earlier)
    return LOWER(JOIN(PLACE(fused, precision)), lowering)


@dataclass(frozen=True)
class Pipeline:
    """Programs of `grouped` under `options`, their planning instances, and their plans.

    Attributes:
        selector: the kernel selector that all programs share.
        slicing: the sizes of slices.
        watch: entered for each "fuse", "generate" and "plan_and_check".
        final: called with each program before it is planned.
        earlier: weights that a program for other shapes has placed.
        least: memory that programs reserve at least.
        draft: a program of `grouped` without cuts, which was made before with this selector.
        soonest: the earliest first answer with slices of any size, in seconds; None if others were not compared.
    """

    grouped: GroupedGraph
    options: Options
    selector: KernelSelector
    slicing: Slicing = DEFAULT
    watch: Watch = lambda step: nullcontext()
    final: Callable[[Generated], None] = lambda generated: None
    earlier: StoredWeights = NOTHING_STORED
    least: Reserved = NOTHING_RESERVED
    draft: Generated | None = None
    soonest: float | None = None

    @classmethod
    def of(cls, grouped: GroupedGraph, options: Options, *, earlier: StoredWeights = NOTHING_STORED) -> Pipeline:
        """Programs under `options`, with a selector of their own."""
        limits = options.request
        limited = limits.budget is not None or limits.m_peak is not None
        selector = KernelSelector(options.descriptor, limits.optimize, limited=limited, refused=options.refused)
        return cls(grouped, options, selector, earlier=earlier)

    def drafted(self) -> Generated:
        """The program with which a search of slices begins where no memory is limited; that of default slices elsewhere."""
        return (replace(self, slicing=WHOLE) if not self.selector.limited else self).generate()

    def begun_with(self, draft: Generated) -> Pipeline:
        """The same with the selector of `draft`, which is its first program."""
        return replace(self, selector=draft.lowering.selector, earlier=draft.lowering.earlier, draft=draft)

    def attempt(self, cuts: Cuts = frozenset(), generated: Generated | None = None) -> Attempt:
        """The program with `cuts` (or `generated`, which was made with them), and its plan.

        Raises:
            BudgetError: no plan fits the limits.
        """
        generated = generated or self.generate(cuts)
        return self.plan(self.instance(generated.program), generated)

    def generate(self, cuts: Cuts = frozenset()) -> Generated:
        """The program with the fusion groups that `cuts` leave."""
        with self.watch("fuse"):
            placed = self.grouped.placed(cuts)
        with self.watch("generate"):
            slicing = replace(self.slicing, later=self.options.request.optimize == "steady")
            lowering = Lowering(self.options.descriptor, self.selector, slicing, self.earlier, self.least)
            made = self._drafted(placed, lowering) or LOWER(placed, lowering)
        self.final(made)
        return made

    def _drafted(self, placed: PlacedGraph, lowering: Lowering) -> Generated | None:
        """The draft, if it is what `lowering` makes of `placed` but for the memory that is reserved."""
        if self.draft is None or self.draft.placed is not placed:
            return None
        same = replace(lowering, least=self.draft.lowering.least) == self.draft.lowering
        return self.draft.reserving(self.least) if same else None

    def instance(self, program: Program) -> Instance:
        """The planning instance of `program`."""
        with self.watch("plan_and_check"):
            return planning_instance(program, self.options.descriptor, self.options.mode, self.options.request)

    def plan(self, instance: Instance, generated: Generated) -> Attempt:
        """`generated` with its plan.

        Raises:
            BudgetError: no plan fits the limits.
        """
        with self.watch("plan_and_check"):
            return PLAN(generated, instance, self.options)

    def completed(self, tried: Attempt) -> OverlapPlan:
        """The checked plan of an attempt with all its steps.

        Raises:
            BudgetError: no plan fits the limits.
        """
        if objective_of(self.options.request.resolved_objective).completes_at_once:
            return tried.plan
        with self.watch("plan_and_check"):
            program = tried.generated.program
            options = self.options
            return completed(tried.instance, tried.plan, program, options.mode, options.request, soonest=self.soonest)
