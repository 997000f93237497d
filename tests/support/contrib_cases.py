"""Test cases of ONNX Runtime's contrib operators.

If ONNX Runtime has no CPU kernel, the case computes the answer by ONNX Runtime's other operators or by numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.contrib_case import Array, Case, floats, ids, numbers, places


def erf_gelu(x: Array) -> Array:
    """Gelu, in double precision."""
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2.0))))


def tanh_gelu(x: Array) -> Array:
    """Gelu by tanh."""
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def softmax(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Softmax."""
    y = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(y / y.sum(axis, keepdims=True))


def group_norm(x: Array, groups: int, gamma: Array, beta: Array, swish: bool) -> Array:
    """Group normalization of [N, H, W, C]."""
    rows = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    rows = (rows - rows.mean((1, 3), keepdims=True)) / np.sqrt(rows.var((1, 3), keepdims=True) + 1e-5)
    y = rows.reshape(x.shape) * gamma + beta
    return np.asarray(y / (1 + np.exp(-y)) if swish else y)


def _fused() -> list[Case]:
    x, bias, skip = floats(2, 3, 8), floats(8), floats(2, 3, 8)
    image, filters, last = floats(1, 4, 6, 5), floats(8, 4, 3, 3), floats(1, 6, 5, 4)
    added = floats(1, 6, 5, 8)

    def nhwc() -> Array:
        case = Case(
            "FusedConv", [last.transpose(0, 3, 1, 2)], [filters, bias, added.transpose(0, 3, 1, 2)], **same, activation="Relu"
        )
        return case.reference()[0].transpose(0, 2, 3, 1)

    same = {"pads": [1, 1, 1, 1]}
    return [
        Case("FusedMatMul", [floats(2, 5, 3, 4), floats(2, 5, 6, 4)], alpha=0.3, transB=1),
        Case("FusedMatMul", [floats(2, 5, 4, 3)], [floats(2, 5, 6, 4)], transA=1, transB=1),
        Case("FusedMatMul", [floats(3, 2, 5, 4), floats(6, 2, 5, 4)], transBatchA=1, transBatchB=1, transB=1),
        Case("FusedMatMul", [floats(4, 2, 5, 3), floats(2, 5, 4, 6)], transBatchA=1, transA=1),
        Case("FusedMatMul", [floats(4), floats(2, 5, 4, 6)], transA=1),
        Case("TransposeMatMul", [floats(5, 4)], [floats(6, 4)], transB=1),
        Case(
            "FusedMatMulActivation",
            [x],
            [w := floats(8, 5)],
            expected=lambda: [np.maximum(0.5 * x @ w, 0)],
            activation="Relu",
            alpha=0.5,
        ),
        Case(
            "FusedGemm",
            [floats(5, 4)],
            [floats(6, 4), floats(6)],
            transB=1,
            activation="LeakyRelu",
            activation_alpha=0.2,
            beta=2.0,
        ),
        Case("FusedGemm", [floats(5, 4)], [floats(4, 6)], activation="Relu"),
        Case("FusedConv", [image], [filters, bias], activation="HardSigmoid", activation_params=[0.3, 0.4], **same),
        Case("FusedConv", [image], [filters, bias], activation="Clip", activation_params=[-0.3, 0.4], strides=[2, 2]),
        Case("FusedConv", [image], [filters, bias, floats(1, 8, 6, 5)], activation="Relu", **same),
        Case("FusedConv", [image], [filters, None, floats(1, 8, 6, 5)], **same),
        *(Case("FusedConv", [image], [filters], activation=name) for name in ("Sigmoid", "Tanh", "HardSwish")),
        Case("FusedConv", [image], [filters], activation="LeakyRelu", activation_params=[0.1]),
        Case("NhwcFusedConv", [last], [filters, bias, added], expected=lambda: [nhwc()], activation="Relu", **same),
        Case("Gelu", [x]),
        Case("BiasGelu", [x], [bias]),
        Case("FastGelu", [x], [bias]),
        Case("FastGelu", [x]),
        Case("GemmFastGelu", [x], [w, c := floats(5)], expected=lambda: [tanh_gelu(x @ w + c)]),
        Case("QuickGelu", [x], alpha=1.3),
        Case("QuickGelu", [x]),
        Case("BiasAdd", [x, bias, skip], expected=lambda: [x + bias + skip]),
        Case("BiasSplitGelu", [x, bias], expected=lambda: [(x + bias)[..., :4] * erf_gelu((x + bias)[..., 4:])]),
        Case("BiasDropout", [x, bias, skip], expected=lambda: [x + bias + skip]),
        Case("BitmaskDropout", [x], expected=lambda: [x]),
    ]


def _normalizations() -> list[Case]:
    x, gamma, beta, bias = floats(2, 3, 8), floats(8), floats(8), floats(8)
    image, skip = floats(2, 3, 4, 8), floats(2, 8)
    data, mask = floats(2, 3, 4, 4), floats(2, 1, 1, 4)
    total = image + skip[:, None, None] + bias
    tables = [floats(20, 8), floats(9, 8), floats(3, 8), gamma, beta]
    words = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    first = image.transpose(0, 3, 1, 2)
    return [
        Case("SkipLayerNormalization", [x, floats(2, 3, 8)], [gamma, beta, bias], outputs=(0, 3)),
        Case("SkipLayerNormalization", [x, floats(3, 8)], [gamma, None, bias]),
        Case("SkipLayerNormalization", [x, floats(1, 3, 8)], [gamma], epsilon=0.1),
        Case("SkipLayerNormalization", [x, floats(2, 3, 8)], [gamma, beta, bias], outputs=(0, 1, 2, 3)),
        Case("SkipSimplifiedLayerNormalization", [x, floats(2, 3, 8)], [gamma, bias], outputs=(0, 3)),
        Case("SimplifiedLayerNormalization", [x], [gamma], outputs=(0, 1), epsilon=1e-6, domain=""),
        Case("SimplifiedLayerNormalization", [x], [floats(3, 8)], axis=1, domain=""),
        Case("LayerNormalization", [x], [gamma, beta], model_opset=12, domain=""),
        Case("EmbedLayerNormalization", [ids(20, 2, 5), ids(3, 2, 5)], [*tables, words], outputs=(0, 1, 2), epsilon=1e-5),
        Case(
            "EmbedLayerNormalization",
            [ids(20, 2, 5), None],
            [*tables[:2], None, gamma, beta, None, ids(9, 1, 5)],
            outputs=(0, 1),
        ),
        Case(
            "GroupNorm",
            [image],
            [gamma, beta],
            expected=lambda: [group_norm(image, 4, gamma, beta, True)],
            groups=4,
            activation=1,
        ),
        Case(
            "GroupNorm",
            [first],
            [gamma, beta],
            groups=2,
            activation=0,
            channels_last=0,
            expected=lambda: [group_norm(image, 2, gamma, beta, False).transpose(0, 3, 1, 2)],
        ),
        Case(
            "SkipGroupNorm",
            [image],
            [gamma, beta, skip, bias],
            outputs=(0, 1),
            groups=4,
            activation=1,
            expected=lambda: [group_norm(total, 4, gamma, beta, True), total],
        ),
        Case("BiasSoftmax", [data, mask], expected=lambda: [softmax(data + mask, 3)], axis=3, is_inner_broadcast=1),
        Case("BiasSoftmax", [data, mask], expected=lambda: [softmax(data + mask, (2, 3))], axis=2, is_inner_broadcast=1),
    ]


def _attention() -> list[Case]:
    batch, length, heads, size = 2, 5, 3, 4
    width = heads * size
    x, weight, bias = floats(batch, length, 7), floats(7, 3 * width, scale=0.5), floats(3 * width)
    lengths, ends = numbers(3, 5), numbers(3, 5, 1, 0)
    past = floats(2, batch, heads, 6, size)

    def attention(mask: Array | None = None, past: Array | None = None, add: Array | None = None, **fields: Any) -> Case:
        return Case("Attention", [x], [weight, bias, mask, past, add], num_heads=heads, **fields)

    def given(mask: Array, **fields: Any) -> Case:
        return Case("Attention", [x, weight, bias, mask], num_heads=heads, **fields)

    return [
        attention(),
        attention(unidirectional=1, scale=0.3),
        given(ids(2, batch, length)),
        given(np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], np.int32), unidirectional=1),
        given(ids(2, batch, length, length), unidirectional=1),
        attention(ids(2, batch, length, length)),
        given(lengths),
        attention(ends),
        given(ends, unidirectional=1, mask_filter_value=-50.0),
        attention(add=floats(1, heads, length, length)),
        attention(lengths, add=floats(batch, 1, length, length), unidirectional=1),
        attention(past=past, outputs=(0, 1)),
        attention(ids(2, batch, length + 6), past, outputs=(0, 1), unidirectional=1),
        attention(outputs=(0, 1)),
        Case(
            "Attention",
            [x],
            [floats(7, 2 * width + 9), floats(2 * width + 9)],
            num_heads=heads,
            qkv_hidden_sizes=[width, width, 9],
        ),
    ]


def _multi_head() -> list[Case]:
    batch, length, heads, size = 2, 5, 3, 4
    width = heads * size
    query, key, value = floats(batch, length, width), floats(batch, 7, width), floats(batch, 7, 9)
    same = [floats(batch, length, width) for _ in range(3)]
    cache = [floats(batch, heads, 3, size) for _ in range(2)]
    bias = floats(3 * width)

    def attend(run_time: Sequence[Array | None], constants: Sequence[Array | None] = (), **fields: Any) -> Case:
        return Case("MultiHeadAttention", run_time, constants, num_heads=heads, **fields)

    def heads_of(array: Array) -> Array:
        return array.reshape(*array.shape[:2], heads, 1, -1)

    packed, packed_kv = np.concatenate([heads_of(a) for a in same], 3), np.concatenate([heads_of(a) for a in same[1:]], 3)
    return [
        attend([query, key, value]),
        attend([query, key, value], [floats(2 * width + 9)]),
        attend([query, key, value, None, ids(2, batch, 7)]),
        attend([query, key, value], [None, numbers(3, 7)]),
        attend([query, key, value], [None, None, floats(batch, 1, length, 7)]),
        attend([query, key, value], [None, ids(2, batch, length, 7)]),
        attend([*same, None, None, None, *cache], outputs=(0, 1, 2), unidirectional=1),
        attend([*same, bias, ids(2, batch, 8), None, *cache], outputs=(0, 1, 2), scale=0.7),
        attend(same, outputs=(0, 1, 2)),
        attend(same, outputs=(0, 3), scores=True),
        attend([query, floats(batch, heads, 7, size), floats(batch, heads, 7, size)]),
        attend([packed], expected=lambda: attend(same).reference()),
        attend([packed, None, None, bias], expected=lambda: attend([*same, bias]).reference()),
        attend([same[0], packed_kv], expected=lambda: attend(same).reference()),
        attend([same[0], packed_kv, None, bias], expected=lambda: attend([*same, bias]).reference()),
    ]


def _rotary() -> list[Case]:
    tables = [floats(20, 4), floats(20, 4)]

    def turn(x: Array, positions: Array, **fields: Any) -> Case:
        return Case("RotaryEmbedding", [x, positions], tables, **fields)

    return [
        turn(floats(2, 5, 24), places(2, 5)),
        turn(floats(2, 5, 24), np.array([3])),
        turn(floats(2, 3, 5, 8), places(2, 5)),
        turn(floats(2, 3, 5, 8), places(2, 5), interleaved=1),
        turn(floats(2, 5, 30), places(2, 5), num_heads=3, rotary_embedding_dim=8),
        turn(floats(2, 3, 5, 10), places(2, 5), num_heads=3, rotary_embedding_dim=8, interleaved=1),
    ]


def _grouped() -> list[Case]:
    heads, groups, size = 6, 2, 16

    def attend(
        length: int,
        past: int = 0,
        *,
        packed: bool = False,
        batch: int = 2,
        filled: Array | None = None,
        constant: bool = True,
        total: int = 0,
        rest: Sequence[Array | None] = (),
        groups: int = groups,
        **fields: Any,
    ) -> Case:
        qkv = [floats(batch, length, n * size) for n in (heads, groups, groups)]
        inputs: list[Array | None] = [np.concatenate(qkv, 2), None, None] if packed else [*qkv]
        inputs += [floats(batch, groups, past, size) if past else None for _ in range(2)]
        ends = np.full(batch, past + length - 1, np.int32) if filled is None else filled
        known: list[Array | None] = [np.array(total or past + length, np.int32)]
        known += [floats(40, size // 2), floats(40, size // 2)] if fields.get("do_rotary") else [None, None]
        known += rest
        fields = {"num_heads": heads, "kv_num_heads": groups, "outputs": (0, 1, 2)} | fields
        if constant:
            return Case("GroupQueryAttention", inputs, [ends, *known], **fields)
        return Case("GroupQueryAttention", [*inputs, ends], known, **fields)

    bias = floats(2, heads, 5, 5)
    return [
        attend(5),
        attend(5, packed=True, do_rotary=1, rotary_interleaved=1),
        attend(5, do_rotary=1),
        attend(5, softcap=2.0, scale=0.5),
        attend(9, local_window_size=3),
        attend(5, smooth_softmax=1),
        attend(5, rest=[None, None, floats(heads)]),
        attend(5, rest=[None, bias], softcap=1.5),
        attend(5, groups=heads),
        attend(5, batch=1, do_rotary=1, rest=[np.arange(5)[None]]),
        attend(5, filled=numbers(2, 4), constant=False, rows=[slice(0, 3), slice(0, 5)]),
        attend(1, 4),
        attend(3, 4, batch=1, do_rotary=1, local_window_size=2),
        attend(1, 4, do_rotary=1, rest=[np.array([[7], [9]])]),
        attend(1, 4, constant=False, do_rotary=1),
        attend(1, 6, filled=numbers(4, 2), total=5, constant=False, do_rotary=1, local_window_size=2),
        attend(3, 4, batch=1, constant=False),
        attend(3, 8, filled=numbers(2, 2), total=3, constant=False, do_rotary=1),
    ]


def _others() -> list[Case]:
    whole, signal, spectrum = ids(9, 4, 5), floats(2, 8), floats(2, 5, 2)
    imaginary = spectrum[..., 0] + 1j * spectrum[..., 1]

    def rfft() -> list[Array]:
        y = np.fft.rfft(signal)
        return [np.stack([y.real, y.imag], -1)]

    return [
        Case("Trilu", [floats(2, 4, 5)], [np.array(1)], upper=0),
        Case("Trilu", [whole], [np.array(-1)], expected=lambda: [np.triu(whole, -1)]),
        Case("Trilu", [floats(4, 5)]),
        Case("ExpandDims", [floats(4, 5)], [np.array(-1, np.int32)]),
        Case("Rfft", [signal], expected=rfft, signal_ndim=1),
        Case("Irfft", [spectrum], expected=lambda: [np.fft.irfft(imaginary)], signal_ndim=1),
    ]


FLOAT_CASES = [*_fused(), *_normalizations(), *_attention(), *_multi_head(), *_rotary(), *_grouped(), *_others()]
"""Cases whose expansion contains no quantised operator."""

SAMPLED_CASES = [
    Case("GridSample", [floats(1, 2, 4, 5), floats(1, 3, 3, 2)], mode="bilinear", padding_mode="border"),
    Case("GatherND", [floats(4, 5)], [np.array([[1], [2]])]),
]
DEVICE_CASES = [
    *(
        next(case for case in FLOAT_CASES[::-1] if case.op == op)
        for op in ("FusedGemm", "EmbedLayerNormalization", "GroupNorm")
    ),
    *[case for case in _attention() if "unidirectional" in str(case.node)][-2:],
    *[case for case in _multi_head() if len(case.outputs) == 3][:2],
    *[case for case in _grouped() if "do_rotary" in str(case.node)][-2:],
    next(case for case in FLOAT_CASES if case.op == "SkipLayerNormalization" and len(case.outputs) == 4),
    next(case for case in FLOAT_CASES if case.op == "LayerNormalization"),
]
"""A few cases that use runs of many kernels."""
