"""Classes of constants: resident memory, streamed slices, or a table whose rows the host copies."""

from __future__ import annotations

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.view_nodes import unreshaped

RESIDENT_CONSTANT_BYTES = 1 << 20
"""Constants up to this size (biases, position tables) are resident; larger ones are streamed like weights."""


def nbytes_of(value: Value) -> int:
    """Bytes of the elements of `value`, each in its own type."""
    return ITEMSIZE[value.dtype] * value.size


def host_indices(node: Node, graph: Graph) -> str | None:
    """The model input with the row indices, if `node` gathers rows of a large constant table by such an input; else None."""
    if node.op != "Gather" or node.attributes["axis"] != 0:
        return None
    table = node.input(0)
    indices = node.input(1)
    if table.constant is None or len(table.shape) != 2 or table.dtype not in ("float32", "int8", "uint8"):
        return None
    if nbytes_of(table) <= RESIDENT_CONSTANT_BYTES:
        return None
    source = unreshaped(indices)
    states = dict(graph.states)
    return next((port.name for port in graph.inputs if port.value is source and port.name not in states), None)
