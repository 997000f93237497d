"""What a run does when: its loads and their gates, what is let go after which layer, and what is held meanwhile.

Pure functions of a plan and the slices of a program: no OpenCL. Sessions, the runtime of several models and the simulator take
the same ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from flashmem.device import Rates, TransferMode
from flashmem.planning.plan import OverlapPlan, passing_bytes
from flashmem.program import Program, Slice

WORD = 16
"""Bytes of one unit of a stream lane that moves plain buffers; device places of slices are whole words."""


def whole_words(nbytes: int) -> int:
    """`nbytes` rounded up to words."""
    return -(-nbytes // WORD) * WORD


@dataclass(frozen=True)
class Band:
    """A part of a slice that one thread brings in: `nbytes` bytes from its byte `first` on."""

    first: int
    nbytes: int


def bands(part: Slice, mode: TransferMode) -> tuple[Band, ...]:
    """The slice as threads share it, each what passes through staging at once: an image in whole rows; where pages are mapped,
    whole pages. The disk then has a little of a large slice announced, not all, and a band is one copy: copies cost a driver
    more than their bytes do.
    """
    unit = part.row_pitch if part.is_image and mode != "map" else mmap.PAGESIZE
    units = -(-part.file_bytes // unit)
    passing = passing_bytes(part)
    count = 1 if part.file_bytes <= passing else -(-units // (passing // unit))
    ends = [min(units * i // count * unit, part.file_bytes) for i in range(count + 1)]
    return tuple(Band(first, end - first) for first, end in pairwise(ends))


def whole(part: Slice) -> Band:
    """All of a slice."""
    return Band(0, part.file_bytes)


@dataclass(frozen=True)
class Load:
    """A band of a slice to bring in: `gate` is the layer that must be done first (0: none), `preload` whether it is of W."""

    part: Slice
    band: Band
    gate: int = 0
    preload: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Offset and bytes in the weight file."""
        return self.part.offset + self.band.first, self.band.nbytes


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds of `time.perf_counter()`."""

    name: str
    start: float
    end: float


def planned_loads(
    plan: OverlapPlan, slices: Mapping[str, Slice], *, preload: bool, mode: TransferMode | None = None
) -> tuple[Load, ...]:
    """The loads of a run in the order of (g_w, z_w, i_w), W among them (as from layer 1 on) if `preload`.

    In bands, as slices are loaded in `mode`; None: each as a whole.
    """
    chosen = [w for w in plan.weights if preload or not w.preload]
    chosen.sort(key=lambda w: (max(w.read_layer, 1), w.first_mover if mode == "interleave" else w.first_use, w.first_use))
    loads: list[Load] = []
    for w in chosen:
        part, gate = slices[w.name], max(w.read_layer, 1) - 1
        loads += [Load(part, band, gate, w.preload) for band in (bands(part, mode) if mode else (whole(part),))]
    return tuple(loads)


def read_while_opening(loads: Sequence[Load], program: Program, rates: Rates) -> tuple[Load, ...]:
    """The first loads behind no gate, as many as the disk brings in while a session opens.

    A longer queue before the disk would only hold up what nobody could announce: table rows, and whatever opening reads.
    """
    first = tuple(takewhile(lambda load: load.gate == 0, loads))
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    read = accumulate(load.band.nbytes for load in first)
    return tuple(load for load, nbytes in zip(first, read, strict=True) if nbytes <= opening * rates.disk_bandwidth)


def planned_frees(plan: OverlapPlan, slices: Mapping[str, Slice]) -> dict[int, tuple[Slice, ...]]:
    """The streamed slices that are let go when a layer is done: those that are not kept for later runs."""
    frees: dict[int, tuple[Slice, ...]] = {}
    for w in plan.weights:
        if not (w.preload or w.keep):
            frees[w.last_use] = (*frees.get(w.last_use, ()), slices[w.name])
    return frees
