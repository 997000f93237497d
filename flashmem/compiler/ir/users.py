"""The users of each value of a graph."""

from __future__ import annotations

from collections.abc import Collection

from flashmem.compiler.ir.graph import Graph, Node, Value


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
