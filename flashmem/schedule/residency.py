"""The memory layout of slices in a session: the plan's layout for streaming, or all resident for `--strategy preload`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import POOL_ALIGNMENT, TEXEL_BYTES, TransferMode
from flashmem.program.program import Program, fixed_bytes
from flashmem.program.tensors import Slice
from flashmem.schedule.buffer_slots import in_slots, staging_slots
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import OverlapPlan, PoolLayout, TextureSlot, passing_bytes
from flashmem.schedule.plan import Strategy as PlannedStrategy

Strategy = PlannedStrategy | Literal["preload"]


def streamed_layout(program: Program, plan: OverlapPlan, mode: TransferMode, *, shares_memory: bool) -> PoolLayout:
    """The plan's layout for `mode`, adapted to a device that does not share the host's memory.

    Such a device gets slots instead of places in one buffer, which it cannot use. Any device can use slots.

    Raises:
        UserError: the bundle was not compiled for that mode.
    """
    if mode not in plan.layouts:
        modes = ", ".join(plan.layouts) or "none"
        raise UserError(f"the bundle has no layout for transfer mode {mode!r}, only for: {modes}; name one of them or compile")
    layout = plan.layouts[mode]
    if shares_memory or not MODES[mode].copies:
        return layout
    return with_host_ring(program, layout if not plan.shares_memory else _in_slots(program, plan, mode, layout))


def with_host_ring(program: Program, layout: PoolLayout) -> PoolLayout:
    """`layout` with the ring for a device with memory of its own: in host memory, where larger pieces cost no weights a place.

    Loads are read into some pieces while others are copied.
    """
    ring = host_ring_bytes(program, layout.threads)
    return replace(layout, piece_bytes=HOST_PIECE_BYTES, segment_bytes=HOST_PIECE_BYTES, ring_bytes=ring)


def host_ring_bytes(program: Program, threads: int) -> int:
    """Bytes of the ring in host memory for a plan with so many loader threads."""
    largest = max((passing_bytes(part, HOST_PIECE_BYTES) for part in program.slices), default=0)
    largest = max(largest, min(JOINED_BYTES, sum(part.file_bytes for part in program.slices)))
    return (threads + SPARE_PIECES) * (-(-largest // POOL_ALIGNMENT) * POOL_ALIGNMENT)


HOST_PIECE_BYTES = 5 << 20
"""Most bytes of a piece of a ring in host memory. Smaller ones take the host more calls for the same bytes. What is read into
larger ones leaves the processor's caches before it is copied (docs/research/measurements.md)."""

JOINED_BYTES = 1 << 20
"""Most bytes of loads that are read together. All else of a load takes the host longer than so many bytes; with more, other
threads would have nothing to read."""

SPARE_PIECES = 2
"""Pieces of such a ring beside one for each of the plan's loader threads."""


def _in_slots(program: Program, plan: OverlapPlan, mode: TransferMode, layout: PoolLayout) -> PoolLayout:
    """`layout`, planned for shared memory, with slots in place of one buffer."""
    slices = {part.name: part for part in program.slices}
    planned = [(slices[w.name], w) for w in plan.weights]
    begins = [MODES[mode].home_from(w) for w in plan.weights]
    layout = in_slots(layout, planned, begins, len(plan.capacities))
    if not layout.staging:
        return layout
    slots, slot_of = staging_slots(planned)
    return replace(layout, staging_bytes=0, staging={}, staging_slots=slots, staging_slot_of=slot_of)


def session_bytes(program: Program, layout: PoolLayout, *, shares_memory: bool) -> int:
    """Bytes that the budget of a session limits: on a device with memory of its own, those there."""
    return fixed_bytes(program, shares_memory=shares_memory) + layout.budgeted_bytes(shares_memory=shares_memory)


def free_from(plan: OverlapPlan, slices: Mapping[str, Slice], layout: PoolLayout, mode: TransferMode) -> dict[str, int]:
    """By streamed weight, the layer that must be done before the weight can be loaded into its place in `layout`; 0: none.

    The release time can be later than the place is free. Memory is allocated when a session opens, so an earlier read needs
    no more of it. Exceptions are mode `map`, where reading allocates memory, and the baseline strategies, which keep their own
    release times.
    """
    streamed = sorted((w for w in plan.weights if not w.preload), key=lambda w: w.read_layer)
    if MODES[mode].by_pages or plan.strategy != "stream":
        return {w.name: w.read_layer - 1 for w in streamed}
    staging = MODES[mode].by_kernels
    offsets, total = (layout.staging, layout.staging_bytes) if staging else (layout.offsets, layout.pool_bytes)
    slot_of = layout.staging_slot_of if staging else layout.slot_of
    pages = np.zeros(total // POOL_ALIGNMENT + 1, np.int64)  # by page, the last layer that uses its content
    slots = dict.fromkeys(slot_of.values(), 0)
    free: dict[str, int] = {}
    for w in streamed:
        last = w.last_mover if staging else w.last_use
        if w.name in slot_of:
            slot = slot_of[w.name]
            free[w.name] = slots[slot]
            slots[slot] = last
            continue
        start = offsets[w.name] // POOL_ALIGNMENT
        place = pages[start : start - (-slices[w.name].file_bytes // POOL_ALIGNMENT)]
        free[w.name] = int(place.max(initial=0))
        place[:] = last
    return free


def share_places(
    before: PoolLayout, after: PoolLayout, mode: TransferMode, *, slices: tuple[Collection[str], Collection[str]]
) -> bool:
    """Whether two layouts put weights in the same places, each layout with the names of its program's slices.

    If so, resident slices stay valid when a session changes to another shape variant. In mode `map` the places are pages of the
    file, which are always the same.
    """
    if MODES[mode].by_pages:
        return True
    same = (before.pool_bytes, before.offsets, before.slots, before.slot_of) == (
        after.pool_bytes, after.offsets, after.slots, after.slot_of
    )  # fmt: skip
    return same and set(slices[0]) == set(slices[1])


def preload_all(plan: OverlapPlan) -> OverlapPlan:
    """The same plan with all weights in W."""
    weights = tuple(replace(w, preload=True, read_layer=0, moves=(), keep=False) for w in plan.weights)
    return replace(plan, weights=weights)


def preloaded_layout(program: Program, mode: TransferMode, threads: int, *, shares_memory: bool) -> PoolLayout:
    """A layout in which every slice has its own memory, with the staging that loads of `mode` need."""
    kind = MODES[mode]
    unit = program.page_bytes if kind.by_pages else POOL_ALIGNMENT
    sizes = {part.name: -(-part.file_bytes // unit) * unit for part in program.slices}
    if kind.by_pages:
        return PoolLayout(mapped_peak_bytes=sum(sizes.values()), resident_bytes=sum(sizes.values()), threads=threads)
    offsets: dict[str, int] = {}
    slots: list[TextureSlot] = []
    slot_of: dict[str, int] = {}
    end = 0
    for part in program.slices:
        if part.is_image and kind.copies:
            slot_of[part.name] = len(slots)
            nbytes = part.width * part.height * TEXEL_BYTES[part.channel]
            slots.append(TextureSlot(part.width, part.height, part.channel, nbytes))
        else:
            offsets[part.name] = end
            end += sizes[part.name]
    resident = end + sum(slot.nbytes for slot in slots)
    layout = PoolLayout(
        pool_bytes=end, offsets=offsets, slots=tuple(slots), slot_of=slot_of, resident_bytes=resident, threads=threads
    )
    if not kind.copies:
        return layout
    return replace(layout, ring_bytes=threads * _largest_piece(program)) if shares_memory else with_host_ring(program, layout)


def _largest_piece(program: Program) -> int:
    """Bytes of the largest segment in the ring, in whole pages."""
    largest = max((passing_bytes(part) for part in program.slices), default=0)
    return -(-largest // POOL_ALIGNMENT) * POOL_ALIGNMENT
