"""The dynamic program that selects preloads: its plans and bounds compared with exhaustive search."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import forced_preload
from flashmem.planning.opg import preload_dp
from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.opg.objective import PaperInstance
from flashmem.planning.opg.preload_dp import PreloadDynamicProgram, choose_preload
from flashmem.schedule.instance import Instance, WeightSpec
from tests.support.planning_instances import instances, layers_of, least_objective

small = instances(most_layers=5, most_weights=4, most_chunks=3)
whole = instances(most_layers=6, most_weights=4, most_chunks=3, whole_chunks=True, shared=False)


def walked(instance: Instance, lambda_: float, seconds: float = 10.0) -> tuple[float, float]:
    """Objective and bound."""
    paper = PaperInstance(instance, forced_preload(instance), lambda_, None)
    decision, bound = choose_preload(paper, time.monotonic() + seconds)
    assert decision is not None
    return decision.cost / paper.scale, bound / paper.scale


@given(whole, st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]))
@settings(max_examples=150, deadline=None)
def test_with_whole_chunks_the_walk_finds_and_proves_the_optimum(instance: Instance, lambda_: float) -> None:
    objective, bound = walked(instance, lambda_)
    best = least_objective(instance, lambda_, forced_preload(instance))
    assert bound <= best + 1e-9 and best <= objective + 1e-9
    if instance.m_peak >= sum(w.nbytes for w in instance.weights):
        assert bound == pytest.approx(best) == pytest.approx(objective)


@given(small, st.sampled_from([0.3, 0.9]))
@settings(max_examples=100, deadline=None)
def test_bounds_hold_with_partly_filled_chunks_and_weights_used_twice(instance: Instance, lambda_: float) -> None:
    objective, bound = walked(instance, lambda_)
    best = least_objective(instance, lambda_, forced_preload(instance))
    assert bound <= best + 1e-9 and best <= objective + 1e-9


@given(instances(most_layers=6, most_weights=4, most_chunks=3, shared=False), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_bounds_hold_when_labels_are_dropped(instance: Instance, width: int, block: int) -> None:
    """Few labels, and a table with most rows recomputed on demand."""
    paper = PaperInstance(instance, forced_preload(instance), 0.9, None)
    free = paper.distances_alone()
    fixed = sum(paper.preload_cost * paper.chunks[name] for name in paper.sizes if name not in free)
    program = PreloadDynamicProgram(paper, free)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preload_dp, "_TABLE_ENTRIES", block * (program.most + 1))
        program.fill()
        found = program.search(sum(paper.chunks.values()) * paper.preload_cost + 1, width, time.monotonic() + 60)
    best = least_objective(instance, 0.9, forced_preload(instance))
    assert (fixed + min(program.bound(), found.bound)) / paper.scale <= best + 1e-9
    assert program.bound() <= found.bound
    assert found.preload is None or found.preload <= free.keys()


def test_thousands_of_equal_slices_are_solved_at_once() -> None:
    weights = tuple(WeightSpec(f"w{n}", 4 << 20, n, n) for n in range(1, 20_001))
    instance = Instance(layers_of([(0, 2, 2, 9, 2, 1)[n % 6] for n in range(20_000)]), weights, 1 << 20, 500_000_000, 1e9)
    plan = solve(instance)
    assert (plan.status, plan.tier) == ("optimal", "dynamic-program")
    assert 0.2 < plan.preload_ratio < 0.5 and set(plan.capacities) == {0, 1, 2, 9}


def test_slices_of_several_sizes_are_solved_by_labels() -> None:
    sizes = [3, 4, 4, 2, 5]
    weights = tuple(WeightSpec(f"w{n}", sizes[n % 5] << 20, n, n) for n in range(1, 1001))
    instance = Instance(layers_of([(0, 3, 2, 9, 2, 1, 4)[n % 7] for n in range(1000)]), weights, 1 << 20, 500_000_000, 1e9)
    paper = PaperInstance(instance, forced_preload(instance), 0.9, None)
    program = PreloadDynamicProgram(paper, paper.distances_alone())
    program.fill()
    decision, bound = choose_preload(paper, time.monotonic() + 60)
    assert decision is not None and decision.cost == bound
    fixed = paper.preload_cost * paper.chunks["w1"]
    assert program.bound() + fixed < bound, "the table alone would not have proven it"
