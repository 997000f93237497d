"""Static memory layouts: no two live objects overlap, and sizes are close to the lower bound."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.planning.latency.first_answer import first_plan, smallest_m_peak
from flashmem.planning.memory.layout import Interval, lay_out, lay_out_pools, max_concurrent
from flashmem.planning.memory.texture_slots import TextureSlotAllocator, colour_slots
from flashmem.planning.opg.lc_opg import solve
from flashmem.program.tensors import Slice
from flashmem.schedule.buffer_slots import staging_slots
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import PlannedWeight, PlanViolation
from tests.support.planning_instances import instances, slices_for


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    ends = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.integers(1, 300)), max_size=25))
    return [Interval(f"i{n}", nbytes, first, first + length) for n, (first, length, nbytes) in enumerate(ends)]


@given(intervals(), st.sampled_from([1, 16, 256]))
@settings(max_examples=200, deadline=None)
def test_layouts_are_valid_and_never_below_the_bound(parts: list[Interval], alignment: int) -> None:
    offsets, total = lay_out(parts, alignment)
    rounded = {p.name: -(-p.nbytes // alignment) * alignment for p in parts}
    bound = max((sum(rounded[p.name] for p in parts if p.first <= at <= p.last) for at in range(30)), default=0)
    assert max_concurrent(parts, alignment) == bound <= total
    for p in parts:
        assert offsets[p.name] % alignment == 0 and 0 <= offsets[p.name] <= total - rounded[p.name]
        for q in parts:
            if p is not q and p.first <= q.last and q.first <= p.last:
                assert offsets[p.name] + p.nbytes <= offsets[q.name] or offsets[q.name] + q.nbytes <= offsets[p.name]


def test_a_layout_that_meets_the_bound_is_found() -> None:
    parts = [Interval("a", 10, 1, 2), Interval("b", 20, 2, 3), Interval("c", 10, 3, 4), Interval("d", 20, 4, 5)]
    assert lay_out(parts, 1)[1] == 30
    assert lay_out([], 4096) == ({}, 0)


def test_streams_of_mixed_sizes_waste_little() -> None:
    sizes = [1 + (n * 7919) % 1000 for n in range(600)]
    parts = [Interval(f"i{n}", size, n, n + 20) for n, size in enumerate(sizes)]
    assert lay_out(parts, 1)[1] < 1.1 * max_concurrent(parts)


def test_what_is_always_alive_leaves_the_rest_undivided() -> None:
    streams = [Interval(f"i{n}", 1 + (n * 7919) % 1000, n, n + 20) for n in range(300)]
    always = [Interval(f"w{n}", 50 + n, 0, 319) for n in range(40)]
    offsets, total = lay_out([*streams[:150], *always, *streams[150:]], 1)
    assert total == lay_out(streams, 1)[1] + sum(w.nbytes for w in always)
    assert all(offsets[w.name] + w.nbytes <= offsets[i.name] for w in always for i in streams)


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="same name"):
        lay_out([Interval("a", 1, 0, 1), Interval("a", 1, 2, 3)], 1)


def image(name: str, width: int, height: int, channel: str = "float") -> Slice:
    pitch = width * (16 if channel == "float" else 8)
    return Slice(name, name, 0, pitch * height, width, height, pitch, channel)  # type: ignore[arg-type]


def test_slots_are_reused_by_what_fits() -> None:
    images = [
        (image("wide", 8, 2), 1, 3),
        (image("small", 4, 2), 4, 5),
        (image("tall", 2, 8), 4, 6),
        (image("late", 8, 2), 6, 7),
    ]
    slots, slot_of = colour_slots(images)
    assert slot_of["wide"] == slot_of["small"] == slot_of["late"] != slot_of["tall"]
    assert sorted((slot.width, slot.height, slot.nbytes) for slot in slots) == [(2, 8, 256), (8, 2, 256)]
    slots, slot_of = colour_slots([(image("f", 4, 4), 1, 1), (image("h", 4, 4, "half"), 2, 2)])
    assert (slots[slot_of["f"]].channel, slots[slot_of["h"]].channel) == ("float", "half")


@st.composite
def images_in_time(draw: st.DrawFn) -> list[tuple[Slice, int, int]]:
    """Images of a few sizes, in the order of placement, and the layers in which they are alive."""
    sizes = [(8, 2, "float"), (2, 8, "float"), (4, 4, "float"), (4, 2, "float"), (4, 2, "half")]
    lives = draw(st.lists(st.tuples(st.sampled_from(sizes), st.integers(0, 20), st.integers(0, 8)), max_size=30))
    return [(image(f"i{n}", *size), first, first + length) for n, (size, first, length) in enumerate(lives)]


def one_slot_after_the_other(images: list[tuple[Slice, int, int]]) -> list[int]:
    """The slot of each slice by full search: the smallest free slot that is large enough, and among these the one that is used
    again soonest.
    """
    sizes: list[tuple[int, int, str]] = []
    turns: list[list[tuple[int, int]]] = []
    taken = []
    for part, first, last in images:
        able = [
            number
            for number, (width, height, channel) in enumerate(sizes)
            if channel == part.channel and width >= part.width and height >= part.height
            and all(end < first or last < begin for begin, end in turns[number])
        ]  # fmt: skip
        if not able:
            able = [len(sizes)]
            sizes.append((part.width, part.height, part.channel))
            turns.append([])
        until = {number: min((begin for begin, _ in turns[number] if begin > last), default=math.inf) for number in able}
        number = min(able, key=lambda n: (sizes[n][0] * sizes[n][1], sizes.index(sizes[n]), until[n], n))
        turns[number].append((first, last))
        taken.append(number)
    return taken


@given(images_in_time())
@settings(max_examples=300, deadline=None)
def test_slots_are_those_that_a_look_at_every_turn_finds(images: list[tuple[Slice, int, int]]) -> None:
    allocator = TextureSlotAllocator()
    assert [allocator.place(*each) for each in images] == one_slot_after_the_other(images)


Stays = list[tuple[int, int, int]]
"""Pages of slices, with the first and last layer at which they are in staging."""


def staged(stays: Stays) -> list[tuple[Slice, PlannedWeight]]:
    sizes = [pages * POOL_ALIGNMENT for pages, _, _ in stays]
    return [
        (Slice(f"s{n}", "w", 0, size - n), PlannedWeight(f"s{n}", size - n, 1, 99, 99, False, first, ((last, 1),)))
        for n, (size, (_, first, last)) in enumerate(zip(sizes, stays, strict=True))
    ]


def fewest_pages(stays: Stays) -> int:
    """The fewest pages of slots, by trying every way to share them."""

    def best(left: Stays, slots: list[Stays]) -> int:
        if not left:
            return sum(max(pages for pages, _, _ in slot) for slot in slots)
        (stay, *rest) = left
        free = [n for n, slot in enumerate(slots) if all(last < stay[1] or stay[2] < first for _, first, last in slot)]
        shared = [best(rest, [*slots[:n], [*slots[n], stay], *slots[n + 1 :]]) for n in free]
        return min([*shared, best(rest, [*slots, [stay]])])

    return best(stays, [])


def drawn_stays(random: Random, most_pages: int) -> Stays:
    stays = []
    for _ in range(random.randint(1, 7)):
        first = random.randint(1, 9)
        stays.append((random.randint(1, most_pages), first, first + random.randint(0, 4)))
    return stays


def pages_of_slots(stays: Stays) -> int:
    """The pages of the planner's slots; checks that each slot's slices fit, one at a time."""
    sizes, slot_of = staging_slots(staged(stays))
    assert all(size % POOL_ALIGNMENT == 0 for size in sizes) and set(slot_of.values()) == set(range(len(sizes)))
    for n, (pages, first, last) in enumerate(stays):
        assert pages * POOL_ALIGNMENT <= sizes[slot_of[f"s{n}"]]
        for m, (_, other_first, other_last) in enumerate(stays[:n]):
            if slot_of[f"s{n}"] == slot_of[f"s{m}"]:
                assert last < other_first or other_last < first
    return sum(sizes) // POOL_ALIGNMENT


def test_staging_slots_are_about_as_few_bytes_as_can_be() -> None:
    random, most, found, least = Random(3), 0.0, 0, 0
    for _ in range(300):
        stays = drawn_stays(random, 40)
        pages, best = pages_of_slots(stays), fewest_pages(stays)
        assert best <= pages
        most, found, least = max(most, pages / best), found + pages, least + best
    assert most < 1.5 and found < 1.02 * least


def test_staging_slots_of_one_size_are_as_few_as_can_be() -> None:
    random = Random(4)
    for _ in range(300):
        stays = drawn_stays(random, 1)
        assert pages_of_slots(stays) == max(sum(first <= at <= last for _, first, last in stays) for at in range(15))


def test_a_staging_slot_grows_where_that_takes_less_than_another_one() -> None:
    assert staging_slots(staged([(2, 1, 3), (5, 4, 6), (3, 6, 8), (2, 7, 9)]))[0] == (5 * POOL_ALIGNMENT, 3 * POOL_ALIGNMENT)
    assert staging_slots([]) == ((), {})


@given(instances(whole_chunks=True), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_pools_of_every_mode_pass_the_checker(instance: Instance, images: bool, paper: bool) -> None:
    sixteenfold = tuple(replace(w, nbytes=16 * w.nbytes) for w in instance.weights)
    instance = replace(instance, weights=sixteenfold, chunk_bytes=16 * instance.chunk_bytes)
    instance = replace(instance, m_peak=max(16 * instance.m_peak, smallest_m_peak(instance)[0]))
    plan = solve(instance, time_limit=0.1) if paper else first_plan(instance)
    slices = slices_for(instance, images=images)
    layouts = lay_out_pools(slices, plan, ["map", "alias", "dma", "interleave"], loader_threads=3)
    plan = replace(plan, m_peak=max(instance.m_peak, layouts["map"].in_flight_bytes(shares_memory=plan.shares_memory)))
    check(replace(plan, layouts=layouts), replace(instance, m_peak=plan.m_peak), slices)
    apart = lay_out_pools(slices, replace(plan, shares_memory=False), ["interleave"], loader_threads=3)["interleave"]
    check(replace(plan, layouts={"interleave": apart}), replace(instance, m_peak=plan.m_peak), slices)

    def held(layer: int) -> int:
        lives = {w.name: w.preload or w.read_layer <= layer <= w.last_use for w in plan.weights}  # W has its own places
        return sum(-(-w.nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT for w in plan.weights if lives[w.name])

    assert layouts["map"].total_bytes == max(held(layer) for layer in range(len(instance.layers) + 1))
    assert layouts["alias"].total_bytes == layouts["alias"].pool_bytes >= layouts["map"].mapped_peak_bytes
    largest = max((-(-w.nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT for w in plan.weights), default=0)
    assert layouts["dma"].ring_bytes == apart.ring_bytes == 3 * largest
    streamed = {w.name for w in plan.weights if not w.preload}
    assert set(layouts["interleave"].staging) == set(apart.staging_slot_of) == streamed
    assert apart.total_bytes == apart.home_bytes + sum(apart.staging_slots) + apart.ring_bytes
    in_slots = {s.name for s in slices if s.is_image}
    for mode in ("dma", "interleave"):
        assert (
            set(layouts[mode].slot_of) == in_slots and set(layouts[mode].offsets) == {w.name for w in plan.weights} - in_slots
        )


@given(instances(), st.data())
@settings(max_examples=100, deadline=None)
def test_two_live_slices_in_one_place_are_caught(instance: Instance, data: st.DataObject) -> None:
    instance = replace(instance, m_peak=max(instance.m_peak, smallest_m_peak(instance)[0]))
    plan = first_plan(instance)
    layout = lay_out_pools(slices_for(instance, images=False), plan, ["alias"])["alias"]
    lives = {w.name: (0, len(instance.layers)) if w.preload else (w.read_layer, w.last_use) for w in plan.weights}
    pairs = [(a, b) for a in lives for b in lives if a < b and lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]]
    if pairs:
        a, b = data.draw(st.sampled_from(pairs))
        shared = replace(layout, offsets={**layout.offsets, b: layout.offsets[a]})
        with pytest.raises(PlanViolation, match="overlap"):
            check(replace(plan, layouts={"alias": shared}), instance)


@given(instances(most_layers=6), st.data())
@settings(max_examples=100, deadline=None)
def test_two_slices_in_one_staging_slot_at_once_are_caught(instance: Instance, data: st.DataObject) -> None:
    instance = replace(instance, mode="interleave", shares_memory=False, m_peak=10**6)
    plan = solve(instance, time_limit=0.1)
    layout = lay_out_pools(slices_for(instance, images=False), plan, ["interleave"])["interleave"]
    check(replace(plan, layouts={"interleave": layout}), instance)
    lives = {w.name: (w.read_layer, w.moves[-1][0]) for w in plan.weights if not w.preload}
    pairs = [(a, b) for a in lives for b in lives if a < b and lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]]
    if pairs:
        a, b = data.draw(st.sampled_from(pairs))
        shared = replace(layout, staging_slot_of={**layout.staging_slot_of, b: layout.staging_slot_of[a]})
        with pytest.raises(PlanViolation, match="share a staging slot"):
            check(replace(plan, layouts={"interleave": shared}), instance)


def test_a_plan_of_another_program_is_refused() -> None:
    instance = Instance((), (), 1, 1, 1.0)
    assert lay_out_pools([], first_plan(instance), ["map"])["map"].total_bytes == 0
    plan = first_plan(replace(instance, layers=(), weights=(WeightSpec("w", 1, 1, 1),)))
    with pytest.raises(ValueError, match="'w'"):
        lay_out_pools([], plan, ["map"])
