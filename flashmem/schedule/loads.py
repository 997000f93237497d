"""What a run does when: its loads and their gates, what is let go after which layer, and what is held meanwhile.

Pure functions of a plan and the slices of a program: no OpenCL. Sessions, the runtime of several models and the simulator take
the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Literal

from flashmem.base.pages import page_size, whole_pages
from flashmem.base.types import TransferMode
from flashmem.program.program import Program
from flashmem.program.tensors import Slice
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PoolLayout, passing_bytes
from flashmem.schedule.residency import free_from
from flashmem.target.descriptor import Rates

WORD = 16
"""Bytes of one unit of a stream lane that moves plain buffers; device places of slices are whole words."""


def whole_words(nbytes: int) -> int:
    """`nbytes` rounded up to words."""
    return -(-nbytes // WORD) * WORD


@dataclass(frozen=True)
class Segment:
    """A part of a slice that one thread brings in: `nbytes` bytes from its byte `first` on."""

    first: int
    nbytes: int


def segments(part: Slice, mode: TransferMode) -> tuple[Segment, ...]:
    """The slice as threads share it, each what passes through staging at once: an image in whole rows; where pages are mapped,
    whole pages. The disk then has a little of a large slice announced, not all, and a segment is one copy: copies cost a driver
    more than their bytes do.
    """
    unit = part.row_pitch if part.is_image and mode != "map" else page_size()
    units = -(-part.file_bytes // unit)
    passing = passing_bytes(part)
    count = 1 if part.file_bytes <= passing else -(-units // (passing // unit))
    ends = [min(units * i // count * unit, part.file_bytes) for i in range(count + 1)]
    return tuple(Segment(first, end - first) for first, end in pairwise(ends))


def whole(part: Slice) -> Segment:
    """All of a slice."""
    return Segment(0, part.file_bytes)


@dataclass(frozen=True)
class Load:
    """A segment of a slice to bring in: `gate` is the layer that must be done first (0: none), `preload` whether it is of W."""

    part: Slice
    segment: Segment
    gate: int = 0
    preload: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Offset and bytes in the weight file."""
        return self.part.offset + self.segment.first, self.segment.nbytes


Step = Literal["read", "gate", "copy"]
"""What a load spends its time on: reading, waiting for its gate, copying to the device."""


@dataclass(frozen=True)
class TimedInterval:
    """Something that took from `start` to `end`, in seconds of `time.perf_counter()`.

    Of a load: `thread` made it, in `steps`, one after the other, each with when it ended.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    steps: tuple[tuple[Step, float], ...] = ()


LOOKED_AT = 64
"""Loads among which loader threads look for one with an open gate."""


def planned_loads(
    plan: OverlapPlan,
    slices: Mapping[str, Slice],
    layout: PoolLayout,
    mode: TransferMode,
    *,
    preload: bool,
    segmented: bool = True,
) -> tuple[Load, ...]:
    """The loads of a run in the order of what waits for them, W among them (as from layer 1 on) if `preload`.

    In segments, as slices are loaded in `mode`, or each as a whole.
    """
    free = free_from(plan, slices, layout, mode)

    def order(w: PlannedWeight) -> tuple[int, ...]:
        needed = w.first_mover if mode == "interleave" and not w.preload else w.first_use
        return (max(w.read_layer, 1) if mode == "map" else 0, needed, w.first_use)

    loads: list[Load] = []
    for w in sorted((w for w in plan.weights if preload or not w.preload), key=order):
        part, gate = slices[w.name], free.get(w.name, 0)
        loads += [Load(part, segment, gate, w.preload) for segment in (segments(part, mode) if segmented else (whole(part),))]
    return tuple(loads)


def read_while_opening(loads: Sequence[Load], program: Program, rates: Rates) -> tuple[Load, ...]:
    """The first loads behind no gate, as many as the disk brings in while a session opens.

    A longer queue before the disk would only hold up what nobody could announce: table rows, and whatever opening reads.
    """
    first = tuple(takewhile(lambda load: load.gate == 0, loads))
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    read = accumulate(load.segment.nbytes for load in first)
    return tuple(load for load, nbytes in zip(first, read, strict=True) if nbytes <= opening * rates.disk_bandwidth)


def planned_frees(
    plan: OverlapPlan, slices: Mapping[str, Slice], kept: Collection[str] | None = None
) -> dict[int, tuple[Slice, ...]]:
    """The slices that are let go when a layer is done: all but those `kept`, by default W and what is to keep."""
    kept = staying(plan) if kept is None else kept
    frees: dict[int, tuple[Slice, ...]] = {}
    for w in plan.weights:
        if w.name not in kept:
            frees[w.last_use] = (*frees.get(w.last_use, ()), slices[w.name])
    return frees


def staying(plan: OverlapPlan) -> frozenset[str]:
    """What the plan has stay for later runs."""
    return frozenset(w.name for w in plan.weights if w.preload or w.keep)


@dataclass(frozen=True)
class Schedule:
    """What one run loads, in this order, and lets go; which slices are resident when it is over.

    `held`: bytes of slices from when layer l is done until the next one is, l = 0 to N, where pages are what is held (`map`).
    """

    loads: tuple[Load, ...]
    frees: Mapping[int, tuple[Slice, ...]]
    resident: frozenset[str]
    held: tuple[int, ...]

    def peak(self, done: int = 0) -> int:
        """The most that is held from when layer `done` is done."""
        return max(self.held[done:], default=0)

    def peaks(self) -> tuple[int, ...]:
        """`peak` of every layer."""
        return tuple(accumulate(reversed(self.held), max))[::-1]


def scheduled(
    plan: OverlapPlan,
    slices: Mapping[str, Slice],
    layout: PoolLayout,
    mode: TransferMode,
    *,
    resident: Collection[str] = (),
    kept: Collection[str] | None = None,
    done: int = 0,
    segmented: bool = True,
) -> Schedule:
    """A run of `plan` that finds the slices `resident`, goes on behind layer `done`, and leaves `kept`.

    By default W and what is to keep stay. `layout`, `mode` and `segmented` as for `planned_loads`.
    """
    kept = staying(plan) if kept is None else kept
    played = plan.later() if all(w.name in resident for w in plan.weights if w.keep) else plan
    wanted = {w.name for w in plan.weights if w.name not in resident and w.last_use > done}
    planned = planned_loads(played, slices, layout, mode, preload=True, segmented=segmented)
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
    """Bytes of the pages that a slice is mapped in."""
    return whole_pages(part.file_bytes)


def kept_within(plan: OverlapPlan, slices: Mapping[str, Slice], resident: Collection[str], nbytes: float) -> frozenset[str]:
    """The slices that stay behind when a run is over, in `nbytes`: what is resident already, then in the order of their use.

    The first ones are what the next run would wait for; what comes later can be read meanwhile.
    """
    kept, left = set[str](), nbytes
    for w in sorted(plan.weights, key=lambda w: (w.name not in resident, w.first_use)):
        if pages(slices[w.name]) <= left:
            kept.add(w.name)
            left -= pages(slices[w.name])
    return frozenset(kept)
