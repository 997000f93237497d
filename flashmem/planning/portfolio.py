"""The members that compete for the plan with the earliest first answer. A plan names the one that made it.

The planner's own plan is the fastest one that reads whole slices in order of use. A different order can gain a little: where a
slice does not fit yet, a smaller slice of a later layer may fit. So simpler strategies compete, and win if the clock predicts
an earlier answer, or if they fit where the planner's own plan does not. The last member has large slices in W. With lambda, the
plan that won is replaced by a leaner one (`latency.front`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from flashmem.base.errors import BudgetError, UserError
from flashmem.planning.arithmetic.clock import unlimited_seconds
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.baselines import Baseline, WeightedOperator, operators_of
from flashmem.planning.budget import plan_within
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.latency.front import leaner, sooner
from flashmem.planning.problem import Problem
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan, Strategy

IN_FLIGHT: tuple[Strategy, ...] = ("next-operator", "same-op")
IN_ALL: tuple[Strategy, ...] = (*IN_FLIGHT, "resident-first")
"""The strategies that compete within a limit on bytes in flight, and within one that counts W.

Their plans keep C0 and C1 as the planner's do. Always-next is omitted: it is next-operator with less depth."""

_TIE = 1e-6


@dataclass(frozen=True)
class Rival:
    """A simpler strategy that competes, and how its plan is made."""

    strategy: Strategy
    make: Callable[[], OverlapPlan]

    def plan(self, why: str) -> OverlapPlan:
        """Its plan in place of the planner's own, for the reason `why`.

        Raises:
            BudgetError: no plan fits.
        """
        made = self.make()
        return replace(made, strategy="stream", member=self.strategy, notes=(*made.notes, why))


def fastest_plan(instance: Instance, operators: Sequence[WeightedOperator], preload: frozenset[str]) -> OverlapPlan:
    """The plan with the earliest first answer inside M_peak."""
    best = first_plan(instance, preload)
    asked = [Baseline(strategy, operators, preload, 0.0) for strategy in IN_FLIGHT]
    return _earliest_plan(instance, best, [Rival(each.strategy, partial(each.plan, instance)) for each in asked])


def fastest_within(
    instance: Instance,
    operators: Sequence[WeightedOperator],
    budget: int,
    measure: Measure,
    preload: frozenset[str],
    *,
    fixed: int = 0,
    counts_w: bool = True,
) -> OverlapPlan:
    """The plan with the earliest first answer within a budget, which also covers staging and the unused bytes of a layout.

    A weight of W causes less of both, so resident-first competes if the budget `counts_w`. If the layout leaves so many
    bytes unused that the planner's own plan does not fit, use a rival that fits. `fixed`: bytes of the budget that no plan
    changes.

    Raises:
        BudgetError: no plan fits; the error names the smallest budget that works.
    """
    asked = [Baseline(strategy, operators, preload, 0.0, fixed) for strategy in (IN_ALL if counts_w else IN_FLIGHT)]
    rivals = [Rival(each.strategy, partial(each.within, instance, budget, measure)) for each in asked]
    try:
        best, inside = plan_within(instance, budget, measure, preload=preload)
    except BudgetError as refused:
        return _of_those_that_fit(rivals, refused)
    return _earliest_plan(inside, best, rivals)


def _of_those_that_fit(rivals: Iterable[Rival], refused: BudgetError) -> OverlapPlan:
    """The plan of the fastest rival that fits. If none fits, raise the error that names the smallest budget."""
    plans = []
    for rival in rivals:
        try:
            plans.append(rival.plan("which fits where the planner's own does not"))
        except BudgetError as error:
            refused = min(refused, error, key=lambda error: error.smallest_bytes)
    if not plans:
        raise refused
    return min(plans, key=lambda plan: plan.objective)


def _earliest_plan(instance: Instance, best: OverlapPlan, rivals: Iterable[Rival]) -> OverlapPlan:
    if best.objective <= unlimited_seconds(instance, {w.name for w in best.weights if w.preload}) * (1 + _TIE):
        return best  # the plan's memory has no cost
    for rival in rivals:
        try:
            plan = rival.plan("which is predicted to answer first")
        except BudgetError:
            continue
        if plan.objective < best.objective * (1 - _TIE):
            best = plan
    return best


def soonest_plan(problem: Problem) -> OverlapPlan:
    """The plan with the earliest first answer, or within the average memory that lambda permits.

    Raises:
        BudgetError: no plan fits.
        UserError: an unknown name to preload.
    """
    plan = _fastest_plan(problem)
    lambda_ = problem.limits.resolved_lambda
    limit = problem.limit
    measure = problem.measure
    if not lambda_:
        return plan
    return leaner(problem.instance, plan, lambda_, lambda each: limit is None or measure(each) <= limit, problem.roomiest)


def _fastest_plan(problem: Problem) -> OverlapPlan:
    """The plan with the earliest first answer. If only M_peak is limited, slices too large for it are in W."""
    instance = problem.instance
    preload = problem.asked
    limit = problem.limit
    measure = problem.measure
    operators = operators_of(problem.program)
    if limit is None:
        return fastest_plan(instance, operators, preload)
    if problem.limits.m_peak is None:
        return fastest_within(instance, operators, limit, measure, preload, fixed=problem.fixed)
    refused: BudgetError | None = None
    streamed: OverlapPlan | None = None  # the plan that streams every slice that can be streamed
    for part in (1, *(_TOO_LARGE if instance.w_may_grow else ())):
        large = frozenset(w.name for w in instance.weights if part > 1 and w.nbytes > limit // part)
        if part > 1 and not large:
            continue
        try:
            plan = fastest_within(instance, operators, limit, measure, preload | large, counts_w=False)
        except BudgetError as error:
            refused = refused or error
            continue
        if not large:
            streamed = sooner(instance, plan, lambda each: measure(each) <= limit)
            if streamed.gap <= _WORTH_W:
                return streamed
            continue
        if streamed is not None and plan.objective >= streamed.objective * (1 - _WORTH_W):
            return streamed
        note = f"slices of more than M_peak / {part} are in W: streaming them takes more than M_peak, or much longer"
        return replace(
            plan, member="large-resident", asked=tuple(sorted(preload)), tier="incremental-preload", notes=(*plan.notes, note)
        )
    if streamed is not None:
        return streamed
    assert refused is not None
    raise refused


_WORTH_W = 0.02
"""A share of the first answer. If at least so much is unproven, try large slices in W; keep them there for an equal gain."""

_TOO_LARGE = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""If M_peak is too small to stream everything, preload slices larger than M_peak divided by one of these numbers."""


def strategy_plan(problem: Problem) -> OverlapPlan:
    """The plan of the strategy that the limits name, in place of the planner.

    Raises:
        BudgetError: no plan fits.
        UserError: resident-first without a budget, or an unknown name to preload.
    """
    limits = problem.limits
    operators = operators_of(problem.program)
    baseline = Baseline(limits.strategy, operators, problem.asked, limits.resolved_lambda, problem.fixed)
    if limits.budget is not None:
        return baseline.within(problem.instance, limits.budget, problem.in_all)
    if limits.strategy == "resident-first":
        raise UserError("strategy resident-first fills a budget; name one with --budget")
    return baseline.plan(problem.instance)
