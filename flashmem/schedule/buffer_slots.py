"""Buffer slots: separate buffers that streamed slices occupy in turn, on devices that do not share the host's memory.

A copy there writes one slice while kernels read others, which OpenCL leaves undefined within one memory object. And NVIDIA's
driver gives each sub-buffer memory of its own, so that places that overlap in one pool take the memory of all of them
(docs/research/opencl-notes.md, sub-buffers). So each slice has a slot to itself while it is there: in its place from its load
to its last use, and in staging (transfer mode `interleave`) from its release time to its last copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.program.tensors import Slice
from flashmem.schedule.plan import PlannedWeight, PoolLayout


@dataclass(frozen=True)
class Stay:
    """A slice of `nbytes`, rounded up, that is in a slot from layer `first` to layer `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def staging_slots(planned: Sequence[tuple[Slice, PlannedWeight]]) -> tuple[tuple[int, ...], dict[str, int]]:
    """The slots of staging: the bytes of each, and the slot number of each streamed slice."""
    return buffer_slots([Stay(w.name, place_bytes(part), w.read_layer, w.last_mover) for part, w in planned if not w.preload])


def place_bytes(part: Slice) -> int:
    """Bytes of a slice's place on the device."""
    return -(-part.file_bytes // POOL_ALIGNMENT) * POOL_ALIGNMENT


def buffer_slots(stays: Sequence[Stay]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Assign slices to slots: the bytes of each slot, and the slot number of each slice.

    A greedy assignment in several orders; the one with the fewest bytes is returned. A slice gets the smallest free slot that
    is large enough, else the largest free one, which grows, else a new one.
    """
    found = [_take_turns(sorted(stays, key=order)) for order in _ORDERS]
    return min(found, key=lambda taken: sum(taken[0]))


def in_slots(
    layout: PoolLayout, planned: Sequence[tuple[Slice, PlannedWeight]], begins: Sequence[int], layers: int
) -> PoolLayout:
    """`layout` with the pool in slots: slices that stay come first, each in a place of its own, then one slot after the other.

    Slices of one slot have the same offset. `begins`: the layer at which each slice of `planned` is first written, if it is
    streamed.
    """
    offsets: dict[str, int] = {}
    end = 0
    stays = list[Stay]()
    for (part, w), begin in zip(planned, begins, strict=True):
        if part.name not in layout.offsets:
            continue
        first, last = w.home_life(begin, layers)
        if first == 0:
            offsets[part.name] = end
            end += place_bytes(part)
        else:
            stays.append(Stay(part.name, place_bytes(part), first, last))
    sizes, slot_of = buffer_slots(stays)
    starts = [end, *(end + total for total in accumulate(sizes))]
    offsets |= {name: starts[number] for name, number in slot_of.items()}
    return replace(layout, pool_bytes=starts[-1], offsets=offsets)


_ORDERS: tuple[Callable[[Stay], tuple[int, ...]], ...] = (
    lambda stay: (-stay.nbytes, stay.first),
    lambda stay: (stay.first, -stay.last, -stay.nbytes),
    lambda stay: (-stay.nbytes * (stay.last - stay.first + 1), stay.first),
)
"""Largest first, by time, and by bytes times layers."""


def _take_turns(stays: Sequence[Stay]) -> tuple[tuple[int, ...], dict[str, int]]:
    sizes: list[int] = []
    taken: list[int] = []  # by slot, its layers as bits
    slot_of: dict[str, int] = {}
    for stay in stays:
        layers = (1 << stay.last + 1) - (1 << stay.first)
        free = [number for number, occupied in enumerate(taken) if not occupied & layers]
        large = [number for number in free if sizes[number] >= stay.nbytes]
        if large:
            number = min(large, key=sizes.__getitem__)
        elif free:
            number = max(free, key=sizes.__getitem__)
            sizes[number] = stay.nbytes
        else:
            number = len(sizes)
            sizes.append(stay.nbytes)
            taken.append(0)
        taken[number] |= layers
        slot_of[stay.name] = number
    return tuple(sizes), slot_of
