"""Q2_K: 256 codes of two bits; each 16 have factors of four bits of a scale and a minimum."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits


def _split(factors: Bytes, codes: Bytes, scale: Bytes, minimum: Bytes) -> Parts:
    both = np.concatenate([factors & np.uint8(15), factors >> np.uint8(4)], axis=1)
    return Parts(bits(codes, 2, 32), scale, minimum, both)


FORMAT = BlockFormat("Q2_K", 256, (16, 64, 2, 2), (2,), _split, has_minimum=True, run=16, factor_planes=(4,))
