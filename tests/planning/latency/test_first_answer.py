"""The objective `first`: its bound, backfilled reads, interleaved preloads, and improvements by CP-SAT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.types import TransferMode
from flashmem.planning.latency.backfill import filled
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.latency.clock import Moves, Timing, play
from flashmem.planning.latency.cp_sat import improve
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.latency.release_times import closed_late, earliest_gates, held_bytes, in_turn, settled
from flashmem.schedule.instance import Problem, WeightSpec
from tests.support.planning_problems import layers_of, problems

MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")
CURVE = ((0.0, 1.0), (4.0, 1.25), (16.0, 2.0), (64.0, 2.5))


@st.composite
def machines(draw: st.DrawFn) -> Problem:
    """Small problems of every mode, with a host, an opening, pieces, and layers that copies slow down, within their needs."""
    problem = draw(problems(most_layers=5, most_weights=4, most_chunks=3))
    beside = CURVE if draw(st.booleans()) else ()
    problem = replace(
        problem,
        layers=tuple(replace(layer, beside=beside) for layer in problem.layers),
        mode=draw(st.sampled_from(MODES)),
        host_bandwidth=draw(st.sampled_from([2.0, 8.0, float("inf")])),
        opening_seconds=draw(st.sampled_from([0.0, 1.5])),
        piece_bytes=draw(st.sampled_from([0, 3])),
    )
    return replace(problem, m_peak=max(problem.m_peak, smallest_m_peak(problem)[0]))


def every_plan(problem: Problem) -> Iterator[tuple[dict[str, int], Moves]]:
    """Release times in any order with all chunks at one layer, inside M_peak."""
    forced = forced_preload(problem)
    streamed = [w for w in problem.weights if w.name not in forced]
    for gates in product(*(range(1, w.first_use) for w in streamed)):
        for late in (False, True):
            chosen = dict.fromkeys(forced, 0) | {w.name: gate for w, gate in zip(streamed, gates, strict=True)}
            moves = {
                w.name: ((w.first_use - 1 if late else gate, problem.chunks(w)),)
                for w, gate in zip(streamed, gates, strict=True)
            }
            if int(held_bytes(problem, chosen, moves).max(initial=0)) <= problem.m_peak:
                yield chosen, moves


@given(machines())
@settings(max_examples=150, deadline=None)
def test_no_plan_beats_the_bound(problem: Problem) -> None:
    bound = fastest_seconds(problem, forced_preload(problem))
    for gates, moves in every_plan(problem):
        assert bound <= play(problem, gates, moves).seconds + 1e-9
    assert bound <= first_plan(problem).objective + 1e-9


@given(machines())
@settings(max_examples=100, deadline=None)
def test_filling_and_closing_keep_memory_and_the_answer(problem: Problem) -> None:
    forced = forced_preload(problem)
    for gates, moves in list(every_plan(problem))[:6]:
        before = play(problem, gates, moves).seconds
        full, moves = filled(problem, gates, moves, problem.m_peak)
        assert int(held_bytes(problem, full, moves).max(initial=0)) <= problem.m_peak
        assert play(problem, full, moves).seconds <= before + 1e-9
        closed, clock = settled(Timing(problem, moves), forced, full)
        assert clock.seconds <= before + 1e-9
        assert all(full[name] <= closed[name] <= moves[name][0][0] for name in moves)


def test_the_disk_reads_out_of_turn_while_it_waits() -> None:
    """The large slice does not fit with the first two until 20 s; the small one, which is used later, fits at once."""
    weights = (WeightSpec("a", 4, 2, 2), WeightSpec("b", 4, 3, 3), WeightSpec("large", 8, 5, 5), WeightSpec("small", 3, 6, 6))
    layers = tuple(replace(layer, seconds=10.0 if n < 2 else 0.1) for n, layer in enumerate(layers_of([9] * 6)))
    problem = Problem(layers, weights, 1, 15, 1.0)
    in_order = earliest_gates(problem, (), 15)
    assert in_order == {"a": 1, "b": 1, "large": 3, "small": 3}
    assert play(problem, in_order).seconds == pytest.approx(31.1)
    plan = first_plan(problem)
    assert plan.objective == pytest.approx(28.2)
    assert {w.name: w.read_layer for w in plan.weights}["small"] < 3


def test_gates_are_not_closed_where_a_cached_file_would_notice() -> None:
    """With a cold file, layers wait for the disk and are far apart; cached, a read released one layer ahead is too late."""
    weights = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 30))
    problem = Problem(layers_of([9] * 30, seconds=0.1), weights, 10, 1000, 1.0, mode="dma", host_bandwidth=100.0)
    gates = dict.fromkeys((w.name for w in weights), 1)
    moves = {w.name: ((w.first_use - 1, 1),) for w in weights}
    timing = Timing(problem, moves)
    closed = closed_late(timing, gates, timing.play(gates))
    assert max(closed.values()) > 1
    for in_cache in (False, True):
        assert timing.play(closed, in_cache=in_cache).seconds == pytest.approx(timing.play(gates, in_cache=in_cache).seconds)


def test_weights_of_w_are_read_when_their_turn_comes() -> None:
    """A large weight of the last layer does not delay what layer 3 waits for; the disk reads it while memory is full."""
    weights = (WeightSpec("a", 10, 2, 2), WeightSpec("b", 10, 3, 3), WeightSpec("w", 50, 8, 8))
    problem = Problem(layers_of([9] * 8, seconds=5.0), weights, 10, 20, 1.0)
    gates, moves = {"a": 1, "b": 2, "w": 0}, {"a": ((1, 1),), "b": ((2, 1),)}
    turned = in_turn(Timing(problem, moves), {"w"}, gates)
    assert turned["w"] >= 1 and turned["a"] == 1 and turned["b"] == 2
    assert play(problem, turned, moves).seconds < play(problem, gates, moves).seconds


@given(machines())
@settings(max_examples=25, deadline=None)
def test_cp_sat_finds_no_more_than_there_is_and_proves_no_more(problem: Problem) -> None:
    """The target is beyond the optimum, so CP-SAT searches and proves; if copies cost nothing, both reach the optimum."""
    plan = first_plan(problem)
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    late = {w.name: 0 if w.preload else w.first_mover for w in plan.weights}
    found = improve(problem, late, moves, problem.m_peak, problem.m_peak, seconds=20.0, enough=0.0)
    assert int(held_bytes(problem, found.gates, moves).max(initial=0)) <= problem.m_peak
    best = min(play(problem, *each).seconds for each in every_plan(problem))
    assert 0 < found.bound <= best + 1e-6
    if problem.mode != "interleave" and problem.host_bandwidth == float("inf") and not problem.layers[0].beside:
        assert found.bound == pytest.approx(best, rel=1e-4)
        assert play(problem, found.gates, moves).seconds <= play(problem, late, moves).seconds
