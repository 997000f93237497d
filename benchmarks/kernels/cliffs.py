"""Single operators that once took many times as long as their bytes or multiplications need, as ONNX models."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.operators import why_unsupported

_OPSET, _IR = 21, 10
_BLOCK = 32
"""Steps of depth that share a scale of 4-bit weights."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Single:
    """One operator as an ONNX model, which flashmem and ONNX Runtime both run.

    `elements`: those of operands and result. `layouts`: also launches that only move data are measured.
    """

    name: str
    make: Callable[[], onnx.ModelProto]
    elements: int
    flops: int = 0
    layouts: bool = False

    def __str__(self) -> str:
        return self.name

    def model(self) -> onnx.ModelProto:
        """The model; its inputs are floats."""
        return self.make()

    def graph(self) -> Graph:
        """The graph of the model, as the compiler imports it."""
        path = folder() / f"{abs(hash(self.name))}.onnx"
        onnx.save(self.model(), path)
        return imported(path)


def imported(path: Path) -> Graph:
    """The graph of the model in a file, as the compiler imports it."""
    return import_model(path, {}, why_unsupported)


def folder() -> Path:
    """A folder for models until the process ends: a graph reads its weights later."""
    return Path(_folder().name)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _model(
    nodes: Sequence[onnx.NodeProto], x: tuple[int, ...], outputs: dict[str, tuple[int, ...]], constants: dict[str, Array],
    dtypes: dict[str, int] | None = None,
) -> onnx.ModelProto:  # fmt: skip
    def declared(name: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, (dtypes or {}).get(name, onnx.TensorProto.FLOAT), shape)

    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes, "operator", [declared("x", x)], [declared(*each) for each in outputs.items()], initializers
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR)


def _draw(*shape: int) -> Array:
    return np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)


def _transpose(shape: tuple[int, ...], perm: tuple[int, ...]) -> Single:
    made = tuple(shape[axis] for axis in perm)
    node = helper.make_node("Transpose", ["x"], ["y"], perm=perm)
    name = f"Transpose {'x'.join(map(str, shape))} by {''.join(map(str, perm))}"
    return Single(name, partial(_model, [node], shape, {"y": made}, {}), 2 * math.prod(shape), layouts=True)


def _copy(shape: tuple[int, ...]) -> Single:
    node = helper.make_node("Identity", ["x"], ["y"])
    return Single(
        f"copy of {'x'.join(map(str, shape))}", partial(_model, [node], shape, {"y": shape}, {}), 2 * math.prod(shape)
    )


def _convolution(
    op: str, name: str, x: tuple[int, ...], weight: tuple[int, ...], columns: int, size: tuple[int, int], **attributes: Any
) -> Single:
    made = (x[0], columns, *size)
    taps = math.prod(weight[2:])
    pixels = math.prod(x[2:]) if op == "ConvTranspose" else math.prod(size)
    each = weight[1] * x[1] if op == "ConvTranspose" else weight[1] * columns
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    return Single(
        name, lambda: _model([node], x, {"y": made}, {"w": _draw(*weight)}),
        math.prod(x) + math.prod(weight) + math.prod(made), 2 * pixels * taps * each,
    )  # fmt: skip


def _top(shape: tuple[int, ...], k: int) -> Single:
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"])
    made = (*shape[:-1], k)
    return Single(
        f"TopK {k} of {'x'.join(map(str, shape))}",
        partial(
            _model, [node], shape, {"values": made, "indices": made}, {"k": np.array([k])}, {"indices": onnx.TensorProto.INT64}
        ),
        math.prod(shape) + 3 * math.prod(made),
    )


def _product(rows: int, depth: int, columns: int, bits: int) -> Single:
    """A product with weights of `bits` bits. Of 8: a scale for each column. Of 4: a scale and a zero point for each block."""

    def model() -> onnx.ModelProto:
        random = np.random.default_rng(0)
        shapes = (rows, depth), {"y": (rows, columns)}
        if bits == 32:
            return _model([helper.make_node("MatMul", ["x", "w"], ["y"])], *shapes, {"w": _draw(depth, columns)})
        if bits == 8:
            nodes = [
                helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=1),
                helper.make_node("MatMul", ["x", "w"], ["y"]),
            ]
            codes = random.integers(-127, 128, (depth, columns)).astype(np.int8)
            return _model(nodes, *shapes, {"codes": codes, "scale": _draw(columns) / 127})
        node = helper.make_node(
            "MatMulNBits", ["x", "codes", "scale", "zeros"], ["y"], domain="com.microsoft", K=depth, N=columns, bits=4,
            block_size=_BLOCK,
        )  # fmt: skip
        blocks = depth // _BLOCK
        constants = {
            "codes": random.integers(0, 256, (columns, blocks, _BLOCK // 2)).astype(np.uint8),
            "scale": _draw(columns, blocks) / 8,
            "zeros": random.integers(0, 256, (columns, blocks // 2)).astype(np.uint8),
        }
        return _model([node], *shapes, constants)

    size = depth * columns * bits // 32
    return Single(f"MatMul {rows}x{depth}x{columns} int{bits}".replace("int32", "fp32"), model, rows * (depth + columns) + size,
                  2 * rows * depth * columns)  # fmt: skip


@cache
def cliffs() -> tuple[Single, ...]:
    """The operators, beside some of equal bytes or multiplications that were never slow."""
    image = (1, 128, 56, 56)
    same = {"pads": [1, 1, 1, 1]}
    return (
        _copy((1024, 4096)),
        _copy((16, 128, 4096)),
        _transpose((1024, 4096), (1, 0)),
        _transpose((16, 128, 4096), (0, 2, 1)),
        _transpose((1, 197, 12, 64), (0, 2, 3, 1)),
        _transpose((64, 96, 31, 33), (3, 1, 0, 2)),
        _transpose((1, 3, 640, 640), (0, 2, 3, 1)),
        _transpose((1, 640, 640, 3), (0, 3, 1, 2)),
        _convolution("Conv", "Conv depthwise 128x56x56", image, (128, 1, 3, 3), 128, (56, 56), group=128, **same),
        _convolution("Conv", "Conv depthwise 128x56x56, multiplier 2", image, (256, 1, 3, 3), 256, (56, 56), group=128, **same),
        _convolution("Conv", "Conv 128x56x56, 32 groups", image, (128, 4, 3, 3), 128, (56, 56), group=32, **same),
        _convolution(
            "Conv",
            "Conv 64x64x64-128 4x4 /2",
            (1, 128, 64, 64),
            (128, 128, 4, 4),
            128,
            (32, 32),
            strides=[2, 2],
            pads=[1, 1, 1, 1],
        ),
        _convolution(
            "ConvTranspose",
            "ConvTranspose 128x32x32-128 4x4 /2",
            (1, 128, 32, 32),
            (128, 128, 4, 4),
            128,
            (64, 64),
            strides=[2, 2],
            pads=[1, 1, 1, 1],
        ),
        _top((1, 50257), 40),
        _top((64, 1000), 5),
        _top((1, 8400), 300),
        *(_product(rows, 1024, 4096, bits) for rows in (1, 128) for bits in (32, 8, 4)),
    )


@cache
def low_bits() -> tuple[Single, ...]:
    """Products of a decoder of 1.1B parameters, and a square one: of one token, of eight, and of parts of a prompt."""
    shapes = ((2048, 2048), (2048, 5632), (5632, 2048), (2048, 32000), (4096, 4096))
    return (
        *(_product(rows, *shape, 4) for rows in (1, 8, 32, 128) for shape in shapes),
        *(_product(1, *shape, 8) for shape in shapes),
        *(_product(rows, 4096, 4096, 8) for rows in (8, 32, 128)),
        *(_product(rows, 4096, 4096, 32) for rows in (1, 8, 32, 128)),
    )
