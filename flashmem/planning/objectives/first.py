"""The objective `first`: the earliest first answer, from opening a session to its last layer."""

from __future__ import annotations

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
from flashmem.planning.search.effort import Effort
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

    def searched(self, problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
        """`plan` with moves that cost less time, and with better bounds; with lambda also within the average it permits."""
        from flashmem.planning.search.first import search_first

        return search_first(problem, plan, effort)

    def bounded(self, problem: Problem, plan: OverlapPlan) -> OverlapPlan:
        """`plan` with a bound within the user's limits, even if it was made with less memory.

        With lambda, its bound is already that for the memory which lambda leaves.
        """
        return plan if problem.limits.resolved_lambda else judge_first_answer(problem.roomiest(plan), plan)


OBJECTIVE: Objective = FirstAnswer()
