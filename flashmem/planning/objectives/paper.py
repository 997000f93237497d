"""The paper's objective within the user's limits: its plans must leave room for staging and for the padding of a layout.

The wheel for phones omits this module: plans of this objective serve to compare with the paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from flashmem.base.errors import BudgetError
from flashmem.planning.baselines import operators_of
from flashmem.planning.latency.first_answer import smallest_m_peak
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.objectives.objective import Objective
from flashmem.planning.opg.lc_opg import ReadAhead, proven_bound, solve
from flashmem.planning.portfolio import fastest_within
from flashmem.planning.problem import Problem
from flashmem.request.limits import Limits
from flashmem.schedule.objectives import PAPER, ObjectiveKind
from flashmem.schedule.plan import OverlapPlan


class WeightedSum(Objective):
    """FlashMem's weighted sum of W and the loading distances (section 3.2). C_l limits its moves."""

    kind: ClassVar[ObjectiveKind] = PAPER
    serves_later_runs: ClassVar[bool] = False
    needs_capacity: ClassVar[bool] = True
    patience: ClassVar[int] = 1  # W changes by whole slices, so its share is constant for some sizes and then falls

    def plan(self, problem: Problem) -> OverlapPlan:
        """The plan of least cost in which every read begins with its first move."""
        limits = problem.limits
        preload = problem.asked
        if limits.budget is not None:
            return paper_plan_within(problem, preload)
        limited = limits.m_peak is not None
        return paper_plan_inside(problem, preload, limited=limited)

    def completed(self, problem: Problem, plan: OverlapPlan, soonest: float) -> OverlapPlan:
        """`plan` with early reads. One for another objective, which replaced this one, does not change."""
        return reading_ahead(problem, plan) if plan.objective_kind == self.kind.name else plan

    def sizes(self, limit: int | None, least: int, step: int) -> Iterator[int | None]:
        """Only sizes below the limit: slices that do not fit M_peak become part of W."""
        sizes = super().sizes(limit, least, step)
        if limit is not None:
            next(sizes)
            next(sizes, None)
        yield from sizes


@dataclass(frozen=True)
class _Search:
    """How long a solver may search, and with how many threads CP-SAT; 0 for none."""

    first: float
    again: float
    each: float
    workers: int

    @classmethod
    def of(cls, limits: Limits) -> _Search:
        """The search that `limits` ask for: others than the first have a part of its time."""
        first = _SECONDS if limits.solve_seconds is None else limits.solve_seconds
        return cls(first, 0.4 * first, 0.8 * first, 0 if limits.solver == "dp" else _WORKERS)


_SECONDS = 5.0
"""The most seconds of one search, if the user gives no other number."""

_WORKERS = 2
"""Threads of CP-SAT."""


def paper_plan_inside(problem: Problem, preload: frozenset[str], *, limited: bool) -> OverlapPlan:
    """The paper's plan whose layout, with padding and staging, needs at most M_peak. No read starts before its first move.

    Raises:
        BudgetError: no plan fits; the error names the bytes of the smallest plan.
    """
    instance = problem.instance
    in_flight = problem.in_flight
    search = _Search.of(problem.limits)
    lambda_ = problem.limits.resolved_lambda
    units = problem.limits.units
    plan = solve(
        instance, lambda_=lambda_, preload=preload, units=units, time_limit=search.first, workers=search.workers, ahead=False
    )
    least = in_flight(plan)
    if not limited or least <= instance.m_peak:
        return plan
    for share in _SHARES:
        try:
            smaller = solve(
                replace(instance, m_peak=int(instance.m_peak * share)), lambda_=lambda_, preload=preload,
                time_limit=search.again, workers=search.workers, units=units, ahead=False,
            )  # fmt: skip
        except BudgetError:
            break
        taken = in_flight(smaller)
        least = min(least, taken)
        if taken <= instance.m_peak:
            return replace(smaller, m_peak=instance.m_peak, bound=min(plan.bound, smaller.objective))
    raise BudgetError(
        f"M_peak of {instance.m_peak} bytes is too small: {least} bytes are in flight with what staging and the layout take; "
        f"raise the limit to {least} bytes or more",
        smallest_bytes=least,
        binding="",
    )


def paper_plan_within(problem: Problem, preload: frozenset[str]) -> OverlapPlan:
    """The paper's objective under a budget: W and M_peak share the budget, with the largest share for M_peak that works."""
    instance = problem.instance
    limits = problem.limits
    in_all = problem.in_all
    fixed = problem.fixed
    assert limits.budget is not None
    search = _Search.of(limits)
    smallest, _ = smallest_m_peak(instance, preload)
    for share in _SHARES:
        m_peak = max(smallest, int(limits.budget * share))
        plan = solve(
            replace(instance, m_peak=m_peak),
            lambda_=limits.resolved_lambda,
            preload=preload,
            time_limit=search.each,
            workers=search.workers,
            preload_limit=max(0, limits.budget - m_peak),
            units=limits.units,
            ahead=False,
        )
        if in_all(plan) <= limits.budget:
            # A proof for this split of the budget does not hold for other splits. So the bound is for plans that may use the
            # whole budget for W and the whole budget for bytes in flight.
            room = max(m_peak, limits.budget - fixed)
            roomy = replace(instance, m_peak=room)
            bound = proven_bound(roomy, preload, limits.resolved_lambda, room, limits.units, search.each)
            return replace(plan, bound=min(bound, plan.objective))
    # The other planner knows the smallest budget, or finds a plan between the shares tried above.
    plan = fastest_within(instance, operators_of(problem.program), limits.budget, in_all, preload, fixed=fixed)
    return replace(
        plan, notes=(*plan.notes, "no plan of the paper's objective fits the budget; this one is for the first answer")
    )


def reading_ahead(problem: Problem, plan: OverlapPlan) -> OverlapPlan:
    """`plan`, which has no early reads, with reads as early as its layout within the limits permits."""
    instance = problem.instance
    limit = problem.limit
    measure = problem.measure
    staging = instance.transfer.by_kernels and limit is not None
    most = plan.m_peak
    if staging:  # early reads wait in staging, and need no other memory
        layout = lay_out_pools(problem.program.slices, plan, [instance.mode], page_bytes=problem.program.page_bytes)[
            instance.mode
        ]
        most = (limit or 0) - measure(plan) + layout.all_staging_bytes

    reads = ReadAhead(instance, plan)
    widest = reads.within(most, staging=staging)
    if limit is None or (taken := measure(widest)) <= limit:
        return widest
    # The bytes of a layout are about proportional to the share: search near the estimate for the largest one that fits.
    last = len(_READ_AHEAD) - 1
    likely = next((at for at, share in enumerate(_READ_AHEAD) if share * taken <= limit), last)
    tried: dict[int, OverlapPlan] = {}

    def fits(at: int) -> bool:
        tried[at] = reads.within(int(most * _READ_AHEAD[at]), staging=staging)
        return measure(tried[at]) <= limit

    at = likely
    while not fits(at) and at < last:
        at += 1
    if at == likely:
        while at and fits(at - 1):
            at -= 1
    return tried[at]


_READ_AHEAD = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
"""Parts of the free memory to try for early reads; the padding of a layout needs the rest."""

_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
OBJECTIVE: Objective = WeightedSum()
