"""Where slices live in a session: the plan's layout for streaming, or everything resident for `--strategy preload`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from flashmem.device import TransferMode
from flashmem.errors import BudgetError, UserError
from flashmem.planning.plan import OverlapPlan, PoolLayout, TextureSlot
from flashmem.planning.plan import Strategy as PlannedStrategy
from flashmem.program import SLICE_ALIGNMENT, Program
from flashmem.runtime.opencl import TEXEL_BYTES
from flashmem.units import format_size

Strategy = PlannedStrategy | Literal["preload"]

_STAGING_PART = 8 << 20
"""Bytes of staging a loader thread has while everything is preloaded: large reads keep a disk busy."""


def choose_strategy(plan: OverlapPlan, wanted: str) -> Strategy:
    """The strategy of a session that was asked for `wanted`, "auto" being the plan's own.

    Raises:
        UserError: there is no such strategy, or the plan is of another one.
    """
    if wanted == "preload":
        return "preload"
    if wanted not in ("auto", *get_args(PlannedStrategy)):
        raise UserError(f"strategy {wanted!r} is unknown; name one of: {', '.join(get_args(PlannedStrategy))}, preload")
    if wanted not in ("auto", plan.strategy):
        raise UserError(
            f"the bundle was not compiled for strategy {wanted!r}; it plays {plan.strategy} and preload: compile the model anew"
        )
    return plan.strategy


def require_budget(limit: int | None, needed: int, mode: TransferMode) -> None:
    """Check that `needed` bytes, of which `mode` decides, are within `limit` (None: there is none).

    Raises:
        BudgetError: they are not.
    """
    if limit is not None and limit < needed:
        raise BudgetError(
            f"budget {format_size(limit)} is too small: the bundle needs {needed} bytes in transfer mode {mode}; "
            "raise the budget, or compile the model for this one",
            smallest_bytes=needed,
            binding=f"the layout for transfer mode {mode}",
        )


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
    weights = tuple(replace(w, preload=True, load_layer=0, moves=()) for w in plan.weights)
    return replace(plan, weights=weights)


def preloaded_layout(program: Program, mode: TransferMode, threads: int) -> PoolLayout:
    """A place of its own for every slice."""
    sizes = {part.name: -(-part.file_bytes // SLICE_ALIGNMENT) * SLICE_ALIGNMENT for part in program.slices}
    if mode == "map":
        return PoolLayout(mapped_peak_bytes=sum(sizes.values()))
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
    layout = PoolLayout(pool_bytes=end, offsets=offsets, slots=tuple(slots), slot_of=slot_of)
    largest = max(sizes.values(), default=0)
    if mode == "dma":
        pitch = max((part.row_pitch for part in program.slices), default=0)
        part_bytes = max(min(largest, _STAGING_PART), -(-pitch // SLICE_ALIGNMENT) * SLICE_ALIGNMENT)
        return replace(layout, staging_bytes=threads * part_bytes)
    if mode == "interleave":  # one entrance that slices pass through
        return replace(layout, staging_bytes=largest, staging=dict.fromkeys(sizes, 0))
    return layout
