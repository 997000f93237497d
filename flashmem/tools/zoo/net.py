"""A builder of graphs without weights: operators and layers in the importer's form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashmem.base.types import DType
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Placeholder, Value

OPSET = 18


class Net:
    """A graph builder. Each method that computes appends nodes and returns their value."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[GraphPort] = []
        self.nodes: list[Node] = []
        self.weights = 0
        self.numbers: dict[float, Value] = {}

    def finish(self, answer: Value, name: str = "logits") -> Graph:
        """The finished graph with one output."""
        return Graph(self.name, self.inputs, [GraphPort(name, "float32", answer)], self.nodes, OPSET)

    # -- values

    def input(self, name: str, shape: tuple[int, ...], dtype: DType) -> Value:
        """An input of the graph."""
        value = Value(name, shape, dtype)
        self.inputs.append(GraphPort(name, dtype, value))
        return value

    def weight(self, name: str, shape: tuple[int, ...]) -> Value:
        """A placeholder for a weight. Each has its own fill value, so that two of one shape are not merged."""
        self.weights += 1
        return Value(name, shape, "float32", Placeholder(shape, self.weights, np.dtype("float32")))

    def causal_mask(self, name: str, tokens: int, window: int | None = None) -> Value:
        """A constant: which keys a query may see, those up to itself, and of them only the last `window`."""
        seen = np.tri(tokens, dtype=bool)
        if window is not None:
            seen &= ~np.tri(tokens, k=-window, dtype=bool)
        return constant(name, seen[None, None])

    def additive_mask(self, tokens: int) -> Value:
        """A constant: what is added to the scores of the keys that a query may see, and of others."""
        return constant("mask", np.where(np.tri(tokens, dtype=bool), 0, -3.4e38).astype(np.float32)[None, None])

    def number(self, value: float) -> Value:
        """A scalar constant."""
        if value not in self.numbers:
            self.numbers[value] = constant(f"number.{value:g}", np.asarray(value, np.float32))
        return self.numbers[value]

    def integers(self, values: int | Sequence[int]) -> Value:
        """A constant for shapes, axes or indices."""
        return constant("integers", np.asarray(values, np.int64))

    # -- operators

    def op(self, op: str, inputs: Sequence[Value], shape: tuple[int, ...], *, name: str = "", **attributes: Any) -> Value:
        """The output of a new node."""
        name = name or f"{op}_{len(self.nodes)}"
        output = Value(name, shape, "float32")
        output.producer = Node(op, name, list(inputs), [output], attributes)
        self.nodes.append(output.producer)
        return output

    def matmul(self, a: Value, b: Value, name: str = "") -> Value:
        """The matrix product over the last two dimensions."""
        return self.op("MatMul", [a, b], (*a.shape[:-1], b.shape[-1]), name=name)

    def transpose(self, x: Value, perm: tuple[int, ...]) -> Value:
        """Permute the dimensions to the order `perm`."""
        return self.op("Transpose", [x], tuple(x.shape[axis] for axis in perm), perm=perm)

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """The same elements in another shape."""
        return self.op("Reshape", [x, self.integers(shape)], shape)

    def softmax(self, x: Value) -> Value:
        """Softmax over the last dimension."""
        return self.op("Softmax", [x], x.shape, axis=-1)

    def relu(self, x: Value) -> Value:
        """ReLU."""
        return self.op("Relu", [x], x.shape)

    def relu6(self, x: Value) -> Value:
        """ReLU, limited to 6."""
        return self.op("Clip", [x, self.number(0.0), self.number(6.0)], x.shape)

    def hard_swish(self, x: Value) -> Value:
        """`x` times a piecewise linear sigmoid of it."""
        return self.op("HardSwish", [x], x.shape)

    def pooled(self, x: Value) -> Value:
        """The mean of each channel over the image."""
        return self.op("ReduceMean", [x, self.integers([-1, -2])], (*x.shape[:2], 1, 1), keepdims=1)

    # -- layers with weights

    def embed(self, vocabulary: int, hidden: int, tokens: int) -> Value:
        """An embedding of token ids, which are an input."""
        ids = self.input("input_ids", (1, tokens), "int64")
        return self.op("Gather", [self.weight("embedding", (vocabulary, hidden)), ids], (1, tokens, hidden), axis=0)

    def linear(self, x: Value, name: str, columns: int, *, bias: bool = False) -> Value:
        """The product with a weight, with an optional bias."""
        y = self.matmul(x, self.weight(f"{name}.weight", (x.shape[-1], columns)), name)
        return self.op("Add", [y, self.weight(f"{name}.bias", (columns,))], y.shape) if bias else y

    def gemm(self, x: Value, name: str, columns: int) -> Value:
        """The same for a matrix, as one Gemm operator."""
        weights = [self.weight(f"{name}.weight", (columns, x.shape[-1])), self.weight(f"{name}.bias", (columns,))]
        return self.op("Gemm", [x, *weights], (x.shape[0], columns), name=name, transB=1)

    def conv(self, x: Value, name: str, channels: int, kernel: int, stride: int, pad: int, groups: int = 1) -> Value:
        """A convolution over one dimension, or over two with a square kernel."""
        dimensions = len(x.shape) - 2
        side = (x.shape[2] + 2 * pad - kernel) // stride + 1
        weights = [
            self.weight(f"{name}.weight", (channels, x.shape[1] // groups, *(kernel,) * dimensions)),
            self.weight(f"{name}.bias", (channels,)),
        ]
        return self.op(
            "Conv", [x, *weights], (1, channels, *(side,) * dimensions), name=name,
            kernel_shape=(kernel,) * dimensions, strides=(stride,) * dimensions, dilations=(1,) * dimensions,
            pads=(pad,) * (2 * dimensions), group=groups,
        )  # fmt: skip

    def layer_norm(self, x: Value, name: str) -> Value:
        """Layer normalisation over the last dimension, with scale and bias."""
        weights = [self.weight(f"{name}.{part}", (x.shape[-1],)) for part in ("weight", "bias")]
        return self.op("LayerNormalization", [x, *weights], x.shape, name=name, axis=-1, epsilon=1e-5)

    def rms_norm(self, x: Value, name: str) -> Value:
        """RMS normalisation, decomposed as exporters write it up to opset 22."""
        mean_shape = (*x.shape[:-1], 1)
        square = self.op("Pow", [x, self.number(2.0)], x.shape)
        mean = self.op("ReduceMean", [square, self.integers([-1])], mean_shape, name=name, keepdims=1)
        root = self.op("Sqrt", [self.op("Add", [mean, self.number(1e-5)], mean_shape)], mean_shape)
        scaled = self.op("Mul", [x, self.op("Reciprocal", [root], mean_shape)], x.shape)
        return self.op("Mul", [self.weight(f"{name}.weight", (x.shape[-1],)), scaled], x.shape)

    # -- attention: between [1, tokens, heads * width] and [1, heads, tokens, width]

    def split_heads(self, x: Value, heads: int) -> Value:
        """Split the last dimension into heads."""
        return self.reshape(x, (1, x.shape[1], heads, x.shape[2] // heads))

    def heads(self, x: Value, heads: int) -> Value:
        """Split the last dimension into heads, and move heads before tokens."""
        return self.transpose(self.split_heads(x, heads), (0, 2, 1, 3))

    def merge_heads(self, x: Value) -> Value:
        """Merge the heads again."""
        return self.reshape(self.transpose(x, (0, 2, 1, 3)), (1, x.shape[2], x.shape[1] * x.shape[3]))

    def swap_last(self, x: Value) -> Value:
        """Swap the last two dimensions. Exporters fold the batch into the heads for this."""
        _, heads, tokens, width = x.shape
        x = self.transpose(self.reshape(x, (heads, tokens, width)), (0, 2, 1))
        return self.reshape(x, (1, heads, width, tokens))

    def unbind(self, x: Value) -> list[Value]:
        """The slices of `x` along its first dimension."""
        one = self.integers([0])
        rest = x.shape[1:]
        parts = []
        for at in range(x.shape[0]):
            part = self.op("Slice", [x, self.integers([at]), self.integers([at + 1]), one], (1, *rest))
            parts.append(self.op("Squeeze", [part, one], rest))
        return parts

    def repeat_heads(self, x: Value, times: int) -> Value:
        """Repeat each head for the queries that share it."""
        if times == 1:
            return x
        _, heads, tokens, width = x.shape
        wide = (1, heads, times, tokens, width)
        x = self.reshape(x, (1, heads, 1, tokens, width))
        return self.reshape(self.op("Expand", [x, self.integers(wide)], wide), (1, heads * times, tokens, width))

    def rotary(self, x: Value, cos: Value, sin: Value) -> Value:
        """Rotary positions from tables."""
        half = x.shape[-1] // 2
        part = (*x.shape[:-1], half)
        low, high = (
            self.op("Slice", [x, *(self.integers([i]) for i in (start, start + half, 3, 1))], part) for start in (0, half)
        )
        turned = self.op("Concat", [self.op("Neg", [high], part), low], x.shape, axis=-1)
        straight = self.op("Mul", [x, cos], x.shape)
        return self.op("Add", [straight, self.op("Mul", [turned, sin], x.shape)], x.shape)

    # -- activations, in the operators that exporters leave

    def gelu(self, x: Value) -> Value:
        """GELU by the error function."""
        y = self.op("Div", [x, self.number(math.sqrt(2))], x.shape)
        y = self.op("Add", [self.op("Erf", [y], x.shape), self.number(1.0)], x.shape)
        return self.op("Mul", [x, self.op("Mul", [self.number(0.5), y], x.shape)], x.shape)

    def gelu_tanh(self, x: Value) -> Value:
        """The tanh approximation of GELU."""

        def times(a: Value, factor: float) -> Value:
            return self.op("Mul", [a, self.number(factor)], a.shape)

        half = times(x, 0.5)
        cube = times(self.op("Pow", [x, self.number(3.0)], x.shape), 0.044715)
        bent = self.op("Tanh", [times(self.op("Add", [x, cube], x.shape), math.sqrt(2 / math.pi))], x.shape)
        return self.op("Mul", [half, self.op("Add", [bent, self.number(1.0)], x.shape)], x.shape)
