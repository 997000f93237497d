"""Where slices live in a session: the plan's layout for streaming, or everything resident for `--strategy preload`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flashmem.device import TransferMode
from flashmem.errors import UserError
from flashmem.planning.plan import OverlapPlan, PoolLayout, TextureSlot, passing_bytes
from flashmem.planning.plan import Strategy as PlannedStrategy
from flashmem.program import SLICE_ALIGNMENT, TEXEL_BYTES, Program

Strategy = PlannedStrategy | Literal["preload"]


def streamed_layout(program: Program, plan: OverlapPlan, mode: TransferMode, *, shares_memory: bool) -> PoolLayout:
    """The layout that the plan has for `mode`, on a device that shares the host's memory or does not.

    Raises:
        UserError: the bundle was not compiled for that mode.
    """
    if mode not in plan.layouts:
        modes = ", ".join(plan.layouts) or "none"
        raise UserError(f"the bundle has no layout for transfer mode {mode!r}, only for: {modes}; name one of them or compile")
    layout = plan.layouts[mode]
    if mode == "interleave" and not shares_memory and not layout.ring_bytes:  # planned for another kind of device
        layout = replace(layout, ring_bytes=layout.threads * _largest_piece(program))
    return layout


def preloaded(plan: OverlapPlan) -> OverlapPlan:
    """The same plan with every weight in W."""
    weights = tuple(replace(w, preload=True, read_layer=0, moves=(), keep=False) for w in plan.weights)
    return replace(plan, weights=weights)


def preloaded_layout(program: Program, mode: TransferMode, threads: int, *, shares_memory: bool) -> PoolLayout:
    """A place of its own for every slice, and what loads pass through."""
    sizes = {part.name: -(-part.file_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT for part in program.slices}
    if mode == "map":
        return PoolLayout(mapped_peak_bytes=sum(sizes.values()), resident_bytes=sum(sizes.values()), threads=threads)
    offsets: dict[str, int] = {}
    slots: list[TextureSlot] = []
    slot_of: dict[str, int] = {}
    end = 0
    for part in program.slices:
        if part.is_image and mode != "alias":
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
    piece = _largest_piece(program)
    if mode == "dma":
        return replace(layout, staging_bytes=threads * piece)
    if mode == "interleave" and not shares_memory:
        return replace(layout, ring_bytes=threads * piece, staging=dict.fromkeys(sizes, 0))
    if mode == "interleave":  # one entrance that slices pass through
        return replace(layout, staging_bytes=threads * piece, staging=dict.fromkeys(sizes, 0), entrance_bytes=piece)
    return layout


def _largest_piece(program: Program) -> int:
    """Bytes that pass through staging at a time of the largest slice: whole pages."""
    largest = max((passing_bytes(part) for part in program.slices), default=0)
    return -(-largest // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
