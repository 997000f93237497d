"""Activation functions, elementwise, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.arithmetic import call
from flashmem.compiler.operators.registry import FLOAT, NUMBERS, elementwise, register
from flashmem.compiler.operators.rewriting import spreads
from flashmem.compiler.operators.vector import Vector


def _number(node: Node, v: Vector, name: str, default: float) -> str:
    """An attribute as a literal of OpenCL C."""
    return v.literal("float32", node.attributes.get(name, default))


def _below_zero(node: Node, x: str, v: Vector, below: str) -> str:
    """`below` if x < 0, else x; NaN stays."""
    dtype = node.input(0).dtype
    return v.choose(dtype, v.truth(dtype, f"{x} < {v.literal(dtype, 0)}"), below, x)


def _elu(node: Node, x: Sequence[str], v: Vector) -> str:
    return _below_zero(node, x[0], v, f"{_number(node, v, 'alpha', 1.0)} * expm1({x[0]})")


def _selu(node: Node, x: Sequence[str], v: Vector) -> str:
    alpha = _number(node, v, "alpha", 1.67326319217681884765625)
    gamma = _number(node, v, "gamma", 1.05070102214813232421875)
    return f"{gamma} * {_below_zero(node, x[0], v, f'{alpha} * expm1({x[0]})')}"


def _celu(node: Node, x: Sequence[str], v: Vector) -> str:
    alpha = _number(node, v, "alpha", 1.0)
    return _below_zero(node, x[0], v, f"{alpha} * expm1({x[0]} / {alpha})")


def _check_slope(node: Node) -> str | None:
    shape = node.input(0).shape
    slope = node.input(1).shape
    return None if spreads(slope, shape) else f"PRelu of shape {shape} with a slope of shape {slope}"


def _hard_sigmoid(node: Node, x: Sequence[str], v: Vector) -> str:
    line = f"{_number(node, v, 'alpha', 0.2)} * {x[0]} + {_number(node, v, 'beta', 0.5)}"
    return f"fm_min(fm_max({line}, {v.literal('float32', 0)}), {v.literal('float32', 1)})"


def _hard_swish(node: Node, x: Sequence[str], v: Vector) -> str:
    return f"{x[0]} * clamp({x[0]} * {v.literal('float32', 1 / 6)} + 0.5f, 0.0f, 1.0f)"


def _gelu(node: Node, x: Sequence[str], v: Vector) -> str:
    half = v.literal("float32", 0.5)
    one = v.literal("float32", 1)
    if node.attributes.get("approximate", "none") == "tanh":
        # (1 + tanh(u)) / 2 as a sigmoid of 2 u, which does not cancel where tanh is close to -1
        cube = f"{v.literal('float32', 0.044715)} * {x[0]} * {x[0]} * {x[0]}"
        return f"{x[0]} / ({one} + exp({v.literal('float32', -2 * math.sqrt(2 / math.pi))} * ({x[0]} + {cube})))"
    return f"{half} * {x[0]} * ({one} + fm_erf({x[0]} * {v.literal('float32', math.sqrt(0.5))}))"


def _shrink(node: Node, x: Sequence[str], v: Vector) -> str:
    """Shrink. Bounds and shift are truncated to the type of the input, as in ONNX's definition."""
    dtype = node.input(0).dtype
    bound = float(node.attributes.get("lambd", 0.5))
    shift = float(node.attributes.get("bias", 0.0))
    if dtype != "float32":
        bound = int(bound)
        shift = int(shift)
    low, high = (max(0, -bound), max(0, bound)) if dtype.startswith("uint") else (-bound, bound)
    below = v.truth(dtype, f"{x[0]} < {v.literal(dtype, low)}")
    above = v.truth(dtype, f"{x[0]} > {v.literal(dtype, high)}")
    less = v.choose(dtype, above, f"{x[0]} - {v.literal(dtype, shift)}", v.literal(dtype, 0))
    return v.choose(dtype, below, f"{x[0]} + {v.literal(dtype, shift)}", less)


def _softplus(node: Node, x: Sequence[str], v: Vector) -> str:
    return f"fmax({x[0]}, {v.literal('float32', 0)}) + log1p(exp(-fabs({x[0]})))"


register(
    __name__,
    elementwise("Celu", FLOAT, _celu, special=True),
    elementwise("Elu", FLOAT, _elu, special=True),
    elementwise("Gelu", FLOAT, _gelu, special=True),
    elementwise("HardSigmoid", FLOAT, _hard_sigmoid),
    elementwise("HardSwish", FLOAT, _hard_swish),
    elementwise(
        "LeakyRelu", FLOAT, lambda node, x, v: _below_zero(node, x[0], v, f"{x[0]} * {_number(node, v, 'alpha', 0.01)}")
    ),
    elementwise("Mish", FLOAT, lambda node, x, v: f"{x[0]} * fm_tanh(log1p(exp({x[0]})))", special=True),
    elementwise("PRelu", NUMBERS, lambda node, x, v: _below_zero(node, x[0], v, f"{x[0]} * {x[1]}"), check=_check_slope),
    elementwise("Relu", NUMBERS, lambda node, x, v: _below_zero(node, x[0], v, v.literal(node.input(0).dtype, 0))),
    elementwise("Selu", FLOAT, _selu, special=True),
    elementwise("Shrink", NUMBERS, _shrink),
    elementwise("Sigmoid", FLOAT, lambda node, x, v: f"1.0f / (1.0f + exp(-{x[0]}))", special=True),
    elementwise("Softplus", FLOAT, _softplus, special=True),
    elementwise("Softsign", FLOAT, lambda node, x, v: f"{x[0]} / (1.0f + fabs({x[0]}))"),
    elementwise("Tanh", FLOAT, call("fm_tanh"), special=True),
)
