"""The simpler strategies: permitted load layers, M_peak and budgets, and never earlier than the planner's own plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.planning.baselines import Baseline, WeightedOperator
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.portfolio import fastest_plan, fastest_within
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PlanViolation, Strategy
from tests.planning.oracle import first as exhaustive
from tests.support.planning_instances import instances, layers_of, slices_for

STRATEGIES: tuple[Strategy, ...] = ("on-demand", "always-next", "next-operator", "same-op", "resident-first")

# Layers 1..9; operators with weights at 2 (type a), 4 (b, two slices), 6 (a), 9 (b).
USES = {"p": 2, "q.0": 4, "q.1": 5, "r": 6, "s": 9}
OPERATORS = (
    WeightedOperator(2, "a", ("p",)),
    WeightedOperator(4, "b", ("q.0", "q.1")),
    WeightedOperator(6, "a", ("r",)),
    WeightedOperator(9, "b", ("s",)),
)
INSTANCE = Instance(layers_of([2] * 9), tuple(WeightSpec(name, 4, at, at) for name, at in USES.items()), 1, 100, 2.0)


def held(plan: OverlapPlan) -> int:
    """Bytes of W plus the peak of whole slices from z_w to their last use."""
    resident = sum(w.nbytes for w in plan.weights if w.preload)
    layers = range(1, len(plan.capacities) + 1)
    streamed = [w for w in plan.weights if not w.preload]
    return resident + max((sum(w.nbytes for w in streamed if w.read_layer <= at <= w.last_use) for at in layers), default=0)


def releases(strategy: Strategy, m_peak: int = 100) -> dict[str, int]:
    plan = Baseline(strategy, OPERATORS).plan(replace(INSTANCE, m_peak=m_peak))
    check(plan, replace(INSTANCE, m_peak=m_peak))
    assert plan.strategy == strategy
    return {w.name: w.read_layer for w in plan.weights}


def test_on_demand_waits_for_the_operator_itself() -> None:
    assert releases("on-demand") == {"p": 2, "q.0": 4, "q.1": 4, "r": 6, "s": 9}


def test_on_demand_moves_before_the_layer_with_nothing_beside_it() -> None:
    plan = Baseline("on-demand", OPERATORS).plan(INSTANCE)
    assert all(w.moves == ((w.first_use, w.chunks),) for w in plan.weights)
    # Loads (2 s each) and layers (1 s each) alternate; only q.1 loads while q.0's layer computes.
    assert plan.objective == pytest.approx(9 + 2 * 5 - 1)
    with pytest.raises(PlanViolation, match="C0"):
        check(replace(plan, strategy="stream"), INSTANCE)


def test_always_next_begins_with_the_layer_before() -> None:
    assert releases("always-next") == {"p": 1, "q.0": 3, "q.1": 4, "r": 5, "s": 8}


def test_next_operator_begins_with_the_operator_before() -> None:
    assert releases("next-operator") == {"p": 1, "q.0": 2, "q.1": 2, "r": 4, "s": 6}


def test_same_op_begins_with_the_operator_of_its_type() -> None:
    assert releases("same-op") == {"p": 1, "q.0": 2, "q.1": 2, "r": 2, "s": 4}


def test_m_peak_delays_loads_in_use_order() -> None:
    assert releases("next-operator", 8) == {"p": 1, "q.0": 2, "q.1": 3, "r": 5, "s": 6}
    assert releases("on-demand", 4) == {"p": 2, "q.0": 4, "q.1": 5, "r": 6, "s": 9}


@pytest.mark.parametrize(("strategy", "smallest", "binding"), [("on-demand", 4, "layer2"), ("always-next", 8, "layer4")])
def test_an_m_peak_too_small_names_the_smallest(strategy: Strategy, smallest: int, binding: str) -> None:
    with pytest.raises(BudgetError) as refused:
        Baseline(strategy, OPERATORS).plan(replace(INSTANCE, m_peak=smallest - 1))
    assert (refused.value.smallest_bytes, refused.value.binding) == (smallest, binding)
    Baseline(strategy, OPERATORS).plan(replace(INSTANCE, m_peak=smallest))


def test_resident_first_fills_the_budget_with_w() -> None:
    plan = Baseline("resident-first", OPERATORS).within(INSTANCE, 13, held)
    assert held(plan) <= 13
    assert sum(w.preload for w in plan.weights) >= 1
    everything = Baseline("resident-first", OPERATORS).within(INSTANCE, 20, held)
    assert all(w.preload for w in everything.weights)


def _operators(instance: Instance) -> list[WeightedOperator]:
    """One for each first use; every third of the same type."""
    slices: dict[int, list[str]] = {}
    for w in instance.weights:
        slices.setdefault(w.first_use, []).append(w.name)
    return [WeightedOperator(first, str(first % 3), tuple(slices[first])) for first in sorted(slices)]


@given(instances())
@settings(max_examples=150, deadline=None)
def test_every_strategy_keeps_the_rules_and_the_bound_of_our_plan(instance: Instance) -> None:
    """A strategy may be faster than `first_plan`, which tries one order for weights of one layer; its plan is used then.

    So a strategy's plan refutes a bound that is too high, even in problems that are too large for exhaustive search.
    """
    operators = _operators(instance)
    for strategy in STRATEGIES[:4]:
        baseline = Baseline(strategy, operators)
        limited = replace(instance, m_peak=max(1, baseline.smallest(instance, baseline.least_preload(instance))[0]))
        for m_peak in (limited.m_peak, limited.m_peak + instance.m_peak):
            inside = replace(instance, m_peak=m_peak)
            plan = baseline.plan(inside)
            check(plan, inside)
            assert plan.bound <= plan.objective + 1e-9
            if strategy != "on-demand":  # which also streams the weights of layer 1, and so may need less
                assert first_plan(inside).bound <= plan.objective * (1 + 1e-9)
                assert held(plan) - sum(w.nbytes for w in plan.weights if w.preload) <= m_peak


READ_OUT_OF_ORDER = Instance(
    tuple(replace(layer, seconds=each) for layer, each in zip(layers_of([2] * 4), (2.125, 2.5, 2.375, 1.75), strict=True)),
    (WeightSpec("a", 1, 4, 4), WeightSpec("b", 1, 2, 2), WeightSpec("c", 4, 4, 4)), 4, 5, 1.0,
)  # fmt: skip
"""With five bytes in flight, the best plan reads "c" before "a" (8.75 s). Planners read in the given order (10.375 s)."""


@given(instances(most_layers=4, most_weights=3, most_chunks=2))
@example(READ_OUT_OF_ORDER)
@settings(max_examples=100, deadline=None)
def test_no_plan_is_faster_than_the_fastest_of_all(instance: Instance) -> None:
    """Compared with exhaustive search under a separate clock: the strategies' plans, ours, and the one that a user gets."""
    operators = _operators(instance)
    for strategy in STRATEGIES[1:4]:
        baseline = Baseline(strategy, operators)
        inside = replace(instance, m_peak=max(1, baseline.smallest(instance, baseline.least_preload(instance))[0]))
        plan, ours, used = baseline.plan(inside), first_plan(inside), fastest_plan(inside, operators, frozenset())
        resident = frozenset(w.name for w in plan.weights if w.preload)
        best = exhaustive.fastest(inside, resident)
        assert best is not None
        for each in (plan, ours, used):
            moves = {w.name: w.moves for w in each.weights if not w.preload}
            assert moves.keys() == {w.name for w in plan.weights} - resident
            played = exhaustive.seconds_of(inside, resident, {w.name: w.read_layer for w in each.weights}, moves)
            assert each.objective == pytest.approx(played, rel=1e-9, abs=0) and best <= played * (1 + 1e-9)
        assert ours.bound <= best * (1 + 1e-9)
        assert used.objective <= min(plan.objective, ours.objective) * (1 + 2e-6)


@given(instances(whole_chunks=True))
@settings(max_examples=60, deadline=None)
def test_budgets_hold_and_the_smallest_is_exact(instance: Instance) -> None:
    for strategy in STRATEGIES:
        baseline = Baseline(strategy, _operators(instance))
        try:
            plan = baseline.within(instance, instance.m_peak, held)
        except BudgetError as refused:
            assert refused.smallest_bytes > instance.m_peak
            plan = baseline.within(instance, refused.smallest_bytes, held)
            assert held(plan) <= refused.smallest_bytes
            continue
        assert held(plan) <= instance.m_peak
        check(plan, replace(instance, m_peak=plan.m_peak))
        if strategy != "on-demand":
            ours = fastest_within(instance, _operators(instance), instance.m_peak, held, frozenset())
            assert ours.objective <= plan.objective * (1 + 2e-6)


def test_a_weight_used_again_stays() -> None:
    tied = Instance(layers_of([2] * 4), (WeightSpec("t", 2, 2, 4), WeightSpec("u", 2, 3, 3)), 1, 4, 1.0)
    plan = Baseline("on-demand", (WeightedOperator(2, "a", ("t",)), WeightedOperator(3, "a", ("u",)))).plan(tied)
    assert plan.weights[0] == PlannedWeight("t", 2, 2, 2, 4, False, 2, ((2, 2),))
    check(plan, tied)


def test_where_the_layout_of_the_first_plan_does_not_fit_another_is_taken() -> None:
    def measure(plan: OverlapPlan) -> int:  # a layout that wastes as much again for a plan of the latency planner
        return held(plan) * (2 if "in use order" in plan.notes[0] else 1)

    plan = fastest_within(INSTANCE, OPERATORS, 12, measure, frozenset())
    assert measure(plan) <= 12 and plan.strategy == "stream"
    check(plan, replace(INSTANCE, m_peak=plan.m_peak))
    with pytest.raises(BudgetError) as refused:
        fastest_within(INSTANCE, OPERATORS, 7, measure, frozenset())
    assert refused.value.smallest_bytes == 8
    assert measure(fastest_within(INSTANCE, OPERATORS, 8, measure, frozenset())) == 8


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
@pytest.mark.parametrize("images", [False, True])
@given(instance=instances(most_layers=6, most_weights=8), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_no_layout_is_below_the_bound_of_its_resident_set(
    instance: Instance, seed: int, mode: TransferMode, images: bool
) -> None:
    """A W is not planned if this bound is too high: it has to hold for every plan with that W."""
    slices = slices_for(instance, images=images)
    draw = random.Random(seed)
    instance = replace(instance, mode=mode)
    baseline = Baseline("resident-first", _operators(instance), fixed=1000)
    base = baseline.least_preload(instance)
    preload = base | {w.name for w in instance.weights if draw.random() < 0.3}
    bound = baseline._bound(instance, preload)
    least = baseline.smallest(instance, preload)[0]
    for m_peak in (least, 2 * least + 1, 2 * sum(w.nbytes for w in instance.weights) + 1):
        plan = baseline.plan(replace(instance, m_peak=max(1, m_peak)), preload)
        assert bound <= 1000 + lay_out_pools(slices, plan, [mode], page_bytes=64)[mode].total_bytes


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
@pytest.mark.parametrize("images", [False, True])
@given(instance=instances(most_layers=4, most_weights=5))
@example(instance=Instance(layers_of([1, 1]), tuple(WeightSpec(f"w{n}", 16, 2, 2) for n in range(6)), 16, 1, 1.0))
@settings(max_examples=4, deadline=None)
def test_no_budget_below_the_named_one_works(instance: Instance, mode: TransferMode, images: bool) -> None:
    """Every budget in steps of a chunk; in interleave the six weights of the example need less preloaded than in flight."""
    instance = replace(instance, weights=tuple(replace(w, nbytes=256 * w.nbytes) for w in instance.weights), chunk_bytes=4096)
    slices = slices_for(instance, images=images)
    operators = [WeightedOperator(w.first_use, "a", (w.name,)) for w in sorted(instance.weights, key=lambda w: w.first_use)]

    def within(budget: int) -> OverlapPlan:
        return fastest_within(instance, operators, budget, measure, frozenset())

    def measure(plan: OverlapPlan) -> int:
        return 1 + lay_out_pools(slices, plan, [mode])[mode].total_bytes

    with pytest.raises(BudgetError) as refusal:
        within(0)
    smallest = refusal.value.smallest_bytes
    assert measure(within(smallest)) <= smallest
    for budget in range(1, smallest - 1, instance.chunk_bytes):
        with pytest.raises(BudgetError) as refusal:
            within(budget)
        assert refusal.value.smallest_bytes == smallest
