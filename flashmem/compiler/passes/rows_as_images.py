"""Rows as images: what connects convolutions of one dimension works on images of one row, as they do.

A convolution of one dimension is one of images with a single row, between two Reshapes. A Slice or a Concat between two such
convolutions, of padding that wraps around for example, would have three dimensions and keep ONNX's order, with a Transpose
before and behind it. This pass gives it the fourth, also through elementwise operators, so that layout assignment covers it.
"""

from __future__ import annotations

from typing import Any

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import is_elementwise
from flashmem.compiler.operators.rewriting import reshaped

_PER_DIMENSION = {"starts": 0, "steps": 1}
"""Attributes of a Slice with one entry for each dimension, and the entry of the new one."""


def rows_as_images(graph: Graph) -> Graph:
    """`graph` (decomposed), in which Slices and Concats of results of convolutions of one dimension have four dimensions."""
    wanted = _wanted(graph)
    if not wanted:
        return graph
    rewriter = Rewriter()
    images = dict[Value, Value]()
    for node in graph.nodes:
        output = node.outputs[0]
        if node.op == "Reshape":
            source = node.input(0)
            if source.shape == _image(output.shape) and len(output.shape) == 3:
                images[output] = source
            elif source in images and output.shape == images[source].shape:
                rewriter.nodes.append(Node(node.op, node.name, [images[source]], [output], node.attributes))
                output.producer = rewriter.nodes[-1]
                continue
        if output in wanted and any(value in images for value in node.inputs):
            inputs = [None if value is None else _as_image(rewriter, images, value) for value in node.inputs]
            made = rewriter.emit(
                node.op, inputs, _image(output.shape), output.dtype, f"{output.name}.image", **_attributes(node)
            )
            images[output] = made
            rewriter.add("Reshape", [made], output, node.name)
            continue
        rewriter.nodes.append(node)
    return rewriter.graph(graph)


def _wanted(graph: Graph) -> set[Value]:
    """Results of three dimensions of Slices and Concats, and those that reach one through elementwise operators."""
    wanted = set[Value]()
    read = set[Value]()
    for node in reversed(graph.nodes):
        output = node.outputs[0]
        if len(output.shape) != 3 or len(node.outputs) > 1:
            continue
        if node.op in ("Slice", "Concat") or (is_elementwise(node) and output in read):
            wanted.add(output)
            read.update(value for value in node.inputs if value is not None)
    return wanted


def _image(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape`, of up to three dimensions that end in the places of a row, with one row: (N, C, L) as (N, C, 1, L)."""
    return (*shape[:-1], 1, *shape[-1:]) if len(shape) > 1 else shape


def _as_image(rewriter: Rewriter, images: dict[Value, Value], value: Value) -> Value:
    if value not in images:
        images[value] = reshaped(rewriter, value, _image(value.shape))
    return images[value]


def _attributes(node: Node) -> dict[str, Any]:
    given = dict(node.attributes)
    if node.op == "Concat" and given["axis"] == 2:
        given["axis"] = 3
    if node.op == "Slice":
        for name, entry in _PER_DIMENSION.items():
            given[name] = (*given[name][:2], entry, *given[name][2:])
    return given
