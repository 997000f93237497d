"""A graph as flat data, for another process: all that planning asks of it, without the weights and without the model's file.

Values point at the nodes that make them, and those at their inputs, so pickling a graph itself would go as deep as the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashmem.base.types import ITEMSIZE, DType
from flashmem.compiler.ir.graph import ArrayConstant, Constant, Graph, GraphPort, Node, Placeholder, Value
from flashmem.compiler.ir.quantised import QuantizedConstant


@dataclass(frozen=True)
class _Value:
    name: str
    shape: tuple[int, ...]
    dtype: DType
    constant: Constant | None


@dataclass(frozen=True)
class _Node:
    """Inputs and outputs are indices of values; None where an optional input is left out."""

    op: str
    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class PortableGraph:
    """What `portable` makes of a graph. Pickles are read by the same version of flashmem."""

    name: str
    opset: int
    values: tuple[_Value, ...]
    nodes: tuple[_Node, ...]
    inputs: tuple[tuple[str, str, int], ...]
    outputs: tuple[tuple[str, str, int], ...]

    def graph(self) -> Graph:
        """The graph, made anew."""
        values = [Value(v.name, v.shape, v.dtype, v.constant) for v in self.values]
        nodes = []
        for each in self.nodes:
            inputs = [None if at is None else values[at] for at in each.inputs]
            node = Node(each.op, each.name, inputs, [values[at] for at in each.outputs], dict(each.attributes))
            for value in node.outputs:
                value.producer = node
            nodes.append(node)

        def ports(rows: Iterable[tuple[str, str, int]]) -> list[GraphPort]:
            return [GraphPort(name, dtype, values[at]) for name, dtype, at in rows]

        return Graph(self.name, ports(self.inputs), ports(self.outputs), nodes, self.opset)


def portable(graph: Graph, kept_bytes: int) -> PortableGraph:
    """`graph` as flat data. Constants of up to `kept_bytes` on the device come along; of larger ones only the shape does.

    A program that is generated from it is the graph's own as long as no larger constant is read, which generating does not do
    beyond `compiler.memory.constants.RESIDENT_CONSTANT_BYTES`; its weights cannot be written.
    """
    index: dict[Value, int] = {}
    values: list[_Value] = []

    def at(value: Value) -> int:
        if value not in index:
            index[value] = len(values)
            constant = value.constant and _light(value.constant, ITEMSIZE[value.dtype] * value.size, kept_bytes)
            values.append(_Value(value.name, value.shape, value.dtype, constant))
        return index[value]

    def ports(given: Iterable[GraphPort]) -> tuple[tuple[str, str, int], ...]:
        return tuple((port.name, port.dtype, at(port.value)) for port in given)

    nodes = tuple(
        _Node(
            node.op,
            node.name,
            tuple(None if value is None else at(value) for value in node.inputs),
            tuple(at(value) for value in node.outputs),
            dict(node.attributes),
        )
        for node in graph.nodes
    )
    return PortableGraph(graph.name, graph.opset, tuple(values), nodes, ports(graph.inputs), ports(graph.outputs))


def _light(constant: Constant, nbytes: int, kept_bytes: int) -> Constant:
    """`constant` without what it keeps in files, nor more than `kept_bytes` of data if it has `nbytes`."""
    if isinstance(constant, Placeholder):
        return constant
    if isinstance(constant, QuantizedConstant):

        def part(of: Constant) -> Constant:
            return _light(of, math.prod(of.shape) * of.dtype.itemsize, kept_bytes)

        zero = None if constant.zero is None else part(constant.zero)
        return replace(constant, codes=part(constant.codes), scale=part(constant.scale), zero=zero)
    if nbytes <= kept_bytes:
        return ArrayConstant(np.array(constant.array()))
    return Placeholder(constant.shape, 0.0, constant.dtype)
