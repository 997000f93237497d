"""The latency model compared with hand-made examples, an independent recursion, and every choice of load layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings

from flashmem.planning.arithmetic.clock import clock_of, unlimited_seconds
from flashmem.planning.arithmetic.release_times import earliest_releases
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.schedule.instance import Instance, WeightSpec
from tests.support.planning_instances import instances, layers_of


def reference(instance: Instance, releases: dict[str, int]) -> float:
    """Integrated latency by its definition: the end of each load and each layer, by recursion."""
    order = sorted(instance.weights, key=lambda w: (max(1, releases[w.name]), w.first_use))

    @cache
    def loaded(number: int) -> float:
        w = order[number]
        begin = max(loaded(number - 1) if number else 0.0, done(max(0, releases[w.name] - 1)))
        return begin + w.nbytes / instance.load_bandwidth

    @cache
    def done(layer: int) -> float:
        if layer == 0:
            return 0.0
        needed = [n for n, w in enumerate(order) if w.first_use <= layer]
        return max([done(layer - 1), *map(loaded, needed)]) + instance.layers[layer - 1].seconds

    return done(len(instance.layers))


def test_a_load_hidden_and_a_load_waited_for() -> None:
    weights = (WeightSpec("a", 4, 1, 1), WeightSpec("b", 2, 2, 2), WeightSpec("c", 8, 3, 3))
    instance = Instance(layers_of([9, 9, 9], seconds=3.0), weights, 1, 100, 2.0)
    # a: 0-2; layer 1: 2-5; b: 2-3; layer 2: 5-8; c from layer 2 on: 5-9; layer 3: 9-12
    clock = clock_of(instance, {"a": 0, "b": 1, "c": 2})
    assert clock.loaded == {"a": 2.0, "b": 3.0, "c": 9.0}
    assert clock.started == (2.0, 5.0, 9.0) and clock.done == (5.0, 8.0, 12.0) and clock.seconds == 12.0
    # without a limit c follows b at once: 3-7, and no layer waits
    assert unlimited_seconds(instance, {"a"}) == 11.0
    # in M_peak 8 neither all of c nor a part of it longer than 6 fits together with b: c ends 1 s after layer 2
    assert first_plan(replace(instance, m_peak=10)).objective == 11.0
    assert first_plan(replace(instance, m_peak=10)).status == "optimal"


def test_the_slowdown_of_a_tight_limit_is_expected() -> None:
    weights = tuple(WeightSpec(f"w{n}", 6, n, n) for n in range(1, 5))
    instance = Instance(layers_of([9] * 4, seconds=4.0), weights, 1, 12, 1.0)
    tight, roomy = first_plan(instance), first_plan(replace(instance, m_peak=100))
    assert roomy.expected_slowdown == 0 and roomy.objective == unlimited_seconds(instance, {"w1"})
    assert tight.expected_slowdown == pytest.approx(tight.objective / roomy.objective - 1)
    assert tight.objective >= roomy.objective


@given(instances(most_layers=8, most_weights=8))
@settings(max_examples=100, deadline=None)
def test_the_clock_agrees_with_the_recursion(instance: Instance) -> None:
    tight = replace(instance, m_peak=smallest_m_peak(instance)[0])
    releases = earliest_releases(tight, forced_preload(tight), tight.m_peak)
    assert clock_of(tight, releases).seconds == pytest.approx(reference(tight, releases))


@given(instances(most_layers=5, most_weights=4, most_chunks=3))
@settings(max_examples=100, deadline=None)
def test_no_choice_of_release_times_in_use_order_is_faster_and_none_beats_the_bound(instance: Instance) -> None:
    limit = max(instance.m_peak, smallest_m_peak(instance)[0])
    inside = replace(instance, m_peak=limit)
    plan = first_plan(inside)
    streamed = [w for w in plan.weights if not w.preload]
    in_use_order = sorted(streamed, key=lambda w: w.first_use)
    times, every = [], []
    for choice in product(*(range(1, w.first_use) for w in in_use_order)):
        fits = all(
            sum(w.nbytes for w, z in zip(in_use_order, choice, strict=True) if z <= layer <= w.last_use) <= limit
            for layer in range(1, len(instance.layers) + 1)
        )
        if fits:
            chosen = {w.name: 0 for w in plan.weights if w.preload}
            chosen.update({w.name: z for w, z in zip(in_use_order, choice, strict=True)})
            seconds = reference(inside, chosen)
            every.append(seconds)
            if list(choice) == sorted(choice):
                times.append(seconds)
    assert min(every) - 1e-9 <= plan.objective <= min(times) + 1e-9
    assert plan.bound <= min(every) + 1e-9


@given(instances(most_layers=5, most_weights=4, most_chunks=3))
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_for_loads_in_any_order(instance: Instance) -> None:
    inside = replace(instance, m_peak=max(instance.m_peak, smallest_m_peak(instance)[0]))
    forced = forced_preload(instance)
    bound = fastest_seconds(inside, forced)
    streamed = [w for w in instance.weights if w.name not in forced]
    for choice in product(*(range(1, w.first_use) for w in streamed)):
        if all(
            sum(w.nbytes for w, z in zip(streamed, choice, strict=True) if z <= layer <= w.last_use) <= inside.m_peak
            for layer in range(1, len(instance.layers) + 1)
        ):
            chosen = dict.fromkeys(forced, 0) | {w.name: z for w, z in zip(streamed, choice, strict=True)}
            assert bound <= reference(inside, chosen) + 1e-9
    assert bound >= unlimited_seconds(instance, forced) - 1e-9
