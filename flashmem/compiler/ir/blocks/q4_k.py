"""Q4_K: 256 codes of four bits; each 32 have factors of six bits of a scale and a minimum."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits, six_bits


def _split(scale: Bytes, minimum: Bytes, factors: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 32), scale, minimum, six_bits(factors))


FORMAT = BlockFormat("Q4_K", 256, (2, 2, 12, 128), (4,), _split, has_minimum=True, factor_planes=(4, 2))
