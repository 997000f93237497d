"""Lifetimes of a graph's tensors, counted in fusion groups, and the bytes alive between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Value
from flashmem.compiler.memory.aliases import AliasAnalysis

Size = Callable[[Value], int]
"""Bytes of a value."""


class Lifetimes:
    """When the memory of each value of `graph`, whose fusion groups are `groups`, is needed.

    `spans`: the first and the last group of each value with memory of its own: -1 is before the first, their number after
    the last.
    `crossing`: before each group, the bytes computed before it and needed by it or later.
    """

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], aliases: AliasAnalysis, nbytes: Size) -> None:
        self.spans: dict[Value, tuple[int, int]] = {}
        self._aliases = aliases
        for port in graph.inputs:
            self.spans[aliases.base(port.value)] = (-1, -1)
        for i, group in enumerate(groups):
            if not aliases.is_alias(group.main):
                self.spans.update((value, (i, i)) for value in group.written)
            for value in group.read():
                self._lengthen(value, i)
        for port in graph.outputs:
            self._lengthen(port.value, len(groups))
        self._born: dict[int, list[Value]] = {}
        change = [0] * (len(groups) + 3)
        for value, (first, last) in self.spans.items():
            self._born.setdefault(first, []).append(value)
            change[max(first + 1, 0)] += nbytes(value)
            change[last + 1] -= nbytes(value)
        self.crossing = list(accumulate(change))

    def _lengthen(self, value: Value, last: int) -> None:
        base = self._aliases.base(value)
        if base in self.spans:
            self.spans[base] = (self.spans[base][0], last)

    def born(self, first: int, last: int) -> Iterator[Value]:
        """The values that the groups from `first` to `last` write; -1: inputs."""
        for i in range(first, last + 1):
            yield from self._born.get(i, ())
