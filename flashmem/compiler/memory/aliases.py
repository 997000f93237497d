"""Alias analysis: values that are contiguous ranges of others, because a Reshape or a Slice moves no data.

The elements of a RowPart are read in its source (`compiler.passes.row_parts`).

The elements of a Reshape are its source's. The elements of a Slice are a range of its source if they are contiguous. They are
so if the Slice keeps whole dimensions after the first one that it cuts, and one index in each before it. Kernels can use the
range as a tensor if it starts where a buffer may start, at a multiple of TENSOR_ALIGNMENT bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.base.types import ITEMSIZE, TENSOR_ALIGNMENT
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.view_nodes import first_of_run, unreshaped


@dataclass(frozen=True)
class Alias:
    """The elements of a value: those of `base` from element `start` on."""

    base: Value
    start: int


class AliasAnalysis:
    """Alias analysis: maps each value to the value (computed, copied, an input or a constant) whose memory contains it.

    `half`: `--precision fp16` may store float32 in half, so a Slice must start at a multiple of the alignment in both. So may
    states. Results of the model have separate memory: a Slice that is a result, possibly reshaped, is copied.
    """

    def __init__(self, graph: Graph, *, half: bool) -> None:
        self._half = half or graph.states_in_half
        self._found: dict[Value, Alias] = {}
        self._results = {unreshaped(port.value) for port in graph.outputs}
        for node in graph.nodes:
            if node.op in ("Reshape", "Slice", "RowPart"):
                self.of(node.outputs[0])

    def of(self, value: Value) -> Alias:
        """The memory of the elements of `value`."""
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
        """The value whose memory contains `value`."""
        return self.of(value).base

    def is_alias(self, node: Node) -> bool:
        """Whether `node` needs no launch, because its result is a range of its source's memory."""
        return self.base(node.outputs[0]) is not node.outputs[0]

    def _source(self, value: Value) -> tuple[Value, int] | None:
        """The value of which `value` is a range, and the first element of that range."""
        node = value.producer
        if node is None or node.op not in ("Reshape", "Slice", "RowPart"):
            return None
        if node.op != "Slice":
            return node.input(0), 0
        start = first_of_run(node)
        itemsize = 2 if self._half and value.dtype == "float32" else ITEMSIZE[value.dtype]
        if start is None or value in self._results or unreshaped(node.input(0)).constant is not None:
            return None
        # The sum is a multiple if the source starts at a multiple.
        return (node.input(0), start) if start * itemsize % TENSOR_ALIGNMENT == 0 else None
