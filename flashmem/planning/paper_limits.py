"""The paper's objective within the user's limits: what it plans has to leave room for staging and for what a layout wastes.

Left out of the wheel for phones: a plan of this objective is for comparing with the paper.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.errors import BudgetError
from flashmem.planning.baselines import fastest_within, operators_of
from flashmem.planning.budget import Measure
from flashmem.planning.latency import smallest_m_peak
from flashmem.planning.lc_opg import solve, with_room
from flashmem.planning.limits import Limits
from flashmem.planning.memory_layout import lay_out_pools
from flashmem.planning.plan import OverlapPlan, Units
from flashmem.planning.problem import Problem
from flashmem.program import Program


def paper_plan_inside(
    problem: Problem,
    preload: frozenset[str],
    lambda_: float,
    units: Units,
    program: Program,
    in_flight: Measure,
    *,
    limited: bool,
) -> OverlapPlan:
    """The paper's plan whose layout, with what it wastes and with staging, takes no more than M_peak.

    First the reads are given less room to run ahead; then the plan itself.

    Raises:
        BudgetError: nothing fits; it names what the plan with the least takes.
    """
    plan = solve(problem, objective="paper", lambda_=lambda_, preload=preload, units=units, time_limit=_SECONDS_FIRST)
    if not limited:
        return plan
    roomy, least = _reading_ahead(problem, plan, program, in_flight)
    if roomy is not None:
        return roomy
    for share in _SHARES:
        try:
            smaller = solve(
                replace(problem, m_peak=int(problem.m_peak * share)), objective="paper", lambda_=lambda_, preload=preload,
                time_limit=_SECONDS_AGAIN, units=units,
            )  # fmt: skip
        except BudgetError:
            break
        smaller = replace(smaller, m_peak=problem.m_peak, bound=min(plan.bound, smaller.objective))
        roomy, needed = _reading_ahead(problem, smaller, program, in_flight)
        least = min(least, needed)
        if roomy is not None:
            return replace(roomy, status="OPTIMAL" if roomy.bound >= roomy.objective else "FEASIBLE")
    raise BudgetError(
        f"M_peak of {problem.m_peak} bytes is too small: {least} bytes are in flight with what staging and the layout take; "
        f"raise the limit to {least} bytes or more",
        smallest_bytes=least,
        binding="",
    )


def _reading_ahead(problem: Problem, plan: OverlapPlan, program: Program, in_flight: Measure) -> tuple[OverlapPlan | None, int]:
    """`plan` with its reads running as far ahead as its layout has room in M_peak; None if it has none even without that.

    And the bytes that it takes with no read ahead of the first move.
    """
    if (taken := in_flight(plan)) <= problem.m_peak:
        return plan, taken
    tight = with_room(problem, plan, 0)
    needed = in_flight(tight)
    if needed > problem.m_peak:
        return None, needed
    staging = problem.mode == "interleave"
    most = problem.m_peak
    if staging:  # what reads ahead waits in staging, and takes nothing else
        layout = lay_out_pools(program.slices, tight, [problem.mode], page_bytes=program.page_bytes)[problem.mode]
        most -= needed - layout.staging_bytes + layout.threads * layout.entrance_bytes
    for share in _READ_AHEAD:
        roomy = with_room(problem, plan, int(most * share), staging=staging)
        if in_flight(roomy) <= problem.m_peak:
            return roomy, needed
    return tight, needed


_READ_AHEAD = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Parts of what there is within which reads may run ahead, where a layout wastes the rest."""


def paper_plan_within(
    program_problem: Problem, program: Program, limits: Limits, preload: frozenset[str], measure: Measure
) -> OverlapPlan:
    """The paper's objective under a budget: W and M_peak share it, the largest share for M_peak that works."""
    assert limits.budget is not None
    smallest, _ = smallest_m_peak(program_problem, preload)
    for share in _SHARES:
        m_peak = max(smallest, int(limits.budget * share))
        plan = solve(
            replace(program_problem, m_peak=m_peak),
            objective="paper",
            lambda_=limits.resolved_lambda,
            preload=preload,
            time_limit=_SECONDS_EACH,
            preload_limit=max(0, limits.budget - m_peak),
            units=limits.units,
        )
        for ahead in (None, *_READ_AHEAD[1::2], 0.0):
            roomy = plan if ahead is None else with_room(replace(program_problem, m_peak=m_peak), plan, int(m_peak * ahead))
            if measure(roomy) <= limits.budget:
                return roomy
    # The other planner knows the smallest budget, or finds the plan that the shares above stepped over.
    plan = fastest_within(program_problem, operators_of(program), limits.budget, measure, preload, 0.0)
    return replace(
        plan, notes=(*plan.notes, "no plan of the paper's objective fits the budget; this one is for the first answer")
    )


_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
_SECONDS_EACH = 4.0

_SECONDS_FIRST, _SECONDS_AGAIN = 5.0, 2.0
