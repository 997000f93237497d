"""IQ4_NL: 32 codes of four bits with a scale; a code stands for one of 16 integers."""

from __future__ import annotations

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes, Parts, bits

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _split(scale: Bytes, codes: Bytes) -> Parts:
    return Parts(bits(codes, 4, 16), scale)


FORMAT = BlockFormat("IQ4_NL", 32, (2, 16), (4,), _split, values=VALUES)
