"""A new objective is a row of data and a class; nothing else knows the names."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.planning.latency.first_answer import first_plan, smallest_m_peak
from flashmem.planning.objectives.objective import Objective
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.planner import plan_instance
from flashmem.planning.problem import Problem
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.objectives import KINDS, ObjectiveKind
from flashmem.schedule.plan import OverlapPlan
from tests.support.planning_instances import layers_of, program_of

WEIGHTS = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 8))
INSTANCE = Instance(layers_of([2] * 7, seconds=0.5), WEIGHTS, 5, 1000, 10.0)


class Leanest(Objective):
    """The first answer in the least memory."""

    kind: ClassVar[ObjectiveKind] = ObjectiveKind("leanest", "the least memory", "first run", lambda_=0.25)

    def plan(self, problem: Problem) -> OverlapPlan:
        least, _ = smallest_m_peak(problem.instance)
        made = first_plan(replace(problem.instance, m_peak=least))
        return replace(made, objective_kind=self.kind.name)


@pytest.fixture
def leanest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the two files of a new objective would add."""
    module = ModuleType("flashmem.planning.objectives.leanest")
    module.OBJECTIVE = Leanest()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(KINDS, "leanest", Leanest.kind)  # type: ignore[arg-type]


@pytest.mark.usefixtures("leanest")
def test_a_new_objective_is_planned_checked_stored_and_compared() -> None:
    limits = Limits(objective="leanest", m_peak=1000)
    assert limits.resolved_lambda == 0.25
    plan = plan_instance(INSTANCE, program_of(INSTANCE), "map", limits)
    most = max(sum(w.nbytes for w in plan.weights if w.read_layer <= layer <= w.last_use) for layer in range(1, 8))
    assert most == 20 and plan.proof == "optimal for the least memory"
    assert OverlapPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    other = plan_instance(INSTANCE, program_of(INSTANCE), "map", Limits(m_peak=1000))
    assert objective_of("leanest").is_better(plan, other, worth=0.5)
    assert not objective_of(other.objective_kind).is_better(plan, other, worth=0.0)


def test_an_unknown_objective_is_refused() -> None:
    with pytest.raises(UserError, match="objective 'leanest' is unknown; name one of: auto, first, steady, paper"):
        Limits(objective="leanest")
    plan = plan_instance(INSTANCE, program_of(INSTANCE), "map", Limits())
    with pytest.raises(ValueError, match="no objective is named 'leanest'"):
        OverlapPlan.from_json({**json.loads(json.dumps(plan.to_json())), "objective_kind": "leanest"})


def test_no_other_code_asks_for_an_objective_by_name() -> None:
    asks = re.compile(rf"""objective\w* *[!=]= *["']({"|".join(KINDS)})["']""")
    files = Path(flashmem.__file__).parent.rglob("*.py")
    assert not [str(file) for file in files if asks.search(file.read_text(encoding="utf-8"))]
