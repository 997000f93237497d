"""Weights in ggml's blocks: what the bytes of a block are, and how kernels read the same bits in another order.

A kind of block is a `BlockFormat` in a file of its own in this folder. Its size, the packing of weights, what kernels read, and
what a block stands for follow from that one description. Names and layouts are those of ggml
(https://github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`).
"""

from __future__ import annotations

from flashmem.compiler.ir.blocks import iq4_nl, iq4_xs, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from flashmem.compiler.ir.blocks.floats import BF16, F16, FloatFormat
from flashmem.compiler.ir.blocks.format import BlockFormat

FORMATS: dict[str, BlockFormat] = {
    kind.FORMAT.name: kind.FORMAT for kind in (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs)
}
"""All kinds of blocks by ggml's name."""

STORED: dict[str, BlockFormat | FloatFormat] = {**FORMATS, F16.name: F16, BF16.name: BF16}
"""All kinds of weights that stay as they are in a file."""
