"""Normalization matching: x / sqrt(mean(x^2) + epsilon) becomes one operator, NormalizeRms or Normalize.

RMSNormalization (ONNX), SimplifiedLayerNormalization (ONNX Runtime) and exported models all have this pattern once a graph is
decomposed. It begins with a square, its mean over the last axes, and the addition of epsilon. It ends with a square root, and a
product with its inverse or a quotient. If x is y minus its own mean over the same axes, the pattern is the layer normalization
of y. Scale and bias after it fuse with the operator's kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.view_nodes import unreshaped


@dataclass(frozen=True)
class _Match:
    """A normalization of `source` over `axes`, which `node` computes; `op` is NormalizeRms or Normalize."""

    node: Node
    op: str
    source: Value
    axes: tuple[int, ...]
    epsilon: float


def match_normalizations(graph: Graph) -> Graph:
    """`graph` (decomposed) with a NormalizeRms or a Normalize in place of the last operator of each matched pattern.

    Operators before it stay if other nodes read them.
    """
    found = {node: match for node in graph.nodes if node.op in ("Mul", "Div") and (match := _match(node)) is not None}
    return replaced(graph, found, _write)


def _match(node: Node) -> _Match | None:
    """The normalization whose last operator is `node`: x * (1 / root), or x / root."""
    for x, factor in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        if x is None or factor is None or x.constant is not None or x.shape != node.outputs[0].shape or x is factor:
            continue
        moved = _root(factor) if node.op == "Div" else _inverse_root(factor)
        if moved is None or (found := _mean_of_squares(moved, x)) is None:
            continue
        axes, epsilon = found
        if _broadcasts(factor, x, axes):
            y = _centred(x, axes)
            return _Match(node, "NormalizeRms" if y is None else "Normalize", x if y is None else y, axes, epsilon)
    return None


def _broadcasts(factor: Value, x: Value, axes: tuple[int, ...]) -> bool:
    """Whether `factor` has one number for each row of `x`, and the other dimensions of `x`."""
    return factor.shape == tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))


def _inverse_root(value: Value) -> Value | None:
    """v if `value` is 1 / sqrt(v)."""
    node = unreshaped(value).producer
    if node is None:
        return None
    if node.op == "Reciprocal":
        return _root(node.input(0))
    if node.op == "Div":
        return _root(node.input(1)) if _number(node.input(0)) == 1.0 else None
    return node.input(0) if node.op == "Pow" and node.attributes.get("exponent") == -0.5 else None


def _root(value: Value) -> Value | None:
    """v if `value` is sqrt(v)."""
    node = unreshaped(value).producer
    if node is None or not (node.op == "Sqrt" or (node.op == "Pow" and node.attributes.get("exponent") == 0.5)):
        return None
    return node.input(0)


def _mean_of_squares(value: Value, x: Value) -> tuple[tuple[int, ...], float] | None:
    """The axes and the epsilon if `value` is the mean of the squares of `x` over its last axes, plus epsilon."""
    node = unreshaped(value).producer
    if node is None or node.op != "Add":
        return None
    for mean, addend in (node.inputs, node.inputs[::-1]):
        if mean is None or addend is None or (epsilon := _number(addend)) is None or not 0.0 <= epsilon < math.inf:
            continue
        axes = _axes_of_mean(unreshaped(mean).producer, x)
        if axes is not None:
            return axes, epsilon
    return None


def _axes_of_mean(node: Node | None, x: Value) -> tuple[int, ...] | None:
    """The axes if `node` is the mean of the squares of `x` over its last axes."""
    if node is None:
        return None
    if node.op == "ReduceMean":
        squared = _squared(node.input(0))
        axes = node.attributes["axes"] if squared is not None and _same(squared, x) else None
    elif node.op in ("Mul", "Div"):  # a sum of squares, and one over their number
        axes = _axes_of_sum(node, x)
    else:
        return None
    return axes if axes is not None and axes[-1] == len(x.shape) - 1 else None


def _axes_of_sum(node: Node, x: Value) -> tuple[int, ...] | None:
    for total, factor in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        number = None if factor is None else _number(factor)
        made = None if total is None else unreshaped(total).producer
        if not number or made is None or made.op not in ("ReduceSum", "ReduceSumSquare"):
            continue
        source = made.input(0) if made.op == "ReduceSumSquare" else _squared(made.input(0))
        axes: tuple[int, ...] = made.attributes["axes"]
        if source is None or not _same(source, x):
            continue
        count = math.prod(x.shape[axis] for axis in axes)
        if math.isclose(number * count if node.op == "Mul" else number / count, 1.0, rel_tol=1e-6):
            return axes
    return None


def _squared(value: Value) -> Value | None:
    """v if `value` is v * v."""
    node = value.producer
    if node is None:
        return None
    if node.op == "Mul" and node.input(0) is node.input(1):
        return node.input(0)
    if node.op != "Pow":
        return None
    exponent = node.attributes.get("exponent") if len(node.inputs) == 1 else None
    return node.input(0) if exponent == 2.0 else None


def _same(value: Value, other: Value) -> bool:
    """Whether two values have the same elements in the same shape."""
    return value.shape == other.shape and unreshaped(value) is unreshaped(other)


def _number(value: Value) -> float | None:
    """The one element of a constant; None if it has several, or is no constant."""
    if value.constant is None or value.size != 1:
        return None
    return float(np.asarray(value.constant.array()).reshape(-1)[0])


def _centred(x: Value, axes: tuple[int, ...]) -> Value | None:
    """y if `x` is y minus its mean over `axes`."""
    node = unreshaped(x).producer
    if node is None or node.op != "Sub" or node.outputs[0].shape != x.shape:
        return None
    y = node.input(0)
    mean = node.input(1)
    made = unreshaped(mean).producer
    fits = made is not None and made.op == "ReduceMean" and made.attributes["axes"] == axes and _same(made.input(0), y)
    return y if fits and y.shape == x.shape and _broadcasts(mean, x, axes) else None


def _write(rewriter: Rewriter, match: _Match) -> None:
    rewriter.add(match.op, [match.source], match.node.outputs[0], match.node.name, axes=match.axes, epsilon=match.epsilon)
