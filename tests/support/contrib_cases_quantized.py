"""Test cases of ONNX Runtime's quantised contrib operators.

If ONNX Runtime has no CPU kernel, the case computes the answer by ONNX Runtime's other operators or by numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from tests.support.contrib_case import Array, Case, floats, i8, ids, numbers, random, scale, u8
from tests.support.recurrent import recurrent


def _quantized(make: Callable[..., Array]) -> list[Case]:
    """All operators with elements of one type."""
    a, b = make(2, 5, 7), make(5, 7)
    narrow = np.array(0 if a.dtype == np.uint8 else -128, a.dtype)
    fraction = np.float32(1 / 256)
    z = [make() for _ in range(3)]
    mean = [make(2, 5, 7), scale(), make(), np.float32(0.02), make()]

    def reduced() -> list[Array]:
        x = (mean[0].astype(np.float32) - mean[2].astype(np.float32)) * mean[1]
        y = np.rint(x.mean(1, keepdims=True) / mean[3]) + mean[4]
        return [np.clip(y, np.iinfo(a.dtype).min, np.iinfo(a.dtype).max).astype(a.dtype)]

    return [
        Case("QLinearAdd", [a], [scale(), z[0], b, scale(), z[1], scale(), z[2]]),
        Case("QLinearMul", [a], [scale(), z[0], b, scale(), z[1], np.float32(0.1), z[2]]),
        Case("QLinearSigmoid", [a], [scale(), z[0], fraction, z[1]]),
        Case("QLinearLeakyRelu", [a], [scale(), z[0], scale(), z[1]], alpha=0.1),
        Case("QLinearAveragePool", [make(1, 3, 6, 7)], [scale(), z[0], scale(), z[1]], kernel_shape=[2, 3], pads=[1, 1, 0, 1]),
        Case("QLinearAveragePool", [make(1, 6, 7, 3)], [scale(), z[0], scale(), z[1]], kernel_shape=[2, 3], channels_last=1),
        Case("QLinearGlobalAveragePool", [make(1, 3, 6, 7)], [scale(), z[0], scale(), z[1]]),
        Case("QLinearGlobalAveragePool", [make(1, 6, 7, 3)], [scale(), z[0], scale(), z[1]], channels_last=1),
        *(
            Case("QLinearSoftmax", [a], [scale(), z[0], fraction, narrow], axis=axis, opset=opset)
            for axis in (1, 2, -1)
            for opset in (12, 13)
        ),
        Case("QLinearConcat", [scale(), z[0], make(2, 3), scale(), z[1], make(2, 4), scale(1), z[2]], axis=1),
        Case("QLinearWhere", [np.array([[True], [False]]), make(2, 5)], [scale(), z[0], make(5), scale(), z[1], scale(), z[2]]),
        Case("QLinearReduceMean", [mean[0]], mean[1:], expected=reduced, axes=[1], keepdims=1),
        Case(
            "QGemm",
            [make(3, 6)],
            [scale(), z[0], make(5, 6), scale(), z[1], ids(100, 5), np.float32(0.5), z[2]],
            transB=1,
            alpha=0.7,
        ),
        Case("QGemm", [make(3, 6)], [scale(), z[0], make(6, 5), scale(), z[1], ids(100, 5)], alpha=1.3),
        Case("QGemm", [make(3, 6)], [scale(), z[0], make(5, 6), scale(5), make(5), None, np.float32(0.5), z[2]], transB=1),
        Case(
            "QLinearConv",
            [make(1, 6, 5, 4)],
            [scale(), z[0], i8(8, 4, 3, 3), scale(8), np.zeros(8, np.int8), np.float32(3), z[1], ids(100, 8)],
            channels_last=1,
            pads=[1, 1, 1, 1],
        ),
        Case("QuantizeLinear", [floats(3, 4)], [scale(), z[0]], model_opset=12),
        Case("DequantizeLinear", [make(3, 4)], [scale(4), make(4)], axis=1),
        Case("MatMulIntegerToFloat", [make(3, 6)], [i8(6, 5), scale(), scale(5), z[0], i8(5), floats(5)]),
        Case("MatMulIntegerToFloat", [make(3, 6)], [i8(6, 5), scale(1), scale()]),
    ]


def _integer_products() -> list[Case]:
    width = 12
    tables = [u8(20, 8), u8(9, 8), u8(3, 8), u8(8), u8(8)]
    past = floats(2, 2, 3, 2, 4)
    weights = [i8(7, 3 * width), floats(3 * width), scale(), scale()]
    unsigned = [u8(7, 3 * width), floats(3 * width), scale(), scale(), numbers(3, 5), u8(), u8()]
    return [
        Case("DynamicQuantizeMatMul", [floats(3, 6)], [i8(6, 5), scale(5), i8(5), floats(5)]),
        Case("DynamicQuantizeMatMul", [floats(2, 3, 6)], [u8(6, 5), scale()]),
        Case("QAttention", [u8(2, 5, 7)], [*weights, None, u8(), np.int8(0)], num_heads=3),
        Case("QAttention", [u8(2, 5, 7)], [*unsigned, past], num_heads=3, outputs=(0, 1), unidirectional=1),
        Case(
            "QEmbedLayerNormalization",
            [ids(20, 2, 5), ids(3, 2, 5)],
            [
                *tables,
                np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32),
                *(scale() for _ in tables),
                *(u8() for _ in tables),
            ],
            outputs=(0, 1),
            epsilon=1e-5,
        ),
        Case("QuantizeLinear", [floats(3, 4)], [scale(), np.uint16(7)], model_opset=12),
        Case("DequantizeLinear", [np.arange(12, dtype=np.int16)], [scale(), np.int16(7)], model_opset=17),
    ]


def nbits(columns: int, inner: int, block: int, bits: int = 4, zeros: str = "", bias: bool = False, opset: int = 21) -> Case:
    """A MatMulNBits with zero points that are "packed", "float" or omitted."""
    blocks = -(-inner // block)
    weight, scales = u8(columns, blocks, block * bits // 8), scale(columns, blocks)
    points = {
        "": None,
        "packed": u8(columns, blocks if bits == 8 else -(-blocks // 2)),
        "float": (15 * random.random((columns, blocks))).astype(np.float32),
    }[zeros]
    constants = [weight, scales, points, None, floats(columns) if bias else None]
    return Case(
        "MatMulNBits", [floats(2, 3, inner)], constants, K=inner, N=columns, block_size=block, bits=bits, model_opset=opset
    )


def rows_of_blocks(columns: int, block: int, bits: int, *, zeros: bool = False) -> Case:
    """A GatherBlockQuantized of rows, with zero points or without."""
    rows, blocks = 11, columns // block
    constants = [scale(rows, blocks), u8(rows, -(-blocks * bits // 8)) if zeros else None]
    fields = {"block_size": block, "bits": bits, "gather_axis": 0, "quantize_axis": 1}
    weight, order = u8(rows, columns * bits // 8), (1, 0, 2, 3)
    return Case("GatherBlockQuantized", [np.array([[3, 0], [10, 3]])], [weight, *constants], order=order, **fields)


def _blocks() -> list[Case]:
    return [
        rows_of_blocks(64, 32, 4),
        rows_of_blocks(96, 32, 4, zeros=True),
        rows_of_blocks(48, 16, 8),
        rows_of_blocks(64, 16, 8, zeros=True),
        nbits(24, 64, 32),
        nbits(24, 64, 32, zeros="packed"),
        nbits(24, 96, 32, zeros="packed"),
        nbits(24, 96, 32, zeros="float"),
        nbits(7, 45, 16, zeros="packed"),
        nbits(7, 45, 16, bias=True),
        nbits(24, 64, 32, bits=8),
        nbits(9, 40, 16, bits=8, zeros="packed"),
        nbits(24, 96, 32, opset=14),
    ]


def quantized_lstm(
    make: Callable[..., Array], direction: str = "forward", *, channels: bool = False, full: bool = False, **attributes: Any
) -> Case:
    """A DynamicQuantizeLSTM with weights of one type; with a scale for each channel, or one for each direction.

    `full`: with all optional inputs. The answer is that of an LSTM with the weights that the integers mean. ONNX Runtime also
    rounds inputs and states (tests/compiler/frontend/test_contrib_recurrent.py compares with it).
    """
    steps, batch, size, hidden, count = 4, 2, 6, 5, 2 if direction == "bidirectional" else 1
    attributes |= {"hidden_size": hidden, "direction": direction}
    shape = (count, 4 * hidden) if channels else (count,)
    codes = [make(count, size, 4 * hidden), make(count, hidden, 4 * hidden)]
    scales = [(0.1 * scale(*shape)).astype(np.float32) for _ in codes]
    zeros = [make(*shape) if not channels else np.zeros(shape, codes[0].dtype) for _ in codes]
    rest: list[Array | None] = [floats(count, 8 * hidden), None, None, None, None]
    if full:
        states = [floats(count, batch, hidden) for _ in range(2)]
        rest = [rest[0], numbers(3, 4), *states, floats(count, 3 * hidden)]
    x = floats(steps, batch, size)
    spread = (slice(None), None) if channels else (slice(None), None, None)

    def expected() -> list[Array]:
        weights = [
            ((code.astype(np.float64) - zero[spread]) * factor[spread]).transpose(0, 2, 1)
            for code, zero, factor in zip(codes, zeros, scales, strict=True)
        ]
        node = helper.make_node("LSTM", ["x"], ["y"], **attributes)
        return list(recurrent(node, *(None if a is None else a.astype(np.float64) for a in (x, *weights)), *rest))

    constants = [*codes, *rest, scales[0], zeros[0], scales[1], zeros[1]]
    return Case("DynamicQuantizeLSTM", [x], constants, outputs=(0, 1, 2), expected=expected, **attributes)


def _recurrent() -> list[Case]:
    names = ["Sigmoid", "Tanh", "Relu", "HardSigmoid", "Relu", "Tanh"]
    return [
        quantized_lstm(i8),
        quantized_lstm(u8, "reverse", clip=0.7, input_forget=1),
        quantized_lstm(i8, "bidirectional", full=True),
        quantized_lstm(u8, "bidirectional", channels=True, activations=names),
        quantized_lstm(i8, channels=True, full=True),
    ]


QUANTIZED_CASES = [*_quantized(u8), *_quantized(i8), *_integer_products(), *_blocks(), *_recurrent()]
"""Cases whose expansion contains quantised operators."""
