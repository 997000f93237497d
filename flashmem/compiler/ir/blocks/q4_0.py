"""Q4_0: 32 codes of four bits with a scale; the first half of the block is in low nibbles."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits


def _split(scale: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16), scale)


FORMAT = BlockFormat("Q4_0", 32, (2, 16), (4,), _split, offset=8)
