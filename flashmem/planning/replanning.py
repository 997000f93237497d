"""Plan a bundle for another budget on the device, in well below a second, with numpy alone.

The plan is that of `first_plan`, in the least memory that gives about the same first answer as the whole budget. The remaining
memory is more useful for resident weights and for other models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.assemble import with_relaxed
from flashmem.planning.arithmetic.measure import session_measure
from flashmem.planning.budget import plan_within, with_staging_that_fits
from flashmem.planning.latency.first_answer import first_plan, judge_first_answer, smallest_m_peak
from flashmem.planning.latency.later_runs import ladder, serving_later_runs, smallest_flight, with_kept
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.pose import staged_least, staged_within
from flashmem.planning.problem import roomiest
from flashmem.program.program import Program, fixed_bytes
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

_NEAR = 8
"""A part (divisor) of the budget too small to justify another plan: with less memory, a plan needs more time."""


def plan_again(
    program: Program, instance: Instance, mode: TransferMode, budget: int | None, preload: Collection[str], *, keep: bool
) -> OverlapPlan:
    """The checked plan of `instance` within `budget` bytes, with its layout for `mode`.

    `preload`: weights that are in W for any budget. `keep`: use the rest of the budget to keep weights for later runs.

    Raises:
        BudgetError: no plan fits; the error names the smallest budget that works.
    """
    if budget is None:
        return _seal(program, instance, mode, first_plan(instance, preload, quick=True), None)
    measure = session_measure(program, mode)

    def within(staged: Instance) -> OverlapPlan:
        return plan_within(staged, budget, measure, preload=preload, quick=True)[0]

    instance, plan = with_staging_that_fits(staged_within(instance, budget), budget, within)
    least = smallest_m_peak(instance, preload)[0]

    def make(m_peak: int) -> OverlapPlan:
        return first_plan(replace(instance, m_peak=m_peak), preload, quick=True)

    if keep and instance.own is not None:
        rooms = [plan, *(ladder(instance, plan, least, make) if plan.m_peak > least else ())]
        return _seal(program, instance, mode, serving_later_runs(instance, rooms, budget, measure, plan.objective), budget)
    if plan.m_peak > least:
        lean = smallest_flight(plan, least, make, lambda each: each.objective, near=budget // _NEAR)
        if measure(lean) <= budget:
            plan = lean
    if keep:
        plan = with_kept(instance, plan, budget, measure)
    return _seal(program, instance, mode, plan, budget)


def smallest_budget(program: Program, instance: Instance, mode: TransferMode, preload: Collection[str]) -> int:
    """The least budget, in bytes, for which `plan_again` finds a plan."""
    instance = staged_least(instance)
    instance = replace(instance, m_peak=max(1, smallest_m_peak(instance, preload)[0]))
    return session_measure(program, mode)(first_plan(instance, preload, quick=True))


def _seal(program: Program, instance: Instance, mode: TransferMode, plan: OverlapPlan, budget: int | None) -> OverlapPlan:
    fixed = fixed_bytes(program, shares_memory=instance.shares_memory)
    plan = with_relaxed(judge_first_answer(roomiest(instance, plan, None if budget is None else budget - fixed), plan))
    layouts = lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)
    plan = replace(
        plan, layouts=dict(layouts), m_peak=max(plan.m_peak, layouts[mode].in_flight_bytes(shares_memory=plan.shares_memory))
    )
    check(plan, replace(instance, m_peak=plan.m_peak), program.slices)
    return plan
