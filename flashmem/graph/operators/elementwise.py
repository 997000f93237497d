"""Elementwise operators as OpenCL expressions.

Each entry turns the names of its operands, and the node, into one expression over vectors of float or int. Booleans are the
integers 0 and 1. The expressions are spliced into a kernel's epilogue (`codegen.expression`), so they may name an operand
more than once: operands are always variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.graph.ir import Node


@dataclass(frozen=True)
class VectorType:
    """The OpenCL types of a vector of `width` elements; width 1 is a scalar."""

    width: int

    @property
    def float_(self) -> str:
        """Its float type."""
        return f"float{self.width}" if self.width > 1 else "float"

    @property
    def int_(self) -> str:
        """Its int type."""
        return f"int{self.width}" if self.width > 1 else "int"

    def of(self, dtype: str) -> str:
        """Its type for a tensor of `dtype`."""
        return self.float_ if dtype == "float32" else self.int_

    def float_literal(self, value: float) -> str:
        """`value` in every element."""
        return f"(({self.float_})({_literal(value)}))"


Emit = Callable[[Node, Sequence[str], VectorType], str]


def _literal(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    # Hexadecimal would be exact too; the shortest decimal that gives the same float reads better.
    text = np.format_float_scientific(np.float32(value), unique=True, trim="0")
    return f"{text}f" if value >= 0 else f"({text}f)"


def _is_int(node: Node) -> bool:
    return node.input(0).dtype == "int32"


def _infix(symbol: str) -> Emit:
    return lambda node, x, v: f"{x[0]} {symbol} {x[1]}"


def _call(function: str) -> Emit:
    return lambda node, x, v: f"{function}({', '.join(x)})"


def _fold(function: str, int_function: str) -> Emit:
    def emit(node: Node, x: Sequence[str], v: VectorType) -> str:
        name = int_function if _is_int(node) else function
        result = x[0]
        for operand in x[1:]:
            result = f"{name}({result}, {operand})"
        return result

    return emit


def _compare(symbol: str) -> Emit:
    # A vector comparison yields -1 for true, a scalar one 1.
    return lambda node, x, v: f"(({x[0]} {symbol} {x[1]}) & 1)"


def _attribute(node: Node, name: str, default: float) -> float:
    return float(node.attributes.get(name, default))


def _clip(node: Node, x: Sequence[str], v: VectorType) -> str:
    low, high = node.attributes["minimum"], node.attributes["maximum"]
    if _is_int(node):
        # Bounds outside int32 do not bind.
        return f"clamp({x[0]}, ({v.int_})({max(int(low), -(2**31) + 1)}), ({v.int_})({min(int(high), 2**31 - 1)}))"
    # A comparison, not fmin and fmax: NaN passes through, as ONNX Runtime lets it.
    low_, high_ = v.float_literal(low), v.float_literal(high)
    return f"select(select({x[0]}, {low_}, {x[0]} < {low_}), {high_}, {x[0]} > {high_})"


def _leaky(node: Node, x: Sequence[str], v: VectorType) -> str:
    return f"select({x[0]}, {x[0]} * {v.float_literal(_attribute(node, 'alpha', 0.01))}, {x[0]} < {v.float_literal(0)})"


def _prelu(node: Node, x: Sequence[str], v: VectorType) -> str:
    return f"select({x[0]}, {x[0]} * {x[1]}, {x[0]} < {v.float_literal(0)})"


def _elu(node: Node, x: Sequence[str], v: VectorType) -> str:
    alpha = v.float_literal(_attribute(node, "alpha", 1.0))
    return f"select({x[0]}, {alpha} * expm1({x[0]}), {x[0]} < {v.float_literal(0)})"


def _selu(node: Node, x: Sequence[str], v: VectorType) -> str:
    alpha = v.float_literal(_attribute(node, "alpha", 1.67326319217681884765625))
    gamma = v.float_literal(_attribute(node, "gamma", 1.05070102214813232421875))
    return f"{gamma} * select({x[0]}, {alpha} * expm1({x[0]}), {x[0]} <= {v.float_literal(0)})"


def _hard_sigmoid(node: Node, x: Sequence[str], v: VectorType) -> str:
    alpha, beta = v.float_literal(_attribute(node, "alpha", 0.2)), v.float_literal(_attribute(node, "beta", 0.5))
    return f"clamp({alpha} * {x[0]} + {beta}, {v.float_literal(0)}, {v.float_literal(1)})"


def _gelu(node: Node, x: Sequence[str], v: VectorType) -> str:
    half, one = v.float_literal(0.5), v.float_literal(1)
    if node.attributes.get("approximate", "none") == "tanh":
        inner = f"{v.float_literal(math.sqrt(2 / math.pi))} * ({x[0]} + {v.float_literal(0.044715)} * {x[0]} * {x[0]} * {x[0]})"
        return f"{half} * {x[0]} * ({one} + fm_tanh({inner}))"
    return f"{half} * {x[0]} * ({one} + fm_erf({x[0]} * {v.float_literal(math.sqrt(0.5))}))"


def _pow(node: Node, x: Sequence[str], v: VectorType) -> str:
    exponent = node.attributes.get("exponent")
    if exponent is None:
        return f"pow({x[0]}, {x[1]})"
    exact = {0.5: "sqrt({0})", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "1.0f / {0}"}
    if exponent in exact:
        return exact[exponent].format(x[0])
    return f"pow({x[0]}, {v.float_literal(exponent)})"


def _mod(node: Node, x: Sequence[str], v: VectorType) -> str:
    if not _is_int(node):
        return f"fmod({x[0]}, {x[1]})"
    if node.attributes.get("fmod", 0):
        return f"{x[0]} % {x[1]}"
    return f"(({x[0]} % {x[1]}) + {x[1]}) % {x[1]}"  # the sign of the divisor, as in Python


def _cast(node: Node, x: Sequence[str], v: VectorType) -> str:
    source, target = node.input(0).dtype, node.outputs[0].dtype
    if node.attributes.get("to_bool"):
        zero = v.float_literal(0) if source == "float32" else f"(({v.int_})(0))"
        return f"(({x[0]} != {zero}) & 1)"
    if source == target:
        return x[0]
    return f"convert_{v.of(target)}{'_rtz' if target == 'int32' else ''}({x[0]})"


def _where(node: Node, x: Sequence[str], v: VectorType) -> str:
    return f"select({x[2]}, {x[1]}, {x[0]} != ({v.int_})(0))"


def _sign(node: Node, x: Sequence[str], v: VectorType) -> str:
    return f"sign({x[0]})" if not _is_int(node) else f"(({x[0]} > 0) & 1) - (({x[0]} < 0) & 1)"


ELEMENTWISE: dict[str, Emit] = {
    "Abs": lambda n, x, v: f"convert_{v.int_}(abs({x[0]}))" if _is_int(n) else f"fabs({x[0]})",
    "Add": _infix("+"),
    "And": _infix("&"),
    "Cast": _cast,
    "Ceil": _call("ceil"),
    "Clip": _clip,
    "Cos": _call("cos"),
    "Div": _infix("/"),
    "Elu": _elu,
    "Equal": _compare("=="),
    "Erf": _call("fm_erf"),
    "Exp": _call("exp"),
    "Floor": _call("floor"),
    "Gelu": _gelu,
    "Greater": _compare(">"),
    "GreaterOrEqual": _compare(">="),
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda n, x, v: f"{x[0]} * clamp({x[0]} * {v.float_literal(1 / 6)} + 0.5f, 0.0f, 1.0f)",
    "Identity": lambda n, x, v: x[0],
    "IsNaN": lambda n, x, v: f"(isnan({x[0]}) & 1)",
    "LeakyRelu": _leaky,
    "Less": _compare("<"),
    "LessOrEqual": _compare("<="),
    "Log": _call("log"),
    "Max": _fold("fmax", "max"),
    "Min": _fold("fmin", "min"),
    "Mish": lambda n, x, v: f"{x[0]} * fm_tanh(log1p(exp({x[0]})))",
    "Mod": _mod,
    "Mul": _infix("*"),
    "Neg": lambda n, x, v: f"-{x[0]}",
    "Not": lambda n, x, v: f"({x[0]} ^ 1)",
    "Or": _infix("|"),
    "PRelu": _prelu,
    "Pow": _pow,
    "Reciprocal": lambda n, x, v: f"1.0f / {x[0]}",
    "Relu": lambda n, x, v: f"select({x[0]}, {v.float_literal(0)}, {x[0]} < {v.float_literal(0)})",
    "Round": _call("rint"),
    "Selu": _selu,
    "Sigmoid": lambda n, x, v: f"1.0f / (1.0f + exp(-{x[0]}))",
    "Sign": _sign,
    "Sin": _call("sin"),
    "Softplus": lambda n, x, v: f"fmax({x[0]}, {v.float_literal(0)}) + log1p(exp(-fabs({x[0]})))",
    "Softsign": lambda n, x, v: f"{x[0]} / (1.0f + fabs({x[0]}))",
    "Sqrt": _call("sqrt"),
    "Sub": _infix("-"),
    "Sum": lambda n, x, v: " + ".join(x),
    "Tanh": _call("fm_tanh"),
    "Where": _where,
    "Xor": _infix("^"),
}

SPECIAL = frozenset({
    "Cos", "Elu", "Erf", "Exp", "Gelu", "Log", "Mish", "Mod", "Pow", "Selu", "Sigmoid", "Sin", "Softplus", "Tanh",
})  # fmt: skip
"""Operators that cost a function call or more an element, where the others cost an instruction or two."""
