"""Evaluates a decomposed `Graph` by numpy in float64, to compare graphs before and after a pass without kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import Dimension
from flashmem.compiler.kernels.attention.operators import Access

Array = NDArray[Any]

_ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Abs": np.abs,
    "Tanh": np.tanh,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Erf": np.vectorize(math.erf, otypes=[np.float64]),
    "Relu": lambda x: np.maximum(x, 0),
}


def evaluate(graph: Graph, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs of `graph`. Raises KeyError for an operator that is not implemented here."""
    known: dict[Value, Array] = {port.value: np.asarray(feeds[port.name], np.float64) for port in graph.inputs}

    def read(value: Value | None) -> Array:
        assert value is not None
        if value.constant is not None:
            array = np.asarray(value.constant.array(), np.float64)
            assert array.shape == value.shape, value.name
            return array
        return known[value]

    for node in graph.nodes:
        (output,) = node.outputs
        assert output.producer is node, f"{output.name} has another producer"
        known[output] = _computed(node, [read(value) for value in node.inputs if value is not None])
        assert known[output].shape == output.shape, f"{node.op} {node.name}: {known[output].shape} is not {output.shape}"
    return [read(port.value) for port in graph.outputs]


def _computed(node: Node, x: list[Array]) -> Array:
    given, shape = node.attributes, node.outputs[0].shape
    if node.op in _ELEMENTWISE:
        return np.asarray(_ELEMENTWISE[node.op](*x))
    if node.op == "Reshape":
        return x[0].reshape(shape)
    if node.op == "Transpose":
        return x[0].transpose(given["perm"])
    if node.op in ("Slice", "RowPart"):
        at = [np.arange(n) * step + start for n, start, step in zip(shape, given["starts"], given["steps"], strict=True)]
        return x[0][np.ix_(*at)]
    if node.op == "MatMul":
        return np.asarray(x[0] @ (x[1].swapaxes(-1, -2) if given["transposed"] else x[1]))
    if node.op == "Gather":
        return x[0].take(x[1].astype(np.int64), given["axis"])
    if node.op in ("Normalize", "NormalizeGroups"):
        axes = given["axes"] if node.op == "Normalize" else (1, 3)
        centred = x[0] - x[0].mean(axes, keepdims=True)
        return np.asarray(centred / np.sqrt((centred**2).mean(axes, keepdims=True) + given["epsilon"]))
    if node.op == "NormalizeRms":
        return np.asarray(x[0] / np.sqrt((x[0] ** 2).mean(given["axes"], keepdims=True) + given["epsilon"]))
    if node.op == "Softmax":
        e = np.exp(x[0] - x[0].max(given["axes"], keepdims=True))
        return np.asarray(e / e.sum(given["axes"], keepdims=True))
    if node.op in ("ReduceSum", "ReduceMean"):
        return np.asarray((np.sum if node.op == "ReduceSum" else np.mean)(x[0], axis=given["axes"], keepdims=True))
    if node.op in ("MaxPool", "AveragePool"):  # disjoint windows, channels-last
        (down, across), (n, height, width, channels) = given["kernel"], x[0].shape
        assert given["strides"] == given["kernel"] and not any(given["pads"])
        image = x[0][:, : height // down * down, : width // across * across]
        windows = image.reshape(n, height // down, down, width // across, across, channels)
        return np.asarray((np.max if node.op == "MaxPool" else np.mean)(windows, axis=(2, 4)))
    if node.op == "Concat":
        return np.concatenate(x, axis=given["axis"])
    if node.op == "Conv":  # 1x1, channels-last
        return np.asarray(x[0] @ x[1].reshape(x[1].shape[:2]).T)
    if node.op == "FusedAttention":
        return _attention(node, x)
    raise KeyError(node.op)


def _attention(node: Node, x: list[Array]) -> Array:
    """softmax(steps(Q K^T)) V, with each element read through its access."""
    given, scores = node.attributes, node.attributes["scores"]
    assert not given["dropped"] and not given["filled"] and not scores.guarded
    query, key, value = (each.reshape(-1)[_places(given[n])] for each, n in zip(x, ("query", "key", "value"), strict=False))
    values = [each for each in node.inputs[3:] if each is not None]
    score, steps = scores.nodes(values)
    known = {
        score: (query @ key.swapaxes(1, 2) * given["scale"]).reshape(scores.shape),
        **dict(zip(values, x[3:], strict=True)),
    }
    for step in steps:
        score = step.outputs[0]
        known[score] = _computed(step, [known[each] for each in step.inputs if each is not None])
    weights = np.exp(known[score] - known[score].max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).reshape(given["batches"], given["rows"], given["keys"])
    answer = np.full(node.outputs[0].size, np.nan)
    answer[_places(given["answer"])] = weights @ (value * given["value_scale"])
    return answer.reshape(node.outputs[0].shape)


def _places(access: Access) -> NDArray[np.int64]:
    """The element at each (batch, row, channel) of a stack of matrices."""

    def along(dimension: Dimension) -> NDArray[np.int64]:
        made = np.zeros(1, np.int64)
        for size, stride in dimension:
            made = (made[:, None] + np.arange(size) * stride).reshape(-1)
        return made

    channels = along(((access.channels, access.channel),))
    return access.start + along(access.batch)[:, None, None] + along(access.row)[:, None] + channels
