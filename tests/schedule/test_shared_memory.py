"""Memory objects that shape variants share: the place of each slice, by its own definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import RunError
from flashmem.base.types import POOL_ALIGNMENT
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.program.tensors import Slice
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import free_from
from flashmem.schedule.shared_memory import PlacedVariant, SharedLayout, shared_layouts, weight_memory
from tests.support.planning_instances import layers_of, slices_for

COUNT = 7


def instance_of_weights(weights: tuple[WeightSpec, ...], m_peak: int) -> Instance:
    return Instance(layers_of([9] * (len(weights) + 1)), weights, 4, m_peak, 1.0, mode="dma", host_bandwidth=2.0)


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[PlacedVariant], bool]:
    """Two or three plans for the same slices, each keeping some of them, with its layout in mode dma; and whether the device
    has memory of its own.
    """
    apart = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 3 * POOL_ALIGNMENT), min_size=COUNT, max_size=COUNT))
    images = draw(st.booleans())
    variants = []
    for _ in range(draw(st.integers(2, 3))):
        weights = tuple(WeightSpec(f"w{n}", size, n + 2, n + 2) for n, size in enumerate(sizes))
        instance = instance_of_weights(weights, draw(st.integers(2 * max(sizes), 2 * max(sizes) + sum(sizes))))
        plan = first_plan(instance)
        kept = draw(st.sets(st.sampled_from([w.name for w in weights])))
        weights_kept = tuple(replace(w, keep=w.name in kept and not w.preload) for w in plan.weights)
        plan = replace(plan, weights=weights_kept, shares_memory=not apart)
        slices = [replace(part, offset=n << 20) for n, part in enumerate(slices_for(instance, images=images))]
        variants.append(PlacedVariant(plan, lay_out_pools(slices, plan, ["dma"])["dma"], slices))
    return variants, apart


def lives(plan: OverlapPlan, slices: Sequence[Slice], layout: PoolLayout) -> dict[str, tuple[int, int]]:
    """First and last layer during which the place of each slice must not change."""
    free = free_from(plan, {part.name: part for part in slices}, layout, "dma")
    stays, layers = staying(plan), len(plan.capacities)
    return {w.name: (0, layers) if w.name in stays else (free[w.name] + 1, w.last_use) for w in plan.weights}


@given(placed(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_stays_in_two_variants_has_one_place_and_nothing_else_there(
    case: tuple[list[PlacedVariant], bool], enough: bool
) -> None:
    variants, separate = case
    room = 10 * sum(each.layout.home_bytes for each in variants) if enough else 0
    layouts = shared_layouts(variants, room, apart=separate)
    memories = [weight_memory(layout, each.slices, apart=separate) for each, layout in zip(variants, layouts, strict=True)]
    for each in variants:  # without the others
        alone = weight_memory(each.layout, each.slices, apart=separate)
        assert alone.nbytes == each.layout.home_bytes and alone.place_of.keys() == {part.name for part in each.slices}
    for variant, layout, memory in zip(variants, layouts, memories, strict=True):
        assert isinstance(layout, SharedLayout) and layout.home_bytes == memory.nbytes
        assert enough or memory.nbytes == variant.layout.home_bytes
        assert replace(variant.plan, layouts={}) == variant.plan
        alive = lives(variant.plan, variant.slices, variant.layout)
        for part in variant.slices:
            name, first = memory.place_of[part.name]
            assert (part.is_image) == (name in memory.textures)
            assert part.is_image or (first + part.file_bytes <= memory.buffers[name] and first % POOL_ALIGNMENT == 0)
            assert not (separate and first)  # no buffer is divided
            for other in variant.slices:
                where, start = memory.place_of[other.name]
                if other.name == part.name or where != name:
                    continue
                apart = not part.is_image and (start >= first + part.file_bytes or first >= start + other.file_bytes)
                before = alive[part.name][1] < alive[other.name][0] or alive[other.name][1] < alive[part.name][0]
                assert apart or before
    for one, memory in zip(variants, memories, strict=True):
        for other, there in zip(variants, memories, strict=True):
            both = staying(one.plan) & staying(other.plan)
            assert memory.at_same_place(there, both) == both
            stays = {memory.place_of[name][0] for name in staying(one.plan)}
            passing = {w.name for w in other.plan.weights} - staying(other.plan)
            assert stays.isdisjoint(there.place_of[name][0] for name in passing)
            assert not enough or memory.has_same_objects(there)


def test_layouts_that_mix_what_stays_with_the_rest_are_left_alone() -> None:
    weights = tuple(WeightSpec(f"w{n}", POOL_ALIGNMENT, n + 2, n + 2) for n in range(3))
    instance = instance_of_weights(weights, 3 * POOL_ALIGNMENT)
    plan = first_plan(instance)
    plan = replace(plan, weights=tuple(replace(w, keep=w.name == "w1") for w in plan.weights))
    slices = [replace(part, offset=n << 20) for n, part in enumerate(slices_for(instance, images=False))]
    layout = lay_out_pools(slices, plan, ["dma"])["dma"]
    assert layout.offsets["w1"] == 0
    mixed = replace(layout, pool_bytes=3 * POOL_ALIGNMENT, offsets={f"w{n}": n * POOL_ALIGNMENT for n in range(3)})
    variants = [PlacedVariant(plan, each, slices) for each in (layout, mixed)]
    assert shared_layouts(variants, 1 << 30, apart=False) == [layout, mixed]
    one, other = (weight_memory(each, slices, apart=False) for each in (layout, mixed))
    assert not one.at_same_place(other, ["w1"]) and one.at_same_place(one, ["w1", "none"]) == {"w1"}


def test_places_that_overlap_need_slots_on_a_device_with_memory_of_its_own() -> None:
    weights = tuple(WeightSpec(f"w{n}", 2 * POOL_ALIGNMENT, n + 2, n + 2) for n in range(2))
    slices = slices_for(instance_of_weights(weights, 4 * POOL_ALIGNMENT), images=False)
    layout = PoolLayout(pool_bytes=3 * POOL_ALIGNMENT, offsets={"w0": 0, "w1": POOL_ALIGNMENT})
    assert weight_memory(layout, slices, apart=False).nbytes == 3 * POOL_ALIGNMENT
    with pytest.raises(RunError, match=r"^weights overlap .* compile the model for it$"):
        weight_memory(layout, slices, apart=True)
