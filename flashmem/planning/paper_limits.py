"""The paper's objective within the user's limits: what it plans has to leave room for staging and for what a layout wastes.

Left out of the wheel for phones: a plan of this objective is for comparing with the paper.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.baselines import fastest_within, operators_of
from flashmem.planning.latency.first_answer import smallest_m_peak
from flashmem.planning.limits import Limits
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.opg.lc_opg import ReadAhead, proven_bound, solve
from flashmem.program.program import Program, fixed_bytes
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan, Units


def paper_plan_inside(
    instance: Instance, preload: frozenset[str], lambda_: float, units: Units, in_flight: Measure, *, limited: bool
) -> OverlapPlan:
    """The paper's plan whose layout, with what it wastes and with staging, takes no more than M_peak; no read runs ahead.

    Raises:
        BudgetError: nothing fits; it names what the plan with the least takes.
    """
    plan = solve(
        instance, objective="paper", lambda_=lambda_, preload=preload, units=units, time_limit=_SECONDS_FIRST, ahead=False
    )
    least = in_flight(plan)
    if not limited or least <= instance.m_peak:
        return plan
    for share in _SHARES:
        try:
            smaller = solve(
                replace(instance, m_peak=int(instance.m_peak * share)), objective="paper", lambda_=lambda_, preload=preload,
                time_limit=_SECONDS_AGAIN, units=units, ahead=False,
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


def paper_plan_within(
    program_instance: Instance, program: Program, limits: Limits, preload: frozenset[str], in_all: Measure
) -> OverlapPlan:
    """The paper's objective under a budget: W and M_peak share it, the largest share for M_peak that works."""
    assert limits.budget is not None
    smallest, _ = smallest_m_peak(program_instance, preload)
    for share in _SHARES:
        m_peak = max(smallest, int(limits.budget * share))
        plan = solve(
            replace(program_instance, m_peak=m_peak),
            objective="paper",
            lambda_=limits.resolved_lambda,
            preload=preload,
            time_limit=_SECONDS_EACH,
            preload_limit=max(0, limits.budget - m_peak),
            units=limits.units,
            ahead=False,
        )
        if in_all(plan) <= limits.budget:
            # What is proven of this split of the budget says nothing about another: the bound is of plans that have all of
            # it for W, and all of it for what is in flight.
            room = max(m_peak, limits.budget - fixed_bytes(program))
            roomy = replace(program_instance, m_peak=room)
            bound = proven_bound(roomy, preload, limits.resolved_lambda, room, limits.units, _SECONDS_EACH)
            return replace(plan, bound=min(bound, plan.objective))
    # The other planner knows the smallest budget, or finds the plan that the shares above stepped over.
    plan = fastest_within(program_instance, operators_of(program), limits.budget, in_all, preload, 0.0)
    return replace(
        plan, notes=(*plan.notes, "no plan of the paper's objective fits the budget; this one is for the first answer")
    )


def reading_ahead(instance: Instance, plan: OverlapPlan, program: Program, limit: int | None, measure: Measure) -> OverlapPlan:
    """`plan`, in which no read runs ahead, with reads that run as far ahead as `measure` of its layout has room in `limit`."""
    staging = instance.mode == "interleave" and limit is not None
    most = plan.m_peak
    if staging:  # what reads ahead waits in staging, and takes nothing else
        layout = lay_out_pools(program.slices, plan, [instance.mode], page_bytes=program.page_bytes)[instance.mode]
        most = (limit or 0) - measure(plan) + layout.all_staging_bytes

    reads = ReadAhead(instance, plan)
    widest = reads.within(most, staging=staging)
    if limit is None or (taken := measure(widest)) <= limit:
        return widest
    # What is taken falls about as the share does: look around there for the widest one that fits.
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
"""Parts of what there is within which reads may run ahead, where a layout wastes the rest."""

_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
_SECONDS_EACH = 4.0

_SECONDS_FIRST, _SECONDS_AGAIN = 5.0, 2.0
