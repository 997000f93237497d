"""Quantised arithmetic: integers of 8 bits that stand for (integer - zero point) * scale.

Everything is said by an exact product of integers and by elementwise operators, which fusion puts in the product's epilogue:

- `MatMulInteger` and `ConvInteger` sum products of 8-bit integers in int32. After the rewrites their third and fourth inputs
  are the zero points of the two operands, where these are not 0, in shapes that broadcast to the output.
- `Dequantize` is a number less its zero point, in float32. `Quantize` rounds, half to even, adds a zero point, and saturates.

So QLinearConv is ConvInteger, Add (the bias, in int32), Dequantize, Mul, Quantize; DequantizeLinear of what is computed is
Dequantize and Mul. DequantizeLinear of a constant is a constant (`graph.quantized`), which contractions keep as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashmem.graph.builder import DerivedConstant, Rewriter, constant, derived
from flashmem.graph.ir import ArrayConstant, Constant, Node, Value
from flashmem.graph.operators.contraction import lift, window
from flashmem.graph.operators.lowering import from_front, reshaped, spreads
from flashmem.graph.operators.registry import FLOAT, REGISTRY, Operator, Types, elementwise, register
from flashmem.graph.operators.vector import Vector
from flashmem.graph.quantized import QuantizedConstant
from flashmem.program import DType

BYTES: Types = frozenset({"int8", "uint8"})
CODES: Types = frozenset({"int8", "uint8", "int16", "uint16", "int32"})
"""What DequantizeLinear takes."""

NUMBER: Types = frozenset({"float32", "int32"})
"""What QuantizeLinear takes."""

# Expressions


def _dequantize(node: Node, x: Sequence[str], v: Vector) -> str:
    difference = x[0] if len(x) == 1 else f"{x[0]} - {x[1]}"
    return f"convert_{v.named('float')}({difference})"


def _quantize(node: Node, x: Sequence[str], v: Vector) -> str:
    """Bounds come before the zero point is added, so that the sum is exact. NaN gives the lower one."""
    limits = np.iinfo(node.outputs[0].dtype)
    low, high = v.literal("float32", int(limits.min)), v.literal("float32", int(limits.max))
    if len(x) == 1:
        return f"convert_{v.named('int')}(rint(fmin(fmax({x[0]}, {low}), {high})))"
    zero = f"convert_{v.named('float')}({x[1]})"
    return f"convert_{v.named('int')}(rint(fmin(fmax({x[0]}, {low} - {zero}), {high} - {zero}))) + {x[1]}"


def _range_scale(node: Node, x: Sequence[str], v: Vector) -> str:
    """The scale with which 0 to 255 covers the numbers from x[0] to x[1], and 0."""
    zero = v.literal("float32", 0)
    span = f"(fmax({x[1]}, {zero}) - fmin({x[0]}, {zero}))"
    return v.choose(
        "float32", v.truth("float32", f"{span} == {zero}"), v.literal("float32", 1),
        f"fm_quotient({span}, {v.literal('float32', 255)})",
    )  # fmt: skip


def _range_zero(node: Node, x: Sequence[str], v: Vector) -> str:
    """The zero point: x[0] is the smallest number, x[1] the scale. Of an infinite range it is 255, as in ONNX Runtime."""
    zero, high = v.literal("float32", 0), v.literal("float32", 255)
    return f"convert_{v.named('int')}(rint(fmax(fmin({zero} - fm_quotient(fmin({x[0]}, {zero}), {x[1]}), {high}), {zero})))"


# Shapes of scales and zero points


def _blocks(node: Node, x: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...] | None:
    """The block of each axis of `x` that shares an element of `scale`, of the same rank; None if the shapes do not fit."""
    rank = len(x)
    if scale in ((), (1,)):
        return tuple(max(1, size) for size in x)
    axis = from_front(int(node.attributes.get("axis", 1)), rank)
    if not 0 <= axis < rank:
        return None
    size = int(node.attributes.get("block_size", 0))
    if size == 0:
        if scale != (x[axis],):
            return None
        return tuple(1 if a == axis else max(1, n) for a, n in enumerate(x))
    if size < 0 or scale != tuple(-(-n // size) if a == axis else n for a, n in enumerate(x)):
        return None
    return tuple(size if a == axis else 1 for a in range(rank))


def _counts(x: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a scale, in the rank of what it scales."""
    return tuple(-(-size // b) for size, b in zip(x, block, strict=True))


def _check_linear(node: Node) -> str | None:
    """Of QuantizeLinear and DequantizeLinear: the scale fits, and the zero point fits the scale."""
    x, scale, zero = node.input(0), node.input(1), node.optional(2)
    if _blocks(node, x.shape, scale.shape) is None:
        axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
        how = f"axis {axis}" + (f" and block_size {block}" if block else "")
        return f"{node.op} of shape {x.shape} with a scale of shape {scale.shape} along {how}"
    if zero is not None and zero.size != scale.size:
        return f"{node.op} with a scale of shape {scale.shape} and a zero point of shape {zero.shape}"
    made = node.outputs[0].dtype if node.op == "QuantizeLinear" else x.dtype
    if zero is not None and zero.dtype != made:
        return f"{node.op} of {made} with a zero point of {zero.dtype}"
    return None


def linear_constant(node: Node, bits: int) -> Value | None:
    """The constant that a QuantizeLinear or DequantizeLinear of constants is, `bits` an element; None for any other node."""
    given = [value for value in node.inputs if value is not None]
    if node.op not in ("QuantizeLinear", "DequantizeLinear") or len(given) < 2 or not node.input(0).size:
        return None
    if any(value.constant is None for value in given) or REGISTRY[node.op].why_not(node) is not None:
        return None
    x, output = node.input(0), node.outputs[0]
    block = _blocks(node, x.shape, node.input(1).shape)
    assert block is not None and x.constant is not None
    scale = _constant_along(node.input(1), x.shape, block)
    zero = _constant_along(zero_point(node.optional(2)), x.shape, block)
    assert scale is not None
    scale = ArrayConstant(np.asarray(scale.data, np.float32))
    floats = QuantizedConstant(x.constant, scale, zero, block, bits)
    made = floats if node.op == "DequantizeLinear" else _codes(floats, np.dtype(output.dtype))
    return Value(output.name, output.shape, output.dtype, made)


def _constant_along(value: Value | None, x: tuple[int, ...], block: tuple[int, ...]) -> ArrayConstant | None:
    """A constant scale or zero point in the rank of what it belongs to."""
    if value is None or value.constant is None:
        return None
    return ArrayConstant(value.constant.array().reshape(_counts(x, block)))


def _codes(given: QuantizedConstant, dtype: np.dtype[Any]) -> Constant:
    """What QuantizeLinear makes of the constant `given.codes`, when it is read."""

    def compute() -> NDArray[Any]:
        limits, zero = np.iinfo(dtype), 0 if given.zero is None else given.spread(given.zero.array()).astype(np.int64)
        with np.errstate(all="ignore"):
            rounded = np.rint(given.codes.array().astype(np.float32) / given.spread(given.scale.array()))
        bounded = np.clip(np.nan_to_num(rounded, nan=-np.inf, posinf=1e9, neginf=-1e9), -1e9, 1e9)
        codes: NDArray[Any] = np.clip(bounded.astype(np.int64) + zero, limits.min, limits.max).astype(dtype)
        return codes

    return DerivedConstant(given.shape, dtype, compute)


# Rewrites


def zero_point(value: Value | None) -> Value | None:
    """A zero point, or None if it is known to be 0 everywhere."""
    if value is None or (value.constant is not None and value.size and not np.any(value.constant.array())):
        return None
    return value


def _along(rewriter: Rewriter, value: Value | None, x: tuple[int, ...], block: tuple[int, ...]) -> Value | None:
    """A scale or zero point in a shape that broadcasts to `x`; blocks that are part of an axis are written out."""
    if value is None:
        return None
    counts = _counts(x, block)
    value = reshaped(rewriter, value, counts)
    for axis, (size, count) in enumerate(zip(x, counts, strict=True)):
        if 1 < count < size:
            value = _repeated(rewriter, value, axis, np.arange(size, dtype=np.int64) // block[axis])
    return value


def _repeated(rewriter: Rewriter, value: Value, axis: int, at: NDArray[np.int64]) -> Value:
    """Elements `at` of `value` along an axis."""
    name, shape = f"{value.name}.whole", (*value.shape[:axis], at.size, *value.shape[axis + 1 :])
    if value.constant is not None:
        return derived(value, name, shape, lambda array: array.take(at, axis))
    return rewriter.emit("Gather", [value, constant(f"{name}.at", at)], shape, value.dtype, name, axis=axis)


def _split_blocks(rewriter: Rewriter, x: Value, block: tuple[int, ...]) -> tuple[Value, tuple[int, ...], tuple[int, ...]]:
    """`x` with an axis whose blocks fit evenly cut into (blocks, block), and the blocks of the new axes."""
    for axis, (size, b) in enumerate(zip(x.shape, block, strict=True)):
        if 1 < b < size and size % b == 0:
            shape = (*x.shape[:axis], size // b, b, *x.shape[axis + 1 :])
            return reshaped(rewriter, x, shape), shape, (*block[:axis], 1, b, *block[axis + 1 :])
    return x, x.shape, block


def dequantize(
    rewriter: Rewriter, name: str, x: Value, scale: Value, zero: Value | None, block: tuple[int, ...], output: Value
) -> None:
    """`output` = (x - zero) * scale, an element of these for each `block` of `x`."""
    x, shape, block = _split_blocks(rewriter, x, block)
    scale_, zero = _along(rewriter, scale, shape, block), _along(rewriter, zero_point(zero), shape, block)
    whole = rewriter.emit("Dequantize", [x, *([zero] if zero else [])], shape, output.dtype, f"{name}.difference")
    if shape == output.shape:
        rewriter.add("Mul", [whole, scale_], output, name)
    else:
        scaled = rewriter.emit("Mul", [whole, scale_], shape, output.dtype, f"{name}.scaled")
        rewriter.add("Reshape", [scaled], output, name)


def _rewrite_dequantize(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, scale, output = node.input(0), node.input(1), node.outputs[0]
    block = _blocks(node, x.shape, scale.shape)
    assert block is not None
    dequantize(rewriter, node.name, x, scale, node.optional(2), block, output)


def gather_codes(rewriter: Rewriter, node: Node, axis: int) -> None:
    """A Gather from a quantised constant: its integers are gathered, and what is gathered is dequantised."""
    table, indices, output = node.input(0), node.input(1), node.outputs[0]
    quantized = table.constant
    assert isinstance(quantized, QuantizedConstant)
    codes = Value(f"{table.name}.codes", table.shape, cast(DType, quantized.codes.dtype.name), quantized.codes)
    picked = rewriter.emit("Gather", [codes, indices], output.shape, codes.dtype, f"{node.name}.codes", axis=axis)
    varies = quantized.scale.shape[axis] > 1

    def of_picked(part: Constant, name: str) -> Value:
        array = quantized.spread(part.array(), [axis])
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        if not varies:
            return constant(f"{table.name}.{name}", array.reshape(*before, *[1] * len(indices.shape), *after))
        value = constant(f"{table.name}.{name}", array)
        shape = (*before, *indices.shape, *after)
        return rewriter.emit("Gather", [value, indices], shape, value.dtype, f"{node.name}.{name}", axis=axis)

    inner = (1,) * len(indices.shape) if varies else indices.shape
    block = (*quantized.block[:axis], *inner, *quantized.block[axis + 1 :])
    zero = None if quantized.zero is None else of_picked(quantized.zero, "zero")
    dequantize(rewriter, node.name, picked, of_picked(quantized.scale, "scale"), zero, block, output)


def _rewrite_quantize(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, scale, output = node.input(0), node.input(1), node.outputs[0]
    block = _blocks(node, x.shape, scale.shape)
    assert block is not None
    if x.dtype != "float32":
        x = rewriter.emit("Cast", [x], x.shape, "float32", f"{node.name}.float", rounding=None)
    _quantize_to(rewriter, node.name, x, scale, node.optional(2), block, output)


def _quantize_to(
    rewriter: Rewriter, name: str, x: Value, scale: Value, zero: Value | None, block: tuple[int, ...], output: Value
) -> None:
    """`output` = round(x / scale) + zero, saturated."""
    x, shape, block = _split_blocks(rewriter, x, block)
    scale_, zero = _along(rewriter, scale, shape, block), _along(rewriter, zero_point(zero), shape, block)
    quotient = rewriter.emit("Quotient", [x, scale_], shape, "float32", f"{name}.quotient")
    inputs = [quotient, *([zero] if zero else [])]
    if shape == output.shape:
        rewriter.add("Quantize", inputs, output, name)
    else:
        rewriter.add("Reshape", [rewriter.emit("Quantize", inputs, shape, output.dtype, f"{name}.codes")], output, name)


def _rewrite_dynamic(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Smallest and largest number, first of rows and then of all; scale and zero point from them."""
    x, name = node.input(0), node.name
    scale, zero = _dynamic_outputs(node)
    ends = []
    for op in ("ReduceMin", "ReduceMax"):
        value = reshaped(rewriter, x, (x.size // x.shape[-1], x.shape[-1]) if x.shape else (1, 1))
        for axis in (1, 0):
            shape = tuple(1 if a == axis else size for a, size in enumerate(value.shape))
            value = rewriter.emit(op, [value], shape, "float32", f"{name}.{op}{axis}", axes=(axis,))
        ends.append(reshaped(rewriter, value, ()))
    rewriter.add("RangeScale", ends, scale, f"{name}.scale")
    rewriter.add("RangeZero", [ends[0], scale], zero, f"{name}.zero")
    _quantize_to(rewriter, name, x, scale, zero, tuple(max(1, size) for size in x.shape), node.outputs[0])


def _dynamic_outputs(node: Node) -> tuple[Value, Value]:
    """Scale and zero point, also where nobody asked for them."""
    made = [Value(f"{node.name}.scale", (), "float32"), Value(f"{node.name}.zero", (), "uint8")]
    for i, value in enumerate(node.outputs[1:3]):
        if value.name:
            made[i] = value
    return made[0], made[1]


def _rows(rewriter: Rewriter, value: Value | None) -> Value | None:
    """A scale or zero point of the left operand: of all of it, or of each row."""
    if value is None or value.size == 1:
        return None if value is None else reshaped(rewriter, value, ())
    return reshaped(rewriter, value, (*value.shape, 1)) if len(value.shape) == 1 else value


def _columns(rewriter: Rewriter, value: Value | None) -> Value | None:
    """The same of the right operand: of all of it, or of each column."""
    return reshaped(rewriter, value, ()) if value is not None and value.size == 1 else value


def _product(rewriter: Rewriter, node: Node, a: Value, b: Value, zero_a: Value | None, zero_b: Value | None) -> Value:
    """The int32 product, vectors as matrices of one row or column."""
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
    """Vectors become matrices; zero points broadcast to the output."""
    if not node.input(0).size:  # sums of nothing
        output = node.outputs[0]
        rewriter.replaced[output] = constant(output.name, np.zeros(output.shape, output.dtype))
        return
    made = _product(rewriter, node, node.input(0), node.input(1), node.optional(2), node.optional(3))
    rewriter.add("Reshape", [made], node.outputs[0], node.name)


def _rewrite_qlinear_matmul(rewriter: Rewriter, node: Node, opset: int) -> None:
    """The product, scaled, rounded, and moved to the zero point of the output."""
    a, scale_a, zero_a, b, scale_b, zero_b, scale_y, zero_y = (node.input(i) for i in range(8))
    made = _product(rewriter, node, a, b, zero_a, zero_b)
    scales = [_rows(rewriter, scale_a), _columns(rewriter, scale_b), _rows(rewriter, scale_y)]
    scale = _ratio(rewriter, node.name, [value for value in scales if value is not None])
    zero = _rows(rewriter, zero_point(zero_y))
    _requantize(rewriter, node.name, made, scale, zero, node.outputs[0])


def _ratio(rewriter: Rewriter, name: str, scales: Sequence[Value]) -> Value:
    """Scale of the left operand times that of the right one, over that of the output: as ONNX Runtime rounds them."""
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
    """int32 sums (and bias) to the integers of `output`, of the same shape or one of the same elements."""
    shape = sums.shape
    if bias is not None:
        sums = rewriter.emit("Add", [sums, bias], shape, "int32", f"{name}.biased")
    whole = rewriter.emit("Dequantize", [sums], shape, "float32", f"{name}.float")
    scaled = rewriter.emit("Mul", [whole, scale], shape, "float32", f"{name}.scaled")
    inputs = [scaled, *([zero] if zero else [])]
    if shape == output.shape:
        rewriter.add("Quantize", inputs, output, name)
    else:
        rewriter.add("Reshape", [rewriter.emit("Quantize", inputs, shape, output.dtype, f"{name}.codes")], output, name)


def _convolved(rewriter: Rewriter, node: Node, x: Value, w: Value, zero_x: Value | None, zero_w: Value | None) -> Value:
    """The int32 convolution, over two dimensions."""
    output = node.outputs[0]
    sliding, shape = window(node, w.shape[2:]), output.shape
    if len(x.shape) == 3:
        sliding, shape = lift(sliding), (*shape[:2], 1, shape[2])
        x = reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        w = reshaped(rewriter, w, (*w.shape[:2], 1, w.shape[2]))
    zeros = [None if zero is None else _columns(rewriter, zero_point(zero)) for zero in (zero_x, zero_w)]
    group = int(node.attributes.get("group", 1))
    return rewriter.emit("ConvInteger", [x, w, *zeros], shape, "int32", f"{node.name}.product", group=group, **sliding)


def _rewrite_conv_integer(rewriter: Rewriter, node: Node, opset: int) -> None:
    made = _convolved(rewriter, node, node.input(0), node.input(1), node.optional(2), node.optional(3))
    rewriter.add("Reshape", [made], node.outputs[0], node.name)


def _rewrite_qlinear_conv(rewriter: Rewriter, node: Node, opset: int) -> None:
    """The convolution and the bias, scaled, rounded, and moved to the zero point of the output."""
    x, scale_x, zero_x, w, scale_w, zero_w, scale_y, zero_y = (node.input(i) for i in range(8))
    made = _convolved(rewriter, node, x, w, zero_x, zero_w)
    bias = node.optional(8)

    def across(value: Value) -> Value:
        return reshaped(rewriter, value, () if value.size == 1 else (value.size, 1, 1))

    scale = _ratio(rewriter, node.name, [across(scale_x), across(scale_w), across(scale_y)])
    zero = zero_point(zero_y)
    bias = None if bias is None else reshaped(rewriter, bias, (bias.shape[0], 1, 1))
    _requantize(rewriter, node.name, made, scale, None if zero is None else across(zero), node.outputs[0], bias)


# Checks


def _bad_product(node: Node, a: Value, b: Value, left: Sequence[Value | None], right: Sequence[Value | None]) -> str | None:
    """Why a product of `a` and `b`, with scales and zero points `left` and `right`, cannot be."""
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


def _last_columns(node: Node) -> int:
    return len(node.outputs[0].shape) - 1


register(
    __name__,
    Operator("DequantizeLinear", (CODES, FLOAT, CODES), check=_check_linear, rewrite=_rewrite_dequantize, empty=True),
    Operator("QuantizeLinear", (NUMBER, FLOAT, CODES), check=_check_linear, rewrite=_rewrite_quantize, empty=True),
    Operator("DynamicQuantizeLinear", (FLOAT,), rewrite=_rewrite_dynamic),
    Operator(
        "MatMulInteger", (BYTES,), check=_check_matmul_integer, rewrite=_rewrite_matmul_integer, kernel="matmul",
        columns=_last_columns, retypes=True, operator_class="reusable", empty=True,
    ),
    Operator(
        "ConvInteger", (BYTES,), check=_check_conv_integer, rewrite=_rewrite_conv_integer, kernel="convolution",
        layout="channels_last", columns=_last_columns, retypes=True, operator_class="reusable",
    ),
    Operator(
        "QLinearMatMul", (BYTES, FLOAT, BYTES, BYTES, FLOAT, BYTES, FLOAT, BYTES), check=_check_qlinear_matmul,
        rewrite=_rewrite_qlinear_matmul, operator_class="reusable",
    ),
    Operator(
        "QLinearConv", (BYTES, FLOAT, BYTES, BYTES, FLOAT, BYTES, FLOAT, BYTES, frozenset({"int32"})),
        check=_check_qlinear_conv, rewrite=_rewrite_qlinear_conv, operator_class="reusable",
    ),
    elementwise("Dequantize", CODES, _dequantize, onnx=False),
    elementwise("Quantize", (FLOAT, CODES), _quantize, onnx=False),
    elementwise("Quotient", FLOAT, lambda node, x, v: f"fm_quotient({x[0]}, {x[1]})", special=True, onnx=False),
    elementwise("RangeScale", FLOAT, _range_scale, onnx=False),
    elementwise("RangeZero", FLOAT, _range_zero, onnx=False),
)  # fmt: skip
