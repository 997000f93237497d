"""Shape variants planned together: the same weights stay in all, and no later run is much slower."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.latency.later_runs import OWN_WORTH, by_cache_and_disk, later_seconds, with_kept
from flashmem.planning.variants import TOGETHER_WORTH, VariantProblem, plan_together
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, OwnMemory, WeightSpec
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan
from tests.support.planning_instances import layers_of


def held(plan: OverlapPlan) -> int:
    """The most bytes of weights at a time, by definition: those that stay, and those in flight."""
    stays = staying(plan)
    layers = range(1, len(plan.capacities) + 1)
    flying = [w for w in plan.weights if w.name not in stays]
    return sum(w.nbytes for w in plan.weights if w.name in stays) + max(
        sum(w.nbytes for w in flying if w.read_layer <= layer <= w.last_use) for layer in layers
    )


def later(instance: Instance, plan: OverlapPlan) -> float:
    """Seconds of a later run; where memory is shared, the geometric mean of those from the page cache and from the disk."""
    if instance.own is not None:
        return by_cache_and_disk(instance, plan)[0]
    return sqrt(later_seconds(instance, plan) * later_seconds(instance, plan, cached=False))


def problem(sizes: list[int], seconds: float, budget: int, objective: str, *, shared: bool = False) -> VariantProblem:
    """A variant whose layers take `seconds` each, with the plan that it has alone; `shared`: host and device share memory."""
    weights = tuple(WeightSpec(f"w{n}", size, n + 2, n + 2) for n, size in enumerate(sizes))
    own = None if shared else OwnMemory(0.1, 2.0, 8.0)
    instance = Instance(
        layers_of([9] * (len(sizes) + 1), seconds), weights, 4, budget, 1.0, mode="map" if shared else "dma",
        host_bandwidth=2.0, piece_bytes=3, shares_memory=shared, own=own,
    )  # fmt: skip
    least = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    rooms = [first_plan(replace(instance, m_peak=m_peak)) for m_peak in {least, (least + budget) // 2, budget}]
    kept = [with_kept(instance, each, budget, held) for each in rooms if held(each) <= budget]
    first = objective == "first"
    return VariantProblem(instance, min(kept, key=lambda p: p.objective if first else later(instance, p)), held)


@given(
    st.lists(st.integers(1, 12), min_size=3, max_size=8),
    st.lists(st.sampled_from((0.25, 1.0, 4.0)), min_size=2, max_size=3),
    st.sampled_from((0.4, 0.6, 0.9)),
    st.sampled_from(("first", "steady")),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_variants_keep_the_same_within_the_budget_and_cost_little(
    sizes: list[int], seconds: list[float], share: float, objective: str, shared: bool
) -> None:
    least = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    budget = max(least, int(share * sum(sizes)))
    variants = [problem(sizes, each, budget, objective, shared=shared) for each in seconds]
    made = plan_together(variants, budget, answers_first=objective == "first")
    if made is None:
        return
    assert len({staying(plan) for plan in made}) == 1 < len({staying(each.plan) for each in variants})
    for each, plan in zip(variants, made, strict=True):
        assert held(plan) <= budget
        check(replace(plan, m_peak=2 * budget), replace(each.instance, m_peak=2 * budget))
        alone, together = (later(each.instance, one) for one in (each.plan, plan))
        assert together <= (1 + TOGETHER_WORTH) * alone + 1e-6
        if objective == "first":
            soonest = first_plan(replace(each.instance, m_peak=budget)).objective
            assert plan.objective <= max(each.plan.objective, (1 + OWN_WORTH) * soonest * 1.0000001)


@pytest.mark.parametrize("objective", ["first", "steady"])
def test_variants_that_keep_different_weights_are_brought_together(objective: str) -> None:
    """Different rooms for reading ahead make the own plans of a fast and of a slow variant keep different weights."""
    sizes, budget = [4] * 8, 20
    fast, slow = (problem(sizes, seconds, budget, "steady") for seconds in (0.25, 4.0))
    other = replace(slow.plan, weights=tuple(replace(w, keep=w.name == "w5") for w in slow.plan.weights))
    made = plan_together([fast, replace(slow, plan=other)], budget, answers_first=objective == "first")
    assert made is not None and len({staying(plan) for plan in made}) == 1 and staying(made[0])
    assert plan_together([fast, fast], budget, answers_first=objective == "first") is None
