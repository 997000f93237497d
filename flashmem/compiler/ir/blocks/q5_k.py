"""Q5_K: 256 codes of five bits; each 32 have factors of six bits of a scale and a minimum."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits, six_bits


def _split(scale: Bytes, minimum: Bytes, factors: Bytes, high: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 32) | bits(high, 1, 32) << np.uint8(4), scale, minimum, six_bits(factors))


FORMAT = BlockFormat("Q5_K", 256, (2, 2, 12, 32, 128), (4, 1), _split, has_minimum=True, factor_planes=(4, 2))
