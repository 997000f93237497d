"""Interleaved copy streams (stream lanes): the units of memory that a program's kernels copy while they compute."""

from __future__ import annotations

from typing import Literal

from flashmem.base.types import Channel
from flashmem.program.program import Program

LaneKind = Channel | Literal["buffer"]
"""The destination of a stream lane: textures of a channel type (and a buffer), or buffers alone."""


LANE_UNIT: dict[LaneKind, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8, "buffer": 16}
"""Bytes of the unit that a lane of this kind copies: one texel, or the same number of bytes of a buffer."""


def lane_places(kind: LaneKind) -> tuple[LaneKind, ...]:
    """The destinations of the copies that one launch can carry (kernels/templates/common/lane.cl.j2)."""
    return ("buffer",) * 4 if kind == "buffer" else (kind, kind, kind, "buffer")


def lane_kind(program: Program) -> LaneKind:
    """The kind of lanes of a program's kernels: buffers, or textures of the channel type with the most bytes."""
    totals: dict[LaneKind, int] = {}
    for part in program.slices:
        if part.is_image and program.memory_path == "texture":
            totals[part.channel] = totals.get(part.channel, 0) + part.nbytes
    return max(totals, key=lambda channel: totals[channel], default="buffer")
