"""Products of 8-bit integers by dot products of words: four bytes of both operands at a time (contraction/mac.cl.j2, `t.dots`).

Devices have instructions for them (`runtime.opencl.dot_products`). Sums are exact, so they have the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.compiler.ir.graph import Node
from flashmem.compiler.kernels.contraction.quantisation import WeightBinding
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.program.launches import Arg

WORD = 4
"""Bytes of a word: steps of depth that one dot product multiplies."""

MOST_DEPTH = (2**31 - 1) // 255**2
"""The most steps of depth whose products, each of two differences of bytes, have a sum in int32."""


@dataclass(frozen=True)
class DotProduct:
    """A product by dot products. `left`: the type of the left operand's bytes; `filling`: its number outside of an image.

    `words`: words of the left operand that are read by one load.
    """

    left: str
    words: int = 1
    filling: int = 0

    def outside(self, context: LoweringContext, channels: int) -> Arg:
        """A resident array of `channels` bytes that are read outside of an image."""
        content = np.full(channels, self.filling, np.int16).astype(np.uint8)  # the bits of int8 or uint8
        return context.data("filling", channels, lambda: content)

    @staticmethod
    def dims(family: str, dims: Sequence[int]) -> list[int]:
        """The sizes of a kernel of `family`, where those along the depth count words."""
        at = (1,) if family == "matmul" else (3, 4)  # the depth; channels, and those of a group
        return [size // WORD if i in at else size for i, size in enumerate(dims)]


def dot_product(context: LoweringContext, node: Node, binding: WeightBinding, depth: int, run: int) -> DotProduct | None:
    """How dot products compute the product `node` with weights in `binding`; None if they do not.

    `run`: steps of depth that are contiguous in the left operand. Both operands have 8 bits by the model's own meaning. Words
    are whole, the sums have 32 bits, and the number outside of an image is known.
    """
    if not context.descriptor.dot_products or node.op not in ("MatMul", "MatMulInteger", "Conv", "ConvInteger"):
        return None
    left = context.stored(node.input(0))
    words = left in ("char", "uchar") and binding.storage in ("int8", "uint8") and binding.codes is not None
    if not words or run % WORD or depth > MOST_DEPTH or not _scales_whole(node, binding):
        return None
    filling = _filling(node, binding)
    if filling is None:
        return None
    offsets = max(context.nbytes(node.input(0)), depth * node.outputs[0].shape[-1])
    together = context.descriptor.code.vector_loads and run % (4 * WORD) == 0 and offsets < MOST_OFFSET
    return DotProduct(left, 4 if together else 1, filling)


def _scales_whole(node: Node, binding: WeightBinding) -> bool:
    """Whether sums are scaled as a whole, or, if they are the result, not at all."""
    if binding.weight_minimum is not None:
        return False
    if node.outputs[0].dtype == "int32":
        return binding.scale is None and binding.weight_scale is None
    return binding.scale is not None and binding.weight_scale is not None and not binding.block


def _filling(node: Node, binding: WeightBinding) -> int | None:
    """The left operand's number outside of an image, which means zero; None if it is not known."""
    zero = node.optional(2) if binding.zero is not None else None
    if zero is None or not any(node.attributes.get("pads", ())):
        return 0
    if zero.constant is None or zero.size != 1:
        return None
    return int(zero.constant.array().reshape(-1)[0])
