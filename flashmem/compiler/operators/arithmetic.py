"""Elementwise arithmetic. Integers wrap around at the width of their type, as in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.base.types import ITEMSIZE, DType
from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import FLOAT, INTEGERS, NUMBERS, Emit, Operator, elementwise, register
from flashmem.compiler.operators.vector import Vector


def infix(symbol: str) -> Emit:
    """The expression `a symbol b`."""
    return lambda node, x, v: f"{x[0]} {symbol} {x[1]}"


def call(function: str) -> Emit:
    """A call of an OpenCL function or of a macro in the prelude."""
    return lambda node, x, v: f"{function}({', '.join(x)})"


def fold(function: str, float_function: str) -> Emit:
    """A function of two operands, folded over any number of them."""

    def emit(node: Node, x: Sequence[str], v: Vector) -> str:
        name = float_function if node.input(0).dtype == "float32" else function
        result = x[0]
        for operand in x[1:]:
            result = f"{name}({result}, {operand})"
        return result

    return emit


def is_float(node: Node) -> bool:
    """Whether the first operand is floating point."""
    return node.input(0).dtype == "float32"


def _signed(dtype: DType) -> bool:
    return dtype.startswith("int")


def _divisor(dtype: DType, y: str, v: Vector) -> str:
    """`y`, or 1 if dividing by it traps: by 0, for which ONNX has no result, and by -1, where it may overflow."""
    traps = v.truth(dtype, f"{y} == {v.literal(dtype, 0)}")
    if _signed(dtype):
        traps = f"{traps} | {v.truth(dtype, f'{y} == {v.literal(dtype, -1)}')}"
    return v.choose(dtype, traps, v.literal(dtype, 1), y)


def _div(node: Node, x: Sequence[str], v: Vector) -> str:
    """Division; integers truncate towards zero."""
    if is_float(node):
        return f"{x[0]} / {x[1]}"
    dtype = node.input(0).dtype
    quotient = f"{x[0]} / {_divisor(dtype, x[1], v)}"
    if not _signed(dtype):
        return quotient
    return v.choose(dtype, v.truth(dtype, f"{x[1]} == {v.literal(dtype, -1)}"), f"-{x[0]}", quotient)


def _mod(node: Node, x: Sequence[str], v: Vector) -> str:
    """Remainder with the sign of the divisor, as in Python, or with `fmod` that of the dividend, as in C."""
    dtype = node.input(0).dtype
    rest = f"fmod({x[0]}, {x[1]})" if is_float(node) else f"{x[0]} % {_divisor(dtype, x[1], v)}"
    if dtype.startswith("uint") or node.attributes.get("fmod", 0):
        return rest
    zero = v.literal(dtype, 0)
    inexact = v.truth(dtype, f"({rest}) != {zero}")
    if is_float(node):
        opposite = f"{v.truth(dtype, f'({rest}) < {zero}')} ^ {v.truth(dtype, f'{x[1]} < {zero}')}"
        turned = v.choose(dtype, opposite, f"{rest} + {x[1]}", rest)
        return v.choose(dtype, inexact, turned, f"copysign({zero}, {x[1]})")
    opposite = v.truth(dtype, f"(({rest}) ^ {x[1]}) < {zero}")
    return f"({rest}) + {v.choose(dtype, f'{opposite} & {inexact}', x[1], zero)}"


def _pow(node: Node, x: Sequence[str], v: Vector) -> str:
    dtype = node.input(0).dtype
    if dtype != "float32":
        return f"fm_pow_{v.of(dtype)}({x[0]}, {_exponent(node.input(1).dtype, x[1], v)})"
    exponent = node.attributes.get("exponent")
    if exponent is None:
        return f"pow({x[0]}, {v.convert(node.input(1).dtype, 'float32', x[1])})"
    exact = {0.5: "sqrt({0})", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "1.0f / {0}"}
    if exponent in exact:
        return exact[exponent].format(x[0])
    return f"pow({x[0]}, {v.literal('float32', exponent)})"


def _exponent(dtype: DType, y: str, v: Vector) -> str:
    """`y` as int64. An even number to a power from 2**62 on is 0 and an odd one repeats, so higher bits can be dropped."""
    if dtype == "uint64":
        least = v.literal(dtype, 2**62)
        y = v.choose(dtype, v.truth(dtype, f"{y} >= {least}"), f"({y} & {v.literal(dtype, 2**62 - 1)}) | {least}", y)
    return v.convert(dtype, "int64", y)


def _whole_exponents(node: Node) -> bool:
    exponents = node.input(1).constant
    return exponents is not None and bool(np.all(np.mod(np.asarray(exponents.array(), np.float64), 1) == 0))


def _check_pow(node: Node) -> str | None:
    if not is_float(node) and node.input(1).dtype == "float32" and not _whole_exponents(node):
        return "Pow of integers with floating point exponents is not exact in float32, and not implemented"
    return None


def _rewrite_pow(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Pow: a constant exponent becomes an attribute; exponents of integers are integers."""
    base = node.input(0)
    exponent = node.input(1)
    output = node.outputs[0]
    if is_float(node) and exponent.constant is not None and exponent.size == 1 and base.shape == output.shape:
        value = float(exponent.constant.array().reshape(-1)[0])
        rewriter.add("Pow", [base], output, node.name, exponent=value)
        return
    if not is_float(node) and exponent.dtype == "float32":
        assert exponent.constant is not None
        exponent = constant(exponent.name, np.asarray(exponent.constant.array(), np.float64).astype(np.int64))
    rewriter.add("Pow", [base, exponent], output, node.name)


def _shift(node: Node, x: Sequence[str], v: Vector) -> str:
    """A shift. By the width or more, or by a negative count, only copies of the sign, or zeros, remain."""
    dtype = node.input(0).dtype
    is_left = node.attributes["direction"] == "LEFT"
    bits = 8 * ITEMSIZE[dtype]
    inside = v.truth(dtype, f"{x[1]} < {v.literal(dtype, bits)}")
    if _signed(dtype):
        inside = f"{inside} & {v.truth(dtype, f'{x[1]} >= {v.literal(dtype, 0)}')}"
    beyond = f"{x[0]} >> {v.literal(dtype, bits - 1)}" if _signed(dtype) and not is_left else v.literal(dtype, 0)
    return v.choose(dtype, inside, f"{x[0]} {'<<' if is_left else '>>'} {x[1]}", beyond)


def _check_shift(node: Node) -> str | None:
    direction = node.attributes.get("direction")
    return None if direction in ("LEFT", "RIGHT") else f"BitShift with direction {direction!r}; there are LEFT and RIGHT"


def _abs(node: Node, x: Sequence[str], v: Vector) -> str:
    dtype = node.input(0).dtype
    if dtype == "float32":
        return f"fabs({x[0]})"
    return f"convert_{v.of(dtype)}(abs({x[0]}))" if _signed(dtype) else x[0]


def _sign(node: Node, x: Sequence[str], v: Vector) -> str:
    dtype = node.input(0).dtype
    if dtype == "float32":
        return f"fm_sign({x[0]})"
    zero = v.literal(dtype, 0)
    above = v.truth(dtype, f"{x[0]} > {zero}")
    below = v.truth(dtype, f"{x[0]} < {zero}")
    return v.convert("int32", dtype, f"({above} - {below})")


def _clip(node: Node, x: Sequence[str], v: Vector) -> str:
    """Clip by bounds in attributes. The lower bound applies first: if they cross, the upper one is the result."""
    name = ("fm_max", "fm_min") if is_float(node) else ("max", "min")
    value = x[0]
    for function, bound in zip(name, (node.attributes["minimum"], node.attributes["maximum"]), strict=True):
        if bound is not None:
            value = f"{function}({value}, {v.literal(node.input(0).dtype, bound)})"
    return value


def _rewrite_clip(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Clip: constant bounds become attributes, others Max and Min. An omitted bound is the largest finite number."""
    x = node.input(0)
    output = node.outputs[0]
    bounds = [node.attributes.get("min"), node.attributes.get("max")]
    given = [node.optional(1), node.optional(2)]
    if x.dtype == "float32":
        most = float(np.finfo(np.float32).max)
        bounds = [default if bound is None else bound for bound, default in zip(bounds, (-most, most), strict=True)]
    for i, value in enumerate(given):
        if value is not None and value.constant is not None:
            bounds[i] = value.constant.array().reshape(-1)[0].item()
    at_run_time = [None if value is None or value.constant is not None else value for value in given]
    if not any(at_run_time):
        rewriter.add("Clip", [x], output, node.name, minimum=bounds[0], maximum=bounds[1])
        return
    low, high = at_run_time
    attributes = {"minimum": None if low else bounds[0], "maximum": None if high else bounds[1]}
    if low is not None:
        x = rewriter.emit("Max", [x, low], output.shape, output.dtype, f"{node.name}.low")
    if attributes["minimum"] is not None or attributes["maximum"] is not None:
        x = rewriter.emit("Clip", [x], output.shape, output.dtype, f"{node.name}.constant", **attributes)
    if high is not None:
        x = rewriter.emit("Min", [x, high], output.shape, output.dtype, f"{node.name}.high")
    rewriter.add("Reshape", [x], output, node.name)


def _check_clip(node: Node) -> str | None:
    for index in (1, 2):
        value = node.optional(index)
        if value is not None and value.size != 1:
            return f"Clip with a bound ({value.name}) that is not one number"
    return None


def _rewrite_mean(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Mean as the sum of the inputs, times one over their number."""
    output = node.outputs[0]
    total = rewriter.emit("Sum", node.inputs, output.shape, output.dtype, f"{node.name}.sum")
    share: Value = constant(f"{node.name}.share", np.array([1 / len(node.inputs)], np.float32))
    rewriter.add("Mul", [total, share], output, node.name)


register(
    __name__,
    elementwise("Abs", NUMBERS, _abs),
    elementwise("Add", NUMBERS, infix("+")),
    elementwise("Ceil", FLOAT, call("ceil")),
    elementwise("Clip", NUMBERS, _clip, check=_check_clip, rewrite=_rewrite_clip),
    elementwise("Div", NUMBERS, _div),
    elementwise("Erf", FLOAT, call("fm_erf"), special=True),
    elementwise("Floor", FLOAT, call("floor")),
    elementwise("Max", NUMBERS, fold("max", "fm_max")),
    Operator("Mean", (FLOAT,), rewrite=_rewrite_mean),
    elementwise("Min", NUMBERS, fold("min", "fm_min")),
    elementwise("Mod", NUMBERS, _mod, special=True),
    elementwise("Mul", NUMBERS, infix("*")),
    elementwise("Neg", NUMBERS, lambda node, x, v: f"-{x[0]}"),
    elementwise(
        "Pow", (NUMBERS, NUMBERS), _pow, check=_check_pow, rewrite=_rewrite_pow, special=True
    ),
    elementwise("Reciprocal", FLOAT, lambda node, x, v: f"1.0f / {x[0]}"),
    elementwise("Round", FLOAT, call("rint")),
    elementwise("Sign", NUMBERS, _sign),
    elementwise("Sqrt", FLOAT, call("sqrt")),
    elementwise("Sub", NUMBERS, infix("-")),
    elementwise("Sum", FLOAT, lambda node, x, v: " + ".join(x)),
    *(
        elementwise(name, FLOAT, call(name.lower()), special=True)
        for name in (
            "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Exp", "Log", "Sinh",
        )
    ),
    *(elementwise(name, FLOAT, call(f"fm_{name.lower()}"), special=True) for name in ("Cos", "Sin", "Tan")),
    elementwise("BitShift", INTEGERS, _shift, check=_check_shift),
    elementwise("BitwiseAnd", INTEGERS, infix("&")),
    elementwise("BitwiseNot", INTEGERS, lambda node, x, v: f"~{x[0]}"),
    elementwise("BitwiseOr", INTEGERS, infix("|")),
    elementwise("BitwiseXor", INTEGERS, infix("^")),
)  # fmt: skip
