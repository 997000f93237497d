"""The arena: tensors laid out by when each of their bytes is needed.

Tensors that share memory (`codegen.places`) form one block, in which each has its fixed place. Of a block only some bytes may
be needed at a time: a part of a Concat before the others are written, a Slice after the rest has been read. What is not needed
is room for other blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from flashmem.planning.memory_layout import Interval, lay_out
from flashmem.program import SLACK, TENSOR_ALIGNMENT

_ENOUGH = 1.005
"""A layout of whole blocks that is this close to the bound is taken; otherwise their parts are placed one by one."""


@dataclass(frozen=True)
class Use:
    """Bytes of a block that are needed during layers `first` to `last`, both included."""

    block: str
    offset: int
    nbytes: int
    first: int
    last: int


Rectangle = tuple[int, int, int, int]
"""Where bytes of a block start, where they end, and the first and the last layer that needs them."""


def shapes(uses: Iterable[Use], *, slack: int = SLACK) -> dict[str, list[Rectangle]]:
    """Which bytes of each block are needed when. Bytes are counted in whole TENSOR_ALIGNMENT, `slack` behind the last one.

    A block's bytes are needed from their first use to their last: what is written is read later.
    """
    by_block: dict[str, list[Use]] = {}
    for use in uses:
        by_block.setdefault(use.block, []).append(use)
    return {block: _shape(each, slack) for block, each in by_block.items()}


def _shape(uses: Sequence[Use], slack: int) -> list[Rectangle]:
    last = max(use.offset + use.nbytes for use in uses)
    spans = [(use.offset, _whole(use.offset + use.nbytes + (slack if use.offset + use.nbytes == last else 0))) for use in uses]
    cuts = sorted({cut for span in spans for cut in span})
    index = {cut: at for at, cut in enumerate(cuts)}
    first, end = np.full(len(cuts), np.iinfo(np.int64).max), np.full(len(cuts), -1)
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


def alive(blocks: Mapping[str, Sequence[Rectangle]], layers: int) -> list[int]:
    """The bytes that are needed before the first layer, at each of `layers`, and after the last."""
    change = [0] * (layers + 3)
    for rectangles in blocks.values():
        for start, end, first, last in rectangles:
            change[first] += end - start
            change[last + 1] -= end - start
    return list(accumulate(change))[: layers + 2]


def place_blocks(blocks: Mapping[str, Sequence[Rectangle]], layers: int) -> tuple[dict[str, int], int, int]:
    """Where each block starts, the bytes that hold all of them, and how many are needed at once: no layout is smaller."""
    bound = max(alive(blocks, layers), default=0)
    whole = [
        Interval(name, max(r[1] for r in shape), min(r[2] for r in shape), max(r[3] for r in shape))
        for name, shape in blocks.items()
    ]
    best = lay_out(whole, TENSOR_ALIGNMENT)
    if best[1] > bound * _ENOUGH and any(len(shape) > 1 for shape in blocks.values()):
        for order in range(len(_ORDERS)):
            best = _place_parts(blocks, order, best[1]) or best
            if best[1] <= bound * _ENOUGH:
                break
    return *best, bound


def _area(shape: Sequence[Rectangle]) -> int:
    return sum((end - start) * (last - first + 1) for start, end, first, last in shape)


def _size(shape: Sequence[Rectangle]) -> int:
    return max(r[1] for r in shape) - min(r[0] for r in shape)


_ORDERS = (
    lambda shape: (-_size(shape), min(r[2] for r in shape)),
    lambda shape: (-_area(shape), min(r[2] for r in shape)),
    lambda shape: (min(r[2] for r in shape), -_size(shape)),
    lambda shape: (min(r[2] for r in shape) - max(r[3] for r in shape), -_size(shape)),
)
"""Orders in which blocks are placed: large ones first, those that are large for long, those needed first, or for long."""


def _place_parts(blocks: Mapping[str, Sequence[Rectangle]], order: int, limit: int) -> tuple[dict[str, int], int] | None:
    """Blocks one after the other, each as low as its parts fit beside those placed; None if that is no less than `limit`."""
    offsets: dict[str, int] = {}
    placed = np.zeros((sum(map(len, blocks.values())), 4), np.int64)
    count = top = 0
    for name in sorted(blocks, key=lambda name: _ORDERS[order](blocks[name])):
        taken: list[tuple[int, int]] = []  # a block that starts above the one and below the other overlaps something
        for start, end, first, last in blocks[name]:
            there = placed[:count]
            there = there[(there[:, 2] <= last) & (there[:, 3] >= first)]
            taken += zip((there[:, 0] - end).tolist(), (there[:, 1] - start).tolist(), strict=True)
        at = 0
        for low, high in sorted(taken):
            if low >= at:
                break
            at = max(at, high)
        offsets[name] = at
        for start, end, first, last in blocks[name]:
            placed[count] = (at + start, at + end, first, last)
            count, top = count + 1, max(top, at + end)
        if top >= limit:
            return None
    return offsets, top


def _whole(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
