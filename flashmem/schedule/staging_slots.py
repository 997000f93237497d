"""Staging slots: buffers that streamed slices occupy in turn until kernels copy them home (transfer mode `interleave`).

They are for devices that do not share the host's memory. There a copy writes one slice while kernels read others, which OpenCL
leaves undefined within one memory object. So each slice has a slot to itself from its release time to its last copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.program.tensors import Slice
from flashmem.schedule.plan import PlannedWeight


@dataclass(frozen=True)
class _Stay:
    """A slice of `nbytes`, rounded up, that is in staging from layer `first` to layer `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def staging_slots(planned: Sequence[tuple[Slice, PlannedWeight]]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Assign streamed slices to slots: the bytes of each slot, and the slot number of each slice.

    A greedy assignment in several orders; the one with the fewest bytes is returned. A slice gets the smallest free slot that
    is large enough, else the largest free one, which grows, else a new one.
    """
    stays = [
        _Stay(w.name, -(-part.file_bytes // POOL_ALIGNMENT) * POOL_ALIGNMENT, w.read_layer, w.last_mover)
        for part, w in planned
        if not w.preload
    ]
    found = [_take_turns(sorted(stays, key=order)) for order in _ORDERS]
    return min(found, key=lambda taken: sum(taken[0]))


_ORDERS: tuple[Callable[[_Stay], tuple[int, ...]], ...] = (
    lambda stay: (-stay.nbytes, stay.first),
    lambda stay: (stay.first, -stay.last, -stay.nbytes),
    lambda stay: (-stay.nbytes * (stay.last - stay.first + 1), stay.first),
)
"""Largest first, by time, and by bytes times layers."""


def _take_turns(stays: Sequence[_Stay]) -> tuple[tuple[int, ...], dict[str, int]]:
    sizes: list[int] = []
    taken = np.zeros((len(stays), max((stay.last for stay in stays), default=0) + 1), np.bool_)  # slots by layers
    slot_of: dict[str, int] = {}
    for stay in stays:
        layers = slice(stay.first, stay.last + 1)
        free = np.flatnonzero(~taken[: len(sizes), layers].any(axis=1)).tolist()
        large = [number for number in free if sizes[number] >= stay.nbytes]
        if large:
            number = min(large, key=sizes.__getitem__)
        elif free:
            number = max(free, key=sizes.__getitem__)
            sizes[number] = stay.nbytes
        else:
            number = len(sizes)
            sizes.append(stay.nbytes)
        taken[number, layers] = True
        slot_of[stay.name] = number
    return tuple(sizes), slot_of
