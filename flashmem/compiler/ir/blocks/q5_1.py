"""Q5_1: 32 codes of five bits with a scale and a minimum."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits, fifth_bits


def _split(scale: Bytes, minimum: Bytes, high: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16) | fifth_bits(high), scale, minimum)


FORMAT = BlockFormat("Q5_1", 32, (2, 2, 4, 16), (4, 1), _split, has_minimum=True)
