"""A graph as flat data for another process: everything that planning needs, without the weights and the model's file.

Values refer to the nodes that compute them, and nodes to their inputs, so pickling a graph itself would recurse as deep as the
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashmem.base.types import ITEMSIZE, DType
from flashmem.compiler.ir.blocks.constant import BlockConstant, TableRows
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
    """A node as flat data. Inputs and outputs are indices of values; None for an omitted optional input."""

    op: str
    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class PortableGraph:
    """A graph as flat data; see `portable`. Only the same version of flashmem reads its pickles."""

    name: str
    opset: int
    values: tuple[_Value, ...]
    nodes: tuple[_Node, ...]
    inputs: tuple[tuple[str, str, int], ...]
    outputs: tuple[tuple[str, str, int], ...]
    states: tuple[tuple[str, str], ...] = ()

    def graph(self) -> Graph:
        """Build the graph."""
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

        return Graph(self.name, ports(self.inputs), ports(self.outputs), nodes, self.opset, states=self.states)


def portable(graph: Graph, kept_bytes: int) -> PortableGraph:
    """`graph` as flat data. Constants of up to `kept_bytes` on the device are included; larger ones keep only their shape.

    A program generated from it equals the graph's own as long as generation reads no larger constant. It reads none above
    `compiler.memory.constants.RESIDENT_CONSTANT_BYTES`. Its weights cannot be written.
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
    inputs = ports(graph.inputs)
    outputs = ports(graph.outputs)
    return PortableGraph(graph.name, graph.opset, tuple(values), nodes, inputs, outputs, graph.states)


def _light(constant: Constant, nbytes: int, kept_bytes: int) -> Constant:
    """`constant` without data in files, and without its data if it has `nbytes` above `kept_bytes`."""
    if isinstance(constant, Placeholder):
        return constant
    if isinstance(constant, BlockConstant):
        return replace(constant, data=_light(constant.data, constant.nbytes, kept_bytes))
    if isinstance(constant, TableRows):
        source = constant.source
        return TableRows(replace(source, data=_light(source.data, source.nbytes, kept_bytes)))
    if isinstance(constant, QuantizedConstant):

        def part(of: Constant) -> Constant:
            return _light(of, math.prod(of.shape) * of.dtype.itemsize, kept_bytes)

        return constant.with_parts(part, part(constant.codes), constant.block)
    if nbytes <= kept_bytes:
        return ArrayConstant(np.array(constant.array()))
    return Placeholder(constant.shape, 0.0, constant.dtype)
