"""The objectives: units independent of S, reads ahead of moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.instance import chosen_chunk
from flashmem.planning.latency.bounds import cheapest_pieces, cost_of, fastest_seconds
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.latency.later_runs import later_seconds, with_kept
from flashmem.planning.objectives.steady import steady_bound
from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.problem import Problem
from flashmem.planning.why import in_flight_bytes
from flashmem.request.limits import Limits
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan
from tests.support.planning_instances import instances, layers_of, program_of

MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")


@given(instances(), st.sampled_from(MODES))
@settings(max_examples=40, deadline=None)
def test_the_papers_plan_reads_ahead_of_its_moves_within_m_peak(instance: Instance, mode: TransferMode) -> None:
    instance = replace(instance, mode=mode)
    inside = replace(instance, m_peak=max(instance.m_peak, smallest_m_peak(instance)[0]))
    plan = solve(inside, time_limit=0.5)
    check(plan, inside)
    assert all(1 <= w.read_layer <= w.first_mover for w in plan.weights if not w.preload)
    releases = {w.name: w.read_layer for w in plan.weights}
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    assert list(held_bytes(inside, releases, moves)[1 : len(inside.layers) + 1]) == in_flight_bytes(plan)
    tight = {w.name: 0 if w.preload else w.first_mover for w in plan.weights}
    assert clock_of(inside, releases, moves).seconds <= clock_of(inside, tight, moves).seconds + 1e-9


def test_no_plan_is_serial_where_memory_has_room() -> None:
    """Reads take as long as layers: reading after the layer before the move would double the time."""
    weights = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 42))
    for mode in MODES:
        instance = Instance(layers_of([1] * 41, seconds=1.0), weights, 10, 80, 10.0, mode=mode)
        for plan in (first_plan(instance), solve(instance)):
            releases = {w.name: w.read_layer for w in plan.weights}
            clock = clock_of(instance, releases, {w.name: w.moves for w in plan.weights})
            assert clock.seconds <= 1.1 * 41, (mode, plan.objective_kind)


@given(instances(whole_chunks=True, shared=False), st.sampled_from([0.3, 0.9]))
@settings(max_examples=30, deadline=None)
def test_shares_do_not_depend_on_the_size_of_chunks(instance: Instance, lambda_: float) -> None:
    """In chunks of half the size the decisions of a plan cost the same, and more decisions exist."""
    roomy = replace(instance, m_peak=10_000, chunk_bytes=2 * instance.chunk_bytes)
    roomy = replace(roomy, weights=tuple(replace(w, nbytes=2 * w.nbytes) for w in roomy.weights))
    fine = replace(
        roomy, chunk_bytes=roomy.chunk_bytes // 2, layers=tuple(replace(x, capacity=2 * x.capacity) for x in roomy.layers)
    )
    coarse_plan, fine_plan = (solve(each, lambda_=lambda_, units="share", time_limit=5) for each in (roomy, fine))
    a_chunk, a_layer = fine_plan.prices
    inside = sum(fine.chunks(w) for w, p in zip(fine.weights, coarse_plan.weights, strict=True) if p.preload)
    distance = sum(w.first_use - w.first_mover for w in coarse_plan.weights if not w.preload)
    assert a_chunk * inside + a_layer * distance == pytest.approx(coarse_plan.objective)
    assert coarse_plan.status == fine_plan.status == "optimal"
    assert fine_plan.objective <= coarse_plan.objective + 1e-9


def test_slowdowns_follow_the_curve_and_the_bound_takes_the_cheapest() -> None:
    spec = LayerSpec("l", "reusable", 9, 2.0, ((0.0, 1.0), (10.0, 1.1), (20.0, 1.5)))
    assert [spec.loaded_seconds(n) for n in (0, 5, 10, 15, 30)] == pytest.approx([2.0, 2.1, 2.2, 2.6, 3.8])
    instance = Instance((spec, replace(spec, seconds=1.0)), (WeightSpec("w", 15, 2, 2),), 5, 100, 1e9)
    pieces = [piece for layer in instance.layers for piece in cheapest_pieces(layer.seconds, layer.beside)]
    assert cost_of(15, pieces) == pytest.approx(0.1 + 5 * 0.02)  # ten bytes beside the short layer, then the long one
    plan = first_plan(instance)
    assert fastest_seconds(instance, forced_preload(instance)) <= plan.objective


def test_what_is_kept_is_what_later_runs_would_wait_for() -> None:
    weights = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 10))
    instance = Instance(layers_of([2] * 9, seconds=0.1), weights, 5, 30, 10.0)
    plan = first_plan(instance)

    def measure(plan: OverlapPlan) -> int:
        return max(in_flight_bytes(plan))

    kept = with_kept(instance, plan, 60, measure)
    assert measure(kept) <= 60 and any(w.keep for w in kept.weights)
    assert later_seconds(instance, kept) < later_seconds(instance, plan)
    check(replace(kept, m_peak=60), replace(instance, m_peak=60))
    everything = with_kept(instance, plan, None, measure)
    assert all(w.keep for w in everything.weights)
    assert later_seconds(instance, everything) == pytest.approx(0.9)


def test_no_later_run_reads_what_is_in_w_and_the_bound_knows() -> None:
    """M_peak does not limit W: a bound that counts W among the repeated reads exceeds the value of a plan."""
    weights = (WeightSpec("large", 100, 2, 2), WeightSpec("a", 10, 3, 3), WeightSpec("b", 10, 4, 4))
    instance = Instance(layers_of([9] * 4, seconds=1.0), weights, 10, 20, 1.0, host_bandwidth=1.0)
    plan = first_plan(instance, {"large"})
    kept = replace(plan, weights=tuple(replace(w, keep=not w.preload) for w in plan.weights))
    reached = later_seconds(instance, kept)
    assert reached == pytest.approx(4.0)
    program = program_of(instance, fixed=20)

    def bound(plan: OverlapPlan, **limits: int) -> tuple[float, str]:
        return steady_bound(Problem(instance, program, "map", Limits(objective="steady", **limits)), plan)

    assert bound(kept, m_peak=20) == (pytest.approx(4.0), "problem")
    assert bound(plan, m_peak=5) == (pytest.approx(15.0), "resident-set")
    assert bound(plan, budget=70) == (pytest.approx(70.0), "problem")


def test_chunks_are_a_quarter_of_what_the_median_layer_carries() -> None:
    assert chosen_chunk([0.0, 400_000, 300_000, 500_000]) == 65536
    assert chosen_chunk([]) == chosen_chunk([1e9]) == 1 << 20
    assert chosen_chunk([1.0]) == 1 << 14
