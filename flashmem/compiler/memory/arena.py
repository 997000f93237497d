"""Arena layout: offsets for all activations, so that bytes with disjoint lifetimes share memory.

Tensors that share memory (`compiler.memory.buffers`) form one block, in which each has a fixed place. Only some bytes of a
block may be needed at a time. Examples are a part of a Concat before the others are written, and a Slice after the rest has
been read. The other bytes are free for other blocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from flashmem.base.types import SLACK, TENSOR_ALIGNMENT
from flashmem.planning.memory.layout import Interval, lay_out

_ENOUGH = 1.005
"""A layout of whole blocks within this factor of the bound is accepted; otherwise their parts are placed one by one."""

_REPAIRS = 12
_MOVES = 100
_PARTS_PLACED = 30_000
"""Limits on layouts: repairs of each order, random moves, and parts placed in all, at 10 microseconds each."""

_NEAR = 1.03
"""The factor of the bound within which random moves are tried."""


@dataclass(frozen=True)
class LiveBytes:
    """Bytes of a block that are live during launches `first` to `last`, both included."""

    block: str
    offset: int
    nbytes: int
    first: int
    last: int


Rectangle = tuple[int, int, int, int]
"""(first byte, end, first launch, last launch) of bytes of a block that are needed together."""


def shapes(uses: Iterable[LiveBytes], *, slack: int = SLACK) -> dict[str, list[Rectangle]]:
    """The lifetimes of the bytes of each block, in units of TENSOR_ALIGNMENT, with `slack` after the last byte.

    A block's bytes are needed from their first use to their last: they are written first and read later.
    """
    by_block: dict[str, list[LiveBytes]] = {}
    for use in uses:
        by_block.setdefault(use.block, []).append(use)
    return {block: _shape(each, slack) for block, each in by_block.items()}


def _shape(uses: Sequence[LiveBytes], slack: int) -> list[Rectangle]:
    last = max(use.offset + use.nbytes for use in uses)
    spans = [(use.offset, _whole(use.offset + use.nbytes + (slack if use.offset + use.nbytes == last else 0))) for use in uses]
    cuts = sorted({cut for span in spans for cut in span})
    index = {cut: at for at, cut in enumerate(cuts)}
    first = np.full(len(cuts), np.iinfo(np.int64).max)
    end = np.full(len(cuts), -1)
    for use, (start, stop) in zip(uses, spans, strict=True):
        part = slice(index[start], index[stop])
        np.minimum(first[part], use.first, out=first[part])
        np.maximum(end[part], use.last, out=end[part])
    found: list[Rectangle] = []
    for at, (start, stop) in enumerate(pairwise(cuts)):
        life = int(first[at]), int(end[at])
        if life[1] < 0:
            continue
        if found and found[-1][1] == start and found[-1][2:] == life:
            start = found.pop()[0]
        found.append((start, stop, *life))
    return found


def alive(blocks: Mapping[str, Sequence[Rectangle]], launches: int) -> list[int]:
    """The bytes that are needed before the first launch, at each of `launches`, and after the last."""
    change = [0] * (launches + 3)
    for rectangles in blocks.values():
        for start, end, first, last in rectangles:
            change[first] += end - start
            change[last + 1] -= end - start
    return list(accumulate(change))[: launches + 2]


def place_blocks(blocks: Mapping[str, Sequence[Rectangle]], launches: int) -> tuple[dict[str, int], int, int]:
    """The offset of each block, the total bytes, and the most bytes needed at once, below which no layout exists."""
    needed = alive(blocks, launches)
    bound = max(needed, default=0)
    whole = [Interval(name, _end(shape), _first(shape), _last(shape)) for name, shape in blocks.items()]
    best = lay_out(whole, TENSOR_ALIGNMENT)
    levels = np.array(needed)
    tight = {name: int(levels[_first(shape) : _last(shape) + 1].max()) for name, shape in blocks.items()}
    orders: tuple[Callable[[str, Sequence[Rectangle]], tuple[int, ...]], ...] = (
        lambda name, shape: (-tight[name], _first(shape), -_end(shape)),  # blocks alive at the peak first, by time
        lambda name, shape: (-tight[name], _first(shape) - _last(shape)),  # the same, with long lifetimes first
        lambda name, shape: (-_end(shape), _first(shape)),  # large ones first
        lambda name, shape: (-_area(shape), _first(shape)),  # largest product of bytes and launches first
        lambda name, shape: (_first(shape), -_end(shape)),  # by time
    )
    times = max(1, _PARTS_PLACED // max(1, sum(map(len, blocks.values()))))
    found: list[tuple[int, list[str]]] = []
    placing = _Placing(blocks)
    for order in orders:
        names = sorted(blocks, key=lambda name: order(name, blocks[name]))
        for _ in range(min(_REPAIRS, times)):
            if best[1] <= bound * _ENOUGH:
                return *best, bound
            offsets, size = placing.place(names)
            found.append((size, names))
            best = min(best, (offsets, size), key=_size)
            names = sorted(names, key=lambda name: offsets[name] + _end(blocks[name]) < size)
    moved = _moved(min(found)[1], blocks, placing, int(bound * _NEAR), min(_MOVES, times))
    return *min(best, moved, key=_size), bound


def _moved(
    names: Sequence[str], blocks: Mapping[str, Sequence[Rectangle]], placing: _Placing, enough: int, moves: int
) -> tuple[dict[str, int], int]:
    """Improve a layout by random moves: blocks that end highest are placed earlier than in `names`. Returns the best layout."""
    draw = random.Random(0)
    best = placing.place(names)
    for _ in range(moves):
        offsets, size = best
        if size <= enough:
            break
        tried = list(names)
        tried.remove(highest := draw.choice([name for name in names if offsets[name] + _end(blocks[name]) == size]))
        tried.insert(draw.randint(0, names.index(highest)), highest)
        placed = placing.place(tried, size)
        if placed[1] <= size:
            names = tried
            best = placed
    return best


def _size(layout: tuple[dict[str, int], int]) -> int:
    return layout[1]


def _first(shape: Sequence[Rectangle]) -> int:
    return min(first for _, _, first, _ in shape)


def _last(shape: Sequence[Rectangle]) -> int:
    return max(last for *_, last in shape)


def _end(shape: Sequence[Rectangle]) -> int:
    return max(end for _, end, _, _ in shape)


def _area(shape: Sequence[Rectangle]) -> int:
    return sum((end - start) * (last - first + 1) for start, end, first, last in shape)


class _Placing:
    """Places blocks one after the other, each at the lowest offset at which no part overlaps a part that is placed.

    Which parts are needed at the same time as another is found once, for the many orders that are tried.
    """

    def __init__(self, blocks: Mapping[str, Sequence[Rectangle]]) -> None:
        self._own: dict[str, list[int]] = {}  # the parts of each block
        self._block: list[str] = []  # of each part: its block, and its first byte and end
        self._start: list[int] = []
        self._end: list[int] = []
        lives: list[tuple[int, int]] = []
        for name, shape in blocks.items():
            self._own[name] = list(range(len(lives), len(lives) + len(shape)))
            for start, end, first, last in shape:
                self._block.append(name)
                self._start.append(start)
                self._end.append(end)
                lives.append((first, last))
        self._beside: list[list[int]] = [[] for _ in lives]  # of each part: the parts of other blocks at the same time
        alive: list[int] = []
        for part in sorted(range(len(lives)), key=lives.__getitem__):
            first = lives[part][0]
            alive = [other for other in alive if lives[other][1] >= first]
            for other in alive:
                if self._block[other] != self._block[part]:
                    self._beside[part].append(other)
                    self._beside[other].append(part)
            alive.append(part)

    def place(self, names: Sequence[str], most: float = math.inf) -> tuple[dict[str, int], int]:
        """The offsets of blocks that are placed in the order of `names`, and the total bytes. It ends early beyond `most`."""
        offsets: dict[str, int] = {}
        block = self._block
        starts = self._start
        ends = self._end
        top = 0
        for name in names:
            taken: list[tuple[int, int]] = []  # a block with an offset between these two would overlap a placed part
            for part in self._own[name]:
                start = starts[part]
                end = ends[part]
                for other in self._beside[part]:
                    there = offsets.get(block[other])
                    if there is not None:
                        taken.append((there + starts[other] - end, there + ends[other] - start))
            taken.sort()
            at = 0
            for low, high in taken:
                if low >= at:
                    break
                at = max(at, high)
            offsets[name] = at
            top = max([top, *(at + ends[part] for part in self._own[name])])
            if top > most:
                break
        return offsets, top


def _whole(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
