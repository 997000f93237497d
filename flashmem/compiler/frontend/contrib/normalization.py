"""Expansion of normalizations with an addend before them, of embeddings, and of softmax with bias."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError


def _skip_layer_norm(e: Expansion) -> list[ir.Value | None]:
    """input + skip (+ bias), normalized; outputs 1 and 2 are its mean and inverse deviation, 3 is the sum."""
    x = e.input(0)
    epsilon = e.number("epsilon", 1e-12)
    total = e.plus(x, e.input(1), e.optional(4))
    mean = inverse = None
    if e.wants(1) or e.wants(2):
        mean = e.reduce("ReduceMean", total, -1)
        size = _last(e)
        inverse = e.inverse_rms(e.op("Sub", total, mean), size, epsilon, x)
    return [e.layer_norm(total, e.input(2), e.optional(3), epsilon), mean, inverse, total]


def _skip_rms_norm(e: Expansion) -> list[ir.Value | None]:
    """input + skip (+ bias), divided by the root of its mean square; the same outputs as SkipLayerNormalization."""
    x = e.input(0)
    total = e.plus(x, e.input(1), e.optional(3))
    inverse = e.inverse_rms(total, _last(e), e.number("epsilon", 1e-12), x)
    return [e.op("Mul", e.op("Mul", total, inverse), e.input(2)), None, inverse, total]


def _last(e: Expansion) -> int:
    shape = e.shape(e.input(0))
    if not shape or not shape[-1]:
        raise RefusedError(f"of a tensor of shape {shape}")
    return shape[-1]


def _rms_norm(e: Expansion) -> list[ir.Value | None]:
    """x / sqrt(mean(x^2) + epsilon) * scale over all dimensions from `axis` on, as one dimension."""
    x = e.input(0)
    scale = e.input(1)
    shape = e.shape(x)
    epsilon = e.number("epsilon", 1e-5)
    axis = e.integer("axis", -1)
    if not -len(shape) <= axis < len(shape):
        raise RefusedError(f"along axis {axis} of a tensor of {len(shape)} dimensions")
    axis %= len(shape)
    size = math.prod(shape[axis:])
    if not size:
        raise RefusedError(f"of a tensor of shape {shape}")
    rows = x if axis == len(shape) - 1 else e.reshape(x, *shape[:axis], size)
    inverse = e.inverse_rms(rows, size, epsilon, x)
    if axis != len(shape) - 1:
        inverse = e.reshape(inverse, *shape[:axis], *[1] * (len(shape) - axis))
    return [e.op("Mul", e.op("Mul", x, inverse), scale), inverse]


def _layer_norm(e: Expansion) -> list[ir.Value | None]:
    """ONNX's LayerNormalization, for a file of an operator set without it."""
    e.refuse_output(1, 2)
    bias = e.optional(2)
    inputs = [e.input(0), e.input(1), *([] if bias is None else [bias])]
    return [e.op("LayerNormalization", *inputs, **e.keep("axis", "epsilon"))]


def _embed_layer_norm(e: Expansion) -> list[ir.Value | None]:
    """Rows of tables for words, positions and segments, summed and normalized; output 1 counts the words of each sentence."""
    ids = e.input(0)
    segments = e.optional(1)
    words = e.input(2)
    table = e.input(3)
    batch, length = e.ranked(0, 2)
    positions = e.optional(8)
    if positions is None:
        if e.ranked(3, 2)[0] < length:
            raise RefusedError(f"of {length} words with a table of {e.shape(table)[0]} positions")
        added = e.part(table, 0, 0, length)
    else:
        e.expect(8, (batch, length), (1, length))
        added = e.op("Gather", table, positions)
    total = e.op("Add", e.op("Gather", words, ids), added)
    if segments is not None:
        total = e.op("Add", total, e.op("Gather", e.input(4), segments))
    result = e.layer_norm(total, e.input(5), e.input(6), e.number("epsilon", 1e-12))
    return [result, word_count(e, batch) if e.wants(1) else None, total]


def word_count(e: Expansion, batch: int) -> ir.Value:
    """The number of ones in each row of the mask, input 7; 0 without a mask."""
    mask = e.optional(7)
    if mask is None:
        return e.constant(np.zeros(batch), dtype=np.int32)
    ones = e.cast(e.op("Equal", mask, e.constant(1, mask)), ir.DataType.INT32)
    return e.reshape(e.reduce("ReduceSum", ones, 1), batch)


def _group_norm(e: Expansion) -> list[ir.Value | None]:
    return [_grouped(e, e.input(0), 1, 2)]


def _skip_group_norm(e: Expansion) -> list[ir.Value | None]:
    """x + skip (+ bias), normalized; output 1 is the sum."""
    shape = e.ranked(0, 4)
    skip = e.input(3)
    if len(e.shape(skip)) == 2:
        batch, channels = e.shape(skip)
        skip = e.reshape(skip, *((batch, 1, 1, channels) if e.integer("channels_last", 1) else (batch, channels, 1, 1)))
    bias = e.optional(4)
    if bias is not None and not e.integer("channels_last", 1):
        bias = e.reshape(bias, shape[1], 1, 1)
    total = e.plus(e.input(0), skip, bias)
    return [_grouped(e, total, 1, 2), total]


def _grouped(e: Expansion, x: ir.Value, scale: int, bias: int) -> ir.Value:
    """Normalize groups of channels of `x`, of the shape of input 0; then apply scale, bias and activation of each channel."""
    shape = e.ranked(0, 4)
    last = e.integer("channels_last", 1)
    groups = e.integer("groups")
    channels = shape[3] if last else shape[1]
    if groups < 1 or channels % groups:
        raise RefusedError(f"of {channels} channels in {groups} groups")
    e.expect(scale, (channels,))
    e.expect(bias, (channels,))
    active = e.integer("activation", 0)
    if active not in (0, 1):
        raise RefusedError(f"with activation {active}")
    like = e.input(0)
    value = e.transpose(x, 0, 3, 1, 2) if last else x
    plain = (shape[0], channels, *(shape[1:3] if last else shape[2:]))
    one = e.constant(np.ones(groups), like)
    zero = e.constant(np.zeros(groups), like)
    rows = e.reshape(value, shape[0], groups, math.prod(plain[1:]) // groups)
    value = e.reshape(e.op("InstanceNormalization", rows, one, zero, epsilon=e.number("epsilon", 1e-5)), *plain)
    for op, index in (("Mul", scale), ("Add", bias)):
        operand = e.input(index)
        if e.dtype(operand) != e.dtype(like):
            operand = e.cast(operand, ir.DataType.from_numpy(e.dtype(like)))
        value = e.op(op, value, e.reshape(operand, channels, 1, 1))
    if active:
        value = e.op("Mul", value, e.op("Sigmoid", value))
    return e.transpose(value, 0, 2, 3, 1) if last else value


def _bias_softmax(e: Expansion) -> list[ir.Value | None]:
    """Softmax of data + bias over all dimensions from `axis` on, as one dimension."""
    shape = e.shape(e.input(0))
    bias = e.shape(e.input(1))
    axis = e.integer("axis", 1)
    if not -len(shape) <= axis < len(shape):
        raise RefusedError(f"along axis {axis} of a tensor of {len(shape)} dimensions")
    if len(bias) > len(shape) or any(n not in (1, m) for n, m in zip(bias[::-1], shape[::-1], strict=False)):
        raise RefusedError(f"of shape {shape} with a bias of shape {bias}")
    axis %= len(shape)
    total = e.op("Add", e.input(0), e.input(1))
    if axis == len(shape) - 1:
        return [e.op("Softmax", total, axis=-1)]
    rows = e.reshape(total, *shape[:axis], math.prod(shape[axis:]))
    return [e.reshape(e.op("Softmax", rows, axis=-1), *shape)]


EXPANSIONS: dict[str, Expand] = {
    "BiasSoftmax": _bias_softmax,
    "EmbedLayerNormalization": _embed_layer_norm,
    "GroupNorm": _group_norm,
    "LayerNormalization": _layer_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipGroupNorm": _skip_group_norm,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
}
"""Expansions by operator name."""
