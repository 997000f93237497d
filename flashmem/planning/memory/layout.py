"""Static memory layout: a fixed place for every object with a lifetime, decided before the first layer runs.

`lay_out` places intervals of layers in one buffer (the activation arena, the weight pool, staging). Two intervals that are
alive at once never overlap. `lay_out_pools` derives the memory of each transfer mode from an overlap plan: see `PoolLayout`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from flashmem.base.types import DEFAULT_PAGE, POOL_ALIGNMENT, TransferMode
from flashmem.planning.memory.texture_slots import colour_slots
from flashmem.program.tensors import Slice
from flashmem.schedule.buffer_slots import in_slots, staging_slots
from flashmem.schedule.modes import MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PoolLayout, passing_bytes

_RING_WIDENING = 128
"""A ring that is too small is widened by the least size divided by this number, then by twice that, and so on."""

_RING_STEPS = 12
"""The number of bisections below the best size found."""

_WASTED = 1000
"""A ring that wastes less than the least size divided by this number is good enough."""


@dataclass(frozen=True)
class Interval:
    """`nbytes` that are in use during layers `first` to `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int


def max_concurrent(intervals: Iterable[Interval], alignment: int = 1) -> int:
    """The most bytes alive at one layer, with sizes rounded up to `alignment`: a lower bound for every layout."""
    change: dict[int, int] = {}
    for i in intervals:
        change[i.first] = change.get(i.first, 0) + _round_up(i.nbytes, alignment)
        change[i.last + 1] = change.get(i.last + 1, 0) - _round_up(i.nbytes, alignment)
    return max(accumulate(change[layer] for layer in sorted(change)), default=0)


def lay_out(intervals: Sequence[Interval], alignment: int) -> tuple[dict[str, int], int]:
    """Offsets (multiples of `alignment`) by name, and the size of the buffer that holds them.

    Intervals that are always alive (W) are placed below the others. Streamed weights are loaded and freed in order, so the
    others are placed in a ring. Widening and then bisection find a small ring. If its size is not near `max_concurrent`, best
    fit also places the intervals one after the other, in several orders. An order is given up once it is no smaller. If one is
    smaller, the search for a ring below it is repeated.

    Raises:
        ValueError: two intervals of one name.
    """
    if len({i.name for i in intervals}) != len(intervals):
        raise ValueError("two intervals have the same name")
    first = min((i.first for i in intervals), default=0)
    last = max((i.last for i in intervals), default=0)
    offsets: dict[str, int] = {}
    base = 0
    for i in intervals:
        if (i.first, i.last) == (first, last):
            offsets[i.name] = base
            base += _round_up(i.nbytes, alignment)
    above, size = _lay_out_above([i for i in intervals if i.name not in offsets], alignment)
    offsets.update((name, base + offset) for name, offset in above.items())
    return offsets, base + size


def _lay_out_above(intervals: Sequence[Interval], alignment: int) -> tuple[dict[str, int], int]:
    bound = max_concurrent(intervals, alignment)
    orders: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
        lambda i: (-i.nbytes, i.first),
        lambda i: (i.first, -i.last, -i.nbytes),
        lambda i: (-(i.last - i.first), -i.nbytes),
        lambda i: (-i.nbytes * (i.last - i.first + 1), i.first),
    )
    in_time = sorted(intervals, key=lambda i: (i.first, i.last, -i.nbytes))
    best = ring = _smaller_ring(in_time, alignment, bound, _wide_ring(in_time, alignment, bound))
    if ring[1] <= bound + bound // _WASTED:
        return ring
    for order in orders:
        best = _place(sorted(intervals, key=order), alignment, best[1]) or best
        if best[1] <= bound:
            break
    return best if best is ring else _smaller_ring(in_time, alignment, bound, best)


def _place(intervals: Sequence[Interval], alignment: int, limit: int) -> tuple[dict[str, int], int] | None:
    """Best fit in the given order, below `limit`; None if it does not fit. O(n * (n / vector width + alive log alive))."""
    count = len(intervals)
    first, last = (np.array([getattr(i, end) for i in intervals], np.int64) for end in ("first", "last"))
    size = np.array([_round_up(i.nbytes, alignment) for i in intervals], np.int64)
    start = np.zeros(count, np.int64)
    for at in range(count):
        alive = np.flatnonzero((first[:at] <= last[at]) & (last[:at] >= first[at]))
        alive = alive[np.argsort(start[alive], kind="stable")]
        tops = np.maximum.accumulate(np.concatenate(([0], start[alive] + size[alive])))  # possible starts of gaps
        gaps = start[alive] - tops[:-1]
        fits = np.flatnonzero(gaps >= size[at])
        start[at] = tops[fits[np.argmin(gaps[fits])]] if fits.size else tops[-1]
        if start[at] + size[at] >= limit:
            return None
    offsets = {i.name: int(offset) for i, offset in zip(intervals, start, strict=True)}
    return offsets, int(np.max(start + size, initial=0))


def _smaller_ring(
    in_time: Sequence[Interval], alignment: int, bound: int, best: tuple[dict[str, int], int]
) -> tuple[dict[str, int], int]:
    """The smallest ring between `bound` and `best` that bisection finds, or `best`."""
    low = bound
    for _ in range(_RING_STEPS):
        if best[1] - low <= alignment:
            break
        middle = _round_up((low + best[1]) // 2, alignment)
        ring = _place_in_ring(in_time, alignment, middle)
        if ring is None:
            low = middle
        else:
            best = ring
    return best


def _wide_ring(in_time: Sequence[Interval], alignment: int, bound: int) -> tuple[dict[str, int], int]:
    """A ring of `bound` bytes, the lower bound, or the first wider one in steps of `_RING_WIDENING` that works."""
    size = bound
    more = bound // _RING_WIDENING
    while (ring := _place_in_ring(in_time, alignment, size)) is None:
        more = max(more, alignment)
        size = _round_up(bound + more, alignment)
        more = 2 * more
    return ring


def _place_in_ring(intervals: Sequence[Interval], alignment: int, size: int) -> tuple[dict[str, int], int] | None:
    """Next fit in order of time within `size` bytes, continuing at 0 after the end; None if an interval does not fit."""
    offsets: dict[str, int] = {}
    alive: list[tuple[int, int]] = []  # (offset, end), sorted
    expiry: list[tuple[int, int, int]] = []  # (last, offset, end), a heap
    hand = top = 0
    for i in intervals:
        while expiry and expiry[0][0] < i.first:
            _, offset, end = heapq.heappop(expiry)
            del alive[bisect_left(alive, (offset, end))]
        nbytes = _round_up(i.nbytes, alignment)
        found = _next_fit(alive, nbytes, hand, size)
        if found is None:
            found = _next_fit(alive, nbytes, 0, size)
        if found is None:
            return None
        offset = found
        hand = offset + nbytes
        top = max(top, hand)
        offsets[i.name] = offset
        insort(alive, (offset, hand))
        heapq.heappush(expiry, (i.last, offset, hand))
    return offsets, top


def _next_fit(alive: Sequence[tuple[int, int]], nbytes: int, start: int, size: int) -> int | None:
    """The first offset at or after `start` with `nbytes` free below `size`."""
    at = bisect_left(alive, (start, start))
    offset = max(start, alive[at - 1][1]) if at else start
    while at < len(alive) and alive[at][0] - offset < nbytes:
        offset = max(offset, alive[at][1])
        at += 1
    return offset if offset + nbytes <= size else None


def lay_out_pools(
    slices: Sequence[Slice],
    plan: OverlapPlan,
    modes: Sequence[TransferMode],
    *,
    page_bytes: int = DEFAULT_PAGE,
    loader_threads: int | None = None,
) -> dict[str, PoolLayout]:
    """The layout of the planned slices in each of `modes`, by mode. `page_bytes`: the program's alignment of slices.
    `loader_threads`: by default the plan's.

    Raises:
        ValueError: the plan has a weight that is not among `slices`.
    """
    by_name = {s.name: s for s in slices}
    missing = [w.name for w in plan.weights if w.name not in by_name]
    if missing:
        raise ValueError(f"the program has no slice {missing[0]!r}, which the plan streams")
    planned = [(by_name[w.name], w) for w in plan.weights]
    threads = loader_threads or plan.loader_threads
    pools = _Pools(
        planned,
        len(plan.capacities),
        _piece_bytes(slices, plan.piece_bytes),
        page_bytes,
        threads,
        shares_memory=plan.shares_memory,
    )
    return {mode: replace(MODES[mode].lay_out(pools), threads=threads) for mode in modes}


class _Pools:
    """The planned slices, and the kinds of memory that modes choose from (`schedule.modes.kind.Pools`).

    `piece`: bytes that pass through the ring at a time; `page`: bytes of a page of the weight file; `threads`: loader threads,
    each with its part of the ring; `shares_memory`: whether host and device do.
    """

    def __init__(
        self,
        planned: Sequence[tuple[Slice, PlannedWeight]],
        layers: int,
        piece: int,
        page: int,
        threads: int,
        *,
        shares_memory: bool,
    ) -> None:
        self.planned = planned
        self.shares_memory = shares_memory
        self.layers = layers
        self.piece = piece
        self.page = page
        self.threads = threads

    def pages(self) -> PoolLayout:
        """Layout without allocations; pages of the file are resident from g_w to the last use."""
        peak = max_concurrent(self._whole(part for part in self.planned), self.page)
        return PoolLayout(mapped_peak_bytes=peak, resident_bytes=self._resident(self.page))

    def one_buffer(self) -> PoolLayout:
        """Layout with every slice in one buffer; textures are views of it."""
        offsets, total = lay_out(self._whole(self.planned), POOL_ALIGNMENT)
        return PoolLayout(pool_bytes=total, offsets=offsets, resident_bytes=self._resident(POOL_ALIGNMENT))

    def targets(self, kind: TransferKind) -> PoolLayout:
        """Places: plain buffers in the pool, images in texture slots, each from `kind.home_from` (if streamed) to its last use.

        And a ring with one part for each loader thread, for the slices that pass through it; large ones do in pieces.
        """
        lives = [(s, self._lifetime(w, 0 if w.preload else kind.home_from(w))) for s, w in self.planned]
        buffers = [Interval(s.name, s.file_bytes, *life) for s, life in lives if not s.is_image]
        offsets, total = lay_out(buffers, POOL_ALIGNMENT) if self.shares_memory else ({i.name: 0 for i in buffers}, 0)
        slots, slot_of = colour_slots([(s, *life) for s, life in lives if s.is_image])
        resident = sum(
            slots[slot_of[s.name]].nbytes if s.is_image else _round_up(s.file_bytes, POOL_ALIGNMENT)
            for s, w in self.planned
            if w.preload
        )
        passed = (s for s, w in self.planned if kind.passes_ring(preload=w.preload, shares_memory=self.shares_memory))
        layout = PoolLayout(
            pool_bytes=total,
            offsets=offsets,
            slots=slots,
            slot_of=slot_of,
            piece_bytes=self.piece,
            resident_bytes=resident,
            ring_bytes=self.threads * self._most_passing_bytes(passed),
        )
        if self.shares_memory:
            return layout
        return in_slots(layout, self.planned, [kind.home_from(w) for _, w in self.planned], self.layers)

    def staged(self, layout: PoolLayout) -> PoolLayout:
        """`layout` with streamed slices in staging from g_w to their last move: in one buffer, or in slots."""
        if not self.shares_memory:
            slots, slot_of = staging_slots(self.planned)
            return replace(layout, staging_slots=slots, staging_slot_of=slot_of)
        streamed = [Interval(w.name, s.file_bytes, w.read_layer, w.last_mover) for s, w in self.planned if not w.preload]
        staging, total = lay_out(streamed, POOL_ALIGNMENT)
        return replace(layout, staging_bytes=total, staging=staging)

    def _most_passing_bytes(self, slices: Iterable[Slice]) -> int:
        """Bytes of the largest slice that pass through the ring at a time."""
        return max((_round_up(passing_bytes(s, self.piece), POOL_ALIGNMENT) for s in slices), default=0)

    def _whole(self, planned: Iterable[tuple[Slice, PlannedWeight]]) -> list[Interval]:
        return [Interval(w.name, s.file_bytes, *self._lifetime(w, w.read_layer)) for s, w in planned]

    def _resident(self, unit: int) -> int:
        """Bytes of W, with each slice rounded up to `unit` bytes."""
        return sum(_round_up(s.file_bytes, unit) for s, w in self.planned if w.preload)

    def _lifetime(self, w: PlannedWeight, first: int) -> tuple[int, int]:
        return w.home_life(first, self.layers)


def _piece_bytes(slices: Sequence[Slice], wished: int) -> int:
    """Bytes that pass through the ring at a time: a multiple of the pool alignment, and at least one row of an image."""
    rows = max((part.row_pitch for part in slices), default=0)
    return _round_up(max(wished, rows, 1), POOL_ALIGNMENT)


def _round_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
