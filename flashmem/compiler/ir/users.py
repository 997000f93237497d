"""Who reads what in a graph, as passes ask for it."""

from __future__ import annotations

from collections.abc import Collection

from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import is_elementwise


class Readers:
    """Who reads each value; an output of the model (`outputs`) has a reader outside."""

    def __init__(self, graph: Graph) -> None:
        self._readers = graph.consumers()
        self.outputs = {port.value for port in graph.outputs}

    def of(self, value: Value) -> list[Node]:
        """The nodes that read `value`, in order, each once."""
        return self._readers.get(value, [])

    def only(self, value: Value, readers: Collection[Node]) -> bool:
        """Whether nobody but `readers` reads `value`."""
        return value not in self.outputs and all(node in readers for node in self.of(value))

    def single(self, value: Value) -> Node | None:
        """The one reader of `value`, if there is one and it reads it once."""
        nodes = self.of(value)
        alone = len(nodes) == 1 and value not in self.outputs and nodes[0].inputs.count(value) == 1
        return nodes[0] if alone else None


def is_by_column(node: Node, value: Value) -> bool:
    """Whether `node` does to each column of `value` the same in all rows: what constants say that have one element for the
    column, or one for all.
    """
    if not is_elementwise(node) or node.outputs[0].shape != value.shape or node.inputs.count(value) != 1:
        return False
    others = [other for other in node.inputs if other is not None and other is not value]
    return all(other.constant is not None and (other.size == 1 or _has_columns(other, value)) for other in others)


def _has_columns(constant: Value, value: Value) -> bool:
    return constant.size == value.shape[-1] == constant.shape[-1]
