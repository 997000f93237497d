"""Static memory layouts: nothing alive at once overlaps, and sizes are close to the lower bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.planning.latency.first_answer import first_plan, smallest_m_peak
from flashmem.planning.memory.layout import Interval, lay_out, lay_out_pools, max_concurrent
from flashmem.planning.memory.texture_slots import TextureSlotAllocator, colour_slots
from flashmem.planning.opg.lc_opg import solve
from flashmem.program.tensors import Slice
from flashmem.schedule.instance import Problem, WeightSpec
from flashmem.schedule.plan import PlanViolation
from tests.support.planning_problems import problems, slices_for


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
    """Images of a few sizes, in the order in which they are placed, and the layers in which they are alive."""
    sizes = [(8, 2, "float"), (2, 8, "float"), (4, 4, "float"), (4, 2, "float"), (4, 2, "half")]
    lives = draw(st.lists(st.tuples(st.sampled_from(sizes), st.integers(0, 20), st.integers(0, 8)), max_size=30))
    return [(image(f"i{n}", *size), first, first + length) for n, (size, first, length) in enumerate(lives)]


def one_slot_after_the_other(images: list[tuple[Slice, int, int]]) -> list[int]:
    """What a slice takes if every slot and every turn is looked at: the smallest that is large enough and free, of those the
    one that is taken again soonest.
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


@given(problems(whole_chunks=True), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_pools_of_every_mode_pass_the_checker(problem: Problem, images: bool, paper: bool) -> None:
    sixteenfold = tuple(replace(w, nbytes=16 * w.nbytes) for w in problem.weights)
    problem = replace(problem, weights=sixteenfold, chunk_bytes=16 * problem.chunk_bytes)
    problem = replace(problem, m_peak=max(16 * problem.m_peak, smallest_m_peak(problem)[0]))
    plan = solve(problem, time_limit=0.1) if paper else first_plan(problem)
    slices = slices_for(problem, images=images)
    layouts = lay_out_pools(slices, plan, ["map", "alias", "dma", "interleave"], loader_threads=3)
    plan = replace(plan, m_peak=max(problem.m_peak, layouts["map"].in_flight_bytes))
    replace(plan, layouts=layouts).check(replace(problem, m_peak=plan.m_peak), slices)

    def held(layer: int) -> int:
        lives = {w.name: w.preload or w.read_layer <= layer <= w.last_use for w in plan.weights}  # W has places of its own
        return sum(-(-w.nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT for w in plan.weights if lives[w.name])

    assert layouts["map"].total_bytes == max(held(layer) for layer in range(len(problem.layers) + 1))
    assert layouts["alias"].total_bytes == layouts["alias"].pool_bytes >= layouts["map"].mapped_peak_bytes
    largest = max((-(-w.nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT for w in plan.weights), default=0)
    assert layouts["dma"].staging_bytes == 3 * largest
    assert set(layouts["interleave"].staging) == {w.name for w in plan.weights}
    in_slots = {s.name for s in slices if s.is_image}
    for mode in ("dma", "interleave"):
        assert (
            set(layouts[mode].slot_of) == in_slots and set(layouts[mode].offsets) == {w.name for w in plan.weights} - in_slots
        )


@given(problems(), st.data())
@settings(max_examples=100, deadline=None)
def test_two_live_slices_in_one_place_are_caught(problem: Problem, data: st.DataObject) -> None:
    problem = replace(problem, m_peak=max(problem.m_peak, smallest_m_peak(problem)[0]))
    plan = first_plan(problem)
    layout = lay_out_pools(slices_for(problem, images=False), plan, ["alias"])["alias"]
    lives = {w.name: (0, len(problem.layers)) if w.preload else (w.read_layer, w.last_use) for w in plan.weights}
    pairs = [(a, b) for a in lives for b in lives if a < b and lives[a][0] <= lives[b][1] and lives[b][0] <= lives[a][1]]
    if pairs:
        a, b = data.draw(st.sampled_from(pairs))
        shared = replace(layout, offsets={**layout.offsets, b: layout.offsets[a]})
        with pytest.raises(PlanViolation, match="overlap"):
            replace(plan, layouts={"alias": shared}).check(problem)


def test_a_plan_of_another_program_is_refused() -> None:
    problem = Problem((), (), 1, 1, 1.0)
    assert lay_out_pools([], first_plan(problem), ["map"])["map"].total_bytes == 0
    plan = first_plan(replace(problem, layers=(), weights=(WeightSpec("w", 1, 1, 1),)))
    with pytest.raises(ValueError, match="'w'"):
        lay_out_pools([], plan, ["map"])
