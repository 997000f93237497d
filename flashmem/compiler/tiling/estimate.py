"""Estimates of the live bytes of chains in patches.

Tensors from before a chain that end in it are freed patch by patch, and its result grows patch by patch. Weights that all
patches read stay from the first patch to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.operators.tiling_interface import outermost
from flashmem.compiler.tiling.lifetimes import Lifetimes, Size
from flashmem.compiler.tiling.patches import Chain, Patch, units

MOST_AGAIN = 1.5
"""Overlapping windows may make patches repeat work, up to this multiple of the chain's work in all."""


@dataclass(frozen=True)
class Memory:
    """Memory sizes on which a choice of chains is based.

    Attributes:
        alive: live bytes at each group of a fused graph, without patches.
        nbytes: bytes of a tensor.
        weight_bytes: bytes of a constant that is streamed.
        in_flight: bytes of weights that are loaded at a time in any case.
        least: the least bytes of the largest result inside a patch.
    """

    alive: Sequence[int]
    nbytes: Size
    weight_bytes: Size
    in_flight: int
    least: int


@dataclass(frozen=True)
class Estimate:
    """The estimated live bytes of a chain in patches, and the launches that its patches add."""

    chain: Chain
    alive: int
    launches: int


@dataclass(frozen=True)
class _Patched:
    """The part of a chain in patches: the operators of a patch, their results, and those in memory that are read later."""

    chain: Chain
    patch: Patch
    nodes: Sequence[Node]
    made: set[Value]
    results: set[Value]

    @property
    def count(self) -> int:
        """The number of patches."""
        return len(self.chain.starts)


@dataclass(frozen=True)
class _Inputs:
    """Values from before the patches that they read: `whole`, or one range of memory of each. `copies`: bytes of the parts
    that are no such range, which each patch copies.
    """

    whole: set[Value]
    ranges: set[Value]
    copies: int


class Estimates:
    """Estimates of the live bytes of chains of one graph. `nodes`: those of each group, with the Reshapes of its result."""

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], aliases: AliasAnalysis, memory: Memory) -> None:
        """`aliases`: those of `graph`, whose groups are `groups`."""
        self.nodes = units(graph, groups)[1:]
        self.lifetimes = Lifetimes(graph, groups, aliases, memory.nbytes)
        self._groups = groups
        self._memory = memory
        self._nbytes = cache(memory.nbytes)  # called very often, as the next
        self._base = cache(aliases.base)
        self._ends = {port.value for port in graph.outputs}
        self._at = {node: i for i, unit in enumerate(self.nodes) for node in unit}
        self._readers: dict[Value, list[int]] = {}
        for node in graph.nodes:
            for value in node.inputs:
                if value is not None and value.constant is None:
                    self._readers.setdefault(value, []).append(self._at.get(node, -1))

    def read_later(self, patch: Patch, last: int) -> list[Value]:
        """Results that patches compute in parts, and that are read after group `last`, or whole."""

        def is_read(value: Value, reader: int) -> bool:
            return reader > last or any(n not in patch.parts and value in n.inputs for n in self.nodes[reader])

        made = [node.outputs[0] for node in patch.parts]
        return [v for v in made if v in self._ends or any(is_read(v, reader) for reader in self._readers.get(v, ()))]

    def estimate(self, chain: Chain, patch: Patch, read_later: Sequence[Value]) -> Estimate | None:
        """The live bytes in `chain`, one of whose patches is (part of) `patch`; None if patches are not worth it.

        `read_later`: its results.
        """
        part = self._patched(chain, patch, read_later)
        # Most chains end here: their patches are too small, or repeat too much work.
        if part is None or self._largest(part) < self._memory.least:
            return None
        again = self._work(part)
        if again > MOST_AGAIN:
            return None
        inputs = self._inputs(part)
        late = self._late(part)
        weights = sum({v: self._memory.weight_bytes(v) for n in part.nodes for v in _weights(n, patch)}.values())
        alive = max(self._outside(part, late), self._inside(part, inputs) + max(0, weights - self._memory.in_flight))
        taken = sum(any(node in patch.parts for node in unit) for unit in self.nodes[chain.first : chain.last + 1])
        return Estimate(chain, alive, round((part.count - 1) * taken * again))

    def _patched(self, chain: Chain, patch: Patch, read_later: Sequence[Value]) -> _Patched | None:
        """The part of `chain` in patches; None if there is none."""
        inside = [node for unit in self.nodes[chain.first : chain.last + 1] for node in unit]
        nodes = [node for node in inside if node in patch.parts]
        if not nodes or self._groups[chain.last].output not in patch.needs:
            return None
        made = {node.outputs[0] for node in nodes}
        results = {self._base(v) for v in read_later if v.producer is not None and self._at[v.producer] >= chain.first}
        return _Patched(chain, patch, nodes, made, results)

    def _largest(self, part: _Patched) -> int:
        """Bytes of the largest result inside a patch."""
        return max((self._part(v, part.patch) for v in part.made if self._base(v) is v), default=0)

    def _work(self, part: _Patched) -> float:
        """The work of all patches, as a multiple of that without patches: by bytes of results in memory."""
        stored = [v for v in part.made if v in self.lifetimes.spans]
        once = max(1, sum(map(self._nbytes, stored)))
        return part.count * sum(self._part(v, part.patch) for v in stored) / once

    def _inputs(self, part: _Patched) -> _Inputs:
        """What the patches read from before them."""
        inputs = _Inputs(set(), set(), 0)
        for node in part.nodes:
            for value, need in zip(node.inputs, part.patch.parts[node].needs, strict=True):
                if value is None or value.constant is not None or self._is_inside(value, part):
                    continue
                in_place = need is not None and need.axis == outermost(value.shape)
                (inputs.ranges if in_place else inputs.whole).add(self._base(value))
                if need is not None and not in_place:
                    inputs = replace(inputs, copies=inputs.copies + self._nbytes(value) * need.size // value.shape[need.axis])
        return inputs

    def _is_inside(self, value: Value, part: _Patched) -> bool:
        return value.producer in part.patch.parts and self._at[value.producer] >= part.chain.first

    def _outside(self, part: _Patched, late: set[int]) -> int:
        """The most live bytes of groups before the patches, and of those `late`, after them."""
        groups = range(part.chain.first, part.chain.last + 1)
        apart = (i for i in groups if i in late or not any(n in part.patch.parts for n in self.nodes[i]))
        return max((self._memory.alive[i] for i in apart), default=0)

    def _inside(self, part: _Patched, inputs: _Inputs) -> int:
        """The most live bytes inside the patches, without weights."""
        first = part.chain.first
        last = part.chain.last
        spans = self.lifetimes.spans
        nbytes = self._nbytes
        needed = inputs.whole | inputs.ranges
        # Computed in the chain before the first patch, and needed by patches.
        before = {v for v in self.lifetimes.born(first, last) if v not in part.made and v not in part.results and v in needed}
        # Freed patch by patch: the last patch reads it last.
        dying = {v for v in inputs.ranges - inputs.whole if spans.get(v, (0, last + 1))[1] <= last}
        # From before the chain, and not needed when the patches begin.
        gone = (v for v in self.lifetimes.born(-1, first - 1) if first <= spans[v][1] <= last and v not in needed)
        fixed = self.lifetimes.crossing[first] - sum(map(nbytes, gone))
        fixed += sum(map(nbytes, before - dying)) - sum(map(nbytes, dying - before))
        falling = sum(map(nbytes, dying))
        rising = sum(map(nbytes, part.results))
        ends = (falling + -(-rising // part.count), -(-falling // part.count) + rising)
        return fixed + max(ends) + self._within(part) + inputs.copies

    def _late(self, part: _Patched) -> set[int]:
        """The groups in the chain that read results of the patches and are not in patches."""
        behind = set(part.made)
        late = set()
        for i in range(part.chain.first, part.chain.last + 1):
            for node in self.nodes[i]:
                if node.outputs[0] not in part.made and not behind.isdisjoint(node.inputs):
                    behind.update(node.outputs)
                    if self._groups[i].main.outputs[0] not in part.made:  # not only a Reshape of the group's result
                        late.add(i)
        return late

    def _part(self, value: Value, patch: Patch) -> int:
        need = patch.needs[value]
        return self._nbytes(value) * need.size // value.shape[need.axis]

    def _within(self, part: _Patched) -> int:
        """The most live bytes of values that one patch alone needs."""
        last: dict[Value, int] = {}
        for node in part.nodes:
            for value in node.inputs:
                if value is not None:
                    last[self._base(value)] = self._at[node]
        change: dict[int, int] = {}
        for node in part.nodes:
            value = node.outputs[0]
            at = self._at[node]
            if value in self.lifetimes.spans and value not in part.results:
                change[at] = change.get(at, 0) + self._part(value, part.patch)
                end = last.get(value, at) + 1
                change[end] = change.get(end, 0) - self._part(value, part.patch)
        return max(accumulate(change[at] for at in sorted(change)), default=0)


def _weights(node: Node, patch: Patch) -> Iterator[Value]:
    """The constants that all patches of `node` read whole."""
    for value, need in zip(node.inputs, patch.parts[node].needs, strict=True):
        if value is not None and value.constant is not None and need is None:
            yield value
