"""Texture slots: images that slices occupy in turn, because a texture cannot be placed at an offset of a buffer."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from flashmem.base.types import TEXEL_BYTES
from flashmem.program.tensors import Slice
from flashmem.schedule.plan import TextureSlot

_NEVER = sys.maxsize
"""The end of a gap that has no end."""


def colour_slots(images: Sequence[tuple[Slice, int, int]]) -> tuple[tuple[TextureSlot, ...], dict[str, int]]:
    """Assign `images` (slice, first layer, last layer) to texture slots: the slots, and the slot of each slice by name.

    Two greedy orders are tried, largest first and by time; the one with fewer bytes is kept. A slice gets the smallest free
    slot that is large enough in both directions, or a new one of its size.
    """
    largest_first = sorted(images, key=lambda image: (-image[0].width * image[0].height, image[1]))
    in_time = sorted(images, key=lambda image: (image[1], -image[0].width * image[0].height))
    found = [_colour(order) for order in (largest_first, in_time)]
    return min(found, key=lambda colouring: sum(slot.nbytes for slot in colouring[0]))


def _colour(images: Sequence[tuple[Slice, int, int]]) -> tuple[tuple[TextureSlot, ...], dict[str, int]]:
    allocator = TextureSlotAllocator()
    slot_of = {part.name: allocator.place(part, first, last) for part, first, last in images}
    return tuple(allocator.slots), slot_of


class _SlotSize:
    """The slots of one size, and their gaps that are open now: (last layer, slot), sorted."""

    def __init__(self, slot: TextureSlot) -> None:
        self.slot = slot
        self.gaps: list[tuple[int, int]] = []

    def holds(self, part: Slice) -> bool:
        slot = self.slot
        return slot.channel == part.channel and slot.width >= part.width and slot.height >= part.height

    def shortest(self, last: int) -> int | None:
        """Index of the shortest gap that extends to layer `last` at least."""
        at = bisect_left(self.gaps, (last, -1))
        return at if at < len(self.gaps) else None


class TextureSlotAllocator:
    """Allocator of texture slots, each occupied by several images in turn. Ascending first layers are fast; any order works.

    The allocator tracks the gaps that are open at the present layer, so it finds a free slot without a search of its images. If
    an image begins before the one placed last, the gaps are computed again from its first layer.
    """

    def __init__(self) -> None:
        self.slots: list[TextureSlot] = []
        self._turns: list[list[tuple[int, int]]] = []  # by slot: (first, last), sorted
        self._size: list[_SlotSize] = []  # by slot
        self._sizes: dict[tuple[int, int, str], _SlotSize] = {}
        self._opening: list[tuple[int, int, int]] = []  # future gaps, a heap: (first layer, slot, last layer)
        self._now = 0

    def place(self, part: Slice, first: int, last: int) -> int:
        """The slot that `part` occupies in layers `first` to `last`."""
        self._advance(first)
        until, number = self._free(part, last) or (_NEVER, self._new(part))
        insort(self._turns[number], (first, last))
        if last < until:
            heapq.heappush(self._opening, (last + 1, number, until))
        return number

    def _advance(self, layer: int) -> None:
        if layer < self._now:
            for same_size in self._sizes.values():
                same_size.gaps.clear()
            self._opening = [gap for number in range(len(self.slots)) for gap in self._gaps(number)]
            heapq.heapify(self._opening)
        self._now = layer
        while self._opening and self._opening[0][0] <= layer:
            _, number, until = heapq.heappop(self._opening)
            insort(self._size[number].gaps, (until, number))

    def _gaps(self, number: int) -> Iterator[tuple[int, int, int]]:
        begin = 0
        for first, last in self._turns[number]:
            if begin < first:
                yield begin, number, first - 1
            begin = last + 1
        yield begin, number, _NEVER

    def _free(self, part: Slice, last: int) -> tuple[int, int] | None:
        """Allocate the smallest slot that holds `part` and is free from now to `last`; among equals, the one with the shortest
        gap. Return the last layer of the gap and the slot number; None if no slot is free.
        """
        best: tuple[_SlotSize, int] | None = None
        for same_size in self._sizes.values():
            if same_size.holds(part) and (best is None or same_size.slot.nbytes < best[0].slot.nbytes):
                at = same_size.shortest(last)
                if at is not None:
                    best = same_size, at
        return None if best is None else best[0].gaps.pop(best[1])

    def _new(self, part: Slice) -> int:
        assert part.channel is not None
        number = len(self.slots)
        size = (part.width, part.height, part.channel)
        if size not in self._sizes:
            self._sizes[size] = _SlotSize(TextureSlot(*size, part.width * part.height * TEXEL_BYTES[part.channel]))
        same_size = self._sizes[size]
        self.slots.append(same_size.slot)
        self._turns.append([])
        self._size.append(same_size)
        return number
