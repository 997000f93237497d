"""Q3_K: 256 codes of three bits; each 16 have a factor of six bits of a scale. The third bits are stored apart."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits


def _split(high: Bytes, codes: Bytes, factors: Bytes, scale: Bytes) -> Parts:
    low = bits(factors[:, :8], 4, 8)
    upper = bits(factors[:, 8:], 2, 4)
    return Parts(bits(codes, 2, 32) | bits(high, 1, 32) << np.uint8(2), scale, None, low | upper << np.uint8(4))


FORMAT = BlockFormat(
    "Q3_K", 256, (32, 64, 12, 2), (2, 1), _split, offset=4, run=16, factor_planes=(4, 2), factor_offset=32
)  # fmt: skip
