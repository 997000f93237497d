"""The objective `steady`: the fastest later runs in the same memory."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from flashmem.planning.latency.later_runs import (
    by_cache_and_disk,
    fastest_kept,
    later_seconds,
    rooms_for_later_runs,
    with_kept,
)
from flashmem.planning.objectives.objective import Objective
from flashmem.planning.portfolio import soonest_plan
from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import Effort
from flashmem.schedule.objectives import STEADY, ObjectiveKind
from flashmem.schedule.plan import BoundScope, OverlapPlan


class LaterRuns(Objective):
    """Predicted seconds of a later run: what W and the kept weights leave to be read again."""

    kind: ClassVar[ObjectiveKind] = STEADY
    completes_at_once: ClassVar[bool] = True

    def plan(self, problem: Problem) -> OverlapPlan:
        """A plan for the first answer, which `completed` gives the weights that stay."""
        return soonest_plan(problem)

    def completed(self, problem: Problem, plan: OverlapPlan, soonest: float) -> OverlapPlan:
        """The plan with the fastest later runs, whatever its first answer."""
        instance = problem.instance
        limit = problem.limit
        measure = problem.measure
        if limit is None:
            kept = with_kept(instance, plan, None, measure)
        else:
            rooms = rooms_for_later_runs(instance, plan, several=True)
            kept = fastest_kept(instance, rooms, limit, measure, by_cache_and_disk)
        return self.judged(problem, kept)

    def searched(self, problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
        """`plan`, or one that keeps other weights; with a bound for every choice of them."""
        from flashmem.planning.search.kept import search_kept

        return search_kept(problem, plan, effort)

    def judged(self, problem: Problem, plan: OverlapPlan) -> OverlapPlan:
        """`plan`, one for the first answer, with the value and the bound of its later runs."""
        seconds = later_seconds(problem.instance, plan)
        note = f"a later run is predicted to take {seconds:.4g} s, the first answer {plan.objective:.4g} s"
        bound, scope = steady_bound(problem, plan)
        if seconds - bound <= 1e-9 * seconds:
            bound = seconds
        return replace(
            plan, objective_kind=self.kind.name, objective=seconds, bound=bound, bound_scope=scope, notes=(*plan.notes, note)
        )


def steady_bound(problem: Problem, plan: OverlapPlan) -> tuple[float, BoundScope]:
    """A lower bound of a later run, in seconds: the sum of all layers, or the time to read what memory cannot keep.

    A budget limits all kept weights, so that bound holds for every W. M_peak does not limit W, so that bound holds for this W.
    """
    instance = problem.instance
    limits = problem.limits
    compute = sum(layer.seconds for layer in instance.layers)
    if limits.budget is not None:
        read = sum(w.nbytes for w in instance.weights) - (limits.budget - problem.fixed)
    elif limits.m_peak is not None:
        read = sum(w.nbytes for w in plan.weights if not w.preload) - limits.m_peak
    else:
        read = 0
    bound = max(compute, read / instance.host_bandwidth)
    return bound, "problem" if limits.m_peak is None or bound == compute else "resident-set"


OBJECTIVE: Objective = LaterRuns()
