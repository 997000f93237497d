"""Forms of attention that exporters and people write, each a small graph inside one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tests.support.inputs import KINDS

Array = NDArray[Any]
LOWEST = float(np.finfo(np.float32).min)


@dataclass
class Model:
    """A model under construction. `answers` are its outputs; `kind` is the range of its numbers (`inputs.KINDS`)."""

    opset: int = 23
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    kind: str = "normal"

    def input(self, *shape: int) -> str:
        """The name of random run-time data."""
        return self.given(KINDS[self.kind](self.generator, shape).astype(np.float32))

    def given(self, data: Array) -> str:
        """The name of given run-time data."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = data
        return name

    def constant(self, data: Any, dtype: type = np.float32) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data, dtype), name))
        return name

    def shape(self, *shape: int) -> str:
        """The name of a constant shape."""
        return self.constant(shape, np.int64)

    def op(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """The name, or the names, of the results of a node."""
        names = [f"{op}{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=names[0], domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def answer(self, name: str) -> None:
        """Make `name` an output."""
        self.answers.append(name)

    def heads(self, batch: int, length: int, heads: int, size: int) -> str:
        """Run-time data [batch, length, heads * size] as [batch, heads, length, size]."""
        given = self.input(batch, length, heads * size)
        return str(self.op("Transpose", self.op("Reshape", given, self.shape(batch, length, heads, size)), perm=(0, 2, 1, 3)))

    def turned(self, value: str) -> str:
        """Swap the last two of four dimensions."""
        return str(self.op("Transpose", value, perm=(0, 1, 3, 2)))

    def merged(self, value: str, batch: int, length: int, width: int) -> str:
        """[batch, heads, length, size] as [batch, length, width]."""
        return str(self.op("Reshape", self.op("Transpose", value, perm=(0, 2, 1, 3)), self.shape(batch, length, width)))

    def proto(self) -> onnx.ModelProto:
        """The model."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for name, data in self.feeds.items()
        ]
        outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in self.answers]
        graph = helper.make_graph(self.nodes, "attention", inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def plain(m: Model, batch: int, heads: int, rows: int, keys: int, size: int, value_size: int = 0) -> None:
    """Heads sliced from projections, scores scaled."""
    value_size = value_size or size
    q, k, v = m.heads(batch, rows, heads, size), m.heads(batch, keys, heads, size), m.heads(batch, keys, heads, value_size)
    scores = m.op("Mul", m.op("MatMul", q, m.turned(k)), m.constant(1 / math.sqrt(size)))
    answer = m.op("MatMul", m.op("Softmax", scores, axis=-1), v)
    m.answer(m.merged(answer, batch, rows, heads * value_size))


def scaled_before(m: Model) -> None:
    """Both factors scaled by the root of the scale, as PyTorch exports it, and the scores divided again."""
    q, k, v = (m.heads(2, 13, 3, 8) for _ in range(3))
    root = m.constant(8**-0.25)
    scores = m.op("MatMul", m.op("Mul", q, root), m.op("Mul", root, m.turned(k)))
    scores = m.op("Div", scores, m.constant([1.5]))
    m.answer(m.op("MatMul", m.op("Softmax", scores, axis=3), m.op("Mul", v, m.constant(0.5))))


def masked(m: Model, *, guarded: bool) -> None:
    """A mask with rows of only -inf, first keys of -inf, and a row that sees one distant key."""
    q, k, v = m.heads(2, 21, 2, 8), m.heads(2, 150, 2, 8), m.heads(2, 150, 2, 8)
    mask = np.zeros((2, 1, 21, 150), np.float32)
    mask[:, :, 3:7, :140] = -np.inf
    mask[0, :, 8] = -np.inf
    mask[1, :, 20] = -np.inf
    mask[:, :, 10, :149] = -np.inf
    weights = m.op("Softmax", m.op("Add", m.op("MatMul", q, m.turned(k)), m.given(mask)), axis=-1)
    if guarded:
        weights = m.op("Where", m.op("IsNaN", weights), m.constant(0), weights)
    m.answer(m.merged(m.op("MatMul", weights, v), 2, 21, 16))


def causal(m: Model) -> None:
    """A triangle by Where, a run-time bias for each head, a padding mask of keys."""
    q, k, v = (m.heads(2, 35, 3, 16) for _ in range(3))
    scores = m.op("Where", m.constant(np.tri(35)[None, None], np.bool_), m.op("MatMul", q, m.turned(k)), m.constant(LOWEST))
    scores = m.op("Add", m.input(3, 35, 35), scores)
    padding = m.op("Expand", m.given(np.array([[[[0.0] * 30 + [LOWEST] * 5]]], np.float32)), m.shape(2, 1, 35, 35))
    m.answer(m.merged(m.op("MatMul", m.op("Softmax", m.op("Add", scores, padding), axis=-1), v), 2, 35, 48))


def capped(m: Model) -> None:
    """A soft cap: the score is read twice, once for its sign."""
    q, k, v = (m.heads(1, 17, 2, 8) for _ in range(3))
    scores = m.op("MatMul", q, m.turned(k))
    scores = m.op("Mul", m.op("Tanh", m.op("Div", scores, m.constant(3))), m.constant(3))
    scores = m.op("Add", scores, m.op("Mul", m.op("Sign", scores), m.constant(0.25)))
    m.answer(m.op("MatMul", m.op("Softmax", scores, axis=-1), v))


def windowed(m: Model) -> None:
    """Swin: windows as the batch, a table of biases for each head, a mask for each window."""
    images, windows, heads, places, size = 2, 4, 3, 9, 5
    packed = m.input(images * windows, places, 3 * heads * size)
    packed = m.op("Reshape", packed, m.shape(images * windows, places, 3, heads, size))
    parts = m.op("Split", m.op("Transpose", packed, perm=(2, 0, 3, 1, 4)), m.shape(1, 1, 1), outputs=3, axis=0)
    q, k, v = (m.op("Squeeze", part, m.shape(0)) for part in parts)
    scores = m.op("MatMul", m.op("Mul", q, m.constant(size**-0.5)), m.turned(k))
    scores = m.op("Add", scores, m.constant(m.generator.standard_normal((1, heads, places, places))))
    apart = m.constant(np.where(m.generator.random((1, windows, 1, places, places)) < 0.3, -100, 0))
    scores = m.op("Add", m.op("Reshape", scores, m.shape(images, windows, heads, places, places)), apart)
    scores = m.op("Reshape", scores, m.shape(images * windows, heads, places, places))
    m.answer(m.merged(m.op("MatMul", m.op("Softmax", scores, axis=-1), v), images * windows, places, heads * size))


def repeated(m: Model) -> None:
    """Grouped heads, each key and value repeated by Expand, as dynamo exports it."""
    q = m.heads(2, 6, 6, 8)

    def repeat(given: str) -> str:
        more = m.op("Expand", m.op("Unsqueeze", given, m.shape(2)), m.shape(2, 2, 3, 11, 8))
        return str(m.op("Reshape", more, m.shape(2, 6, 11, 8)))

    k, v = repeat(m.heads(2, 11, 2, 8)), repeat(m.heads(2, 11, 2, 8))
    answer = m.op("MatMul", m.op("Softmax", m.op("MatMul", q, m.turned(k)), axis=-1), v)
    m.answer(m.merged(answer, 2, 6, 48))


def in_rows(m: Model) -> None:
    """Grouped heads: the queries that share a key are rows of one product, masked as heads."""
    q, k, v = m.heads(2, 6, 6, 8), m.heads(2, 11, 2, 8), m.heads(2, 11, 2, 8)
    scores = m.op("MatMul", m.op("Reshape", q, m.shape(2, 2, 18, 8)), m.turned(k))
    scores = m.op("Reshape", m.op("Mul", scores, m.constant(0.3)), m.shape(2, 6, 6, 11))
    scores = m.op("Where", m.constant(np.tri(6, 11, 5), np.bool_), scores, m.constant(LOWEST))
    weights = m.op("Reshape", m.op("Softmax", scores, axis=-1), m.shape(2, 2, 18, 11))
    answer = m.op("Reshape", m.op("MatMul", weights, v), m.shape(2, 6, 6, 8))
    m.answer(m.merged(answer, 2, 6, 48))


def strided(m: Model) -> None:
    """Single matrices, channels far apart in keys and values, queries shared by a batch."""
    q, k, v = m.input(12, 10), m.input(3, 10, 37), m.input(3, 6, 37)
    scores = m.op("MatMul", q, k)
    m.answer(m.op("MatMul", m.op("Softmax", scores, axis=-1), m.op("Transpose", v, perm=(0, 2, 1))))


def images(m: Model) -> None:
    """Queries, keys and values from one convolution: channels last in memory, first in the model."""
    x, w = m.input(1, 4, 5, 6), m.constant(m.generator.standard_normal((48, 4, 1, 1)))
    packed = m.op("Reshape", m.op("Conv", x, w), m.shape(1, 2, 24, 30))
    q, k, v = m.op("Split", packed, m.shape(8, 8, 8), outputs=3, axis=2)
    scores = m.op("MatMul", m.turned(q), k)
    answer = m.turned(m.op("MatMul", m.op("Softmax", scores, axis=-1), m.turned(v)))
    m.answer(m.op("Reshape", answer, m.shape(1, 16, 5, 6)))


def filled(m: Model, ends: Array, keys: int = 150, *, window: int = 0) -> None:
    """A cache that is filled so far: each query of each batch sees the keys up to an end, or the last few of them."""
    batch, _, rows, _ = ends.shape
    q, k, v = m.heads(batch, rows, 4, 16), m.heads(batch, keys, 4, 16), m.heads(batch, keys, 4, 16)
    numbers, end = m.constant(np.arange(keys)[None], ends.dtype.type), m.given(ends)
    seen = m.op("Less", numbers, end)
    if window:
        seen = m.op("And", m.op("Less", m.op("Sub", end, m.constant(window, ends.dtype.type)), numbers), seen)
    scores = m.op("Where", seen, m.op("MatMul", q, m.turned(k)), m.constant(LOWEST))
    m.answer(m.merged(m.op("MatMul", m.op("Softmax", scores, axis=-1), v), batch, rows, 64))


def filled_in_rows(m: Model, ends: Array, keys: int = 150) -> None:
    """Grouped heads over a cache: the queries of two heads that share a key are rows of one product."""
    rows = ends.size
    q, k, v = m.heads(1, rows, 4, 16), m.heads(1, keys, 2, 16), m.heads(1, keys, 2, 16)
    scores = m.op("MatMul", m.op("Reshape", q, m.shape(1, 2, 2 * rows, 16)), m.turned(k))
    seen = m.op("Less", m.constant(np.arange(keys)[None], np.int32), m.given(ends.reshape(1, 1, rows, 1)))
    scores = m.op("Where", seen, m.op("Reshape", scores, m.shape(1, 4, rows, keys)), m.constant(LOWEST))
    weights = m.op("Reshape", m.op("Softmax", scores, axis=-1), m.shape(1, 2, 2 * rows, keys))
    answer = m.op("Reshape", m.op("MatMul", weights, v), m.shape(1, 4, rows, 16))
    m.answer(m.merged(answer, 1, rows, 64))


def grouped(m: Model, rows: int, window: int) -> None:
    """Grouped heads, causal or with a window: the queries of two heads that share a key are rows of one product."""
    q, k, v = m.heads(2, rows, 4, 16), m.heads(2, rows, 2, 16), m.heads(2, rows, 2, 16)
    distance = np.arange(rows) - np.arange(rows)[:, None]
    seen = m.constant((distance <= 0) & (distance > -window), np.bool_)
    scores = m.op("MatMul", m.op("Reshape", q, m.shape(2, 2, 2 * rows, 16)), m.turned(k))
    scores = m.op("Where", seen, m.op("Reshape", scores, m.shape(2, 4, rows, rows)), m.constant(LOWEST))
    weights = m.op("Reshape", m.op("Softmax", scores, axis=-1), m.shape(2, 2, 2 * rows, rows))
    answer = m.op("Reshape", m.op("MatMul", weights, v), m.shape(2, 4, rows, 16))
    m.answer(m.merged(answer, 2, rows, 64))


def masked_twice(m: Model) -> None:
    """GPT-Neo: a window by Where, then a causal mask by Add."""
    q, k, v = (m.heads(1, 50, 2, 16) for _ in range(3))
    near = np.tri(50, dtype=bool) & (np.arange(50) > np.arange(50)[:, None] - 20)
    scores = m.op("Where", m.constant(near, np.bool_), m.op("MatMul", q, m.turned(k)), m.constant(LOWEST))
    scores = m.op("Add", scores, m.constant(np.where(np.tri(50, dtype=bool), 0, LOWEST)))
    m.answer(m.merged(m.op("MatMul", m.op("Softmax", scores, axis=-1), v), 1, 50, 32))


def banded(m: Model, rows: int, keys: int, low: int | None, high: int | None, *, added: bool = False, size: int = 16) -> None:
    """Each query sees the keys from its number + `low` to its number + `high`; None: no limit."""
    q, k, v = m.heads(2, rows, 3, size), m.heads(2, keys, 3, size), m.heads(2, keys, 3, size)
    distance = np.arange(keys) - np.arange(rows)[:, None]
    seen = (low is None or distance >= low) & ((high is None) | (distance <= (high or 0)))
    scores = m.op("Mul", m.op("MatMul", q, m.turned(k)), m.constant(0.3))
    if added:
        mask = np.where(np.broadcast_to(seen, (rows, keys)), 0, -np.inf)
        scores = m.op("Add", m.op("Add", scores, m.constant(mask)), m.constant(m.generator.uniform(1, 2, (3, rows, keys))))
    else:
        hidden = ~np.broadcast_to(seen, (1, 1, rows, keys))
        scores = m.op("Where", m.constant(hidden, np.bool_), m.constant(LOWEST), scores)
    m.answer(m.merged(m.op("MatMul", m.op("Softmax", scores, axis=-1), v), 2, rows, 3 * size))


def standard(m: Model) -> None:
    """ONNX's own operator: grouped heads, causal, with a soft cap."""
    q, k, v = m.input(2, 4, 9, 8), m.input(2, 2, 9, 8), m.input(2, 2, 9, 8)
    m.answer(m.op("Attention", q, k, v, is_causal=1, softcap=2.0, scale=0.4))


def standard_masked(m: Model) -> None:
    """ONNX's own operator with a boolean mask, in which one query sees nothing: its answer is 0."""
    mask = m.generator.random((19, 12)) < 0.6
    mask[4] = False
    m.answer(m.op("Attention", m.input(2, 4, 19, 8), m.input(2, 2, 12, 8), m.input(2, 2, 12, 8), m.given(mask)))


def few_masked(m: Model) -> None:
    """The same with two queries."""
    mask = np.array([[False] * 9, [True] * 9])
    m.answer(m.op("Attention", m.input(2, 4, 2, 8), m.input(2, 4, 9, 8), m.input(2, 4, 9, 8), m.given(mask)))


def contributed(m: Model) -> None:
    """ONNX Runtime's operator."""
    m.answer(
        m.op("MultiHeadAttention", m.input(2, 7, 24), m.input(2, 9, 24), m.input(2, 9, 24), num_heads=3, domain="com.microsoft")
    )


FORMS: dict[str, Callable[[Model], None]] = {
    "one query": lambda m: plain(m, 2, 3, 1, 197, 64),
    "three queries": lambda m: plain(m, 1, 2, 3, 257, 20),
    "seven": lambda m: plain(m, 1, 2, 7, 7, 20),
    "197 queries": lambda m: plain(m, 1, 2, 197, 197, 64),
    "257 of one channel": lambda m: plain(m, 1, 3, 257, 257, 1),
    "heads of 40": lambda m: plain(m, 1, 2, 64, 33, 40, 24),
    "heads of 80": lambda m: plain(m, 2, 1, 70, 3, 80),
    "heads of 160": lambda m: plain(m, 1, 1, 5, 77, 160),
    "heads of 256": lambda m: plain(m, 1, 1, 19, 70, 256),
    "one key": lambda m: plain(m, 1, 2, 5, 1, 8),
    "scaled before": scaled_before,
    "masked": lambda m: masked(m, guarded=False),
    "guarded": lambda m: masked(m, guarded=True),
    "causal": causal,
    "capped": capped,
    "windowed": windowed,
    "repeated": repeated,
    "in rows": in_rows,
    "strided": strided,
    "images": images,
    "standard": standard,
    "standard, masked": standard_masked,
    "few, masked": few_masked,
    "contributed": contributed,
    "filled": lambda m: filled(m, np.array([[[[3], [4], [5]]], [[[70], [71], [72]]]], np.int32)),
    "filled, one query": lambda m: filled(m, np.array([[[[37]]]], np.int64), 1024),
    "filled, all": lambda m: filled(m, np.array([[[[140], [150], [999]]]], np.int32)),
    "filled, one sees none": lambda m: filled(m, np.array([[[[-2], [9]]]], np.int64)),
    "filled, shared keys": lambda m: filled_in_rows(m, 5 + np.arange(45, dtype=np.int32) * 3 % 140),
    "filled, many queries": lambda m: filled(m, (np.arange(300, dtype=np.int32) * 7 % 390 + 3).reshape(1, 1, 300, 1), 400),
    "filled, many, one sees none": lambda m: filled(
        m, np.where(np.arange(70) == 41, 0, 9 + np.arange(70)).reshape(1, 1, 70, 1)
    ),
    "grouped": lambda m: grouped(m, 40, 99),
    "grouped, a window": lambda m: grouped(m, 70, 12),
    "masked twice": masked_twice,
    "band to each query": lambda m: banded(m, 197, 197, None, 0),
    "band behind a cache": lambda m: banded(m, 70, 203, None, 133),
    "band of a window": lambda m: banded(m, 150, 150, -20, 0, added=True),
    "band around each query": lambda m: banded(m, 90, 131, -70, 65, size=40),
    "band from each query": lambda m: banded(m, 133, 260, 3, None),
    "band of few queries": lambda m: banded(m, 5, 300, 40, 295),
    "filled, windows": lambda m: filled(m, 60 + np.arange(24, dtype=np.int32).reshape(1, 1, 24, 1), window=20),
}
"""Every form by name; each adds one answer to a model."""


def read_elsewhere() -> Iterator[tuple[str, Model]]:
    """Forms that must not be fused: another node reads scores or weights, or another axis is summed."""
    m = Model()
    q, k, v = (m.heads(1, 9, 2, 8) for _ in range(3))
    scores = m.op("MatMul", q, m.turned(k))
    m.answer(m.op("MatMul", m.op("Softmax", scores, axis=-1), v))
    m.answer(scores)
    yield "scores", m
    m = Model()
    q, k, v = (m.heads(1, 9, 2, 8) for _ in range(3))
    weights = m.op("Softmax", m.op("MatMul", q, m.turned(k)), axis=-1)
    m.answer(m.op("MatMul", weights, v))
    m.answer(m.op("ReduceMax", weights, m.shape(3)))
    yield "weights", m
    m = Model()
    q, k, v = (m.heads(1, 9, 2, 8) for _ in range(3))
    m.answer(m.op("MatMul", m.op("Softmax", m.op("MatMul", q, m.turned(k)), axis=2), v))
    yield "columns", m
    m = Model()
    given = [m.input(1, 2, 5, 8), m.input(1, 2, 6, 8), m.input(1, 2, 6, 8)]
    m.nodes.append(helper.make_node("Attention", given, ["answer", "", "", "scores"], is_causal=1))
    m.answers += ["answer", "scores"]
    yield "ONNX's scores", m
