"""The reasons why a weight is preloaded: each one in a case where it applies, and none that an optimal plan contradicts."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.why import in_flight_bytes, moved_chunks, reasons
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan
from tests.support.planning_instances import instances, layers_of


def kinds(plan: OverlapPlan) -> dict[str, str]:
    return {reason.name: reason.kind for reason in reasons(plan)}


def test_each_reason() -> None:
    weights = (
        WeightSpec("first", 10, 1, 1),
        WeightSpec("early", 30, 2, 2),
        WeightSpec("wanted", 10, 8, 8),
        WeightSpec("large", 90, 8, 8),
        WeightSpec("late", 10, 8, 8),
    )
    plan = solve(Instance(layers_of([2] * 8), weights, 10, 80, 1.0), preload=frozenset({"wanted"}))
    assert kinds(plan) == {"first": "first-layer", "early": "no-capacity", "wanted": "asked", "large": "too-large"}
    assert plan.asked == ("wanted",)
    assert "2 of its 3 chunks" in next(reason.text for reason in reasons(plan) if reason.name == "early")


def test_distance_and_memory() -> None:
    far = Instance(layers_of([1] + [0] * 11), (WeightSpec("w", 10, 12, 12),), 10, 100, 1.0)
    [reason] = reasons(solve(far))  # 0.1 * 11 layers against 0.9 * 1 chunk
    assert (reason.kind, reason.waits) == ("distance", 11)
    assert reason.text == "no capacity left in layers 2-11; streamed, it would wait 11 layers: (1-λ)·11 = 1.1 > λ·1 = 0.9"
    pair = tuple(WeightSpec(name, 10, 3, 3) for name in "ab")
    tight = solve(Instance(layers_of([2, 2, 0]), pair, 10, 10, 1.0))
    assert [reason.kind for reason in reasons(tight)] == ["memory"]


def test_a_plan_that_could_be_better_says_so() -> None:
    weights = (WeightSpec("w", 10, 3, 3),)
    instance = Instance(layers_of([1, 1, 0]), weights, 10, 100, 1.0)
    plan = solve(instance, preload=frozenset("w"))
    assert kinds(replace(plan, asked=())) == {"w": "unproven"}


@given(instances(), st.sampled_from([0.3, 0.9]))
@settings(max_examples=60, deadline=None)
def test_every_weight_of_w_has_a_reason_and_optimal_plans_no_doubt(instance: Instance, lambda_: float) -> None:
    plan = solve(instance, lambda_=lambda_, time_limit=2)
    found = kinds(plan)
    assert found.keys() == {w.name for w in plan.weights if w.preload}
    if plan.status == "optimal":
        assert "unproven" not in found.values()
    assert max(in_flight_bytes(plan), default=0) <= instance.m_peak
    assert sum(moved_chunks(plan)) == sum(w.chunks for w in plan.weights if not w.preload)
