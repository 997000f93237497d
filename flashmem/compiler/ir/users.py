"""The users of each value of a graph."""

from __future__ import annotations

from collections.abc import Collection

from flashmem.compiler.ir.graph import Graph, Node, Value


class Readers:
    """The nodes that read each value. The model's `outputs` have a reader outside the graph."""

    def __init__(self, graph: Graph) -> None:
        self._readers = graph.consumers()
        self.outputs = {port.value for port in graph.outputs}

    def of(self, value: Value) -> list[Node]:
        """The nodes that read `value`, in order, without duplicates."""
        return self._readers.get(value, [])

    def only(self, value: Value, readers: Collection[Node]) -> bool:
        """Whether only nodes of `readers` read `value`."""
        return value not in self.outputs and all(node in readers for node in self.of(value))

    def single(self, value: Value) -> Node | None:
        """The only reader of `value`; None if it has several readers or is read more than once."""
        nodes = self.of(value)
        alone = len(nodes) == 1 and value not in self.outputs and nodes[0].inputs.count(value) == 1
        return nodes[0] if alone else None
