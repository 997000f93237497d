"""Alias analysis: values that are contiguous ranges of others, where a Reshape or a Slice moves no data.

A Reshape's elements are its source's. A Slice's are a range of its source if it takes neighbours only: whole dimensions behind
the first one that it cuts, and one index in each before that. The range is a tensor of its own kernels' taking if it starts
where a buffer may start, at a multiple of TENSOR_ALIGNMENT bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.base.types import ITEMSIZE, TENSOR_ALIGNMENT
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import StridedView


@dataclass(frozen=True)
class Alias:
    """`value`'s elements are those of `base` from element `start` on."""

    base: Value
    start: int


class AliasAnalysis:
    """Alias analysis: for each value the value whose memory it is a range of (computed, copied, an input or a constant).

    `half`: where `--precision fp16` may store float32 in half, so that a Slice has to start at a multiple of the alignment in
    either. Results of the model have memory of their own: a Slice that is one, but for Reshapes, is copied.
    """

    def __init__(self, graph: Graph, *, half: bool) -> None:
        self._half = half
        self._found: dict[Value, Alias] = {}
        self._results = {unreshaped(port.value) for port in graph.outputs}
        for node in graph.nodes:
            if node.op in ("Reshape", "Slice"):
                self.of(node.outputs[0])

    def of(self, value: Value) -> Alias:
        """Where the elements of `value` are."""
        way = []
        while value not in self._found:
            source = self._source(value)
            if source is None:
                self._found[value] = Alias(value, 0)
            else:
                way.append((value, source[1]))
                value = source[0]
        found = self._found[value]
        for each, start in reversed(way):
            found = self._found[each] = Alias(found.base, found.start + start)
        return found

    def base(self, value: Value) -> Value:
        """The value whose memory holds `value`."""
        return self.of(value).base

    def moves_nothing(self, node: Node) -> bool:
        """Whether `node` needs no launch, because its result is a range of its source's memory."""
        return self.base(node.outputs[0]) is not node.outputs[0]

    def _source(self, value: Value) -> tuple[Value, int] | None:
        """The value that `value` is a range of, and from which element on."""
        node = value.producer
        if node is None or node.op not in ("Reshape", "Slice"):
            return None
        if node.op == "Reshape":
            return node.input(0), 0
        start = _first_of_range(node)
        itemsize = 2 if self._half and value.dtype == "float32" else ITEMSIZE[value.dtype]
        if start is None or value in self._results or unreshaped(node.input(0)).constant is not None:
            return None
        # Where the source starts at a multiple too, the sum does.
        return (node.input(0), start) if start * itemsize % TENSOR_ALIGNMENT == 0 else None


def unreshaped(value: Value) -> Value:
    """The value that `value` is but for its shape."""
    while value.producer is not None and value.producer.op == "Reshape":
        value = value.producer.input(0)
    return value


def _first_of_range(node: Node) -> int | None:
    """The element of its source at which a Slice starts, if it takes neighbours; None if it does not, or takes nothing."""
    taken = node.outputs[0].shape
    if 0 in taken:
        return None
    steps = [1 if size == 1 else step for step, size in zip(node.attributes["steps"], taken, strict=True)]
    view = StridedView.of(node.input(0)).sliced(taken, node.attributes["starts"], steps)
    return int(view.start) if view is not None and view.is_contiguous else None
