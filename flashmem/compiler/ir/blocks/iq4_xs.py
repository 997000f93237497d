"""IQ4_XS: 256 codes of four bits, which stand for the integers of IQ4_NL; each 32 have a factor of six bits of a scale."""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits
from flashmem.compiler.ir.blocks.iq4_nl import VALUES


def _split(scale: Bytes, high: Bytes, low: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16), scale, None, bits(low, 4, 1) | bits(high, 2, 1) << np.uint8(4))


FORMAT = BlockFormat("IQ4_XS", 256, (2, 2, 4, 128), (4,), _split, factor_planes=(4, 2), factor_offset=32, values=VALUES)
