"""Moves behind a product that belong before it: a Transpose of a product's rows is one of the rows that it reads.

There it is nothing more than another order in which attention writes its answer (`graph.attention`), and what is added to the
product's result finds it in the order that it has itself: the way from windows back to the image, and the sum behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flashmem.graph.builder import Rewriter, reshaped_constant
from flashmem.graph.ir import Graph, Node, Value
from flashmem.graph.operators import is_elementwise
from flashmem.graph.views import View, whole, write

Single = Callable[[Value], Node | None]
"""The one reader of a value, if there is one and it reads it once."""


@dataclass(frozen=True)
class _Found:
    """A product and what finishes it, the nodes behind them that move rows, and their result as a view of the product's."""

    nodes: list[Node]
    end: Node
    view: View


def hoist_moves(graph: Graph) -> Graph:
    """`graph` (in normal form) with Transposes before products where they meet another Transpose there."""
    readers, outputs = graph.consumers(), {port.value for port in graph.outputs}

    def single(value: Value) -> Node | None:
        nodes = readers.get(value, [])
        return nodes[0] if len(nodes) == 1 and value not in outputs and nodes[0].inputs.count(value) == 1 else None

    found = {each.end: each for node in graph.nodes if node.op == "MatMul" and (each := _found(node, single)) is not None}
    if not found:
        return graph
    rewriter = Rewriter()
    for node in graph.nodes:
        if node in found:
            _write(rewriter, found[node])
        else:
            rewriter.nodes.append(node)
    return rewriter.graph(graph)


def _found(product: Node, single: Single) -> _Found | None:
    """What is behind `product`, if its rows are moved before and behind it, and nowhere else."""
    weight = product.input(1)
    if weight.constant is None or math.prod(weight.shape[:-2]) != 1 or not _is_moved(product.input(0), single):
        return None
    nodes, value = [product], product.outputs[0]
    while (reader := single(value)) is not None and _by_column(reader, value):
        nodes.append(reader)
        value = reader.outputs[0]
    view, best = whole(value), None
    while (reader := single(value)) is not None and reader.op in ("Reshape", "Transpose"):
        value = reader.outputs[0]
        seen = view.reshaped(value.shape) if reader.op == "Reshape" else view.transposed(reader.attributes["perm"])
        if seen is None:
            break
        view = seen
        if value.shape[-1:] == product.outputs[0].shape[-1:] and view.dimensions[-1] == ((value.shape[-1], 1),):
            best = _Found(nodes, reader, view)
    return best if best is not None and not best.view.is_in_order else None


def _is_moved(value: Value, single: Single) -> bool:
    """Whether `value` is made by a Transpose, or by what may be attention, and is nobody else's."""
    while single(value) is not None and value.producer is not None and value.producer.op == "Reshape":
        value = value.producer.input(0)
    node = value.producer if single(value) is not None else None
    return node is not None and (node.op == "Transpose" or (node.op == "MatMul" and node.input(1).constant is None))


def _by_column(node: Node, value: Value) -> bool:
    """Whether `node` does the same to all rows of `value`."""
    if not is_elementwise(node) or node.outputs[0].shape != value.shape:
        return False
    others = [other for other in node.inputs if other is not None and other is not value]
    return all(each.constant is not None and each.size in (1, each.shape[-1] if each.shape else 1) for each in others)


def _write(rewriter: Rewriter, found: _Found) -> None:
    """Append the product of moved rows, and what finishes it."""
    product, output = found.nodes[0], found.end.outputs[0]
    source, wide = product.input(0), output.shape[-1]
    depth = source.shape[-1]
    rows = tuple(tuple((size, stride // wide * depth) for size, stride in each) for each in found.view.dimensions[:-1])
    moved = Value(f"{output.name}.rows", (*output.shape[:-1], depth), source.dtype)
    value = write(rewriter, View(source, 0, (*rows, whole(Value("", (depth,), "float32")).dimensions[0])), moved)
    for node in found.nodes:
        previous = node.outputs[0]
        made = output if node is found.nodes[-1] else Value(f"{previous.name}.moved", output.shape, previous.dtype)
        inputs = [
            each if each is None or each.constant is None or node is product or len(each.shape) <= len(output.shape)
            else reshaped_constant(each, each.name, each.shape[-1:])
            for each in node.inputs
        ]  # fmt: skip
        inputs[node.inputs.index(source)] = value
        value = rewriter.add(node.op, inputs, made, node.name, **node.attributes)
        source = previous
