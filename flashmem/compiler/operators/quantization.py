"""Quantised numbers: 8-bit integers, whose values are (integer - zero point) * scale.

`Dequantize` is a number minus its zero point, in float32. `Quantize` rounds half to even, adds a zero point, and saturates. So
DequantizeLinear of a computed value is Dequantize and Mul, which fuse with its reader or producer. DequantizeLinear of a
constant is a constant (`compiler.ir.quantised`), which contractions keep as integers. Products are in `integer_products`.

DequantizeLinear has a fourth input here, which ONNX lacks: a minimum for each scale, which is added
(`compiler.frontend.contrib.quantized`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType
from flashmem.compiler.ir.builder import DerivedConstant, Rewriter, constant, derived
from flashmem.compiler.ir.graph import ArrayConstant, Constant, Node, Value
from flashmem.compiler.ir.quantised import HalvedConstant, QuantizedConstant, moved, wide
from flashmem.compiler.operators.registry import FLOAT, REGISTRY, Operator, Types, all_fp32, elementwise, register
from flashmem.compiler.operators.rewriting import from_front, reshaped
from flashmem.compiler.operators.vector import Vector

BYTES: Types = frozenset({"int8", "uint8"})
CODES: Types = frozenset({"int8", "uint8", "int16", "uint16", "int32"})
"""Input types of DequantizeLinear."""

NUMBER: Types = frozenset({"float32", "int32"})
"""Input types of QuantizeLinear."""

# -- expressions


def _dequantize(node: Node, x: Sequence[str], v: Vector) -> str:
    difference = x[0] if len(x) == 1 else f"{x[0]} - {x[1]}"
    return f"convert_{v.named('float')}({difference})"


def _quantize(node: Node, x: Sequence[str], v: Vector) -> str:
    """Quantise. Bounds apply before the zero point is added, so that the sum is exact. NaN becomes the lower bound."""
    limits = np.iinfo(node.outputs[0].dtype)
    low = v.literal("float32", int(limits.min))
    high = v.literal("float32", int(limits.max))
    if len(x) == 1:
        return _rounded(f"fmin(fmax({x[0]}, {low}), {high})", v)
    zero = f"convert_{v.named('float')}({x[1]})"
    return f"{_rounded(f'fmin(fmax({x[0]}, {low} - {zero}), {high} - {zero})', v)} + {x[1]}"


def _rounded(x: str, v: Vector) -> str:
    """The integers next to floats of at most 2^22."""
    return f"fm_rounded({x}, as_{v.named('int')}, convert_{v.named('int')}_rte)"


def _range_scale(node: Node, x: Sequence[str], v: Vector) -> str:
    """The scale with which 0 to 255 covers the range from x[0] to x[1], and 0. NaN stays: integers hide it."""
    zero = v.literal("float32", 0)
    span = f"(fm_max({x[1]}, {zero}) - fm_min({x[0]}, {zero}))"
    return v.choose(
        "float32", v.truth("float32", f"{span} == {zero}"), v.literal("float32", 1),
        f"fm_quotient({span}, {v.literal('float32', 255)})",
    )  # fmt: skip


def _range_zero(node: Node, x: Sequence[str], v: Vector) -> str:
    """The zero point for smallest number x[0] and scale x[1]. For an infinite range it is 255, as in ONNX Runtime."""
    zero = v.literal("float32", 0)
    high = v.literal("float32", 255)
    return f"convert_{v.named('int')}(rint(fmax(fmin({zero} - fm_quotient(fmin({x[0]}, {zero}), {x[1]}), {high}), {zero})))"


# -- shapes of scales and zero points


def _blocks(node: Node, x: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...] | None:
    """The block of each axis of `x` that shares an element of `scale`; None if the shapes do not fit."""
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
    """The shape of a scale, with the rank of the scaled tensor."""
    return tuple(-(-size // b) for size, b in zip(x, block, strict=True))


def _check_linear(node: Node) -> str | None:
    """Check QuantizeLinear and DequantizeLinear: the scale fits the input, and the zero point fits the scale."""
    x = node.input(0)
    scale = node.input(1)
    zero = node.optional(2)
    minimum = node.optional(3)
    if _blocks(node, x.shape, scale.shape) is None:
        axis = node.attributes.get("axis", 1)
        block = node.attributes.get("block_size", 0)
        how = f"axis {axis}" + (f" and block_size {block}" if block else "")
        return f"{node.op} of shape {x.shape} with a scale of shape {scale.shape} along {how}"
    if zero is not None and zero.size != scale.size:
        return f"{node.op} with a scale of shape {scale.shape} and a zero point of shape {zero.shape}"
    made = node.outputs[0].dtype if node.op == "QuantizeLinear" else x.dtype
    if zero is not None and zero.dtype != made:
        return f"{node.op} of {made} with a zero point of {zero.dtype}"
    if minimum is not None and (node.op != "DequantizeLinear" or minimum.size != scale.size):
        return f"{node.op} with a fourth input of shape {minimum.shape}"
    return None


def linear_constant(node: Node, bits: int) -> Value | None:
    """Evaluate a QuantizeLinear or DequantizeLinear of constants, with `bits` per element; None for any other node."""
    given = [value for value in node.inputs if value is not None]
    if node.op not in ("QuantizeLinear", "DequantizeLinear") or len(given) < 2 or not node.input(0).size:
        return None
    if any(value.constant is None for value in given) or REGISTRY[node.op].why_not(node) is not None:
        return None
    x = node.input(0)
    output = node.outputs[0]
    block = _blocks(node, x.shape, node.input(1).shape)
    assert block is not None and x.constant is not None
    scale = _constant_along(node.input(1), x.shape, block)
    zero = _constant_along(zero_point(node.optional(2)), x.shape, block)
    minimum = _constant_along(node.optional(3), x.shape, block)
    assert scale is not None
    if scale.dtype != np.float32:
        scale = ArrayConstant(scale.array().astype(np.float32))
    if any(1 < b < size for b, size in zip(block, x.shape, strict=True)):  # as many as a weight has blocks
        scale = _narrow(scale)
        minimum = minimum and _narrow(minimum)
    floats = QuantizedConstant(x.constant, scale, zero, block, bits, minimum)
    made = floats if node.op == "DequantizeLinear" else _codes(floats, np.dtype(output.dtype))
    return Value(output.name, output.shape, output.dtype, made)


def _constant_along(value: Value | None, x: tuple[int, ...], block: tuple[int, ...]) -> Constant | None:
    """A constant scale or zero point with the rank of its tensor."""
    if value is None or value.constant is None:
        return None
    return moved(value.constant, _counts(x, block))


def _narrow(given: Constant) -> Constant:
    """Floats in float16 if that changes none of them; subnormal numbers stay in float32, because devices may flush them."""
    wide = np.asarray(given.array(), np.float32)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float16)
    is_exact = ((narrow == wide) & ((np.abs(wide) >= np.finfo(np.float16).tiny) | (wide == 0))).all()
    if not isinstance(given, ArrayConstant):
        return HalvedConstant(given) if is_exact else given
    return ArrayConstant(narrow if is_exact else wide)


def _codes(given: QuantizedConstant, dtype: np.dtype[Any]) -> Constant:
    """The result of QuantizeLinear of the constant `given.codes`, computed when it is read."""

    def compute() -> NDArray[Any]:
        limits = np.iinfo(dtype)
        zero = 0 if given.zero is None else given.spread(given.zero.array()).astype(np.int64)
        with np.errstate(all="ignore"):
            rounded = np.rint(given.codes.array().astype(np.float32) / given.spread(given.scale.array()))
        bounded = np.clip(np.nan_to_num(rounded, nan=-np.inf, posinf=1e9, neginf=-1e9), -1e9, 1e9)
        codes: NDArray[Any] = np.clip(bounded.astype(np.int64) + zero, limits.min, limits.max).astype(dtype)
        return codes

    return DerivedConstant(given.shape, dtype, compute)


# -- rewrites


def zero_point(value: Value | None) -> Value | None:
    """A zero point, or None if it is known to be 0 everywhere."""
    if value is None or (value.constant is not None and value.size and not np.any(value.constant.array())):
        return None
    return value


def _along(rewriter: Rewriter, value: Value | None, x: tuple[int, ...], block: tuple[int, ...]) -> Value | None:
    """A scale or zero point in a shape that broadcasts to `x`; blocks inside an axis are repeated."""
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
    name = f"{value.name}.whole"
    shape = (*value.shape[:axis], at.size, *value.shape[axis + 1 :])
    if value.constant is not None:
        return derived(value, name, shape, lambda array: array.take(at, axis))
    return rewriter.emit("Gather", [value, constant(f"{name}.at", at)], shape, value.dtype, name, axis=axis)


def _split_blocks(rewriter: Rewriter, x: Value, block: tuple[int, ...]) -> tuple[Value, tuple[int, ...], tuple[int, ...]]:
    """`x` with an axis of whole blocks reshaped to (blocks, block), its shape, and the blocks of the new axes."""
    for axis, (size, b) in enumerate(zip(x.shape, block, strict=True)):
        if 1 < b < size and size % b == 0:
            shape = (*x.shape[:axis], size // b, b, *x.shape[axis + 1 :])
            return reshaped(rewriter, x, shape), shape, (*block[:axis], 1, b, *block[axis + 1 :])
    return x, x.shape, block


def dequantize(
    rewriter: Rewriter,
    name: str,
    x: Value,
    scale: Value,
    zero: Value | None,
    block: tuple[int, ...],
    output: Value,
    minimum: Value | None = None,
) -> None:
    """Append `output` = (x - zero) * scale + minimum, where each `block` of `x` has one element of each."""
    x, shape, block = _split_blocks(rewriter, x, block)
    scale_ = _along(rewriter, scale, shape, block)
    zero = _along(rewriter, zero_point(zero), shape, block)
    made = rewriter.emit("Dequantize", [x, *([zero] if zero else [])], shape, output.dtype, f"{name}.difference")
    steps = [("Mul", scale_)]
    if minimum is not None:
        steps.append(("Add", _along(rewriter, minimum, shape, block)))
    for i, (op, operand) in enumerate(steps):
        if shape == output.shape and i == len(steps) - 1:
            rewriter.add(op, [made, operand], output, name)
            return
        made = rewriter.emit(op, [made, operand], shape, output.dtype, f"{name}.{op}")
    rewriter.add("Reshape", [made], output, name)


def _rewrite_dequantize(rewriter: Rewriter, node: Node, opset: int) -> None:
    x = node.input(0)
    scale = node.input(1)
    output = node.outputs[0]
    block = _blocks(node, x.shape, scale.shape)
    assert block is not None
    dequantize(rewriter, node.name, x, scale, node.optional(2), block, output, node.optional(3))


def gather_codes(rewriter: Rewriter, node: Node, axis: int) -> None:
    """Rewrite a Gather from a quantised constant: gather its integers, then dequantise the result."""
    table = node.input(0)
    indices = node.input(1)
    output = node.outputs[0]
    quantized = table.constant
    assert isinstance(quantized, QuantizedConstant)
    codes = Value(f"{table.name}.codes", table.shape, cast(DType, quantized.codes.dtype.name), quantized.codes)
    picked = rewriter.emit("Gather", [codes, indices], output.shape, codes.dtype, f"{node.name}.codes", axis=axis)
    varies = quantized.scale.shape[axis] > 1

    def of_picked(part: Constant, name: str) -> Value:
        array = quantized.spread(wide(part), [axis])
        before = array.shape[:axis]
        after = array.shape[axis + 1 :]
        if not varies:
            return constant(f"{table.name}.{name}", array.reshape(*before, *[1] * len(indices.shape), *after))
        value = constant(f"{table.name}.{name}", array)
        shape = (*before, *indices.shape, *after)
        return rewriter.emit("Gather", [value, indices], shape, value.dtype, f"{node.name}.{name}", axis=axis)

    inner = (1,) * len(indices.shape) if varies else indices.shape
    block = (*quantized.block[:axis], *inner, *quantized.block[axis + 1 :])
    zero = None if quantized.zero is None else of_picked(quantized.zero, "zero")
    minimum = None if quantized.minimum is None else of_picked(quantized.minimum, "minimum")
    dequantize(rewriter, node.name, picked, of_picked(quantized.scale, "scale"), zero, block, output, minimum)


def _rewrite_quantize(rewriter: Rewriter, node: Node, opset: int) -> None:
    x = node.input(0)
    scale = node.input(1)
    output = node.outputs[0]
    block = _blocks(node, x.shape, scale.shape)
    assert block is not None
    if x.dtype != "float32":
        x = rewriter.emit("Cast", [x], x.shape, "float32", f"{node.name}.float", rounding=None)
    _quantize_to(rewriter, node.name, x, scale, node.optional(2), block, output)


def _quantize_to(
    rewriter: Rewriter, name: str, x: Value, scale: Value, zero: Value | None, block: tuple[int, ...], output: Value
) -> None:
    """Append `output` = round(x / scale) + zero, saturated."""
    x, shape, block = _split_blocks(rewriter, x, block)
    scale_ = _along(rewriter, scale, shape, block)
    zero = _along(rewriter, zero_point(zero), shape, block)
    quotient = rewriter.emit("Quotient", [x, scale_], shape, "float32", f"{name}.quotient")
    rounded(rewriter, name, quotient, zero, output)


def rounded(rewriter: Rewriter, name: str, x: Value, zero: Value | None, output: Value) -> None:
    """Append `output` = round(x) + zero, saturated; it has the elements of `x`, possibly in another shape."""
    inputs = [x, *([zero] if zero else [])]
    if x.shape == output.shape:
        rewriter.add("Quantize", inputs, output, name)
    else:
        rewriter.add("Reshape", [rewriter.emit("Quantize", inputs, x.shape, output.dtype, f"{name}.codes")], output, name)


def _rewrite_dynamic(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite DynamicQuantizeLinear: smallest and largest number, of rows and then of all; from these, scale and zero point."""
    x = node.input(0)
    name = node.name
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
    """Scale and zero point, also if the model does not use them."""
    made = [Value(f"{node.name}.scale", (), "float32"), Value(f"{node.name}.zero", (), "uint8")]
    for i, value in enumerate(node.outputs[1:3]):
        if value.name:
            made[i] = value
    return made[0], made[1]


register(
    __name__,
    Operator("DequantizeLinear", (CODES, FLOAT, CODES, FLOAT), check=_check_linear, rewrite=_rewrite_dequantize, empty=True),
    Operator("QuantizeLinear", (NUMBER, FLOAT, CODES), check=_check_linear, rewrite=_rewrite_quantize, empty=True),
    Operator("DynamicQuantizeLinear", (FLOAT,), rewrite=_rewrite_dynamic),
    elementwise("Dequantize", CODES, _dequantize, onnx=False),
    elementwise("Quantize", (FLOAT, CODES), _quantize, onnx=False),
    elementwise("Quotient", FLOAT, lambda node, x, v: f"fm_quotient({x[0]}, {x[1]})", special=True, onnx=False),
    elementwise("RangeScale", FLOAT, _range_scale, keep_fp32=all_fp32, onnx=False),
    elementwise("RangeZero", FLOAT, _range_zero, keep_fp32=all_fp32, onnx=False),
)  # fmt: skip
