"""Q4_1: 32 codes of four bits with a scale and a minimum."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits


def _split(scale: Bytes, minimum: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16), scale, minimum)


FORMAT = BlockFormat("Q4_1", 32, (2, 2, 16), (4,), _split, has_minimum=True)
