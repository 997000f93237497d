"""Where slices live in a session: the plan's layout for streaming, or everything resident for `--strategy preload`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flashmem.device import TransferMode
from flashmem.errors import UserError
from flashmem.planning.plan import OverlapPlan, PoolLayout, TextureSlot, passing_bytes
from flashmem.planning.plan import Strategy as PlannedStrategy
from flashmem.program import POOL_ALIGNMENT, TEXEL_BYTES, Program

Strategy = PlannedStrategy | Literal["preload"]


def streamed_layout(plan: OverlapPlan, mode: TransferMode) -> PoolLayout:
    """The layout that the plan has for `mode`.

    Raises:
        UserError: the bundle was not compiled for that mode.
    """
    if mode not in plan.layouts:
        modes = ", ".join(plan.layouts) or "none"
        raise UserError(f"the bundle has no layout for transfer mode {mode!r}, only for: {modes}; name one of them or compile")
    return plan.layouts[mode]


def preloaded(plan: OverlapPlan) -> OverlapPlan:
    """The same plan with every weight in W."""
    weights = tuple(replace(w, preload=True, read_layer=0, moves=(), keep=False) for w in plan.weights)
    return replace(plan, weights=weights)


def preloaded_layout(program: Program, mode: TransferMode, threads: int) -> PoolLayout:
    """A place of its own for every slice."""
    unit = program.page_bytes if mode == "map" else POOL_ALIGNMENT
    sizes = {part.name: -(-part.file_bytes // unit) * unit for part in program.slices}
    if mode == "map":
        return PoolLayout(mapped_peak_bytes=sum(sizes.values()), resident_bytes=sum(sizes.values()))
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
    layout = PoolLayout(pool_bytes=end, offsets=offsets, slots=tuple(slots), slot_of=slot_of, resident_bytes=resident)
    largest = max((passing_bytes(part) for part in program.slices), default=0)
    piece = -(-largest // POOL_ALIGNMENT) * POOL_ALIGNMENT
    if mode == "dma":
        return replace(layout, staging_bytes=threads * piece)
    if mode == "interleave":  # one entrance that slices pass through
        return replace(layout, staging_bytes=threads * piece, staging=dict.fromkeys(sizes, 0), entrance_bytes=piece)
    return layout
