"""Conversion between strided views and nodes: the view that a chain of nodes computes, and nodes that compute a view."""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import StridedView, merged


def emit_view(rewriter: Rewriter, view: StridedView, output: Value, moved: dict[object, Value] | None = None) -> Value:
    """Append the nodes that compute `output` from `view`, which has each element of its root once: at most one Transpose.

    `moved`: the existing Transposes, by root and order.
    """
    moved = {} if moved is None else moved
    factors = merged(view.factors)
    root = view.root
    if view.is_contiguous:
        return rewriter.add("Reshape", [root], output)
    key = root, factors
    if key not in moved:
        outward = sorted(range(len(factors)), key=lambda i: -factors[i][1])
        shape = tuple(factors[i][0] for i in outward)
        source = root if root.shape == shape else rewriter.emit("Reshape", [root], shape, root.dtype, f"{root.name}.parts")
        perm = tuple(outward.index(i) for i in range(len(factors)))
        made = tuple(size for size, _ in factors)
        if made == output.shape:
            moved[key] = rewriter.add("Transpose", [source], output, perm=perm)
            return output
        moved[key] = rewriter.emit("Transpose", [source], made, root.dtype, f"{output.name}.moved", perm=perm)
    return rewriter.add("Reshape", [moved[key]], output)


def through(node: Node, view: StridedView) -> StridedView | None:
    """The result of `node`, which moves elements of its first operand, in the memory of that operand, which is `view`.

    None if it has no such view, or if `node` does not only move elements.
    """
    shape = node.outputs[0].shape
    if node.op == "Reshape":
        return view.reshaped(shape)
    if node.op == "Transpose":
        return view.transposed(node.attributes["perm"])
    if node.op == "Expand":
        return view.expanded(shape)
    if node.op == "Slice":
        return view.sliced(shape, node.attributes["starts"], node.attributes["steps"])
    return None


def first_of_run(node: Node) -> int | None:
    """The first element of a Slice in its source, if its elements are contiguous; None if they are not, or it is empty."""
    taken = node.outputs[0].shape
    if 0 in taken:
        return None
    steps = [1 if size == 1 else step for step, size in zip(node.attributes["steps"], taken, strict=True)]
    view = StridedView.of(node.input(0)).sliced(taken, node.attributes["starts"], steps)
    return view.start if view is not None and view.is_contiguous else None


KEPT = 4
"""A Slice of less than 1 / KEPT of its source is copied: a view would keep the whole source in memory."""


def view_of(value: Value, kept: int = KEPT) -> StridedView:
    """`value` as a view of its farthest ancestor through data movement and products with one constant.

    A Slice of less than 1 / `kept` of its source is no view.
    """
    node = value.producer
    if value.constant is not None or node is None:
        return StridedView.of(value)
    multiplied = constant_factor(node)
    if multiplied is not None:
        source, scale = multiplied
        view = view_of(source, kept)
        return replace(view, scale=view.scale * scale)
    if node.op not in ("Reshape", "Transpose", "Slice", "Expand"):
        return StridedView.of(value)
    view = view_of(node.input(0), kept)
    if node.op == "Slice" and value.size * kept < view.root.size:
        return StridedView.of(value)
    return through(node, view) or StridedView.of(value)


def unreshaped(value: Value) -> Value:
    """The value before all Reshapes that lead to `value`."""
    while value.producer is not None and value.producer.op == "Reshape":
        value = value.producer.input(0)
    return value


def constant_factor(node: Node) -> tuple[Value, float] | None:
    """(x, c) if the node multiplies x by the one constant c, or divides it by 1 / c."""
    if node.op not in ("Mul", "Div") or node.outputs[0].dtype != "float32":
        return None
    for x, other in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        if x is None or other is None or other.constant is None or other.size != 1 or x.shape != node.outputs[0].shape:
            continue
        number = float(other.constant.array().reshape(-1)[0])
        if not math.isfinite(number) or (node.op == "Div" and not number):
            continue
        return x, number if node.op == "Mul" else 1 / number
    return None
