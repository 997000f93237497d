"""QDQ fusion: products read 8-bit integers and dequantise them in their kernels, if a DequantizeLinear has one scale.

After this pass MatMul, Conv and ConvTranspose may have integer operands. Inputs 2 and 3 are then the zero points of the left
and the right operand, inputs 4 and 5 their scales, each one number or None. The kernel multiplies (integer - zero point) *
scale, rounded like DequantizeLinear, so no answer changes; or it multiplies integers, and scales their exact sum
(`compiler.kernels.contraction.dot_products`). The tensors between two operators of a quantised model stay 8 bit.
"""

from __future__ import annotations

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Graph, Node, Value

_PRODUCTS = {"Conv", "ConvTranspose", "MatMul"}


def fuse_qdq(graph: Graph) -> Graph:
    """`graph` (decomposed), in which products read the integers of operands that are dequantised with one scale."""
    rewriter = Rewriter()
    for node in graph.nodes:
        inputs = list(node.inputs)
        if node.op in _PRODUCTS and len(inputs) == 2:
            sources = [_source(value) for value in node.inputs]
            if node.op != "MatMul":  # the weights of convolutions are constants
                sources[1] = None
            left, right = sources
            if any(sources) and (node.op == "MatMul" or _is_plain_convolution(node)):
                codes = [value if source is None else source[0] for value, source in zip(inputs, sources, strict=True)]
                inputs = [*codes, left and left[1], right and right[1], left and left[2], right and right[2]]
        node.outputs[0].producer = Node(node.op, node.name, inputs, node.outputs, node.attributes)
        rewriter.nodes.append(node.outputs[0].producer)
    return rewriter.graph(graph)


def _source(value: Value | None) -> tuple[Value, Value | None, Value] | None:
    """(integers, zero point, scale) of a value that is dequantised with one scale; else None."""
    scaled = value.producer if value is not None else None
    if scaled is None or scaled.op != "Mul" or len(scaled.inputs) != 2:
        return None
    whole = scaled.input(0)
    scale = scaled.input(1)
    made = whole.producer
    if made is None or made.op != "Dequantize" or whole.shape != scaled.outputs[0].shape or scale.size != 1:
        return None
    zero = made.optional(1)
    if (
        made.input(0).dtype not in ("int8", "uint8")
        or made.input(0).constant is not None
        or (zero is not None and zero.size != 1)
    ):
        return None
    return made.input(0), zero, scale


def _is_plain_convolution(node: Node) -> bool:
    weight = node.input(1)
    return weight.constant is not None and len(weight.shape) == 4
