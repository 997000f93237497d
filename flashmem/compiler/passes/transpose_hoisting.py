"""Transpose hoisting: moves a Transpose from the result of a product with weights to the operand that it reads.

Before the product, attention absorbs the Transpose: it writes its answer in another order (`compiler.passes.attention_views`).
Operands added to the product's result, such as the sum after the windows return to the image, then need no Transpose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmem.compiler.ir.builder import Rewriter, replaced, reshaped_constant
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import StridedView
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.ir.view_nodes import emit_view, through
from flashmem.compiler.passes.patterns import is_by_column


@dataclass(frozen=True)
class _Found:
    """A product with its elementwise operators, the last node after them that moves rows, and its result as a view."""

    nodes: list[Node]
    end: Node
    view: StridedView


def hoist_transposes(graph: Graph) -> Graph:
    """`graph` (decomposed) with Transposes hoisted over products, if attention or another Transpose precedes the product."""
    readers = Readers(graph)
    found = {each.end: each for node in graph.nodes if node.op == "MatMul" and (each := _found(node, readers)) is not None}
    return replaced(graph, found, _write)


def _found(product: Node, readers: Readers) -> _Found | None:
    """The nodes after `product` that move rows; None if no rows are moved before it, or its result has another reader."""
    weight = product.input(1)
    if weight.constant is None or math.prod(weight.shape[:-2]) != 1 or not _is_moved(product.input(0), readers):
        return None
    nodes = [product]
    value = product.outputs[0]
    while (reader := readers.single(value)) is not None and is_by_column(reader, value):
        nodes.append(reader)
        value = reader.outputs[0]
    view = StridedView.of(value)
    best = None
    while (reader := readers.single(value)) is not None and reader.op in ("Reshape", "Transpose"):
        value = reader.outputs[0]
        seen = through(reader, view)
        if seen is None:
            break
        view = seen
        if value.shape[-1:] == product.outputs[0].shape[-1:] and view.dimensions[-1] == ((value.shape[-1], 1),):
            best = _Found(nodes, reader, view)
    return best if best is not None and not best.view.is_contiguous else None


def _is_moved(value: Value, readers: Readers) -> bool:
    """Whether a Transpose, attention or a product of activations computes `value`, and it has a single reader."""
    while readers.single(value) is not None and value.producer is not None and value.producer.op == "Reshape":
        value = value.producer.input(0)
    node = value.producer if readers.single(value) is not None else None
    moves = ("Transpose", "FusedAttention")
    return node is not None and (node.op in moves or (node.op == "MatMul" and node.input(1).constant is None))


def _write(rewriter: Rewriter, found: _Found) -> None:
    """Append the product of the moved rows, and its elementwise operators."""
    product = found.nodes[0]
    output = found.end.outputs[0]
    source = product.input(0)
    wide = output.shape[-1]
    depth = source.shape[-1]
    rows = tuple(tuple((size, stride // wide * depth) for size, stride in each) for each in found.view.dimensions[:-1])
    moved = Value(f"{output.name}.rows", (*output.shape[:-1], depth), source.dtype)
    value = emit_view(
        rewriter, StridedView(source, 0, (*rows, StridedView.of(Value("", (depth,), "float32")).dimensions[0])), moved
    )
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
