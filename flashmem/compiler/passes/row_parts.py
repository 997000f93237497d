"""Row parts: elementwise operators read columns of a product where they are, without a copy.

The halves of a gated MLP are columns of one product. Of one row they are contiguous. Of several rows a Slice would copy them,
for kernels that could read rows that lie apart as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import is_elementwise

Wanted = Callable[[Node, list[Node]], bool]
"""Whether a node, with those that read its result, is replaced."""

_UNIT = 16
"""Columns at which parts and rows begin are multiples of this: the widest vector, which then ends in the same part."""


def fold_row_parts(graph: Graph) -> Graph:
    """`graph`, in which each Slice of a product's columns that only elementwise operators read is a RowPart."""
    return _renamed(graph, "Slice", "RowPart", _is_part)


def copied_row_parts(graph: Graph) -> Graph:
    """`graph`, in which each RowPart that other operators read is a Slice again: patches of a chain read parts of tensors."""
    return _renamed(graph, "RowPart", "Slice", lambda node, users: not _read_in_place(node.outputs[0], users))


def _renamed(graph: Graph, op: str, other: str, wanted: Wanted) -> Graph:
    users = graph.consumers()
    given = {port.value for port in graph.outputs}
    found = {
        node: node
        for node in graph.nodes
        if node.op == op and node.outputs[0] not in given and wanted(node, users.get(node.outputs[0], []))
    }

    def write(rewriter: Rewriter, node: Node) -> None:
        rewriter.add(other, node.inputs, node.outputs[0], node.name, **node.attributes)

    return replaced(graph, found, write)


def _is_part(node: Node, users: list[Node]) -> bool:
    whole = node.input(0)
    part = node.outputs[0]
    *rows, columns = whole.shape
    starts = node.attributes["starts"]
    steps = node.attributes["steps"]
    return (
        whole.producer is not None
        and whole.producer.op == "MatMul"
        and part.shape[:-1] == tuple(rows)
        and math.prod(rows) > 1
        and set(steps) == {1}
        and not any(each % _UNIT for each in (columns, part.shape[-1], starts[-1]))
        and _read_in_place(part, users)
    )


def _read_in_place(part: Value, users: list[Node]) -> bool:
    return bool(users) and all(is_elementwise(node) and node.outputs[0].shape == part.shape for node in users)
