"""Q5_0: 32 codes of five bits with a scale; the fifth bits are in their order, in four bytes."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits, fifth_bits


def _split(scale: Bytes, high: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16) | fifth_bits(high), scale)


FORMAT = BlockFormat("Q5_0", 32, (2, 4, 16), (4, 1), _split, offset=16)
