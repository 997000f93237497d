"""Q6_K: 256 codes of six bits; each 16 have a signed factor of eight bits of a scale."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits


def _split(codes: Bytes, high: Bytes, factors: Bytes, scale: Bytes) -> Parts:
    return Parts(bits(codes, 4, 64) | bits(high, 2, 32) << np.uint8(4), scale, None, factors)


FORMAT = BlockFormat("Q6_K", 256, (128, 64, 16, 2), (4, 2), _split, offset=32, run=16, factor_planes=(8,))
