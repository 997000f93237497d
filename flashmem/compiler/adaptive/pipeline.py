"""The pipeline from a graph to a checked plan, repeated by the adaptive searches with other slices or other fusion groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.lowering.context import Cuts as SlicesOfWeights
from flashmem.compiler.lowering.context import PackedBefore
from flashmem.compiler.lowering.program import NOTHING_RESERVED, Generated, Reserved, generate
from flashmem.compiler.memory.launch_order import in_lowest_order
from flashmem.compiler.options import Options
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.weights.sharing import NOTHING_STORED, StoredWeights
from flashmem.compiler.weights.slicing import DEFAULT, Slicing
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.planner import completed, plan_instance, planning_instance
from flashmem.program.launches import LaunchOrder
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

Cuts = frozenset[Node]
"""Nodes before which a fusion group is split."""

Watch = Callable[[str], AbstractContextManager[None]]
"""Entered for each step of the pipeline, with the name of the step."""


@dataclass(frozen=True)
class Attempt:
    """A program for some cuts, its planning instance, and its plan."""

    generated: Generated
    instance: Instance
    plan: OverlapPlan


@dataclass(frozen=True)
class Pipeline:
    """Programs of `graph` under `options`, their planning instances, and their plans.

    Attributes:
        selector: the kernel selector that all programs share.
        slicing: the sizes of slices.
        watch: entered for each "fuse", "generate" and "plan_and_check".
        final: called with each program before it is planned.
        lowest_order: whether launches are put into the order with the lowest peak of activations.
        earlier: weights that a program for other shapes has placed.
        least: memory that programs reserve at least.
        soonest: the earliest first answer with slices of any size, in seconds; None if others were not compared.
    """

    graph: Graph
    options: Options
    selector: KernelSelector
    slicing: Slicing = DEFAULT
    watch: Watch = lambda step: nullcontext()
    final: Callable[[Generated], None] = lambda generated: None
    lowest_order: bool = True
    earlier: StoredWeights = NOTHING_STORED
    least: Reserved = NOTHING_RESERVED
    soonest: float | None = None

    def attempt(self, cuts: Cuts, generated: Generated | None = None) -> Attempt:
        """The program with `cuts` (or `generated`, which was made with them), and its plan.

        Raises:
            BudgetError: no plan fits the limits.
        """
        generated = generated or self.generate(cuts)
        instance = self.instance(generated.program)
        return Attempt(generated, instance, self.plan(instance, generated.program))

    def generate(self, cuts: Cuts) -> Generated:
        """The program with the fusion groups that `cuts` leave."""
        with self.watch("fuse"):
            groups, order = self._fused(cuts)
        with self.watch("generate"):
            made = self._lowered(groups, order)
            if self.selector.select():
                made = self._lowered(groups, order)
        self.final(made)
        return made

    def instance(self, program: Program) -> Instance:
        """The planning instance of `program`."""
        with self.watch("plan_and_check"):
            return planning_instance(program, self.options.descriptor, self.options.mode, self.options.request)

    def plan(self, instance: Instance, program: Program) -> OverlapPlan:
        """The checked plan of `instance`, without the steps that only the chosen plan needs (`planning.planner.completed`).

        Raises:
            BudgetError: no plan fits the limits.
        """
        with self.watch("plan_and_check"):
            return plan_instance(instance, program, self.options.mode, self.options.request, complete=False)

    def completed(self, tried: Attempt) -> OverlapPlan:
        """The checked plan of an attempt with all its steps.

        Raises:
            BudgetError: no plan fits the limits.
        """
        if objective_of(self.options.request.resolved_objective).completes_at_once:
            return tried.plan
        with self.watch("plan_and_check"):
            program, options = tried.generated.program, self.options
            return completed(tried.instance, tried.plan, program, options.mode, options.request, soonest=self.soonest)

    def _fused(self, cuts: Cuts) -> tuple[Sequence[FusionGroup], LaunchOrder | None]:
        groups = fuse(self.graph, cuts)
        if not self.lowest_order:
            return groups, None
        return in_lowest_order(self.graph, groups, half=self.options.request.precision == "fp16")

    def _lowered(self, groups: Sequence[FusionGroup], order: LaunchOrder | None) -> Generated:
        made = self._generated(groups, self.selector)
        again = partial(self._for_later_runs, groups, PackedBefore(made.cuts))
        elsewhere = partial(self._for_instruction_set, groups, made.cuts)
        return replace(made, program=replace(made.program, order=order), again=again, elsewhere=elsewhere)

    def _for_later_runs(self, groups: Sequence[FusionGroup], packed: PackedBefore) -> Generated | None:
        """The program that is faster in later runs over the same packed weights; None if it is the same."""
        if not self.selector.differs_later() and all(len(parts) == 1 for parts in packed.cuts.values()):
            return None
        return self._generated(groups, self.selector.for_later_runs(), packed)

    def _for_instruction_set(self, groups: Sequence[FusionGroup], packed: SlicesOfWeights, name: str) -> Generated:
        """The program of a CPU with instruction set `name` over the same packed weights."""
        descriptor, limited = self.options.descriptor.for_instruction_set(name), self.options.request.budget is not None
        selector = KernelSelector(descriptor, self.options.request.optimize, limited=limited)
        other = replace(self, options=replace(self.options, descriptor=descriptor), selector=selector)
        before = PackedBefore(packed, joined=False, kept=True)
        made = other._generated(groups, selector, before)
        if selector.select():
            made = other._generated(groups, selector, before)
        return replace(made, again=partial(other._for_later_runs, groups, replace(before, joined=True)))

    def _generated(
        self, groups: Sequence[FusionGroup], selector: KernelSelector, packed: PackedBefore | None = None
    ) -> Generated:
        """The program of `groups`, again with other configs as long as a kernel of one is refused and others are left."""
        while True:
            made = self._generated_once(groups, selector, packed)
            refused = [name for name in made.chosen if name in selector.refused]
            if not any([selector.avoid(name, made.chosen[name]) for name in refused]):  # all of them
                return made

    def _generated_once(
        self, groups: Sequence[FusionGroup], selector: KernelSelector, packed: PackedBefore | None
    ) -> Generated:
        descriptor, request = self.options.descriptor, self.options.request
        slicing = replace(self.slicing, later=request.optimize == "steady")
        return generate(
            self.graph, groups, descriptor, precision=request.precision, slicing=slicing, selector=selector,
            earlier=self.earlier, before=packed, least=self.least,
        )  # fmt: skip
