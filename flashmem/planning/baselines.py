"""Baseline strategies: overlap plans of simpler rules for the same program, runtime and budget, to compare the planner with.

- on-demand: load a weight when its operator is next. The operator waits for it.
- always-next: while a layer executes, load the weights of the next layer (FlashMem section 5.4).
- next-operator: while an operator with weights executes, load the weights of the next such operator; skip layers without
  weights.
- same-op: while an operator executes, load the weights of the next operator of its type (FlashMem section 5.4).
- resident-first: preload as many weights as the budget can hold, and load the rest as next-operator does.

Strategies that count depth in operators may load all slices of a weight together, each as soon as M_peak permits. That is more
than the paper's depth of one layer, and favours the baselines. A *type* of operators is one kernel: the same operator, shape
and epilogue. The first operator of a type has no predecessor, so its weights are loaded as next-operator loads them.

Only on-demand loads at layer i_w itself (g_w = i_w: the loader starts once layer i_w - 1 is done). It also moves the weights at
i_w, in separate launches before the layer's kernel. So no transfer mode hides any of its transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from flashmem.base.errors import BudgetError
from flashmem.planning.arithmetic.assemble import assemble
from flashmem.planning.arithmetic.clock import Moves, clock_of
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.budget import largest_within
from flashmem.planning.latency.first_answer import forced_preload, late_moves, least_in_use, smallest_m_peak
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.objectives import FIRST
from flashmem.schedule.plan import OverlapPlan, Strategy


@dataclass(frozen=True)
class WeightedOperator:
    """An operator with weights: its first layer, its type, and the slices that no earlier operator uses."""

    first: int
    kind: str
    slices: tuple[str, ...]


def operators_of(program: Program) -> list[WeightedOperator]:
    """The operators with weights, in execution order. Weights first used at the same layer belong to one operator."""
    uses = program.uses()
    first_of: dict[str, int] = {}
    for part in program.slices:
        first = uses[part.name][0]
        first_of[part.weight] = min(first, first_of.get(part.weight, first))
    slices: dict[int, list[str]] = {}
    for part in program.slices:
        slices.setdefault(first_of[part.weight], []).append(part.name)
    return [WeightedOperator(first, program.launches[first - 1].kernel, tuple(slices[first])) for first in sorted(slices)]


@dataclass(frozen=True)
class Baseline:
    """The plans of one strategy for one program.

    `asked`: weights that the user asked to preload. `fixed`: bytes that a budget has to hold besides weights.
    """

    strategy: Strategy
    operators: Sequence[WeightedOperator]
    asked: frozenset[str] = frozenset()
    lambda_: float = 0.9
    fixed: int = 0

    @property
    def waits(self) -> bool:
        """Whether the strategy loads weights only at the layer that uses them."""
        return self.strategy == "on-demand"

    def least_preload(self, instance: Instance) -> frozenset[str]:
        """The smallest W that the strategy can work with."""
        return self.asked if self.waits else forced_preload(instance, self.asked)

    def smallest(self, instance: Instance, preload: Collection[str]) -> tuple[int, str]:
        """The smallest M_peak for W = `preload`, in bytes, and the name of the layer that requires it."""
        if not self.waits:
            return smallest_m_peak(instance, preload)
        copies = instance.transfer.places_in_flight  # one in staging, one in its final place
        change = [0] * (len(instance.layers) + 2)
        for w in instance.weights:
            if w.name not in preload:
                change[w.first_use] += copies * w.nbytes
                change[w.first_use + 1] -= (copies - 1) * w.nbytes
                change[w.last_use + 1] -= w.nbytes
        needed = list(accumulate(change))[1:-1]
        layer = max(range(len(needed)), key=needed.__getitem__)
        return needed[layer], instance.layers[layer].name

    def opens(self, instance: Instance) -> dict[str, int]:
        """The first layer at which the strategy lets each slice be loaded."""
        if self.strategy == "always-next":
            return {w.name: max(1, w.first_use - 1) for w in instance.weights}
        opens: dict[str, int] = {}
        before = 1
        of_kind = dict[str, int]()
        for operator in self.operators:
            first = operator.first if self.waits else before
            if self.strategy == "same-op":
                first = of_kind.get(operator.kind, before)
            opens.update(dict.fromkeys(operator.slices, first))
            before = of_kind[operator.kind] = operator.first
        return opens

    def releases(self, instance: Instance, preload: Collection[str], limit: int) -> dict[str, int]:
        """g_w of every weight (0 for W), in order of use. Each is as early as the strategy permits, and as early as whole
        slices fit `limit` bytes."""
        opens = self.opens(instance)
        releases = dict.fromkeys(preload, 0)
        held = np.zeros(len(instance.layers) + 2, np.int64)  # bytes in flight, by layer
        latest = 0 if self.waits else 1
        for w in sorted((w for w in instance.weights if w.name not in preload), key=lambda w: w.first_use):
            first = opens[w.name]
            full = np.flatnonzero(held[first : w.last_use + 1] + w.nbytes > limit)
            first = min(w.first_use - latest, first + (int(full[-1]) + 1 if full.size else 0))
            releases[w.name] = first
            held[first : w.last_use + 1] += w.nbytes
        return releases

    def plan(self, instance: Instance, preload: frozenset[str] | None = None, note: str = "") -> OverlapPlan:
        """The strategy's plan inside M_peak with W = `preload` (default: `least_preload`), without a proven bound.

        Raises:
            BudgetError: M_peak is too small for the strategy.
        """
        begun = time.monotonic()
        chosen = self.least_preload(instance) if preload is None else preload
        smallest, binding = self.smallest(instance, chosen)
        if instance.m_peak < smallest:
            raise BudgetError(
                f"M_peak of {instance.m_peak} bytes is too small for strategy {self.strategy}: layer {binding!r} needs "
                f"{smallest} bytes in flight; raise the limit to {smallest} bytes or more",
                smallest_bytes=smallest,
                binding=binding,
            )
        releases, moves = self._read_and_move(instance, chosen)
        seconds = clock_of(instance, releases, moves).seconds
        plan = assemble(
            instance, chosen, releases, moves, kind=FIRST, lambda_=self.lambda_, objective=seconds, bound=0.0,
            bound_scope="resident-set", tier="greedy", started=begun, base=self.least_preload(instance), asked=self.asked,
            notes=(f"reads as strategy {self.strategy} does{note}",),
        )  # fmt: skip
        return replace(plan, strategy=self.strategy, member=self.strategy)

    def _read_and_move(self, instance: Instance, preload: frozenset[str]) -> tuple[dict[str, int], Moves]:
        """Release times and moves. Mode `interleave` uses the largest part of M_peak that leaves enough room for staging."""
        latest = 0 if self.waits else 1
        streamed = [w for w in instance.weights if w.name not in preload]
        at_the_last = {w.name: ((w.first_use - latest, instance.chunks(w)),) for w in streamed}
        for part in _PARTS:
            releases = self.releases(instance, preload, int(instance.m_peak * part))
            moves: Moves = (
                at_the_last
                if self.waits
                else late_moves(instance, releases, clock_of(instance, releases), len(instance.layers))
            )
            if int(held_bytes(instance, releases, moves).max(initial=0)) <= instance.m_peak:
                return releases, moves
        releases = {w.name: 0 if w.name in preload else w.first_use - latest for w in instance.weights}
        return releases, at_the_last

    def within(self, instance: Instance, budget: int, measure: Measure) -> OverlapPlan:
        """The strategy's plan within `budget` bytes, counted by `measure`.

        Raises:
            BudgetError: no plan fits; the error names the smallest budget that works.
        """
        if self.strategy == "resident-first":
            return self._resident_within(instance, budget, measure)
        return self._stretch(instance, budget, measure, self.least_preload(instance), "")

    def _stretch(self, instance: Instance, budget: int, measure: Measure, preload: frozenset[str], note: str) -> OverlapPlan:
        """The plan with W = `preload` and the largest M_peak that fits."""
        return largest_within(
            instance,
            budget,
            measure,
            lambda limited: self.plan(limited, preload, note),
            self.smallest(instance, preload),
            preload,
        )

    def _resident_within(self, instance: Instance, budget: int, measure: Measure) -> OverlapPlan:
        """Fill W in several orders. Return the plan with the earliest predicted answer, or, if none fits, the smallest plan."""
        base = self.least_preload(instance)
        rest = [w for w in instance.weights if w.name not in base]

        def fits(added: frozenset[str]) -> bool:
            preload = base | added
            return self._bound(instance, preload) <= budget and measure(self._tight(instance, preload)) <= budget

        plans = []
        filled = set[frozenset[str]]()
        for name, order in _ORDERS.items():
            preload = base | _most_that_fit([w.name for w in sorted(rest, key=order)], fits)
            if preload in filled:
                continue
            filled.add(preload)
            with suppress(BudgetError):
                plans.append(self._stretch(instance, budget, measure, preload, f"; W filled {name}"))
        if not plans:
            plans.append(self._leanest_within(instance, budget, measure))
        return min(plans, key=lambda plan: plan.objective)

    def _leanest_within(self, instance: Instance, budget: int, measure: Measure) -> OverlapPlan:
        """The plan with the fewest bytes, for any W. If moving a weight needs staging as well as its place, a larger W can need
        less memory. It saves more in flight than it adds.

        Raises:
            BudgetError: that plan needs more than `budget`; the error names how much.
        """
        base = self.least_preload(instance)
        rest = [w for w in instance.weights if w.name not in base]
        sizes = {len(rest) * step // _LEAN_STEPS for step in range(_LEAN_STEPS + 1)}
        chosen = {frozenset(w.name for w in sorted(rest, key=order)[:size]) for order in _ORDERS.values() for size in sizes}
        plan = self._tight(instance, base)
        needed = measure(plan)
        for added in sorted(chosen, key=lambda added: (len(added), sorted(added))):
            preload = base | added
            if self._bound(instance, preload) < needed:
                smaller = self._tight(instance, preload)
                if measure(smaller) < needed:
                    plan = smaller
                    needed = measure(smaller)
        if needed > budget:
            raise BudgetError(
                f"budget of {budget} bytes is too small: {needed} bytes are needed, with {plan.preload_ratio:.0%} of the "
                f"weights preloaded; raise the budget to {needed} bytes or more",
                smallest_bytes=needed,
                binding=self.smallest(instance, base)[1],
            )
        return plan

    def _bound(self, instance: Instance, preload: frozenset[str]) -> int:
        """Bytes below which no plan with W = `preload` exists: W, and slices in use at one layer, without their layout."""
        resident = sum(w.nbytes for w in instance.weights if w.name in preload)
        return self.fixed + resident + least_in_use(instance, preload)

    def _tight(self, instance: Instance, preload: frozenset[str]) -> OverlapPlan:
        """The plan with W = `preload` in the smallest M_peak."""
        return self.plan(replace(instance, m_peak=max(1, self.smallest(instance, preload)[0])), preload)


_ORDERS: Mapping[str, Callable[[WeightSpec], tuple[int, ...]]] = {
    "in the order of layers": lambda w: (w.first_use,),
    "from the last layer back": lambda w: (-w.first_use,),
    "largest first": lambda w: (-w.nbytes, w.first_use),
}


_PARTS = (1.0, 0.75, 0.5, 0.25)
"""Parts of M_peak to try for weights in their final places; staging needs memory in addition."""

_LEAN_STEPS = 32
"""Number of sizes of W, from the least to all weights, among which to search for the plan with the fewest bytes."""


def _most_that_fit(names: Sequence[str], fits: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """The longest prefix of `names` that fits, found by bisection."""
    low = 0
    high = len(names)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(frozenset(names[:middle])):
            low = middle
        else:
            high = middle - 1
    return frozenset(names[:low])
