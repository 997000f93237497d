"""The schedule of a run: its loads and the layer each waits for, the slices freed after each layer, and the bytes held.

Pure functions of a plan and a program's slices, without OpenCL. Sessions, runtimes and the simulator share them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from typing import Literal

from flashmem.base.pages import page_size, whole_pages
from flashmem.base.types import TransferMode
from flashmem.program.program import Program
from flashmem.program.tensors import Slice
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import PASSING_BYTES, OverlapPlan, PlannedWeight, PoolLayout, passing_bytes
from flashmem.schedule.residency import free_from
from flashmem.target.descriptor import Rates

WORD = 16
"""Bytes of the unit that an interleaved copy stream copies between buffers. Slices start at multiples of it in device memory.
"""


def whole_words(nbytes: int) -> int:
    """`nbytes` rounded up to words."""
    return -(-nbytes // WORD) * WORD


@dataclass(frozen=True)
class Segment:
    """A part of a slice that one thread loads: `nbytes` bytes from byte `first` of the slice on."""

    first: int
    nbytes: int


def segments(part: Slice, mode: TransferMode, most: int = PASSING_BYTES) -> tuple[Segment, ...]:
    """The segments of a slice, each of about `most` bytes and small enough to pass through staging at once.

    They are whole rows of an image, or whole pages in mode `map`. Small segments keep the readahead of the disk short. One
    segment is one copy, because copies cost a driver more than their bytes do.
    """
    unit = part.row_pitch if part.is_image and not MODES[mode].by_pages else page_size()
    units = -(-part.file_bytes // unit)
    passing = passing_bytes(part, most)
    count = 1 if part.file_bytes <= passing else -(-units // (passing // unit))
    ends = [min(units * i // count * unit, part.file_bytes) for i in range(count + 1)]
    return tuple(Segment(first, end - first) for first, end in pairwise(ends))


def whole(part: Slice) -> Segment:
    """One segment that covers a whole slice."""
    return Segment(0, part.file_bytes)


@dataclass(frozen=True)
class Load:
    """A segment to load. `after` is the layer that must be done first (0: none). `preload`: the slice is in W."""

    part: Slice
    segment: Segment
    after: int = 0
    preload: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Offset and size of the segment in the weight file, in bytes."""
        return self.part.offset + self.segment.first, self.segment.nbytes


Step = Literal["read", "wait", "copy"]
"""The steps of a load: read from disk, wait for its release, copy to the device."""


@dataclass(frozen=True)
class TimedInterval:
    """The time interval of a load or a layer, in seconds of `time.perf_counter()`.

    For a load, `thread` is the one that read it, and `steps` are its consecutive steps, each with its end time. It has `nbytes`
    bytes, and was released when layer `after` was done (0: at once). For a layer, `waited_for` is the slice that its launch
    last waited for; empty if all were loaded.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    steps: tuple[tuple[Step, float], ...] = ()
    nbytes: int = 0
    after: int = 0
    waited_for: str = ""


def planned_loads(
    plan: OverlapPlan,
    slices: Mapping[str, Slice],
    layout: PoolLayout,
    mode: TransferMode,
    *,
    preload: bool,
    segmented: bool = True,
    undivided: Collection[str] = (),
) -> tuple[Load, ...]:
    """The loads of a run, sorted by the first layer that needs each. With `preload` also those of W, as for layer 1.

    With `segmented`, each slice but those `undivided` is divided into the segments of `mode` that pass through the ring.
    """
    free = free_from(plan, slices, layout, mode)
    kind = MODES[mode]

    def order(w: PlannedWeight) -> tuple[int, ...]:
        return (max(w.read_layer, 1) if kind.by_pages else 0, kind.needed_at(w), w.first_use)

    loads: list[Load] = []
    most = layout.segment_bytes or PASSING_BYTES
    for w in sorted((w for w in plan.weights if preload or not w.preload), key=order):
        part = slices[w.name]
        after = free.get(w.name, 0)
        divided = segmented and w.name not in undivided
        found = segments(part, mode, most) if divided else (whole(part),)
        loads += [Load(part, segment, after, w.preload) for segment in found]
    return tuple(loads)


def read_while_opening(loads: Sequence[Load], program: Program, rates: Rates) -> tuple[Load, ...]:
    """The first loads that wait for no layer, as many as the disk reads while a session opens.

    A longer queue would delay reads that cannot be announced to the disk: table rows, and those of the opening itself.
    """
    first = tuple(takewhile(lambda load: load.after == 0, loads))
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    read = accumulate(load.segment.nbytes for load in first)
    return tuple(load for load, nbytes in zip(first, read, strict=True) if nbytes <= opening * rates.disk_bandwidth)


def planned_frees(
    plan: OverlapPlan, slices: Mapping[str, Slice], kept: Collection[str] | None = None
) -> dict[int, tuple[Slice, ...]]:
    """By layer, the slices that are freed when it is done: all but those `kept`, by default `staying(plan)`."""
    kept = staying(plan) if kept is None else kept
    frees: dict[int, tuple[Slice, ...]] = {}
    for w in plan.weights:
        if w.name not in kept:
            frees[w.last_use] = (*frees.get(w.last_use, ()), slices[w.name])
    return frees


def staying(plan: OverlapPlan) -> frozenset[str]:
    """Names of the slices that stay resident for later runs under the plan: those in W, and those with `keep`."""
    return frozenset(w.name for w in plan.weights if w.preload or w.keep)


@dataclass(frozen=True)
class Schedule:
    """The schedule of one run: its loads in order, its frees by layer, and the slices resident at its end.

    `held[l]` is the bytes of resident slices from the end of layer l to the end of the next one, l = 0 to N. They are whole
    pages, as in mode `map`.
    """

    loads: tuple[Load, ...]
    frees: Mapping[int, tuple[Slice, ...]]
    resident: frozenset[str]
    held: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all loads."""
        return sum(load.segment.nbytes for load in self.loads)

    def peak(self, done: int = 0) -> int:
        """The largest `held` from the end of layer `done` on, in bytes."""
        return max(self.held[done:], default=0)

    def peaks(self) -> tuple[int, ...]:
        """`peak` for every layer."""
        return tuple(accumulate(reversed(self.held), max))[::-1]


def make_schedule(
    plan: OverlapPlan,
    slices: Mapping[str, Slice],
    layout: PoolLayout,
    mode: TransferMode,
    *,
    resident: Collection[str] = (),
    kept: Collection[str] | None = None,
    done: int = 0,
    segmented: bool = True,
    undivided: Collection[str] = (),
) -> Schedule:
    """The schedule of a run that starts with the slices `resident`, continues after layer `done`, and leaves `kept` resident.

    `kept` is `staying(plan)` by default. `layout`, `mode`, `segmented` and `undivided` are those of `planned_loads`.
    """
    kept = staying(plan) if kept is None else kept
    running = plan.later() if all(w.name in resident for w in plan.weights if w.keep) else plan
    wanted = {w.name for w in plan.weights if w.name not in resident and w.last_use > done}
    planned = planned_loads(running, slices, layout, mode, preload=True, segmented=segmented, undivided=undivided)
    loads = tuple(load for load in planned if load.part.name in wanted)
    there = frozenset(w.name for w in plan.weights if w.name in wanted or w.name in resident)
    frees = {
        layer: tuple(part for part in parts if part.name in there)
        for layer, parts in planned_frees(plan, slices, kept).items()
        if layer > done
    }
    layers = len(plan.capacities)
    change = [0] * (layers + 2)
    for w in plan.weights:
        if w.name in there:
            change[0 if w.name in resident else max(w.read_layer, done + 1) - 1] += pages(slices[w.name])
            change[layers + 1 if w.name in kept else max(w.last_use, done)] -= pages(slices[w.name])
    return Schedule(loads, frees, there & frozenset(kept), tuple(accumulate(change))[: layers + 1])


def pages(part: Slice) -> int:
    """Bytes of the pages of a slice in mode `map`."""
    return whole_pages(part.file_bytes)


def kept_within(plan: OverlapPlan, slices: Mapping[str, Slice], resident: Collection[str], nbytes: float) -> frozenset[str]:
    """The slices to keep resident after a run, within `nbytes` bytes: first those resident now, then by first use.

    The next run would wait for the first slices it uses; it can read later ones while it computes.
    """
    kept = set[str]()
    left = nbytes
    for w in sorted(plan.weights, key=lambda w: (w.name not in resident, w.first_use)):
        if pages(slices[w.name]) <= left:
            kept.add(w.name)
            left -= pages(slices[w.name])
    return frozenset(kept)
