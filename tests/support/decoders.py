"""One decoder layer in the shapes of Llama and of SmolLM2, as exporters write it: ONNX models with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


@dataclass
class Decoder:
    """A decoder of `layers` layers that reads `words` hidden states after `past` earlier keys and values.

    With `past`, keys and values of the words before are inputs and those of all words outputs, as for generation.
    """

    layers: int = 1
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    inner: int = 128
    words: int = 8
    past: int = 0
    seed: int = 5
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    def input(self, name: str, *shape: int) -> str:
        """A float input."""
        self.inputs[name] = shape
        return name

    def constant(self, data: Any, dtype: Any = np.float32) -> str:
        """A constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        """A random weight."""
        return self.constant(self.random.standard_normal(shape) / np.sqrt(shape[0]))

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output."""
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def norm(self, x: str) -> str:
        """RMS normalization as PyTorch exports it below opset 23."""
        mean = self.op("ReduceMean", self.op("Pow", x, self.constant(2.0)), self.constant([-1], np.int64), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-5)))
        scale = self.constant(1 + 0.1 * self.random.standard_normal(self.hidden))
        return self.op("Mul", scale, self.op("Mul", x, self.op("Reciprocal", root)))

    def split(self, x: str, heads: int) -> str:
        """[1, words, heads * width] to [1, heads, words, width]."""
        x = self.op("Reshape", x, self.constant([1, self.words, heads, self.width], np.int64))
        return self.op("Transpose", x, perm=[0, 2, 1, 3])

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Rotary positions as PyTorch exports them."""

        def part(start: int, end: int) -> str:
            return self.op("Slice", x, *(self.constant([i], np.int64) for i in (start, end, 3, 1)))

        half = self.width // 2
        turned = self.op("Concat", self.op("Neg", part(half, self.width)), part(0, half), axis=-1)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))

    def repeat(self, x: str) -> str:
        """Keys or values once for each head of queries."""
        keys, times = self.past + self.words, self.heads // self.kv_heads
        x = self.op("Unsqueeze", x, self.constant([2], np.int64))
        x = self.op("Expand", x, self.constant([1, self.kv_heads, times, keys, self.width], np.int64))
        return self.op("Reshape", x, self.constant([1, self.heads, keys, self.width], np.int64))

    def cached(self, name: str, x: str) -> str:
        """`x` after the earlier ones, which is an output."""
        if self.past:
            x = self.op("Concat", self.input(name, 1, self.kv_heads, self.past, self.width), x, axis=2)
            self.outputs.append(x)
        return x

    def layer(self, at: int, x: str, cos: str, sin: str) -> str:
        """One decoder layer."""
        y = self.norm(x)
        q, k, v = (
            self.split(self.op("MatMul", y, self.weight(self.hidden, heads * self.width)), heads)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (self.repeat(self.cached(f"{name}{at}", each)) for name, each in (("k", k), ("v", v)))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(self.width**-0.5))
        if self.words > 1:
            rows, keys = np.arange(self.past, self.past + self.words)[:, None], np.arange(self.past + self.words)
            scores = self.op("Add", scores, self.constant(np.where(keys > rows, np.finfo(np.float32).min, 0)[None, None]))
        y = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        y = self.op("Reshape", y, self.constant([1, self.words, self.hidden], np.int64))
        x = self.op("Add", x, self.op("MatMul", y, self.weight(self.hidden, self.hidden)))
        y = self.norm(x)
        gate = self.op("MatMul", y, self.weight(self.hidden, self.inner))
        gate = self.op("Mul", gate, self.op("Sigmoid", gate))
        y = self.op("Mul", gate, self.op("MatMul", y, self.weight(self.hidden, self.inner)))
        return self.op("Add", x, self.op("MatMul", y, self.weight(self.inner, self.hidden)))

    def model(self) -> onnx.ModelProto:
        """The model. Cosines and sines of positions are computed from an input, the angles of each word."""
        x = self.input("x", 1, self.words, self.hidden)
        angles = self.op("Unsqueeze", self.input("angles", 1, self.words, self.width // 2), self.constant([1], np.int64))
        angles = self.op("Concat", angles, angles, axis=-1)
        cos, sin = self.op("Cos", angles), self.op("Sin", angles)
        for at in range(self.layers):
            x = self.layer(at, x, cos, sin)
        self.outputs.insert(0, self.norm(x))
        float32 = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes, "decoder",
            [helper.make_tensor_value_info(name, float32, shape) for name, shape in self.inputs.items()],
            [helper.make_tensor_value_info(name, float32, None) for name in self.outputs],
            self.constants,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    def feeds(self) -> dict[str, np.ndarray[Any, Any]]:
        """Random inputs."""
        return {name: self.random.standard_normal(shape).astype(np.float32) for name, shape in self.inputs.items()}


def llama(layers: int = 2) -> Decoder:
    """Like Llama 2, of small sizes: as many heads for keys as for queries, eight words at once."""
    return Decoder(layers, 64, 4, 4, 176)


def smollm2(layers: int = 2) -> Decoder:
    """Like SmolLM2-135M, of a third of its width: a third as many heads for keys; one word after twelve, with a cache."""
    return Decoder(layers, 192, 6, 2, 512, words=1, past=12)
