"""Later runs on a device with memory of its own: an independent clock, and every way to divide weights among three memories."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.latency.later_runs import OWN_WORTH, by_later_runs, read_early, serving_later_runs, with_kept
from flashmem.planning.latency.tiers import expected_seconds, least_expected_seconds, tiered_seconds, with_pinned
from flashmem.schedule.check import check
from flashmem.schedule.host_tier import spread
from flashmem.schedule.instance import Instance, OwnMemory, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlanViolation
from tests.support.planning_instances import layers_of

CHUNK = 4


@st.composite
def problems(draw: st.DrawFn, most: int = 4) -> tuple[Instance, OverlapPlan]:
    """A device with memory of its own, up to `most` weights after the first layer, and the plan of its first answer."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    seconds = draw(st.lists(st.sampled_from((0.5, 1.0, 3.0)), min_size=count + 1, max_size=count + 1))
    layers = tuple(replace(layer, seconds=each) for layer, each in zip(layers_of([9] * (count + 1)), seconds, strict=True))
    weights = tuple(WeightSpec(f"w{n}", size, n + 2, n + 2) for n, size in enumerate(sizes))
    own = OwnMemory(
        draw(st.sampled_from((0.0, 0.25))), draw(st.sampled_from((1.0, 2.0, 4.0))), draw(st.sampled_from((2.0, 8.0)))
    )
    needed = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    m_peak = draw(st.integers(needed, sum(sizes)))
    instance = Instance(
        layers, weights, CHUNK, m_peak, 1.0, mode="dma", host_bandwidth=2.0, piece_bytes=3, shares_memory=False, own=own
    )
    return instance, first_plan(instance)


def reference(instance: Instance, plan: OverlapPlan, pinned: Collection[str]) -> float:
    """A later run by its definition, by recursion. Weights are used by one layer each."""
    own = instance.own
    assert own is not None
    streamed = sorted((w for w in plan.weights if not (w.preload or w.keep)), key=lambda w: w.first_use)
    held = {
        layer: sum(w.nbytes for w in streamed if w.read_layer <= layer <= w.last_use)
        for layer in range(1, len(instance.layers) + 1)
    }
    limit = max(held.values(), default=0)
    opened: list[int] = []
    for n, w in enumerate(streamed):
        earliest = opened[-1] if opened else 1
        opened.append(next(
            layer for layer in range(earliest, w.first_use + 1)
            if layer == w.first_use
            or sum(other.nbytes for other in streamed[:n] if other.last_use >= layer) + w.nbytes <= limit
        ))  # fmt: skip

    @cache
    def issued(n: int) -> float:
        return (max(issued(n - 1), done(opened[n] - 1)) if n >= 0 else -own.load_seconds) + own.load_seconds

    @cache
    def read(n: int) -> float:
        if n < 0:
            return 0.0
        if streamed[n].name in pinned:
            return read(n - 1)
        return max(read(n - 1), issued(n)) + streamed[n].nbytes / own.read_bandwidth

    @cache
    def copied(n: int) -> float:
        if n < 0:
            return 0.0
        w = streamed[n]
        end = max(copied(n - 1), issued(n)) + w.nbytes / own.copy_bandwidth
        return end if w.name in pinned else max(end, read(n) + min(w.nbytes, instance.piece_bytes) / own.copy_bandwidth)

    @cache
    def done(layer: int) -> float:
        if layer == 0:
            return 0.0
        begin = max([done(layer - 1), *(copied(n) for n, w in enumerate(streamed) if w.first_use == layer)])
        return begin + instance.layers[layer - 1].seconds

    return done(len(instance.layers))


@given(problems(), st.data())
@settings(max_examples=80, deadline=None)
def test_a_later_run_takes_the_time_of_its_definition(problem: tuple[Instance, OverlapPlan], data: st.DataObject) -> None:
    instance, plan = problem
    names = [w.name for w in plan.weights]
    keep, pinned = (data.draw(st.sets(st.sampled_from(names))) for _ in range(2))
    plan = replace(plan, weights=tuple(replace(w, keep=w.name in keep and not w.preload) for w in plan.weights))
    assert tiered_seconds(instance, plan, pinned) == pytest.approx(reference(instance, plan, pinned))


def kept(plan: OverlapPlan, names: Collection[str]) -> OverlapPlan:
    return replace(plan, weights=tuple(replace(w, keep=w.name in names) for w in plan.weights))


def sets_of(names: Collection[str]) -> list[frozenset[str]]:
    return [frozenset(chosen) for size in range(len(names) + 1) for chosen in combinations(sorted(names), size)]


@given(problems(), st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_no_other_resident_set_serves_both_kinds_of_sessions_better(problem: tuple[Instance, OverlapPlan], device: int) -> None:
    """Without a host budget the plan is made for later runs from the page cache and from pinned memory alike."""
    instance, plan = problem
    made = with_kept(instance, plan, device, kept_bytes)
    assert kept_bytes(made) <= device
    names = {w.name for w in plan.weights}
    others = (kept(plan, chosen) for chosen in sets_of(names))
    best = min(
        reference(instance, each, ()) * reference(instance, each, names) for each in others if kept_bytes(each) <= device
    )
    assert expected_seconds(instance, made) ** 2 == pytest.approx(best, rel=1e-4)
    assert by_later_runs(instance, made)[0] == pytest.approx(expected_seconds(instance, made), abs=1e-6)


@given(problems(), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_no_other_division_among_three_memories_is_faster(
    problem: tuple[Instance, OverlapPlan], device: int, host: int
) -> None:
    """With a host budget, what stays on the device and what in pinned memory is one choice: every pair of sets is tried."""
    instance, plan = problem
    assert instance.own is not None
    instance = replace(instance, own=replace(instance.own, host_bytes=host))
    made = with_pinned(instance, with_kept(instance, plan, device, kept_bytes))
    names, sizes = {w.name for w in plan.weights}, {w.name: w.nbytes for w in plan.weights}
    pinned = {w.name for w in made.weights if w.pinned}
    assert kept_bytes(made) <= device and sum(map(sizes.__getitem__, pinned)) <= host
    assert not any(w.pinned and w.keep for w in made.weights)
    everything = 2 * sum(sizes.values())
    check(replace(made, m_peak=everything), replace(instance, m_peak=everything))
    best = min(
        reference(instance, each, there)
        for chosen in sets_of(names)
        if kept_bytes(each := kept(plan, chosen)) <= device
        for there in sets_of(names - chosen)
        if sum(map(sizes.__getitem__, there)) <= host
    )
    assert reference(instance, made, pinned) == pytest.approx(best, rel=1e-4)
    assert expected_seconds(instance, made) == pytest.approx(best, rel=1e-4)
    assert least_expected_seconds(instance, device) <= best * (1 + 1e-9)


def test_more_than_a_few_weights_are_chosen_at_least_as_well_as_by_spreading() -> None:
    layers = tuple(replace(layer, seconds=1.0) for layer in layers_of([9] * 13))
    weights = tuple(WeightSpec(f"w{n}", 4 if n % 3 else 8, n + 2, n + 2) for n in range(12))
    own = OwnMemory(0.1, 2.0, 8.0, host_bytes=30)
    instance = Instance(
        layers, weights, CHUNK, 20, 1.0, mode="dma", host_bandwidth=2.0, piece_bytes=3, shares_memory=False, own=own
    )
    plan = first_plan(instance)
    made = with_pinned(instance, plan)
    pinned = {w.name for w in made.weights if w.pinned}
    assert 0 < sum(w.nbytes for w in weights if w.name in pinned) <= 30
    sizes, even, left = [w.nbytes for w in weights], set[str](), 30
    for at in spread(sizes, 30):
        if sizes[at] <= left:
            even.add(weights[at].name)
            left -= sizes[at]
    assert reference(instance, plan, pinned) <= reference(instance, plan, even)
    with pytest.raises(PlanViolation, match="pinned memory, which has"):
        check(made, replace(instance, own=replace(own, host_bytes=3)))


@given(problems(), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_no_resident_set_beats_the_bound_that_ends_a_search(problem: tuple[Instance, OverlapPlan], device: int) -> None:
    """Every set that fits beside nothing in flight, which is more than any layout has room for."""
    instance, plan = problem
    names = {w.name for w in plan.weights}
    others = [kept(plan, chosen) for chosen in sets_of(names)]
    best = min(
        math.sqrt(reference(instance, each, ()) * reference(instance, each, names))
        for each in others if kept_bytes(each) <= device
    )  # fmt: skip
    assert least_expected_seconds(instance, device) <= best * (1 + 1e-9)
    assert least_expected_seconds(instance, sum(w.nbytes for w in instance.weights)) == pytest.approx(
        sum(layer.seconds for layer in instance.layers)
    )


def test_bytes_are_spread_over_a_run() -> None:
    assert spread([4] * 8, 16)[:4] == [0, 2, 4, 6]
    assert spread([4] * 8, 8)[:2] == [1, 5]
    assert spread([4] * 8, 24)[:6] == [0, 1, 3, 4, 5, 7]
    assert spread([1, 7, 8], 8) == [0, 2, 1]
    assert spread([4] * 3, 12) == [0, 1, 2] and spread([4] * 3, 0) == [0, 1, 2] and spread([], 5) == []


@given(problems(), st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_weights_that_stay_are_read_early_if_that_is_sooner(problem: tuple[Instance, OverlapPlan], device: int) -> None:
    instance, plan = problem
    made = with_kept(instance, plan, device, kept_bytes)
    early = read_early(instance, made)
    assert early.objective <= made.objective == plan.objective
    assert {w.name for w in early.weights if w.keep} == {w.name for w in made.weights if w.keep}
    check(replace(early, m_peak=2 * plan.m_peak + device), replace(instance, m_peak=2 * plan.m_peak + device))


def test_a_first_answer_waits_only_a_little_for_later_runs() -> None:
    """Four equal weights and memory for three: all of it reads ahead, or one place streams and two weights stay."""
    weights = tuple(WeightSpec(f"w{n}", 8, n + 2, n + 2) for n in range(4))
    own = OwnMemory(0.0, 2.0, 8.0)
    instance = Instance(
        layers_of([9] * 5), weights, CHUNK, 24, 1.0, mode="dma", host_bandwidth=2.0, opening_seconds=20.0, piece_bytes=3,
        shares_memory=False, own=own,
    )  # fmt: skip
    rooms = [first_plan(replace(instance, m_peak=m_peak)) for m_peak in (24, 16)]

    def measure(plan: OverlapPlan) -> int:
        return max(held(plan).values()) + kept_bytes(plan)

    made = serving_later_runs(instance, rooms, 24, measure, rooms[0].objective)
    assert made.objective <= rooms[0].objective * (1 + OWN_WORTH) < rooms[1].objective
    assert kept_bytes(made) == 16 and measure(made) == 24


def held(plan: OverlapPlan) -> dict[int, int]:
    """Bytes in flight of weights that do not stay, by layer."""
    streamed = [w for w in plan.weights if not (w.preload or w.keep)]
    layers = range(1, len(plan.capacities) + 1)
    return {layer: sum(w.nbytes for w in streamed if w.read_layer <= layer <= w.last_use) for layer in layers}


def kept_bytes(plan: OverlapPlan) -> int:
    return sum(w.nbytes for w in plan.weights if w.keep)
