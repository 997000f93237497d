"""Texture slots: images that slices take turns in, because a texture cannot be placed at an offset of a buffer."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence

import numpy as np

from flashmem.planning.plan import TextureSlot
from flashmem.program import TEXEL_BYTES, Slice

_NEVER = np.iinfo(np.int64).max
"""The end of a gap that nothing follows."""


def colour_slots(images: Sequence[tuple[Slice, int, int]]) -> tuple[tuple[TextureSlot, ...], dict[str, int]]:
    """Texture slots that `images` (slice, first layer, last layer) take turns in, and the slot of each slice by name.

    Two greedy orders, largest first and in order of time; the one with fewer bytes is kept. A slice takes the smallest slot
    that is free and large enough in both directions, or a new one of its own size.
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
    """The slots of one size. `free_until` has, by slot, the last layer of the gap that is open now; -1 while it is taken."""

    def __init__(self, slot: TextureSlot) -> None:
        self.slot = slot
        self.numbers: list[int] = []
        self.free_until = np.full(8, -1, np.int64)

    def holds(self, part: Slice) -> bool:
        slot = self.slot
        return slot.channel == part.channel and slot.width >= part.width and slot.height >= part.height

    def add(self, number: int) -> int:
        if len(self.numbers) == len(self.free_until):
            self.free_until = np.concatenate((self.free_until, np.full(len(self.numbers), -1, np.int64)))
        self.numbers.append(number)
        return len(self.numbers) - 1

    def first_free(self, last: int) -> int | None:
        """The first slot whose open gap lasts through layer `last`."""
        if not self.numbers:
            return None
        at = int(np.argmax(self.free_until >= last))
        return at if self.free_until[at] >= last else None


class TextureSlotAllocator:
    """Slots and their turns. Images are placed in any order; quickly, as long as their first layers ascend.

    As layers go by, gaps between turns open; a free slot of a size is then found without looking at its turns. When an image
    comes that begins before the one placed last, the gaps are computed again from its first layer.
    """

    def __init__(self) -> None:
        self.slots: list[TextureSlot] = []
        self._turns: list[list[tuple[int, int]]] = []  # by slot: (first, last), sorted
        self._place: list[tuple[_SlotSize, int]] = []  # by slot
        self._sizes: dict[tuple[int, int, str], _SlotSize] = {}
        self._opening: list[tuple[int, int, int]] = []  # gaps to come, a heap: (first layer, slot, last layer)
        self._now = 0

    def place(self, part: Slice, first: int, last: int) -> int:
        """The slot that `part` takes in layers `first` to `last`."""
        self._advance(first)
        number = self._free(part, last)
        if number is None:
            number, until = self._new(part), int(_NEVER)
        else:
            same_size, at = self._place[number]
            until, same_size.free_until[at] = int(same_size.free_until[at]), -1
        insort(self._turns[number], (first, last))
        if last < until:
            heapq.heappush(self._opening, (last + 1, number, until))
        return number

    def _advance(self, layer: int) -> None:
        if layer < self._now:
            for same_size in self._sizes.values():
                same_size.free_until[:] = -1
            self._opening = [gap for number in range(len(self.slots)) for gap in self._gaps(number)]
            heapq.heapify(self._opening)
        self._now = layer
        while self._opening and self._opening[0][0] <= layer:
            _, number, until = heapq.heappop(self._opening)
            same_size, at = self._place[number]
            same_size.free_until[at] = until

    def _gaps(self, number: int) -> Iterator[tuple[int, int, int]]:
        begin = 0
        for first, last in self._turns[number]:
            if begin < first:
                yield begin, number, first - 1
            begin = last + 1
        yield begin, number, int(_NEVER)

    def _free(self, part: Slice, last: int) -> int | None:
        """The smallest slot that holds `part` and is free from now to `last`, the first of them if several are."""
        best: tuple[int, int] | None = None
        for same_size in self._sizes.values():
            if same_size.holds(part) and (best is None or same_size.slot.nbytes <= best[0]):
                at = same_size.first_free(last)
                if at is not None:
                    found = (same_size.slot.nbytes, same_size.numbers[at])
                    best = found if best is None else min(best, found)
        return None if best is None else best[1]

    def _new(self, part: Slice) -> int:
        assert part.channel is not None
        number, size = len(self.slots), (part.width, part.height, part.channel)
        if size not in self._sizes:
            self._sizes[size] = _SlotSize(TextureSlot(*size, part.width * part.height * TEXEL_BYTES[part.channel]))
        same_size = self._sizes[size]
        self.slots.append(same_size.slot)
        self._turns.append([])
        self._place.append((same_size, same_size.add(number)))
        return number
