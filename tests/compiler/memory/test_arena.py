"""Layout of the arena: blocks alive at the same time never overlap, and the size is close to the minimum."""

from __future__ import annotations

import itertools
import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmem.base.types import TENSOR_ALIGNMENT
from flashmem.compiler.memory import arena
from flashmem.compiler.memory.arena import Rectangle, alive, place_blocks

LAYERS = 12


@st.composite
def _shapes(draw: st.DrawFn) -> list[Rectangle]:
    """One block of adjacent parts, each with its own lifetime."""
    parts, offset = [], 0
    for _ in range(draw(st.integers(1, 3))):
        size = TENSOR_ALIGNMENT * draw(st.integers(1, 6))
        first = draw(st.integers(1, LAYERS))
        parts.append((offset, offset + size, first, draw(st.integers(first, LAYERS))))
        offset += size
    return parts


@given(st.lists(_shapes(), min_size=1, max_size=12))
def test_no_two_parts_that_are_needed_at_once_overlap(shapes: list[list[Rectangle]]) -> None:
    blocks = {f"b{number}": shape for number, shape in enumerate(shapes)}
    offsets, size, bound = place_blocks(blocks, LAYERS)
    assert bound == max(alive(blocks, LAYERS)) <= size
    placed = [(offsets[name] + part[0], offsets[name] + part[1], *part[2:], name) for name in blocks for part in blocks[name]]
    assert max(end for _, end, *_ in placed) <= size
    for (a, b, first, last, one), (c, d, begin, end, other) in combinations(placed, 2):
        assert one == other or b <= c or d <= a or last < begin or end < first


@given(st.lists(_shapes(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_block_is_placed_at_the_lowest_offset_that_is_free(shapes: list[list[Rectangle]], order: random.Random) -> None:
    blocks = {f"b{number}": shape for number, shape in enumerate(shapes)}
    names = list(blocks)
    order.shuffle(names)
    offsets: dict[str, int] = {}
    for name in names:

        def is_free(at: int, name: str = name) -> bool:
            return not any(
                at + a < offsets[other] + d and offsets[other] + c < at + b and first <= end and begin <= last
                for other in offsets
                for a, b, first, last in blocks[name]
                for c, d, begin, end in blocks[other]
            )

        offsets[name] = next(at for at in itertools.count(0, TENSOR_ALIGNMENT) if is_free(at))
    size = max(offsets[name] + part[1] for name in blocks for part in blocks[name])
    placing = arena._Placing(blocks)
    assert placing.place(names) == placing.place(names, size) == (offsets, size)
    assert placing.place(names, size - 1)[1] > size - 1


def test_repairs_and_moves_help_where_no_order_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    programs = []
    for _ in range(30):
        blocks = {}
        for number in range(40):
            first = int(generator.integers(1, 60))
            blocks[str(number)] = [
                (0, TENSOR_ALIGNMENT * int(generator.integers(1, 20)), first, min(60, first + int(generator.integers(0, 25))))
            ]
        programs.append(blocks)
    sizes = []
    for placed, moved in ((1, 0), (arena._REPAIRS, 0), (arena._REPAIRS, arena._MOVES)):
        monkeypatch.setattr(arena, "_REPAIRS", placed)
        monkeypatch.setattr(arena, "_MOVES", moved)
        sizes.append(sum(place_blocks(blocks, 60)[1] for blocks in programs))
    assert sizes[0] > sizes[1] > sizes[2]
