"""Which solvers may search, and for how long."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from flashmem.base.errors import UserError
from flashmem.planning import planner
from flashmem.planning.objectives import paper
from flashmem.planning.planner import plan_instance, search_gap
from flashmem.planning.problem import Problem
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan
from tests.support.planning_instances import layers_of, program_of

WEIGHTS = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(9, 13))
INSTANCE = Instance(layers_of([9] * 12), WEIGHTS, 10, 1000, 5.0)
"""Four reads of 2 s for the last four layers of 1 s, which must run ahead."""


def plan(**limits: Any) -> OverlapPlan:
    asked = Limits(m_peak=1000, **limits)
    made = plan_instance(INSTANCE, program_of(INSTANCE), "map", asked)
    return search_gap(Problem(INSTANCE, program_of(INSTANCE), "map", asked), made)


def test_a_bound_within_the_average_is_searched_unless_only_the_program_may() -> None:
    alone, searched = plan(lambda_=0.9, solver="dp"), plan(lambda_=0.9, solve_seconds=60)
    assert (alone.solver, searched.solver) == ("none", "linear-program")
    assert alone.bound < searched.bound <= searched.objective == alone.objective
    assert plan(lambda_=0.9, solve_seconds=0).bound == alone.bound


def test_a_plan_without_or_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "find_spec", lambda name: None)
    made = plan(lambda_=0.9)
    assert made.solver == "none" and made.notes[-1] == "OR-tools is not installed: nothing searched the gap"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="solver cp-sat needs ortools; install flashmem with its `compile` extra, or give auto"):
        Limits(solver="cp-sat")


@pytest.mark.parametrize(
    ("asked", "workers", "seconds"), [({}, 2, 5.0), ({"solver": "dp"}, 0, 5.0), ({"solve_seconds": 7.0}, 2, 7.0)]
)
def test_the_papers_objective_is_searched_as_asked(
    asked: dict[str, Any], workers: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, float]] = []
    solve = paper.solve

    def recorded(*given: Any, **named: Any) -> OverlapPlan:
        calls.append((named["workers"], named["time_limit"]))
        return solve(*given, **named)

    monkeypatch.setattr(paper, "solve", recorded)
    plan(objective="paper", **asked)
    assert calls == [(workers, seconds)]
