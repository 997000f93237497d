"""Which weights of a file pass through the page cache, where memory cannot hold all of the file.

Each run reads the same bytes in the same order. A cache by recency loses every page of such a scan before its next use; a fixed
part that memory can hold is hit by every run. The rest is read past the page cache, and takes no memory there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Range = tuple[int, int]
"""Offset and bytes of a range of the file."""

_SLACK = 32 << 20
"""Bytes that stay free: for pages of the file that are in the cache and on their way, and for what else the process needs."""

_GROWTH = 1.125
"""The part grows only by this factor, so that it stays the same while free memory changes a little."""

_GOLDEN = 0.6180339887498949


class CachedPart:
    """The ranges that pass through the page cache: none at first. Any thread may ask `has`."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._of: tuple[Range, ...] = ()
        self.nbytes = 0

    def has(self, offset: int) -> bool:
        """Whether the range with the byte at `offset` passes through the page cache."""
        starts = self._starts
        ends = self._ends
        at = bisect_right(starts, offset) - 1
        return 0 <= at < len(ends) and offset < ends[at]

    def choose(self, ranges: Sequence[Range], free: int) -> list[Range]:
        """Choose among `ranges`, which each run reads, for `free` bytes of memory; returns those that were chosen before and
        are no longer.

        Chosen ones are spread evenly over the file, so that the disk works all the time. Those for less memory are among those
        for more.
        """
        room = free - _SLACK
        same = self._of == tuple(ranges)
        if same and self.nbytes <= room < max(self.nbytes, _SLACK) * _GROWTH:
            return []
        chosen = []
        nbytes = 0
        order = sorted(range(len(ranges)), key=lambda at: at * _GOLDEN % 1)
        for at in order:
            if nbytes + ranges[at][1] > room:
                break
            chosen.append(ranges[at])
            nbytes += ranges[at][1]
        before = list(zip(self._starts, self._ends, strict=True))
        chosen.sort()
        self._ends = []  # nothing is found between the two
        self._starts = [start for start, _ in chosen]
        self._ends = [start + size for start, size in chosen]
        self._of = tuple(ranges)
        self.nbytes = nbytes
        kept = set(self._starts)
        return [(start, end - start) for start, end in before if start not in kept]
