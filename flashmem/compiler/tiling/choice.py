"""Choice of the chains to compute in patches, so that live activations stay within a limit.

The search begins with the group at which most is alive. Around it, it tries runs of groups that begin and end where little is
alive, in patches of several sizes. Of the runs that stay within the limit, it chooses the one with the fewest added launches
for the bytes it saves. If none does, it chooses the one with the lowest peak. It continues with the new peak, until nothing
exceeds the limit or the peak cannot be lowered. A chain that helped is tried first wherever the same sequence of operators
appears again.

Live bytes in a chain are estimated. Tensors from before the chain that end in it are freed patch by patch, and its result grows
patch by patch. Weights that all patches read stay from the first patch to the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from flashmem.base.types import TENSOR_ALIGNMENT
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.operators.tiling_interface import AxisRange, outermost
from flashmem.compiler.tiling.patches import Chain, Patch, alike, tiled, units

WINDOW = 40
"""The most groups of a chain before, and after, the group it is made for."""

ENDS = 7
"""The number of places at which a chain may begin, and end, that are tried."""

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of patches that are tried."""

WORTH = 0.98
"""A chain is used for a group if at most this fraction of its live bytes remains."""

MOST_AGAIN = 1.5
"""Overlapping windows may make patches repeat work, up to this multiple of the chain's work in all."""

ROUNDS = 8
"""The most rounds in which the patches of a chain are made to agree on the operators they divide."""

Size = Callable[[Value], int]


@dataclass(frozen=True)
class Memory:
    """Memory sizes on which a choice of chains is based.

    Attributes:
        alive: live bytes at each group of `fuse(graph)`, without patches.
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
class _Tried:
    chain: Chain
    alive: int
    launches: int

    def rank(self, limit: int, alive: Sequence[int]) -> tuple[float, ...]:
        """The cost of the chain, where `alive` are the present live bytes; smaller is better.

        Within the limit: launches for each byte saved above it. Above the limit: the peak in the chain and next to it.
        """
        first, last = self.chain.first, self.chain.last
        if self.alive <= limit:
            gone = sum(max(0, now - limit) for now in alive[first : last + 1])
            return (0, self.launches / max(1, gone), self.alive)
        return (1, max([self.alive, *alive[max(0, first - 1) : first], *alive[last + 1 : last + 2]]), self.launches)


@dataclass(frozen=True)
class _Known:
    """A chain that helped: signatures of its groups, the group it was made for, the places of a patch, the live bytes."""

    signatures: list[tuple[object, ...]]
    offset: int
    rows: int
    alive: int


class PatchChoice:
    """The chains of one graph that may run in patches; results for one limit are reused for others."""

    def __init__(self, graph: Graph, groups: Sequence[FusionGroup], aliases: AliasAnalysis, memory: Memory) -> None:
        """`aliases`: those of `graph`, whose groups are `groups`."""
        self.groups, self.memory, self.aliases = groups, memory, aliases
        self.nbytes, self.base, self.tile = cache(memory.nbytes), cache(aliases.base), cache(tiled)  # called very often
        self.nodes = units(graph, groups)[1:]
        self.results = {port.value for port in graph.outputs}
        self.readers: dict[Value, list[int]] = {}
        self.at = {node: i for i, unit in enumerate(self.nodes) for node in unit}
        for node in graph.nodes:
            for value in node.inputs:
                if value is not None and value.constant is None:
                    self.readers.setdefault(value, []).append(self.at.get(node, -1))
        # The first and the last group at which the memory of each value is needed.
        self.life: dict[Value, tuple[int, int]] = {}
        for port in graph.inputs:
            self.life[aliases.base(port.value)] = (-1, -1)
        for i, group in enumerate(groups):
            if not aliases.is_alias(group.main):
                self.life.update((value, (i, i)) for value in group.written)
            for value in group.read():
                if (base := aliases.base(value)) in self.life:
                    self.life[base] = (self.life[base][0], i)
        for value in self.results:
            base = aliases.base(value)
            if base in self.life:
                self.life[base] = (self.life[base][0], len(groups))
        self.born: dict[int, list[Value]] = {}
        change = [0] * (len(groups) + 3)
        for value, (first, last) in self.life.items():
            self.born.setdefault(first, []).append(value)
            change[max(first + 1, 0)] += memory.nbytes(value)
            change[last + 1] -= memory.nbytes(value)
        self.crossing, total = [], 0  # before each group: bytes computed before it and needed by it or later
        for step in change:
            total += step
            self.crossing.append(total)
        self.signatures = [_signature(unit) for unit in self.nodes]
        # Results for one limit are cached for the next.
        self.patches: dict[tuple[int, int, int], Patch | None] = {}
        self.estimates: dict[tuple[int, int, int, int], _Tried | None] = {}

    def chains(self, limit: int) -> tuple[list[Chain], int]:
        """Chains that keep live bytes within `limit`, or as near to it as possible, and the resulting peak."""
        alive = list(self.memory.alive)
        chosen: list[_Tried] = []
        known: list[_Known] = []
        while alive and max(alive) > limit:
            peak = max(range(len(alive)), key=alive.__getitem__)
            kept = [tried for tried in chosen if not tried.chain.first <= peak <= tried.chain.last]
            free = _free(peak, kept, len(self.groups))
            without = list(alive)  # the live bytes without the chain around the peak, if it exists
            for old in chosen:
                if old not in kept:
                    part = slice(old.chain.first, old.chain.last + 1)
                    without[part] = self.memory.alive[part]
            best = next(self._again(peak, free, known, limit), None)
            candidates = self._candidates(peak, free, limit) if best is None else ()
            best = best or min(candidates, key=lambda t: t.rank(limit, without), default=None)
            if best is None or best.alive > WORTH * alive[peak]:
                limit = alive[peak]  # the lowest possible peak
                continue
            alive = without
            chosen = [*kept, best]
            first, last = best.chain.first, best.chain.last
            alive[first : last + 1] = [best.alive] * (last + 1 - first)
            known.append(_Known(self.signatures[first : last + 1], peak - first, best.chain.starts[1], best.alive))
        return sorted((tried.chain for tried in chosen), key=lambda chain: chain.first), max(alive, default=0)

    def _again(self, peak: int, free: tuple[int, int], known: Sequence[_Known], limit: int) -> Iterator[_Tried]:
        """Chains that helped elsewhere, if the same operators surround `peak`, and help as much here."""
        for chain in known:
            first = peak - chain.offset
            last = first + len(chain.signatures) - 1
            if free[0] <= first and last <= free[1] and self.signatures[first : last + 1] == chain.signatures:
                yield from (t for t in self._tried(last, chain.rows, [first]) if t.alive <= max(limit, chain.alive))

    def _candidates(self, peak: int, free: tuple[int, int], limit: int) -> Iterator[_Tried]:
        crossing = self.crossing
        lasts = range(peak, min(free[1], peak + WINDOW) + 1)
        firsts = range(max(free[0], peak - WINDOW), peak + 1)
        begins = sorted(firsts, key=lambda i: (crossing[i], peak - i))[:ENDS]
        begins += [i for i in (peak, peak - 1, peak - 2) if i in firsts and i not in begins]
        ends = sorted(lasts, key=lambda j: (crossing[j + 1], j))[:ENDS]
        ends += [j for j in (peak, peak + 1, peak + 2) if j in lasts and j not in ends]
        for last in ends:
            left = list(begins)
            for rows in self._sizes(last):
                done = []
                for tried in self._tried(last, rows, left):
                    yield tried
                    if tried.alive <= limit:
                        done.append(tried.chain.first)
                left = [first for first in left if first not in done]  # more patches are more launches

    def _sizes(self, last: int) -> Iterator[int]:
        """Sizes of patches of a group's result, the largest first: aligned ranges of memory, of equal sizes if possible."""
        output = self.groups[last].output
        if output.size < 2 or output.dtype not in ("float32",) or self.aliases.is_alias(self.groups[last].main):
            return  # nothing to divide: one number has one patch, and a scalar has no axis
        places = output.shape[outermost(output.shape)]
        place_bytes = self.memory.nbytes(output) // places
        unit = TENSOR_ALIGNMENT // math.gcd(TENSOR_ALIGNMENT, max(1, place_bytes))
        seen = set()
        for count in COUNTS:
            least = -(-places // count)
            rows = -(-least // unit) * unit
            equal = next((n for n in range(rows, 2 * rows, unit) if places % n == 0), rows)
            for size in (equal, rows):
                if size < places and size not in seen:
                    seen.add(size)
                    yield size

    def _tried(self, last: int, rows: int, firsts: Sequence[int]) -> Iterator[_Tried]:
        """Chains up to group `last` in patches of `rows` places, from each of `firsts`, and their live bytes."""
        output = self.groups[last].output
        axis = outermost(output.shape)
        places = output.shape[axis]
        starts = tuple(range(0, places, rows))
        begin = min(firsts, default=last)
        if (begin, last, rows) not in self.patches:
            self.patches[begin, last, rows] = self._largest_patch(Chain(begin, last, axis, starts), output, places)
        patch = self.patches[begin, last, rows]
        if patch is None:
            return
        joined: list[Value] | None = None  # the same for every first group
        for first in firsts:
            key = (begin, first, last, rows)
            if key not in self.estimates:
                joined = self._joined(patch, last) if joined is None else joined
                self.estimates[key] = self._estimate(Chain(first, last, axis, starts), patch, joined)
            made = self.estimates[key]
            if made is not None:
                yield made

    def _largest_patch(self, chain: Chain, output: Value, places: int) -> Patch | None:
        """The patch of `chain`, which ends in the `places` of `output`, that needs most; None if patches are impossible."""
        spans = chain.spans(places)
        few = [spans[0], *spans[1:2], *spans[-1:]] if len(spans) > 3 else spans
        nodes = [node for unit in self.nodes[chain.first : chain.last + 1] for node in unit]
        found = self._patches(nodes, output, few, chain.last)
        return None if found is None else max(found, key=lambda patch: sum(span.size for span in patch.needs.values()))

    def _patches(self, nodes: Sequence[Node], end: Value, spans: Sequence[AxisRange], last: int) -> list[Patch] | None:
        """Like `patches.patches_of` for all spans, determined from the first ones and the last one."""

        def overlapping(patches: Sequence[Patch]) -> Iterator[Value]:
            for value in self._joined(patches[0], last):
                needs = [patch.needs[value] for patch in patches]
                apart = needs[0].start == 0 and needs[0].stop == needs[1].start
                if not apart or needs[-1].stop != value.shape[needs[0].axis]:
                    yield value

        return alike(nodes, end, spans, overlapping, ROUNDS, self.tile)

    def _joined(self, patch: Patch, last: int) -> list[Value]:
        """Results that patches compute in parts, and that are read after group `last`, or whole."""
        made = [node.outputs[0] for node in patch.parts]
        inside = patch.parts
        return [
            value
            for value in made
            if value in self.results
            or any(
                reader > last or any(n not in inside and value in n.inputs for n in self.nodes[reader])
                for reader in self.readers.get(value, ())
            )
        ]

    def _estimate(self, chain: Chain, patch: Patch, joined: Sequence[Value]) -> _Tried | None:
        """Estimate the live bytes in `chain`, one of whose patches is (part of) `patch`. `joined`: its results, read later."""
        first, last = chain.first, chain.last
        count = len(chain.starts)
        base, nbytes = self.base, self.nbytes
        inside = [node for unit in self.nodes[first : last + 1] for node in unit]
        members = [node for node in inside if node in patch.parts]
        if not members or self.groups[last].output not in patch.needs:
            return None
        inner = {node.outputs[0] for node in members}
        # Most chains end here: their patches are too small, or repeat too much work.
        if max((self._part(v, patch) for v in inner if base(v) is v), default=0) < self.memory.least:
            return None
        stored = [v for v in inner if v in self.life]
        again = count * sum(self._part(v, patch) for v in stored) / max(1, sum(map(nbytes, stored)))
        if again > MOST_AGAIN:
            return None
        # Before the patches: operators whose whole results the patches need.
        wanted: set[Value] = set()
        sliced: set[Value] = set()
        copies = 0
        for node in members:
            for value, need in zip(node.inputs, patch.parts[node].needs, strict=True):
                if value is None or value.constant is not None:
                    continue
                if value.producer in patch.parts and self.at[value.producer] >= first:
                    continue
                in_place = need is not None and need.axis == outermost(value.shape)
                (sliced if in_place else wanted).add(base(value))
                if need is not None and not in_place:
                    copies += nbytes(value) * need.size // value.shape[need.axis]
        at_first = self.crossing[first]
        results = {base(value) for value in joined if value.producer is not None and self.at[value.producer] >= first}
        whole = [v for i in range(first, last + 1) for v in self.born.get(i, ()) if v not in inner and v not in results]
        needed = wanted | sliced
        before = [v for v in whole if v in needed]
        late = self._late(first, last, inner)
        early = [i for i in range(first, last + 1) if i not in late and not any(n in patch.parts for n in self.nodes[i])]
        peak_before = max((self.memory.alive[i] for i in early), default=0)
        # Inside the patches.
        dying = {v for v in sliced if v not in wanted and self.life.get(v, (0, last + 1))[1] <= last}
        gone = sum(
            nbytes(v)
            for i in range(-1, first)
            for v in self.born.get(i, ())
            if first <= self.life[v][1] <= last and v not in needed
        )
        fixed = (
            at_first
            - gone
            - sum(nbytes(v) for v in dying if v not in before)
            + sum(nbytes(v) for v in before if v not in dying)
        )
        falling, rising = sum(map(nbytes, dying)), sum(map(nbytes, results))
        within = self._within(members, patch, results) + copies
        ends = [falling + -(-rising // count), -(-falling // count) + rising]
        weights = sum({v: self.memory.weight_bytes(v) for n in members for v in self._weights(n, patch)}.values())
        behind = max((self.memory.alive[i] for i in late), default=0)
        alive = max(peak_before, behind, fixed + max(ends) + within + max(0, weights - self.memory.in_flight))
        taken = sum(any(node in patch.parts for node in unit) for unit in self.nodes[first : last + 1])
        return _Tried(chain, alive, round((count - 1) * taken * again))

    def _late(self, first: int, last: int, inner: set[Value]) -> set[int]:
        """The groups in this range that read results of the patches and are not in patches."""
        behind, late = set(inner), set()
        for i in range(first, last + 1):
            for node in self.nodes[i]:
                if node.outputs[0] not in inner and not behind.isdisjoint(node.inputs):
                    behind.update(node.outputs)
                    if self.groups[i].main.outputs[0] not in inner:  # not only a Reshape of the group's result
                        late.add(i)
        return late

    def _weights(self, node: Node, patch: Patch) -> Iterator[Value]:
        for value, need in zip(node.inputs, patch.parts[node].needs, strict=True):
            if value is not None and value.constant is not None and need is None:
                yield value

    def _part(self, value: Value, patch: Patch) -> int:
        need = patch.needs[value]
        return self.nbytes(value) * need.size // value.shape[need.axis]

    def _within(self, members: Sequence[Node], patch: Patch, results: set[Value]) -> int:
        """The most live bytes of values that one patch alone needs."""
        last: dict[Value, int] = {}
        for node in members:
            for value in node.inputs:
                if value is not None:
                    last[self.base(value)] = self.at[node]
        change: dict[int, int] = {}
        for node in members:
            value, at = node.outputs[0], self.at[node]
            if value in self.life and value not in results:
                change[at] = change.get(at, 0) + self._part(value, patch)
                end = last.get(value, at) + 1
                change[end] = change.get(end, 0) - self._part(value, patch)
        return max(accumulate(change[at] for at in sorted(change)), default=0)


def _free(peak: int, chosen: Sequence[_Tried], count: int) -> tuple[int, int]:
    """The longest range of groups around `peak` without a chosen chain: its first and last group."""
    first = max((tried.chain.last + 1 for tried in chosen if tried.chain.last < peak), default=0)
    last = min((tried.chain.first - 1 for tried in chosen if tried.chain.first > peak), default=count - 1)
    return first, last


def _signature(nodes: Sequence[Node]) -> tuple[object, ...]:
    return tuple((node.op, *(value.shape for value in (*node.inputs, *node.outputs) if value is not None)) for node in nodes)
