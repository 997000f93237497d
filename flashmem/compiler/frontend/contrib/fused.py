"""Expansion of products, convolutions and activations with fused operators after them."""

from __future__ import annotations

import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError

_WINDOW = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def gelu(e: Expansion, value: ir.Value, approximate: str = "none") -> ir.Value:
    """Gelu of `value`."""
    return e.op("Gelu", value, approximate=approximate)


def _matmul(e: Expansion) -> list[ir.Value]:
    a = _operand(e, 0, "A")
    b = _operand(e, 1, "B")
    return [e.scaled(e.op("MatMul", a, b), e.number("alpha", 1.0), e.input(0))]


def _operand(e: Expansion, index: int, name: str) -> ir.Value:
    """An operand of FusedMatMul: dimension 0 moved behind the batch, then the last two exchanged, as its attributes request."""
    value = e.input(index)
    rank = len(e.shape(e.input(index)))
    order = list(range(rank))
    if e.integer(f"transBatch{name}", 0) and rank > 2:
        order = [*order[1:-1], 0, order[-1]]
    if e.integer(f"trans{name}", 0) and rank > 1:
        order[-2:] = order[-1], order[-2]
    return value if order == list(range(rank)) else e.transpose(value, *order)


def _matmul_activation(e: Expansion) -> list[ir.Value]:
    (product,) = _matmul(e)
    return [_named_activation(e, product)]


def _gemm(e: Expansion) -> list[ir.Value]:
    c = e.optional(2)
    inputs = [e.input(0), e.input(1), *([] if c is None else [c])]
    return [_named_activation(e, e.op("Gemm", *inputs, **e.keep("alpha", "beta", "transA", "transB")))]


def _named_activation(e: Expansion, value: ir.Value) -> ir.Value:
    """The activation of FusedGemm, whose parameters are separate attributes."""
    given = {
        name: e.number(f"activation_{name}", 0.0)
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in e.node.attributes
    }
    return _activated(e, value, given)


def _listed_activation(e: Expansion, value: ir.Value) -> ir.Value:
    """The activation of FusedConv, whose parameters are a list."""
    names = _PARAMETERS.get(e.text("activation", ""), ())
    numbers = e.numbers("activation_params")
    if len(numbers) > len(names):
        raise RefusedError(f"with {len(numbers)} activation_params")
    return _activated(e, value, dict(zip(names, numbers, strict=False)))


def _activated(e: Expansion, value: ir.Value, parameters: dict[str, float]) -> ir.Value:
    """The activation named by the node, applied to `value`."""
    name = e.text("activation", "")
    if not name:
        return value
    if name not in _PARAMETERS:
        raise RefusedError(f"with activation {name}")
    parameters = {key: number for key, number in parameters.items() if key in _PARAMETERS[name]}
    if name == "Clip" and e.opset >= 11:
        low = parameters.get("min")
        high = parameters.get("max")
        return e.op("Clip", value, *(None if bound is None else e.constant(bound, e.input(0)) for bound in (low, high)))
    return e.op(name, value, **parameters)


_PARAMETERS: dict[str, tuple[str, ...]] = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "Gelu": (),
    "HardSigmoid": ("alpha", "beta"),
    "HardSwish": (),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}


def _conv(e: Expansion) -> list[ir.Value]:
    value = e.plus(_convolved(e, e.input(0)), e.optional(3))
    return [_listed_activation(e, value)]


def _convolved(e: Expansion, x: ir.Value) -> ir.Value:
    bias = e.optional(2)
    return e.op("Conv", x, e.input(1), *([] if bias is None else [bias]), **e.keep(*_WINDOW))


def _nhwc_conv(e: Expansion) -> list[ir.Value]:
    """Channels-last convolution; its addend Z is channels-last too."""
    rank = len(e.shape(e.input(0)))
    if rank < 3:
        raise RefusedError(f"of a tensor of {rank} dimensions")
    value = _convolved(e, e.transpose(e.input(0), 0, rank - 1, *range(1, rank - 1)))
    value = e.plus(e.transpose(value, 0, *range(2, rank), 1), e.optional(3))
    return [_listed_activation(e, value)]


def _gelu(e: Expansion) -> list[ir.Value]:
    return [gelu(e, e.input(0))]


def _bias_gelu(e: Expansion) -> list[ir.Value]:
    return [gelu(e, e.op("Add", e.input(0), e.input(1)))]


def _fast_gelu(e: Expansion) -> list[ir.Value]:
    return [gelu(e, e.plus(e.input(0), e.optional(1)), "tanh")]


def _gemm_fast_gelu(e: Expansion) -> list[ir.Value]:
    return [gelu(e, e.plus(e.op("MatMul", e.input(0), e.input(1)), e.optional(2)), "tanh")]


def _quick_gelu(e: Expansion) -> list[ir.Value]:
    x = e.input(0)
    return [e.op("Mul", x, e.op("Sigmoid", e.scaled(x, e.number("alpha", 1.702), x)))]


def _bias_add(e: Expansion) -> list[ir.Value]:
    return [e.plus(e.input(0), e.input(1), e.input(2))]


def _bias_split_gelu(e: Expansion) -> list[ir.Value]:
    half, odd = divmod(e.ranked(0, 3)[2], 2)
    if odd:
        raise RefusedError("of an odd number of channels")
    value = e.op("Add", e.input(0), e.input(1))
    return [e.op("Mul", e.part(value, 2, 0, half), gelu(e, e.part(value, 2, half, 2 * half)))]


def _bias_dropout(e: Expansion) -> list[ir.Value]:
    """Bias and residual without dropout, as in inference; the bias has the last dimension, or the shape of the data."""
    _check_inference(e, 4)
    return [e.plus(e.input(0), e.input(1), e.optional(2))]


def _dropout(e: Expansion) -> list[ir.Value]:
    _check_inference(e, 2)
    return [e.input(0)]


def _check_inference(e: Expansion, mode: int) -> None:
    value = e.optional(mode)
    known = None if value is None else e.known(value)
    if value is not None and (known is None or known.any()):
        raise RefusedError("in training mode")


EXPANSIONS: dict[str, Expand] = {
    "BiasAdd": _bias_add,
    "BiasDropout": _bias_dropout,
    "BiasGelu": _bias_gelu,
    "BiasSplitGelu": _bias_split_gelu,
    "BitmaskBiasDropout": _bias_dropout,
    "BitmaskDropout": _dropout,
    "FastGelu": _fast_gelu,
    "FusedConv": _conv,
    "FusedGemm": _gemm,
    "FusedMatMul": _matmul,
    "FusedMatMulActivation": _matmul_activation,
    "Gelu": _gelu,
    "GemmFastGelu": _gemm_fast_gelu,
    "NhwcConv": _nhwc_conv,
    "NhwcFusedConv": _nhwc_conv,
    "QuickGelu": _quick_gelu,
    "TransposeMatMul": _matmul,
}
"""Expansions by operator name."""
