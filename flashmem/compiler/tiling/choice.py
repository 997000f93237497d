"""Choice of the chains to compute in patches, so that live activations stay within a limit.

The search begins with the group at which most is alive. Around it, it tries runs of groups that begin and end where little is
alive, in patches of several sizes. Of the runs that stay within the limit, it chooses the one with the fewest added launches
for the bytes it saves. If none does, it chooses the one with the lowest peak. It continues with the new peak, until nothing
exceeds the limit or the peak cannot be lowered. A chain that helped is tried first wherever the same sequence of operators
appears again.

Live bytes in a chain are estimated (`compiler.tiling.estimate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from flashmem.base.types import TENSOR_ALIGNMENT
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.operators.tiling_interface import AxisRange, outermost
from flashmem.compiler.tiling.estimate import Estimate, Estimates, Memory
from flashmem.compiler.tiling.patches import Chain, Patch, alike, tiled

WINDOW = 40
"""The most groups of a chain before, and after, the group it is made for."""

ENDS = 7
"""The number of places at which a chain may begin, and end, that are tried."""

COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""The numbers of patches that are tried."""

WORTH = 0.98
"""A chain is used for a group if at most this fraction of its live bytes remains."""

ROUNDS = 8
"""The most rounds in which the patches of a chain are made to agree on the operators they divide."""


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
        self.groups = groups
        self.memory = memory
        self.aliases = aliases
        self._estimates = Estimates(graph, groups, aliases, memory)
        self._tile = cache(tiled)  # called very often
        self._signatures = [_signature(unit) for unit in self._estimates.nodes]
        # Results for one limit are cached for the next.
        self._largest: dict[tuple[int, int, int], Patch | None] = {}
        self._estimated: dict[tuple[int, int, int, int], Estimate | None] = {}

    def chains(self, limit: int) -> tuple[list[Chain], int]:
        """Chains that keep live bytes within `limit`, or as near to it as possible, and the resulting peak."""
        alive = list(self.memory.alive)
        chosen: list[Estimate] = []
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
            best = best or min(candidates, key=lambda each: _rank(each, limit, without), default=None)
            if best is None or best.alive > WORTH * alive[peak]:
                limit = alive[peak]  # the lowest possible peak
                continue
            alive = without
            chosen = [*kept, best]
            first = best.chain.first
            last = best.chain.last
            alive[first : last + 1] = [best.alive] * (last + 1 - first)
            known.append(_Known(self._signatures[first : last + 1], peak - first, best.chain.starts[1], best.alive))
        return sorted((tried.chain for tried in chosen), key=lambda chain: chain.first), max(alive, default=0)

    def _again(self, peak: int, free: tuple[int, int], known: Sequence[_Known], limit: int) -> Iterator[Estimate]:
        """Chains that helped elsewhere, if the same operators surround `peak`, and help as much here."""
        for chain in known:
            first = peak - chain.offset
            last = first + len(chain.signatures) - 1
            if free[0] <= first and last <= free[1] and self._signatures[first : last + 1] == chain.signatures:
                yield from (t for t in self._tried(last, chain.rows, [first]) if t.alive <= max(limit, chain.alive))

    def _candidates(self, peak: int, free: tuple[int, int], limit: int) -> Iterator[Estimate]:
        crossing = self._estimates.lifetimes.crossing
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

    def _tried(self, last: int, rows: int, firsts: Sequence[int]) -> Iterator[Estimate]:
        """Chains up to group `last` in patches of `rows` places, from each of `firsts`, and their live bytes."""
        output = self.groups[last].output
        axis = outermost(output.shape)
        places = output.shape[axis]
        starts = tuple(range(0, places, rows))
        begin = min(firsts, default=last)
        if (begin, last, rows) not in self._largest:
            self._largest[begin, last, rows] = self._largest_patch(Chain(begin, last, axis, starts), output, places)
        patch = self._largest[begin, last, rows]
        if patch is None:
            return
        read_later: list[Value] | None = None  # the same for every first group
        for first in firsts:
            key = (begin, first, last, rows)
            if key not in self._estimated:
                read_later = self._estimates.read_later(patch, last) if read_later is None else read_later
                self._estimated[key] = self._estimates.estimate(Chain(first, last, axis, starts), patch, read_later)
            made = self._estimated[key]
            if made is not None:
                yield made

    def _largest_patch(self, chain: Chain, output: Value, places: int) -> Patch | None:
        """The patch of `chain`, which ends in the `places` of `output`, that needs most; None if patches are impossible."""
        spans = chain.spans(places)
        few = [spans[0], *spans[1:2], *spans[-1:]] if len(spans) > 3 else spans
        nodes = [node for unit in self._estimates.nodes[chain.first : chain.last + 1] for node in unit]
        found = self._patches(nodes, output, few, chain.last)
        return None if found is None else max(found, key=lambda patch: sum(span.size for span in patch.needs.values()))

    def _patches(self, nodes: Sequence[Node], end: Value, spans: Sequence[AxisRange], last: int) -> list[Patch] | None:
        """Like `patches.patches_of` for all spans, determined from the first ones and the last one."""

        def overlapping(patches: Sequence[Patch]) -> Iterator[Value]:
            for value in self._estimates.read_later(patches[0], last):
                needs = [patch.needs[value] for patch in patches]
                apart = needs[0].start == 0 and needs[0].stop == needs[1].start
                if not apart or needs[-1].stop != value.shape[needs[0].axis]:
                    yield value

        return alike(nodes, end, spans, overlapping, ROUNDS, self._tile)


def _rank(found: Estimate, limit: int, alive: Sequence[int]) -> tuple[float, ...]:
    """The cost of a chain, where `alive` are the present live bytes; smaller is better.

    Within the limit: launches for each byte saved above it. Above the limit: the peak in the chain and next to it.
    """
    first = found.chain.first
    last = found.chain.last
    if found.alive <= limit:
        gone = sum(max(0, now - limit) for now in alive[first : last + 1])
        return (0, found.launches / max(1, gone), found.alive)
    return (1, max([found.alive, *alive[max(0, first - 1) : first], *alive[last + 1 : last + 2]]), found.launches)


def _free(peak: int, chosen: Sequence[Estimate], count: int) -> tuple[int, int]:
    """The longest range of groups around `peak` without a chosen chain: its first and last group."""
    first = max((tried.chain.last + 1 for tried in chosen if tried.chain.last < peak), default=0)
    last = min((tried.chain.first - 1 for tried in chosen if tried.chain.first > peak), default=count - 1)
    return first, last


def _signature(nodes: Sequence[Node]) -> tuple[object, ...]:
    return tuple((node.op, *(value.shape for value in (*node.inputs, *node.outputs) if value is not None)) for node in nodes)
