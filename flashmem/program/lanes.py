"""Interleaved copy streams: which units of memory the kernels of a program copy beside their own work."""

from __future__ import annotations

from typing import Literal

from flashmem.base.types import Channel
from flashmem.program.program import Program

LaneKind = Channel | Literal["buffer"]
"""What a stream lane writes: textures of a channel type (and a buffer), or buffers alone."""


LANE_UNIT: dict[LaneKind, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8, "buffer": 16}
"""Bytes of a unit that such a lane moves: a texel, or as many bytes of a buffer."""


def lane_places(kind: LaneKind) -> tuple[LaneKind, ...]:
    """What each of the moves writes that one launch can take along (kernels/templates/common/lane.cl.j2)."""
    return ("buffer",) * 4 if kind == "buffer" else (kind, kind, kind, "buffer")


def lane_kind(program: Program) -> LaneKind:
    """What the stream lanes of a program's kernels write: buffers, or textures of the channel type that most bytes have."""
    totals: dict[LaneKind, int] = {}
    for part in program.slices:
        if part.is_image and program.memory_path == "texture":
            totals[part.channel] = totals.get(part.channel, 0) + part.nbytes
    return max(totals, key=lambda channel: totals[channel], default="buffer")
