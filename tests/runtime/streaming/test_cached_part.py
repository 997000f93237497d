"""The part of a weight file that passes through the page cache where memory cannot hold all of it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmem.runtime.memory.arena import new_pages
from flashmem.runtime.streaming import cached_part
from flashmem.runtime.streaming.cached_part import CachedPart
from flashmem.runtime.streaming.direct import UNIT
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.uncached import cached_pages, write_uncached

CONTENT = np.random.default_rng(0).integers(0, 255, 64 * UNIT, np.uint8)
RANGES = [(at * UNIT, 4 * UNIT) for at in range(0, 64, 4)]


def chosen(part: CachedPart, ranges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    found = {each for each in ranges if part.has(each[0])}
    assert found == {each for each in ranges if part.has(each[0] + each[1] - 1)}
    return found


@given(st.lists(st.integers(1, 9), max_size=40), st.lists(st.integers(-5, 200), min_size=1, max_size=6))
def test_what_is_chosen_fits_and_changes_by_what_is_told(sizes: list[int], rooms: list[int]) -> None:
    """Whatever the sequence of free memory: the part fits, less memory chooses a subset, and what left is returned."""
    ends = np.cumsum(sizes, dtype=int).tolist()
    ranges = [(end - size + 3 * at, size) for at, (end, size) in enumerate(zip(ends, sizes, strict=True))]
    part, before, before_room = CachedPart(), set[tuple[int, int]](), -1
    for room in rooms:
        left = part.choose(ranges, room + cached_part._SLACK)
        now = chosen(part, ranges)
        assert sum(size for _, size in now) == part.nbytes <= max(room, 0)
        assert set(left) == before - now
        assert (now <= before) if room <= before_room else (before <= now)
        assert not any(part.has(start - 1) or part.has(start + size) for start, size in now)  # the gaps between ranges
        before, before_room = now, room
    part.choose(ranges, sum(sizes) + cached_part._SLACK)
    part.choose((), 0)
    assert not chosen(part, ranges) and not part.nbytes


def test_the_part_stays_the_same_while_free_memory_changes_a_little() -> None:
    part, ranges, unit = CachedPart(), [(at << 24, 1 << 24) for at in range(64)], 1 << 24
    part.choose(ranges, 20 * unit + cached_part._SLACK)
    before = chosen(part, ranges)
    assert len(before) == 20
    assert not part.choose(ranges, 22 * unit + cached_part._SLACK) and chosen(part, ranges) == before
    assert not part.choose(ranges, 24 * unit + cached_part._SLACK) and len(chosen(part, ranges)) == 24
    assert len(part.choose(ranges, 19 * unit + cached_part._SLACK)) == 5 and chosen(part, ranges) < before
    # Of each quarter of the file about as much, so that the disk works all the time.
    assert {len([1 for start, _ in before if start >> 28 == quarter]) for quarter in range(4)} <= {4, 5, 6}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that the page cache does not have."""
    return write_uncached(tmp_path / "weights.bin", CONTENT)


@pytest.fixture
def file(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightFile]:
    """The same file, where memory cannot hold it, but 21 of its 64 pages."""
    room = [21 * UNIT]
    for name, more in (("available", 0), ("room_for_files", cached_part._SLACK)):
        monkeypatch.setattr(f"flashmem.runtime.streaming.weight_file.{name}", lambda more=more: room[0] + more)
    monkeypatch.setattr("flashmem.runtime.streaming.weight_file.LOOK_SECONDS", 0.0)
    opened = WeightFile(path, CONTENT.size)
    opened.room = room  # type: ignore[attr-defined]
    yield opened
    opened.close()


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_runs_find_a_fixed_part_in_the_page_cache(mapped: bool, path: Path, file: WeightFile) -> None:
    """The first run knows nothing yet. Then each has the same pages there, no others, and the right bytes."""
    place = new_pages(4 * UNIT)
    if file.direct.refused or mmap.PAGESIZE != UNIT or cached_pages(path):
        pytest.skip("the file system of the temporary folder has no such reads, or keeps all pages")

    def run(known: bool) -> int:
        file.look_at_memory(lambda: (RANGES, 0) if known else None)
        before = file.direct.nbytes
        for offset, nbytes in RANGES:
            if mapped:
                file.populate(offset, nbytes)
                np.testing.assert_array_equal(file.mapped[offset : offset + nbytes], CONTENT[offset : offset + nbytes])
                file.drop(offset, nbytes)
            else:
                file.read_into(place, offset)
                np.testing.assert_array_equal(place, CONTENT[offset : offset + nbytes])
        assert not file.owned_bytes
        return file.direct.nbytes - before

    assert run(known=False) == CONTENT.size and cached_pages(path) == 0
    for _ in range(3):
        assert run(known=True) == CONTENT.size - 20 * UNIT and cached_pages(path) == 20
    file.room[0] = 9 * UNIT  # type: ignore[attr-defined]
    file.look_at_memory(lambda: (RANGES, 0))
    assert cached_pages(path) == 8  # what left the part leaves the page cache
    assert run(known=True) == CONTENT.size - 8 * UNIT and cached_pages(path) == 8
    file.look_at_memory(lambda: (RANGES, 5 * UNIT))  # which a run needs itself
    assert file.cached.nbytes == 4 * UNIT
    file.room[0] = CONTENT.size  # type: ignore[attr-defined]
    assert run(known=True) == 0 and cached_pages(path) == 64
