"""The bound within a limit on average memory, against every plan of small problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.latency.average_bound import seconds_within_average
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.latency.first_answer import average_bytes, forced_preload
from flashmem.schedule.instance import Instance, WeightSpec
from tests.planning.oracle.first import Choice, fastest
from tests.support.planning_instances import instances, layers_of


def best_within(instance: Instance, preload: frozenset[str], average: int) -> float | None:
    """The least latency of any plan with at most `average` bytes of pages beside W; None if no plan exists."""
    resident = sum(w.nbytes for w in instance.weights if w.name in preload)

    def fits(streamed: Sequence[WeightSpec], choice: Choice) -> bool:
        releases = dict.fromkeys(preload, 0) | {w.name: release for w, (release, _) in zip(streamed, choice, strict=True)}
        moves = {w.name: moves for w, (_, moves) in zip(streamed, choice, strict=True)}
        return average_bytes(instance, releases, moves, clock_of(instance, releases, moves)) - resident <= average

    return fastest(instance, preload, fits)


@given(
    instances(most_layers=4, most_weights=3, most_chunks=1, shared=False),
    st.sampled_from((0.0, 0.5, 2.0)),
    st.sampled_from((0.3, 0.6, 0.9)),
    st.sampled_from((4.0, float("inf"))),
)
@settings(max_examples=30, deadline=None)
def test_no_plan_within_the_average_is_faster(instance: Instance, opening: float, share: float, host: float) -> None:
    curve = ((0.0, 1.0), (float(instance.chunk_bytes), 1.25), (3.0 * instance.chunk_bytes, 2.0))
    layers = tuple(replace(layer, beside=curve) for layer in instance.layers)
    instance = replace(instance, layers=layers, opening_seconds=opening, host_bandwidth=host, piece_bytes=3, m_peak=1000)
    preload, average = forced_preload(instance), int(share * max((w.nbytes for w in instance.weights), default=1))
    best = best_within(instance, preload, average)
    if best is not None:
        assert seconds_within_average(instance, preload, average, 1e9, 60.0) <= best * (1 + 1e-6)


def test_it_says_more_than_a_bound_within_bytes_in_flight() -> None:
    """Layers of 1 s that each use 10 bytes, read in 1 s: in half the memory, reads cannot run ahead."""
    weights = tuple(WeightSpec(f"w{n}", 10, n, n) for n in range(2, 10))
    layers = tuple(replace(layer, seconds=1.0) for layer in layers_of([9] * 9))
    instance = Instance(layers, weights, 10, 1000, 10.0)
    free = fastest_seconds(instance, frozenset())
    bounds = [seconds_within_average(instance, frozenset(), average, 100.0, 60.0) for average in (20, 15, 12)]
    assert free <= bounds[0] * (1 + 1e-5) and bounds[0] < bounds[1] < bounds[2] <= 100.0
