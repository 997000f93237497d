"""The objective `first`: the earliest first answer, from opening a session to its last layer."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

from flashmem.planning.latency.first_answer import judge_first_answer
from flashmem.planning.latency.later_runs import (
    by_later_runs,
    fastest_kept,
    rooms_for_later_runs,
    serving_later_runs,
    with_kept,
)
from flashmem.planning.objectives.objective import Objective
from flashmem.planning.portfolio import soonest_plan
from flashmem.planning.problem import Problem
from flashmem.schedule.objectives import FIRST, ObjectiveKind
from flashmem.schedule.plan import OverlapPlan


class FirstAnswer(Objective):
    """Predicted seconds of the first run. Memory that it does not need keeps weights for later runs."""

    kind: ClassVar[ObjectiveKind] = FIRST
    grows_w: ClassVar[bool] = True

    def plan(self, problem: Problem) -> OverlapPlan:
        """The fastest plan of the portfolio."""
        return soonest_plan(problem)

    def completed(self, problem: Problem, plan: OverlapPlan, soonest: float) -> OverlapPlan:
        """`plan` with weights kept for later runs in the rest of a budget; all of them without a limit.

        On a device with memory of its own, the plan with the fastest later runs whose first answer is at most `OWN_WORTH` after
        `soonest`.
        """
        plan = within_average(problem, plan)
        if problem.limits.m_peak is not None:
            return plan
        instance = problem.instance
        limit = problem.limit
        measure = problem.measure
        if limit is None:
            return with_kept(instance, plan, None, measure)
        rooms = rooms_for_later_runs(instance, plan, several=instance.own is not None)
        if instance.own is not None:
            return serving_later_runs(instance, rooms, limit, measure, soonest)
        return fastest_kept(instance, rooms, limit, measure, by_later_runs)

    def bounded(self, problem: Problem, plan: OverlapPlan) -> OverlapPlan:
        """`plan` with a bound within the user's limits, even if it was made with less memory.

        With lambda, its bound is already that for the memory which lambda leaves.
        """
        return plan if problem.limits.resolved_lambda else judge_first_answer(problem.roomiest(plan), plan)


def within_average(problem: Problem, plan: OverlapPlan) -> OverlapPlan:
    """`plan` with a bound for plans that keep the average memory that lambda permits, if its own leaves a gap.

    It needs OR-tools, which a phone does not have.
    """
    limits = problem.limits
    if plan.average_within is None or plan.gap <= _PROVEN or limits.solver == "dp":
        return plan
    seconds = _SECONDS if limits.solve_seconds is None else limits.solve_seconds
    try:
        from flashmem.planning.latency.average_bound import seconds_within_average
    except ModuleNotFoundError:
        note = "OR-tools is not installed: the bound ignores the average of memory that lambda permits"
        return replace(plan, notes=(*plan.notes, note))
    begun = time.monotonic()
    preload = {w.name for w in plan.weights if w.preload}
    bound = seconds_within_average(problem.instance, preload, plan.average_within, plan.objective, seconds)
    plan = replace(plan, solver="linear-program", solve_seconds=plan.solve_seconds + time.monotonic() - begun)
    return replace(plan, bound=bound, bound_scope="resident-set", bound_within=None) if bound > plan.bound else plan


_PROVEN = 0.005
"""A gap that needs no better bound."""

_SECONDS = 2.0
"""The most seconds that the search for a bound adds to a compilation, if the user gives no other number."""

OBJECTIVE: Objective = FirstAnswer()
