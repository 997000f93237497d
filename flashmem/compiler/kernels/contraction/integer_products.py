"""Products of quantised operands: exact sums of integers, and elementwise operators, which fusion adds to their epilogue.

`MatMulInteger` and `ConvInteger` sum products of 8-bit integers in int32. After the rewrites their third and fourth inputs are
the zero points of the two operands, in shapes that broadcast to the output. An operand whose zero points are 0 has no such
input. QLinearConv is ConvInteger, Add (the bias, in int32), Dequantize, Mul, Quantize.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.contraction.operators import last_columns, lift, window
from flashmem.compiler.operators.quantization import BYTES, rounded, zero_point
from flashmem.compiler.operators.registry import FLOAT, REGISTRY, Operator, register
from flashmem.compiler.operators.rewriting import reshaped, spreads


def _rows(rewriter: Rewriter, value: Value | None) -> Value | None:
    """A scale or zero point of the left operand: one for all of it, or one for each row."""
    if value is None or value.size == 1:
        return None if value is None else reshaped(rewriter, value, ())
    return reshaped(rewriter, value, (*value.shape, 1)) if len(value.shape) == 1 else value


def _columns(rewriter: Rewriter, value: Value | None) -> Value | None:
    """A scale or zero point of the right operand: one for all of it, or one for each column."""
    return reshaped(rewriter, value, ()) if value is not None and value.size == 1 else value


def _product(rewriter: Rewriter, node: Node, a: Value, b: Value, zero_a: Value | None, zero_b: Value | None) -> Value:
    """The int32 product; vectors become matrices of one row or column."""
    shape = node.outputs[0].shape
    full = (*shape, 1) if len(b.shape) == 1 else shape
    if len(b.shape) == 1:
        b = reshaped(rewriter, b, (b.shape[0], 1))
    if len(a.shape) == 1:
        full = (*full[:-1], 1, full[-1])
        a = reshaped(rewriter, a, (1, a.shape[0]))
    zeros = [_rows(rewriter, zero_point(zero_a)), _columns(rewriter, zero_point(zero_b))]
    stored = rewriter.transposed.get(b)
    inputs = [a, stored or b, *zeros]
    return rewriter.emit("MatMulInteger", inputs, full, "int32", f"{node.name}.product", transposed=int(stored is not None))


def _rewrite_matmul_integer(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite MatMulInteger: vectors become matrices; zero points broadcast to the output."""
    if not node.input(0).size:  # empty sums
        output = node.outputs[0]
        rewriter.replaced[output] = constant(output.name, np.zeros(output.shape, output.dtype))
        return
    made = _product(rewriter, node, node.input(0), node.input(1), node.optional(2), node.optional(3))
    rewriter.add("Reshape", [made], node.outputs[0], node.name)


def _rewrite_qlinear_matmul(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite QLinearMatMul: the product, scaled, rounded, and shifted to the zero point of the output."""
    a, scale_a, zero_a, b, scale_b, zero_b, scale_y, zero_y = (node.input(i) for i in range(8))
    made = _product(rewriter, node, a, b, zero_a, zero_b)
    scales = [_rows(rewriter, scale_a), _columns(rewriter, scale_b), _rows(rewriter, scale_y)]
    scale = _ratio(rewriter, node.name, [value for value in scales if value is not None])
    zero = _rows(rewriter, zero_point(zero_y))
    _requantize(rewriter, node.name, made, scale, zero, node.outputs[0])


def _ratio(rewriter: Rewriter, name: str, scales: Sequence[Value]) -> Value:
    """Scale of the left operand times that of the right one, over that of the output, rounded as in ONNX Runtime."""
    left, right, result = scales
    if all(value.constant is not None for value in scales):
        arrays = [np.asarray(value.constant.array(), np.float32) for value in scales if value.constant is not None]
        with np.errstate(all="ignore"):
            return constant(f"{name}.scale", np.asarray(arrays[0] * arrays[1] / arrays[2], np.float32))
    shape = np.broadcast_shapes(left.shape, right.shape)
    both = rewriter.emit("Mul", [left, right], shape, "float32", f"{name}.scales")
    shape = np.broadcast_shapes(shape, result.shape)
    return rewriter.emit("Quotient", [both, result], shape, "float32", f"{name}.scale")


def _requantize(
    rewriter: Rewriter, name: str, sums: Value, scale: Value, zero: Value | None, output: Value, bias: Value | None = None
) -> None:
    """Requantise int32 sums (and bias) to the integers of `output`, which has the same elements, possibly in another shape."""
    shape = sums.shape
    if bias is not None:
        sums = rewriter.emit("Add", [sums, bias], shape, "int32", f"{name}.biased")
    whole = rewriter.emit("Dequantize", [sums], shape, "float32", f"{name}.float")
    scaled = rewriter.emit("Mul", [whole, scale], shape, "float32", f"{name}.scaled")
    rounded(rewriter, name, scaled, zero, output)


def _convolved(rewriter: Rewriter, node: Node, x: Value, w: Value, zero_x: Value | None, zero_w: Value | None) -> Value:
    """The int32 convolution, over two or three dimensions."""
    output = node.outputs[0]
    sliding = window(node, w.shape[2:])
    shape = output.shape
    if len(x.shape) == 3:
        sliding = lift(sliding)
        shape = (*shape[:2], 1, shape[2])
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        w = reshaped(rewriter, w, (*w.shape[:2], 1, w.shape[2]))
    zeros = [None if zero is None else _columns(rewriter, zero_point(zero)) for zero in (zero_x, zero_w)]
    group = int(node.attributes.get("group", 1))
    return rewriter.emit("ConvInteger", [x, w, *zeros], shape, "int32", f"{node.name}.product", group=group, **sliding)


def _rewrite_conv_integer(rewriter: Rewriter, node: Node, opset: int) -> None:
    made = _convolved(rewriter, node, node.input(0), node.input(1), node.optional(2), node.optional(3))
    rewriter.add("Reshape", [made], node.outputs[0], node.name)


def _rewrite_qlinear_conv(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite QLinearConv: the convolution and the bias, scaled, rounded, and shifted to the zero point of the output."""
    x, scale_x, zero_x, w, scale_w, zero_w, scale_y, zero_y = (node.input(i) for i in range(8))
    made = _convolved(rewriter, node, x, w, zero_x, zero_w)
    bias = node.optional(8)

    def across(value: Value) -> Value:
        return reshaped(rewriter, value, () if value.size == 1 else (value.size, *[1] * (len(made.shape) - 2)))

    scale = _ratio(rewriter, node.name, [across(scale_x), across(scale_w), across(scale_y)])
    zero = zero_point(zero_y)
    bias = None if bias is None else reshaped(rewriter, bias, (bias.size, *[1] * (len(made.shape) - 2)))
    _requantize(rewriter, node.name, made, scale, None if zero is None else across(zero), node.outputs[0], bias)


def _bad_product(node: Node, a: Value, b: Value, left: Sequence[Value | None], right: Sequence[Value | None]) -> str | None:
    """Why a product of `a` and `b`, with scales and zero points `left` and `right`, is impossible, or None."""
    if not a.shape or not b.shape or a.shape[-1] != (b.shape[-2] if len(b.shape) > 1 else b.shape[0]):
        return f"{node.op} of shapes {a.shape} and {b.shape}"
    rows = (*node.outputs[0].shape[:-1], 1) if len(b.shape) > 1 else (*node.outputs[0].shape, 1)
    rows = rows if len(a.shape) > 1 else (*rows[:-1], 1, 1)
    columns = (*b.shape[:-2], 1, b.shape[-1]) if len(b.shape) > 1 else (1, 1)
    for value in left:
        if value is not None and value.size != 1:
            shape = (*value.shape, 1) if len(value.shape) == 1 else value.shape
            if not spreads(shape, rows):
                return f"{node.op} of shapes {a.shape} and {b.shape} with a scale or zero point of shape {value.shape}"
    for value in right:
        if value is not None and value.size != 1 and not spreads(value.shape, columns):
            return f"{node.op} of shapes {a.shape} and {b.shape} with a scale or zero point of shape {value.shape}"
    return None


def _check_matmul_integer(node: Node) -> str | None:
    return _bad_product(node, node.input(0), node.input(1), [node.optional(2)], [node.optional(3)])


def _check_qlinear_matmul(node: Node) -> str | None:
    a, scale_a, zero_a, b, scale_b, zero_b, scale_y, zero_y = (node.input(i) for i in range(8))
    if zero_y.dtype != node.outputs[0].dtype:
        return f"{node.op} to {node.outputs[0].dtype} with a zero point of {zero_y.dtype}"
    return _bad_product(node, a, b, [scale_a, zero_a, scale_y, zero_y], [scale_b, zero_b])


def _check_conv_integer(node: Node) -> str | None:
    return _bad_integer_convolution(node, node.input(0), node.input(1), None, [node.optional(2)], [node.optional(3)])


def _check_qlinear_conv(node: Node) -> str | None:
    x, scale_x, zero_x, w, scale_w, zero_w, scale_y, zero_y = (node.input(i) for i in range(8))
    if zero_y.dtype != node.outputs[0].dtype:
        return f"{node.op} to {node.outputs[0].dtype} with a zero point of {zero_y.dtype}"
    return _bad_integer_convolution(node, x, w, node.optional(8), [scale_x, zero_x, scale_y, zero_y], [scale_w, zero_w])


def _bad_integer_convolution(
    node: Node, x: Value, w: Value, bias: Value | None, single: Sequence[Value | None], columns: Sequence[Value | None]
) -> str | None:
    if w.constant is None:
        return f"{node.op} with weights computed at run time is not implemented"
    reason = REGISTRY["Conv"].check(Node(node.op, node.name, [x, w, bias], node.outputs, node.attributes))
    if reason is not None:
        return reason
    for value in single:
        if value is not None and value.size != 1:
            return f"{node.op} with a scale or zero point of shape {value.shape} for its whole input or output"
    for value in columns:
        if value is not None and value.size not in (1, w.shape[0]):
            return f"{node.op} with a scale or zero point of shape {value.shape} for {w.shape[0]} filters"
    return None


register(
    __name__,
    Operator(
        "MatMulInteger", (BYTES,), check=_check_matmul_integer, rewrite=_rewrite_matmul_integer, kernel="matmul",
        columns=last_columns, in_place="epilogue", epilogue_cast=True, operator_class="reusable", empty=True,
    ),
    Operator(
        "ConvInteger", (BYTES,), check=_check_conv_integer, rewrite=_rewrite_conv_integer, kernel="convolution",
        layout="channels_last", columns=last_columns, in_place="epilogue", epilogue_cast=True, operator_class="reusable",
    ),
    Operator(
        "QLinearMatMul", (BYTES, FLOAT, BYTES, BYTES, FLOAT, BYTES, FLOAT, BYTES), check=_check_qlinear_matmul,
        rewrite=_rewrite_qlinear_matmul, operator_class="reusable",
    ),
    Operator(
        "QLinearConv", (BYTES, FLOAT, BYTES, BYTES, FLOAT, BYTES, FLOAT, BYTES, frozenset({"int32"})),
        check=_check_qlinear_conv, rewrite=_rewrite_qlinear_conv, operator_class="reusable",
    ),
)  # fmt: skip
