"""Q8_0: 32 signed codes of eight bits with a scale."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts


def _split(scale: Bytes, codes: Bytes) -> Parts:
    return Parts(codes, scale)


FORMAT = BlockFormat("Q8_0", 32, (2, 32), (8,), _split)
