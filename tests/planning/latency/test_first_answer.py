"""The objective `first`: its bound, backfilled reads, interleaved preloads, and improvements by CP-SAT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.clock import Moves, TimingModel, clock_of
from flashmem.planning.arithmetic.release_times import earliest_releases, final_releases, held_bytes, in_turn, released_late
from flashmem.planning.latency.backfill import backfill
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.schedule.instance import Instance, WeightSpec
from tests.support.planning_instances import instances, layers_of

MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")
CURVE = ((0.0, 1.0), (4.0, 1.25), (16.0, 2.0), (64.0, 2.5))


@st.composite
def machines(draw: st.DrawFn) -> Instance:
    """Small problems of every mode, with a host, an opening, pieces, and layers that copies slow down, within their needs."""
    instance = draw(instances(most_layers=5, most_weights=4, most_chunks=3))
    beside = CURVE if draw(st.booleans()) else ()
    instance = replace(
        instance,
        layers=tuple(replace(layer, beside=beside) for layer in instance.layers),
        mode=draw(st.sampled_from(MODES)),
        host_bandwidth=draw(st.sampled_from([2.0, 8.0, float("inf")])),
        opening_seconds=draw(st.sampled_from([0.0, 1.5])),
        piece_bytes=draw(st.sampled_from([0, 3])),
    )
    return replace(instance, m_peak=max(instance.m_peak, smallest_m_peak(instance)[0]))


def every_plan(instance: Instance) -> Iterator[tuple[dict[str, int], Moves]]:
    """Release times in any order with all chunks at one layer, inside M_peak."""
    forced = forced_preload(instance)
    streamed = [w for w in instance.weights if w.name not in forced]
    for releases in product(*(range(1, w.first_use) for w in streamed)):
        for late in (False, True):
            chosen = dict.fromkeys(forced, 0) | {w.name: release for w, release in zip(streamed, releases, strict=True)}
            moves = {
                w.name: ((w.first_use - 1 if late else release, instance.chunks(w)),)
                for w, release in zip(streamed, releases, strict=True)
            }
            if int(held_bytes(instance, chosen, moves).max(initial=0)) <= instance.m_peak:
                yield chosen, moves


@given(machines())
@settings(max_examples=150, deadline=None)
def test_no_plan_beats_the_bound(instance: Instance) -> None:
    bound = fastest_seconds(instance, forced_preload(instance))
    for releases, moves in every_plan(instance):
        assert bound <= clock_of(instance, releases, moves).seconds + 1e-9
    assert bound <= first_plan(instance).objective + 1e-9


@given(machines())
@settings(max_examples=100, deadline=None)
def test_filling_and_closing_keep_memory_and_the_answer(instance: Instance) -> None:
    forced = forced_preload(instance)
    for releases, moves in list(every_plan(instance))[:6]:
        before = clock_of(instance, releases, moves).seconds
        full, moves = backfill(instance, releases, moves, instance.m_peak)
        assert int(held_bytes(instance, full, moves).max(initial=0)) <= instance.m_peak
        assert clock_of(instance, full, moves).seconds <= before + 1e-9
        closed, clock = final_releases(TimingModel(instance, moves), forced, full)
        assert clock.seconds <= before + 1e-9
        assert all(full[name] <= closed[name] <= moves[name][0][0] for name in moves)


def test_the_disk_reads_out_of_turn_while_it_waits() -> None:
    """The large slice does not fit with the first two until 20 s. The small one is used later, but fits at once."""
    weights = (WeightSpec("a", 4, 2, 2), WeightSpec("b", 4, 3, 3), WeightSpec("large", 8, 5, 5), WeightSpec("small", 3, 6, 6))
    layers = tuple(replace(layer, seconds=10.0 if n < 2 else 0.1) for n, layer in enumerate(layers_of([9] * 6)))
    instance = Instance(layers, weights, 1, 15, 1.0)
    in_order = earliest_releases(instance, (), 15)
    assert in_order == {"a": 1, "b": 1, "large": 3, "small": 3}
    assert clock_of(instance, in_order).seconds == pytest.approx(31.1)
    plan = first_plan(instance)
    assert plan.objective == pytest.approx(28.2)
    assert {w.name: w.read_layer for w in plan.weights}["small"] < 3


def test_release_times_are_not_late_where_a_cached_file_would_notice() -> None:
    """With a cold file, layers wait for the disk and are far apart; cached, a read released one layer ahead is too late."""
    weights = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 30))
    instance = Instance(layers_of([9] * 30, seconds=0.1), weights, 10, 1000, 1.0, mode="dma", host_bandwidth=100.0)
    releases = dict.fromkeys((w.name for w in weights), 1)
    moves = {w.name: ((w.first_use - 1, 1),) for w in weights}
    timing = TimingModel(instance, moves)
    closed = released_late(timing, releases, timing.clock(releases))
    assert max(closed.values()) > 1
    for in_cache in (False, True):
        assert timing.clock(closed, in_cache=in_cache).seconds == pytest.approx(
            timing.clock(releases, in_cache=in_cache).seconds
        )


def test_weights_of_w_are_read_when_their_turn_comes() -> None:
    """A large weight of the last layer does not delay what layer 3 waits for; the disk reads it while memory is full."""
    weights = (WeightSpec("a", 10, 2, 2), WeightSpec("b", 10, 3, 3), WeightSpec("w", 50, 8, 8))
    instance = Instance(layers_of([9] * 8, seconds=5.0), weights, 10, 20, 1.0)
    releases, moves = {"a": 1, "b": 2, "w": 0}, {"a": ((1, 1),), "b": ((2, 1),)}
    turned = in_turn(TimingModel(instance, moves), {"w"}, releases)
    assert turned["w"] >= 1 and turned["a"] == 1 and turned["b"] == 2
    assert clock_of(instance, turned, moves).seconds < clock_of(instance, releases, moves).seconds
