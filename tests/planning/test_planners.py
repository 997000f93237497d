"""Every planner's plans against the rules, the optimum and the budget."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from flashmem.base.errors import BudgetError, UserError
from flashmem.planning.budget import plan_within
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.opg.greedy import greedy
from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.why import moved_chunks
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import RELAXING_TIERS, OverlapPlan
from tests.support.planning_instances import (
    in_flight,
    instances,
    keeps_the_rules,
    layers_of,
    least_distance,
    least_objective,
    slices_for,
)

FOREVER = 3600.0
"""Seconds, for a search that ends earlier without a limit."""

small = instances(most_layers=5, most_weights=4, most_chunks=3)


@given(instances(), st.sampled_from([0.0, 0.3, 0.9, 1.0]))
@settings(max_examples=25, deadline=None)
def test_plans_for_the_papers_objective_keep_the_rules(instance: Instance, lambda_: float) -> None:
    plan = solve(instance, lambda_=lambda_, time_limit=0.5)
    check(plan, instance)
    assert keeps_the_rules(plan, instance)
    assert plan.tier in ("dynamic-program", "cp-sat") and not plan.relaxed
    assert plan.bound <= plan.objective + 1e-9


@given(small, st.sampled_from([0.3, 0.9]))
@settings(max_examples=25, deadline=None)
def test_the_papers_optimum_is_found_and_proven(instance: Instance, lambda_: float) -> None:
    plan = solve(instance, lambda_=lambda_, time_limit=20)
    assert plan.status == "optimal"
    assert plan.objective == pytest.approx(least_objective(instance, lambda_, forced_preload(instance)))


@given(small)
@settings(max_examples=25, deadline=None)
def test_the_bound_holds_when_time_is_short(instance: Instance) -> None:
    plan = solve(instance, time_limit=0.02)
    if plan.tier in ("dynamic-program", "cp-sat"):
        assert plan.bound <= least_objective(instance, 0.9, forced_preload(instance)) + 1e-9 <= plan.objective + 2e-9


@given(instances())
@settings(max_examples=100, deadline=None)
def test_first_plans_keep_the_rules_down_to_the_smallest_m_peak(instance: Instance) -> None:
    smallest, binding = smallest_m_peak(instance)
    assert not instance.weights or binding in {layer.name for layer in instance.layers}
    for m_peak in {smallest, max(smallest, instance.m_peak)}:
        inside = replace(instance, m_peak=m_peak)
        plan = first_plan(inside)
        check(plan, inside)
        assert keeps_the_rules(plan, inside)
        assert {w.name for w in plan.weights if w.preload} == forced_preload(instance)
        for layer in range(1, len(instance.layers) + 1):  # whole slices, as the runtime holds them
            assert sum(w.nbytes for w in plan.weights if not w.preload and w.read_layer <= layer <= w.last_use) <= m_peak


@given(small)
@settings(max_examples=60, deadline=None)
def test_below_the_smallest_m_peak_there_is_no_plan(instance: Instance) -> None:
    smallest, _ = smallest_m_peak(instance)
    anything_moves = tuple(replace(layer, capacity=12) for layer in instance.layers)
    generous = replace(instance, layers=anything_moves, m_peak=smallest)
    assert least_distance(generous, forced_preload(instance)) is not None
    if smallest > 0:
        below = replace(generous, m_peak=smallest - 1)
        assert least_distance(below, forced_preload(instance)) is None
        with pytest.raises(BudgetError, match=str(smallest)) as refusal:
            first_plan(below)
        assert refusal.value.smallest_bytes == smallest


@given(instances())
@settings(max_examples=50, deadline=None)
def test_the_greedy_tier_needs_no_more_than_the_smallest_m_peak(instance: Instance) -> None:
    tight = replace(instance, m_peak=smallest_m_peak(instance)[0])
    plan = greedy(tight, forced_preload(tight))
    assert max(in_flight(tight, plan.moves), default=0) <= tight.m_peak


def test_the_binding_layer_is_named() -> None:
    weights = (WeightSpec("a", 10, 2, 2), WeightSpec("b", 30, 4, 4), WeightSpec("c", 25, 5, 5))
    instance = Instance(layers_of([1, 1, 1, 1, 1]), weights, 10, 54, 1.0)
    assert smallest_m_peak(instance) == (55, "layer4")
    with pytest.raises(BudgetError, match="'layer4'") as refusal:
        first_plan(instance)
    assert (refusal.value.smallest_bytes, refusal.value.binding) == (55, "layer4")


HEAVY_PAIR = (WeightSpec("one", 50, 3, 3), WeightSpec("two", 50, 3, 3))
"""Five chunks each, with two layers of one chunk (three, once softened) to move them."""


@pytest.mark.parametrize(
    ("weights", "options", "tier"),
    [
        ((WeightSpec("w", 20, 3, 3),), {}, "dynamic-program"),
        ((WeightSpec("w", 20, 3, 3),), {"lambda_": 0.0, "preload_limit": 0}, "cp-sat"),
        ((WeightSpec("w", 30, 3, 3),), {"preload_limit": 0}, "soft-threshold"),
        ((WeightSpec("w", 30, 3, 3),), {"time_limit": 0.0}, "soft-threshold"),
        (HEAVY_PAIR, {"preload_limit": 50}, "incremental-preload"),
        (HEAVY_PAIR, {"preload_limit": 0}, "greedy"),
    ],
)
def test_each_tier_is_reached(weights: tuple[WeightSpec, ...], options: dict[str, float], tier: str) -> None:
    instance = Instance(layers_of([1, 1, 0]), weights, 10, 1000, 1.0)
    plan = solve(instance, **options)  # type: ignore[arg-type]
    assert plan.tier == tier
    assert keeps_the_rules(plan, instance)
    assert bool(plan.relaxed) == (tier in RELAXING_TIERS) == any("C_l relaxed" in note for note in plan.notes)


def test_a_plan_that_needs_the_solver_says_so_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance(layers_of([1, 1, 0]), (WeightSpec("w", 20, 3, 3),), 10, 1000, 1.0)
    for loaded in ("cp_sat", "cp_models"):
        monkeypatch.delitem(sys.modules, f"flashmem.planning.opg.{loaded}", raising=False)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UserError, match="this plan needs ortools"):
        solve(instance, lambda_=0.0, preload_limit=0)
    assert solve(instance).tier == "dynamic-program"


def test_no_tier_can_do_without_memory() -> None:
    instance = Instance(layers_of([1, 1, 0]), HEAVY_PAIR, 10, 99, 1.0)
    with pytest.raises(BudgetError) as refusal:
        solve(instance, preload_limit=0)
    assert refusal.value.smallest_bytes == 100
    assert solve(instance).preload_ratio == 1  # with no limit on W both are preloaded


def test_hierarchical_layers_move_last() -> None:
    layers = (*layers_of([0, 0]), LayerSpec("softmax", "hierarchical", 0, 9.0), *layers_of([0]))
    instance = Instance(layers, (WeightSpec("w", 60, 4, 4),), 10, 1000, 1e9)
    plan = first_plan(instance)
    moved = moved_chunks(plan)
    assert moved[2] == 0 and sum(moved) == 6 and not plan.relaxed
    assert any(note.startswith("more than C_l is moved") for note in plan.notes)


@given(instances(), st.data())
@settings(max_examples=15, deadline=None)
def test_named_weights_are_preloaded(instance: Instance, data: st.DataObject) -> None:
    names = [w.name for w in instance.weights]
    preload = frozenset(data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else [])
    roomy = replace(instance, m_peak=10_000)
    for plan in (solve(roomy, preload=preload, time_limit=0.3), first_plan(roomy, preload)):
        assert preload <= {w.name for w in plan.weights if w.preload}


def test_what_cannot_be_asked() -> None:
    instance = Instance(layers_of([1]), (), 10, 10, 1.0)
    with pytest.raises(UserError, match="lambda"):
        solve(instance, lambda_=1.5)
    with pytest.raises(UserError, match="nobody"):
        solve(instance, preload=frozenset({"nobody"}))


@given(instances(most_weights=8), st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_plan_within_a_budget(instance: Instance, budget: int) -> None:
    slices = slices_for(instance, images=False)

    def measure(plan: OverlapPlan) -> int:
        return 7 + sum(-(-w.nbytes // 3) * 3 for w in plan.weights if w.preload) + plan.m_peak

    try:
        plan, inside = plan_within(instance, budget, measure)
    except BudgetError as refusal:
        assert refusal.smallest_bytes > budget
        assert measure(plan_within(instance, refusal.smallest_bytes, measure)[0]) <= refusal.smallest_bytes
    else:
        assert measure(plan) <= budget
        check(plan, inside, slices)


@given(instances(most_weights=6))
@settings(max_examples=20, deadline=None)
def test_plans_survive_json(instance: Instance) -> None:
    roomy = replace(instance, m_peak=10_000)
    plan = first_plan(roomy)
    slices = slices_for(roomy, images=True)
    plan = replace(plan, layouts=lay_out_pools(slices, plan, ["map", "alias", "dma", "interleave"]))
    assert OverlapPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def long_instance(count: int) -> Instance:
    """A transformer-like chain: large weights, an elemental layer after each, every fifth layer hierarchical."""
    kinds = ("reusable", "elemental", "reusable", "elemental", "hierarchical")
    layers = tuple(LayerSpec(f"layer{n}", kinds[n % 5], 9 * (n % 5 != 4), 0.001) for n in range(count))  # type: ignore[arg-type]
    weights = tuple(WeightSpec(f"w{n}", (1 + n * 7919 % 28) * 500_000 + n, n, n) for n in range(1, count + 1))
    return Instance(layers, weights, 1 << 20, 500_000_000, 1e9)


def test_ten_thousand_slices() -> None:
    instance = long_instance(10_000)
    plan = first_plan(instance)
    plan = replace(plan, layouts=lay_out_pools(slices_for(instance, images=False), plan, ["map", "alias"]))
    check(plan, instance)
    assert plan.layouts["alias"].pool_bytes < 1.1 * plan.layouts["map"].mapped_peak_bytes


@pytest.mark.thorough
def test_long_models_with_a_limit_on_w_go_through_rolling_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[cp_model.CpSolver] = []

    def first_found(workers: int, seconds: float) -> cp_model.CpSolver:
        """CP-SAT stopped by a solution instead of the time: the result does not depend on the machine's load."""
        cp = cp_model.CpSolver()
        cp.parameters.num_workers = 1
        cp.parameters.random_seed = 1
        cp.parameters.cp_model_presolve = False
        cp.parameters.stop_after_first_solution = True
        windows.append(cp)
        return cp

    monkeypatch.setattr("flashmem.planning.opg.cp_sat.cp_solver", first_found)
    instance = long_instance(1500)
    free = solve(instance, time_limit=FOREVER)
    assert free.tier == "dynamic-program" and keeps_the_rules(free, instance) and not windows
    taken = sum(w.nbytes for w in free.weights if w.preload and w.first_use > 1)
    plan = solve(instance, time_limit=FOREVER, preload_limit=taken - 1)
    assert plan.tier == "cp-sat" and keeps_the_rules(plan, instance)
    assert len(windows) == 2, "1500 layers, of which a window decides 1000"
    assert sum(w.nbytes for w in plan.weights if w.preload and w.first_use > 1) < taken
    assert free.bound <= plan.objective
