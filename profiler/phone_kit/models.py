"""The models of the phone kit, as ONNX: every kernel family, contractions in half precision, weights in ggml's blocks, and one
to stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.compiler.ir.blocks import FORMATS
from flashmem.compiler.ir.blocks.places import bit_places

Array = NDArray[Any]

STREAMED_LAYERS = 12
STREAMED_WIDTH = 1024


@dataclass(frozen=True)
class KitModel:
    """A model with its inputs. `precision`: what a bundle of it stores.

    `plain`: the same model of ONNX's operators alone, for ONNX Runtime, where `proto` has others.
    """

    name: str
    proto: onnx.ModelProto
    inputs: dict[str, Array]
    precision: Literal["fp32", "fp16"] = "fp32"
    plain: onnx.ModelProto | None = None

    def save(self, folder: Path) -> Path:
        """Write the model to `folder`; returns its path."""
        return _save(self.proto, folder / f"{self.name}.onnx")

    def save_plain(self, folder: Path) -> Path:
        """Write the model that ONNX Runtime runs to `folder`; returns its path."""
        return _save(self.plain or self.proto, folder / f"{self.name}-plain.onnx")


def _save(proto: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(proto.SerializeToString())
    return path


@dataclass
class _Nodes:
    """A model under construction: inputs, constants, and nodes whose last results are outputs."""

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def input(self, *shape: int) -> str:
        """A random input."""
        return self.given(self.random.standard_normal(shape, np.float32))

    def given(self, data: Any) -> str:
        """An input with this content."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.asarray(data)
        return name

    def weight(self, *shape: int) -> str:
        """A random weight, scaled so that sums stay near one."""
        depth = float(np.prod(shape[1:])) if len(shape) > 2 else float(shape[0])
        return self.constant(self.random.standard_normal(shape, np.float32) / np.float32(np.sqrt(depth)))

    def constant(self, data: Any) -> str:
        """A constant with this content."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def nibbles(self, *shape: int) -> str:
        """A constant of random integers of 4 bits."""
        name = f"c{len(self.constants)}"
        numbers = self.random.integers(0, 16, shape)
        self.constants.append(helper.make_tensor(name, onnx.TensorProto.UINT4, shape, numbers.reshape(-1)))
        return name

    def node(self, op: str, *inputs: str, dtypes: Sequence[str] = (), count: int = 1, **attributes: Any) -> list[str]:
        """Add a node; its results are outputs of the model where `dtypes` are given."""
        names = [f"{op}{len(self.nodes)}.{i}" for i in range(max(count, len(dtypes)))]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        for name, dtype in zip(names, dtypes, strict=False):
            self.outputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))
        return names

    def out(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Add a node whose one result, of float, is an output."""
        self.node(op, *inputs, dtypes=("float32",), **attributes)

    def model(self, name: str, precision: Literal["fp32", "fp16"] = "fp32") -> KitModel:
        """The finished model."""
        inputs = [
            helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for key, data in self.feeds.items()
        ]
        graph = helper.make_graph(self.nodes, name, inputs, self.outputs, self.constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return KitModel(name, onnx.shape_inference.infer_shapes(proto), self.feeds, precision)


def families() -> KitModel:
    """A model that needs every kernel family, each for outputs of its own, so that a wrong one shows."""
    n = _Nodes(1)
    _contractions(n)
    _reductions(n)
    _spatial(n)
    _add_indexing(n)
    return n.model("families")


def half() -> KitModel:
    """Contractions whose weights and activations are stored in half."""
    n = _Nodes(2)
    _contractions(n)
    return n.model("half", "fp16")


BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K")
"""The kinds of blocks in a kit: every form of codes, scales and minima."""


def blocks() -> KitModel:
    """Products of one row and of eight with weights in ggml's blocks, and rows of tables in them."""
    return KitModel("blocks", _of_blocks(plain=False), _block_inputs(), plain=_of_blocks(plain=True))


def _block_inputs() -> dict[str, Array]:
    random = np.random.default_rng(4)
    floats = {f"x{rows}": random.standard_normal((rows, 512), np.float32) for rows in (1, 8)}
    return {**floats, "ids": np.array([3, 0, 39, 7, 7])}


def _of_blocks(*, plain: bool) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []
    outputs: list[onnx.ValueInfoProto] = []

    def out(op: str, name: str, shape: tuple[int, int], *inputs: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        outputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))

    for number, kind in enumerate(BLOCKS):
        data = block_bytes(kind, 40, 512, number)
        if plain:
            constants.append(numpy_helper.from_array(FORMATS[kind].floats(data), f"{kind}.w"))
        else:
            constants.append(numpy_helper.from_array(data, f"{kind}.blocks"))
            nodes.append(helper.make_node("Blocks", [f"{kind}.blocks"], [f"{kind}.w"], domain="flashmem", kind=kind))
        nodes.append(helper.make_node("Transpose", [f"{kind}.w"], [f"{kind}.t"], perm=[1, 0]))
        for rows in (1, 8):
            out("MatMul", f"{kind}.{rows}", (rows, 40), f"x{rows}", f"{kind}.t")
        out("Gather", f"{kind}.rows", (5, 512), f"{kind}.w", "ids", axis=0)
    inputs = [
        helper.make_tensor_value_info(key, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
        for key, data in _block_inputs().items()
    ]
    opsets = [helper.make_opsetid("", 21), *([] if plain else [helper.make_opsetid("flashmem", 1)])]
    graph = helper.make_graph(nodes, "blocks", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def block_bytes(kind: str, rows: int, depth: int, seed: int) -> NDArray[np.uint8]:
    """Blocks of random bytes, [rows, bytes], with scales of 2^-9 to 2^-8, so that sums are moderate."""
    random = np.random.default_rng(seed)
    made, places = FORMATS[kind], bit_places(FORMATS[kind])
    data = random.integers(0, 256, (rows * depth // made.weights, made.nbytes), np.uint8)
    for at in (places.scale, places.minimum) if made.has_minimum else (places.scale,):
        data[:, at + 1] = 0x18 | data[:, at + 1] & 3
    return data.reshape(rows, -1)


def streamed(layers: int = STREAMED_LAYERS, width: int = STREAMED_WIDTH) -> KitModel:
    """A chain of products, to stream: 4 * width**2 bytes of weights a layer.

    A weight has one of two values, so that the kit compresses to a twentieth; signs are random, so that each bit counts.
    """
    n = _Nodes(3)
    y = n.input(16, width)
    for layer in range(layers):
        signs = n.random.integers(0, 2, (width, width)).astype(np.float32) * 2 - 1
        [y] = n.node("MatMul", y, n.constant(signs * np.float32(1 / np.sqrt(width))))
        if layer < layers - 1:
            [y] = n.node("Tanh", y)
    n.out("Identity", y)
    return n.model("streamed")


def _contractions(n: _Nodes) -> None:
    for rows, depth, columns in ((33, 96, 72), (1, 64, 40)):
        [y] = n.node("MatMul", n.input(rows, depth), n.weight(depth, columns))
        n.out("Relu", y)
    image = n.input(1, 16, 13, 11)
    n.out("Conv", image, n.weight(24, 16, 3, 3), kernel_shape=[3, 3], pads=[1] * 4)
    n.out("Conv", image, n.weight(40, 16, 1, 1), kernel_shape=[1, 1])
    n.out("Conv", n.input(1, 3, 12, 16), n.weight(24, 3, 3, 3), kernel_shape=[3, 3], pads=[1] * 4)
    [y] = n.node("Conv", image, n.weight(24, 16, 3, 3), kernel_shape=[3, 3])
    [y] = n.node("GroupNormalization", y, n.weight(24), n.weight(24), num_groups=3)
    n.out("Conv", y, n.weight(16, 24, 1, 1), kernel_shape=[1, 1])
    n.out("Conv", image, n.weight(16, 1, 3, 3), kernel_shape=[3, 3], pads=[1] * 4, group=16)
    n.out("Conv", n.input(1, 6, 13, 11), n.weight(6, 1, 3, 3), kernel_shape=[3, 3], group=6)
    n.out("Conv", image, n.weight(24, 4, 3, 3), kernel_shape=[3, 3], group=4)
    n.out("MatMul", n.input(2, 3, 19, 32), n.input(2, 3, 32, 21))
    queries, keys, values = (n.input(1, 4, 24, 32) for _ in range(3))
    [turned] = n.node("Transpose", keys, perm=[0, 1, 3, 2])
    [scores] = n.node("MatMul", queries, turned)
    [scaled] = n.node("Mul", scores, n.constant(np.float32(0.17)))
    [weights] = n.node("Softmax", scaled, axis=-1)
    n.out("MatMul", weights, values)
    scales = n.constant(n.random.uniform(0.02, 0.05, (2, 40)).astype(np.float32))
    [weight] = n.node("DequantizeLinear", n.nibbles(64, 40), scales, n.nibbles(2, 40), axis=0, block_size=32)
    n.out("MatMul", n.input(1, 64), weight)
    n.out("MatMul", n.input(8, 64), weight)


def _reductions(n: _Nodes) -> None:
    x = n.input(2, 24, 50)
    n.out("LayerNormalization", x, n.weight(50), n.weight(50), axis=-1)
    n.out("Softmax", x, axis=-1)
    n.out("ReduceMean", x, n.constant(np.array([1])), keepdims=0)
    image = n.input(1, 12, 9, 9)
    n.out("InstanceNormalization", image, n.weight(12), n.weight(12))
    n.out("LRN", image, size=5)
    n.out("Det", n.input(3, 4, 4))
    n.out("CumSum", x, n.constant(np.int64(1)))
    n.node("ArgMax", x, axis=2, dtypes=("int64",))
    n.node("TopK", n.input(3, 600), n.constant(np.array([7])), dtypes=("float32", "int64"))
    n.node("TopK", n.input(1, 20_000), n.constant(np.array([3000])), dtypes=("float32", "int64"))
    n.node("TopK", n.input(2, 5000), n.constant(np.array([900])), dtypes=("float32", "int64"))
    weights = (n.weight(1, 32, 12), n.weight(1, 32, 8), n.weight(1, 64))
    n.node("LSTM", n.input(5, 2, 12), *weights, hidden_size=8, dtypes=("float32", "float32", "float32"))


def _spatial(n: _Nodes) -> None:
    image = n.input(1, 8, 12, 12)
    n.out("MaxPool", image, kernel_shape=[3, 3], strides=[2, 2])
    values, places = n.node("MaxPool", image, kernel_shape=[2, 2], strides=[2, 2], count=2)
    n.out("MaxUnpool", values, places, kernel_shape=[2, 2], strides=[2, 2])
    n.out("Resize", image, "", n.constant(np.array([1, 1, 2, 2], np.float32)), mode="linear")
    n.out("GridSample", image, n.given(n.random.uniform(-1, 1, (1, 5, 6, 2)).astype(np.float32)))
    boxes = n.given(np.array([[1, 1, 8, 9], [0, 2, 6, 11]], np.float32))
    n.out("RoiAlign", image, boxes, n.given(np.zeros(2, np.int64)), output_height=3, output_width=3, sampling_ratio=2)
    offsets = n.given(n.random.uniform(-1, 1, (1, 18, 12, 12)).astype(np.float32))
    n.out("DeformConv", image, n.weight(16, 8, 3, 3), offsets, kernel_shape=[3, 3], pads=[1] * 4)


def _add_indexing(n: _Nodes) -> None:
    x = n.input(20, 30)
    n.out("Gather", x, n.given(np.array([3, 0, 19, 7])), axis=0)
    n.out("Gather", n.weight(40, 16), n.given(np.array([3, 0, 39, 7, 7])), axis=0)
    n.out("GatherElements", x, n.given(n.random.integers(0, 20, (5, 30))), axis=0)
    n.out("ScatterElements", x, n.given(n.random.permutation(20)[:3].repeat(30).reshape(3, 30)), n.input(3, 30), axis=0)
    boxes = n.given(n.random.uniform(0, 9, (2, 50, 4)).astype(np.float32))
    scores = n.input(2, 3, 50)
    n.node(
        "NonMaxSuppression",
        boxes,
        scores,
        n.constant(np.array([8])),
        n.constant(np.array([0.4], np.float32)),
        dtypes=("int64",),
    )
    n.out("Transpose", x, perm=[1, 0])
    n.out("Concat", x, n.input(20, 7), axis=1)
    n.out("Gelu", x)
    _add_rotation(n)


def _add_rotation(n: _Nodes) -> None:
    """Rotary positions of 4 heads."""
    x, (cosines, sines) = n.input(1, 4, 24, 32), (n.weight(24, 32) for _ in range(2))
    start, middle, end, last = (n.constant(np.array([at])) for at in (0, 16, 32, 3))
    [first] = n.node("Slice", x, start, middle, last)
    [second] = n.node("Slice", x, middle, end, last)
    [negative] = n.node("Neg", second)
    [turned] = n.node("Concat", negative, first, axis=-1)
    [left] = n.node("Mul", x, cosines)
    [right] = n.node("Mul", turned, sines)
    n.out("Add", left, right)
