"""The memory objects that hold a model's weights on a device, and how shape variants of one bundle share them.

Each variant has a plan and a layout of its own. Slices that stay resident in the same variants lie together in a buffer that
these variants have in common. An image has a texture, and on devices with memory of their own each slice has a buffer. So a
session that changes to another variant frees and allocates the other objects only, and loads nothing that both variants keep.
If memory suffices for the objects of all variants at once, it frees nothing.

Pure functions of plans and layouts, without OpenCL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from flashmem.base.errors import RunError
from flashmem.program.tensors import Slice
from flashmem.schedule.buffer_slots import place_bytes
from flashmem.schedule.host_tier import SliceIdentity, identity
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout, TextureSlot

_POOL = "the weight pool"


@dataclass(frozen=True)
class WeightMemory:
    """Memory objects by name: the bytes of `buffers`, and `textures`. `place_of`: the object and the offset of each slice."""

    buffers: Mapping[str, int]
    textures: Mapping[str, TextureSlot]
    place_of: Mapping[str, tuple[str, int]]

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(self.buffers.values()) + sum(slot.nbytes for slot in self.textures.values())

    def has_same_objects(self, other: WeightMemory) -> bool:
        """Whether `other` has objects of the same names and sizes."""
        return self.buffers == other.buffers and self.textures == other.textures

    def at_same_place(self, other: WeightMemory, names: Collection[str]) -> frozenset[str]:
        """The slices among `names` that have the same place in the same object of `other`."""
        return frozenset(
            name
            for name in names
            if (place := self.place_of.get(name)) is not None
            and place == other.place_of.get(name)
            and self.buffers.get(place[0]) == other.buffers.get(place[0])
            and self.textures.get(place[0]) == other.textures.get(place[0])
        )


@dataclass(frozen=True)
class SharedLayout(PoolLayout):
    """A layout whose weights are in memory objects that other shape variants have too."""

    memory: WeightMemory = WeightMemory({}, {}, {})

    @property
    def home_bytes(self) -> int:
        """Bytes of the memory objects."""
        return self.memory.nbytes


def weight_memory(layout: PoolLayout, slices: Sequence[Slice], *, apart: bool) -> WeightMemory:
    """The memory objects of a layout with places of `slices`: a pool and texture slots.

    `apart`: the device does not share the host's memory. Its pool is in slots (`buffer_slots.in_slots`), each a buffer.
    """
    if isinstance(layout, SharedLayout):
        return layout.memory
    buffers: dict[str, int] = {}
    place_of: dict[str, tuple[str, int]] = {}
    if apart:
        _put_slots(layout, slices, buffers, place_of)
    elif layout.pool_bytes:
        buffers[_POOL] = layout.pool_bytes
        place_of |= {name: (_POOL, offset) for name, offset in layout.offsets.items()}
    textures = {f"texture slot {number}": slot for number, slot in enumerate(layout.slots)}
    place_of |= {name: (f"texture slot {number}", 0) for name, number in layout.slot_of.items()}
    return WeightMemory(buffers, textures, place_of)


def _put_slots(
    layout: PoolLayout, slices: Sequence[Slice], buffers: dict[str, int], place_of: dict[str, tuple[str, int]]
) -> None:
    """Add a buffer for each slot of the pool, the largest first, and the places of slices that have none yet.

    Raises:
        RunError: places overlap that do not begin at the same byte.
    """
    parts = sorted((layout.offsets[part.name], place_bytes(part), part.name) for part in slices if part.name in layout.offsets)
    slots: dict[int, int] = {}
    for offset, nbytes, name in parts:
        if name not in place_of:
            slots[offset] = nbytes  # the last one is the largest
    for (offset, nbytes), after in pairwise([*slots.items(), (layout.pool_bytes, 0)]):
        if offset + nbytes > after[0]:
            raise RunError("weights overlap in the bundle's pool, and the device needs slots; compile the model for it")
    numbers = {offset: at for at, (offset, _) in enumerate(sorted(slots.items(), key=lambda slot: (-slot[1], slot[0])))}
    for offset, _, name in parts:
        if name not in place_of:
            where = f"weight slot {numbers[offset]}"
            buffers[where] = slots[offset]
            place_of[name] = (where, 0)


@dataclass(frozen=True)
class PlacedVariant:
    """The plan of a shape variant, its layout in one transfer mode, and the slices of its program."""

    plan: OverlapPlan
    layout: PoolLayout
    slices: Sequence[Slice]

    @property
    def staying(self) -> list[Slice]:
        """The slices that stay resident between runs, in the order of the file."""
        names = staying(self.plan)
        return sorted((part for part in self.slices if part.name in names), key=identity)


def shared_layouts(variants: Sequence[PlacedVariant], room: int, *, apart: bool) -> list[PoolLayout]:
    """The layouts of `variants` in common memory objects; `apart` as for `weight_memory`.

    If those of all variants together fit `room` bytes, each layout has all of them. Layouts that have other slices among those
    that stay are not changed.
    """
    if not all(map(_stays_below, variants)):
        return [each.layout for each in variants]
    keepers: dict[SliceIdentity, list[int]] = {}
    for number, each in enumerate(variants):
        for part in each.staying:
            keepers.setdefault(identity(part), []).append(number)
    memories = [_memory(each, keepers, apart=apart) for each in variants]
    everything = WeightMemory(
        {name: max(each.buffers.get(name, 0) for each in memories) for each in memories for name in each.buffers},
        {name: slot for each in memories for name, slot in each.textures.items()},
        {},
    )
    alike = all(slot == everything.textures[name] for each in memories for name, slot in each.textures.items())
    if alike and everything.nbytes <= room:
        memories = [replace(everything, place_of=each.place_of) for each in memories]
    pairs = zip(variants, memories, strict=True)
    return [SharedLayout(**_fields_of(each.layout), memory=memory) for each, memory in pairs]


def _fields_of(layout: PoolLayout) -> dict[str, Any]:
    return {each.name: getattr(layout, each.name) for each in fields(PoolLayout)}


def _below(variant: PlacedVariant) -> int:
    """Bytes of the pool with slices that stay, where the planner puts them at its beginning."""
    return sum(place_bytes(part) for part in variant.staying if part.name in variant.layout.offsets)


def _stays_below(variant: PlacedVariant) -> bool:
    """Whether the slices that stay are at the beginning of the pool, and each image of them has a texture to itself."""
    stays = {part.name for part in variant.staying}
    layout = variant.layout
    end = _below(variant)
    slots = [number for name, number in layout.slot_of.items() if name in stays]
    others = {number for name, number in layout.slot_of.items() if name not in stays}
    return (
        all((offset < end) == (name in stays) for name, offset in layout.offsets.items())
        and len(set(slots)) == len(slots)
        and others.isdisjoint(slots)
    )


def _memory(variant: PlacedVariant, keepers: Mapping[SliceIdentity, Sequence[int]], *, apart: bool) -> WeightMemory:
    """The objects of one variant: a buffer for each set of variants that keep the same slices (`apart`: for each of these
    slices), and the rest of the pool.
    """
    layout = variant.layout
    end = _below(variant)
    buffers: dict[str, int] = {}
    textures: dict[str, TextureSlot] = {}
    place_of: dict[str, tuple[str, int]] = {}
    for part in variant.staying:
        if part.name in layout.slot_of:
            name = f"the texture of the weight at {identity(part)}"
            textures[name] = layout.slots[layout.slot_of[part.name]]
            place_of[part.name] = (name, 0)
        else:
            kept = f"weights that stay in variants {', '.join(map(str, keepers[identity(part)]))}"
            name = f"the weight at {identity(part)}" if apart else kept
            place_of[part.name] = name, buffers.get(name, 0)
            buffers[name] = buffers.get(name, 0) + place_bytes(part)
    if apart:
        _put_slots(layout, variant.slices, buffers, place_of)
    elif layout.pool_bytes > end:
        buffers[_POOL] = layout.pool_bytes - end
        place_of |= {name: (_POOL, offset - end) for name, offset in layout.offsets.items() if name not in place_of}
    names = _slot_names(layout, [number for name, number in layout.slot_of.items() if name not in place_of])
    textures |= {name: layout.slots[number] for number, name in names.items()}
    place_of |= {name: (names[number], 0) for name, number in layout.slot_of.items() if name not in place_of}
    return WeightMemory(buffers, textures, place_of)


def _slot_names(layout: PoolLayout, numbers: Collection[int]) -> dict[int, str]:
    """Names of texture slots by their sizes, so that two variants have equal ones in common."""
    names: dict[int, str] = {}
    for number in sorted(set(numbers)):
        slot = layout.slots[number]
        size = f"{slot.width} x {slot.height} {slot.channel}"
        names[number] = f"texture slot {size}, {sum(name.startswith(f'texture slot {size},') for name in names.values())}"
    return names
