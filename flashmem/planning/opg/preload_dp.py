"""Dynamic program that chooses W on the backward walk: fast enough for 10^5 slices, with a proven bound.

SRPT (`planning.opg.srpt`) is the best plan for a given W, so W is the only choice. The walk goes from the last layer to the
first, and streams or preloads each weight when it reaches its first use. Earlier decisions affect the rest only through the
chunks that each pending weight still needs.

*Cost to go.* Reduce that state to B, the number of pending chunks. A layer then costs at least ceil(B / largest T(w) that may
be pending) waiting weights. It holds at least B times the fewest bytes of a chunk. The least cost from (layer, B) down to layer
1 is a table, computed upwards from layer 1. If all weights that can be pending at once have the same number of chunks, the
reduction relaxes nothing (SRPT finishes them one after the other), and the table is exact.

*Labels.* The full state is the sorted tuple of remaining chunks. Labels (state, cost so far) are carried through the layers.
A label is dropped if its cost so far plus the table's cost to go reaches the cost of the best known plan. If time does not
admit all labels, the best are kept, and the smallest estimate among the dropped ones is the proven bound.

*A window.* In a best plan no streamed weight waits longer than (lambda / (1 - lambda)) T(w) layers: preloading it would cost
less and delay no other weight. So only weights used within that many layers can be pending. This limits B, and makes T(w)
local.

The caller must check two relaxations by running SRPT on the W found. A weight used again later is counted until its first use
only, and partly filled chunks count as the lightest of their kind.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flashmem.planning.opg.objective import Decision, PaperInstance
from flashmem.schedule.instance import WeightSpec

_NEVER = 1 << 60
"""The cost of an impossible state: far above any plan's, and sums of a few stay below 2**63."""

_TABLE_ENTRIES = 20_000_000
"""The most table entries in memory (160 MB). Larger tables keep some rows, and compute the others again on demand."""

_TABLE_MOST = 2_000_000_000
"""The most entries of a table that is worth computing: about ten seconds."""

_FIRST_WIDTH = 16
_WIDER = 8
"""The most labels of a layer in the first pass, and the factor for each next pass. Better plans let it drop more labels."""

_LABEL_SECONDS = 3e-6
"""The approximate time of one label at one layer."""

_COUNTED_WEIGHTS = 2000
"""The most weights whose chunks are sorted by bytes at each layer. For more weights, the lightest chunk represents all."""

_PEAK = 4
"""The most labels of a layer, as a multiple of the average that time admits. If all layers use it, later ones get fewer."""

State = tuple[int, ...]
"""Chunks that each pending weight still needs, fewest first."""


@dataclass(frozen=True)
class Choice:
    """W (None if no better one was found), its cost in the walk, and a proven bound, all without weights that must be in W."""

    preload: frozenset[str] | None
    cost: int
    bound: int


def choose_preload(paper: PaperInstance, deadline: float) -> tuple[Decision | None, int]:
    """The best plan found until `deadline` (of `time.monotonic`), and a proven bound on the cost of any plan.

    The plan is None if the W of every plan tried exceeds `paper.limit`, or if the table would need too much time.
    """
    free = paper.distances_alone()
    fixed = frozenset(paper.sizes.keys() - free.keys())
    if paper.limit is not None and paper.bytes_of(fixed) > paper.limit:
        return None, 0
    fixed_cost = paper.preload_cost * sum(paper.chunks[name] for name in fixed)
    best: Decision | None = None
    bound = 0
    for fullness in _FULLNESS:
        program = PreloadDynamicProgram(paper, free, fullness)
        if program.layers * (program.most + 1) > _TABLE_MOST:
            break
        program.fill()
        proven = program.bound()
        found = program.search(_NEVER, 1, deadline)
        width = _FIRST_WIDTH
        while True:
            plan = None if found.preload is None else paper.repaired(fixed | found.preload)
            best = _better(best, plan)
            repaired = found.preload is not None and (plan is None or plan.cost > fixed_cost + found.cost)
            if best is None or repaired or best.cost <= fixed_cost + proven or time.monotonic() > deadline:
                break
            found = program.search(best.cost - fixed_cost, width, deadline)
            proven = max(proven, found.bound)
            width *= _WIDER
        if not fullness:
            bound = fixed_cost + proven
        if best is None or best.cost <= bound or time.monotonic() > deadline:
            break
    return best, bound


_FULLNESS = (0.0, 0.5, 1.0)
"""Assumed fullness of partly filled chunks: 0 for the bound. If M_peak binds, the other values lead to better plans."""


def _better(one: Decision | None, other: Decision | None) -> Decision | None:
    return other if one is None or (other is not None and other.cost < one.cost) else one


class PreloadDynamicProgram:
    """The dynamic program for the weights in `free`; all others are in W.

    At `fullness` 0, pending chunks count as the fewest bytes that so many chunks of weights pending there can have. At
    `fullness` 1 they count as S bytes each. Only the bound at 0 holds for all plans.
    """

    def __init__(self, paper: PaperInstance, free: Mapping[str, int], fullness: float = 0.0) -> None:
        self.paper = paper
        self.layers = len(paper.instance.layers)
        self.served = [0, *(spec.capacity for spec in paper.instance.layers)]  # C_l, index l
        self.used_at: defaultdict[int, list[WeightSpec]] = defaultdict(list)
        for w in paper.instance.weights:
            if w.name in free:
                self.used_at[w.first_use].append(w)
        self._look_around([w for w in paper.instance.weights if w.name in free], fullness)

    def fill(self) -> None:
        """Compute the table, which `bound` and `search` need."""
        self.table = _CostToGo(self)

    def _look_around(self, weights: list[WeightSpec], fullness: float) -> None:
        """By layer, for weights that may be pending: the `largest` T(w), the bytes of a chunk (`weighs`), the `most` chunks."""
        chunk = self.paper.instance.chunk_bytes
        largest: list[tuple[int, int, float]] = []
        lightest: list[tuple[int, int, float]] = []
        pending = [0] * (self.layers + 2)
        for w in weights:
            chunks = self.paper.chunks[w.name]
            wait = self.layers
            if self.paper.distance_cost:
                wait = min(wait, self.paper.preload_cost * chunks // self.paper.distance_cost)
            span = (max(1, w.first_use - wait), w.first_use - 1)
            pending[span[0]] += chunks
            pending[w.first_use] -= chunks
            largest.append((*span, chunks))
            lightest.append((*span, -w.nbytes / chunks))
        self.largest = [int(value) for value in _greatest_values(largest, self.layers, 1)]
        self.weighs = [-value + fullness * (chunk + value) for value in _greatest_values(lightest, self.layers, -chunk)]
        self.lightest_first = [_Lightest() for _ in self.weighs] if len(weights) <= _COUNTED_WEIGHTS else []
        if self.lightest_first:
            for (first, last, density), w in sorted(zip(lightest, weights, strict=True), key=lambda each: -each[0][2]):
                each_weighs = -density + fullness * (chunk + density)
                for layer in range(first, last + 1):
                    self.lightest_first[layer].add(self.paper.chunks[w.name], each_weighs)
        self.most = max(
            (min(count, self.pending_beside(layer, 0)) for layer, count in enumerate(accumulate(pending[:-1]))), default=0
        )

    def pending_beside(self, layer: int, nbytes: int) -> int:
        """The most pending chunks within M_peak while a layer uses `nbytes` of weights; negative if those exceed M_peak."""
        room = self.paper.instance.m_peak - nbytes
        if self.lightest_first and room >= 0:
            return self.lightest_first[layer].most(room)
        return math.floor(room / self.weighs[layer] * (1 + 1e-12))

    def bound(self) -> int:
        """A proven bound: the table's cost of the whole problem."""
        return int(self.table.row(self.layers)[0])

    def search(self, best: int, width: int, deadline: float) -> Choice:
        """The W of the cheapest walk that costs less than `best`, the cost of a known plan; and a proven bound of at most
        `best`.

        A layer keeps at most `width` labels, or fewer so that the walk ends by `deadline`.
        """
        labels: dict[State, int] = {(): 0}
        origins: list[dict[State, tuple[State, int]]] = []  # predecessors of labels, from the last layer on
        dropped = best
        serve = _Served()
        for layer in range(self.layers, 0, -1):
            if (self.layers - layer) % 64 == 0:
                allowed = max(1, min(width, int(_PEAK * (deadline - time.monotonic()) / (layer * _LABEL_SECONDS))))
            after: dict[State, int] = {}
            origin: dict[State, tuple[State, int]] = {}
            arrivals = [(self.paper.chunks[w.name], w.nbytes) for w in self.used_at[layer]] if layer in self.used_at else []
            below = self.table.row(layer - 1)
            for state, cost in labels.items():
                left = serve(state, self.served[layer])
                spent = cost + self.paper.distance_cost * len(state)
                for reached, price, streamed in self._options(layer, left, sum(state), arrivals):
                    pending = sum(reached)
                    total = spent + price
                    if pending <= self.most and total + int(below[pending]) < best and total < after.get(reached, _NEVER):
                        after[reached] = total
                        origin[reached] = (state, streamed)
            if len(after) > allowed:
                estimates = sorted((total + int(below[sum(state)]), state) for state, total in after.items())
                dropped = min(dropped, estimates[allowed][0])
                after = {state: after[state] for _, state in estimates[:allowed]}
            labels = after
            origins.append(origin)
            if not labels:
                return Choice(None, _NEVER, dropped)
        return Choice(self._trace_preload(origins), labels[()], min(dropped, labels[()]))

    def _options(self, layer: int, left: State, pending: int, arrivals: list[tuple[int, int]]) -> list[tuple[State, int, int]]:
        """The choices at a layer: the state before the next one, the cost of preloaded weights, a bit for each streamed one."""
        price = self.paper.preload_cost
        options = [(left, 0, 0, 0)]
        for bit, (chunks, nbytes) in enumerate(arrivals):
            grown = [(state, paid + price * chunks, mask, held) for state, paid, mask, held in options]
            for state, paid, mask, held in options:
                if pending <= self.pending_beside(layer, held + nbytes):
                    inserted = list(state)
                    insort(inserted, chunks)
                    grown.append((tuple(inserted), paid, mask | 1 << bit, held + nbytes))
            options = grown
        return [(state, paid, mask) for state, paid, mask, _ in options]

    def _trace_preload(self, origins: list[dict[State, tuple[State, int]]]) -> frozenset[str]:
        chosen: set[str] = set()
        state: State = ()
        for layer, origin in enumerate(reversed(origins), start=1):
            state, streamed = origin[state]
            chosen.update(w.name for bit, w in enumerate(self.used_at.get(layer, ())) if not streamed >> bit & 1)
        return frozenset(chosen)


class _Served(dict[tuple[State, int], State]):
    """Cache of states after a layer has moved a number of chunks, fewest remaining first. Few states differ."""

    def __call__(self, state: State, chunks: int) -> State:
        if not chunks or not state:
            return state
        key = (state, chunks)
        if key not in self:
            self[key] = self._serve(state, chunks)
        return self[key]

    @staticmethod
    def _serve(state: State, chunks: int) -> State:
        for index, remaining in enumerate(state):
            if remaining > chunks:
                return (remaining - chunks, *state[index + 1 :])
            chunks -= remaining
        return ()


class _CostToGo:
    """Row l: the least cost of layers l to 1 and of the weights they use, by B, the chunks pending before layer l moves any."""

    def __init__(self, program: PreloadDynamicProgram) -> None:
        self.program = program
        self.width = program.most + 1
        self._waits: dict[int, NDArray[np.int64]] = {}
        self.block = max(1, _TABLE_ENTRIES // self.width)
        start = np.full(self.width, _NEVER, np.int64)
        start[0] = 0  # after layer 1 no chunk may be pending
        self.kept: list[NDArray[np.int64]] = [start]  # rows 0, block, 2 block ...
        self.begin = 0
        self.rows = [start]
        layers = program.layers
        for begin in range(0, layers, self.block):
            if begin:
                self.kept.append(self.rows[-1])
            self._compute(begin, min(begin + self.block, layers))

    def row(self, layer: int) -> NDArray[np.int64]:
        """The row of `layer`. If rows are requested from the last layer to the first, each is computed at most twice."""
        if not self.begin <= layer < self.begin + len(self.rows):
            number = max(0, layer - 1) // self.block
            self._compute(number * self.block, min((number + 1) * self.block, self.program.layers))
        return self.rows[layer - self.begin]

    def _compute(self, begin: int, end: int) -> None:
        self.begin = begin
        self.rows = [self.kept[begin // self.block]]
        for layer in range(begin + 1, end + 1):
            self.rows.append(self._next(layer, self.rows[-1]))

    def _next(self, layer: int, below: NDArray[np.int64]) -> NDArray[np.int64]:
        program = self.program
        paper = self.program.paper
        arrivals = program.used_at.get(layer, ())
        go = below
        preloaded = 0
        for w in arrivals:
            chunks = paper.chunks[w.name]
            price = paper.preload_cost * chunks
            preloaded += price
            streamed = go[chunks:]
            go = go + price
            np.minimum(go[: len(streamed)], streamed, out=go[: len(streamed)])
        row = self._before(go, program.served[layer])
        if arrivals:
            fits = program.pending_beside(layer, min(w.nbytes for w in arrivals)) + 1
            if fits < self.width:
                row[max(fits, 0) :] = self._before(below + preloaded, program.served[layer])[max(fits, 0) :]
        most = max(0, program.pending_beside(layer, 0)) + 1
        if most < self.width:
            row[most:] = _NEVER
        row += self._waiting_costs(int(program.largest[layer]))
        return row

    def _before(self, after: NDArray[np.int64], served: int) -> NDArray[np.int64]:
        """`after`, indexed by the chunks pending before `served` chunks were moved."""
        served = min(served, self.width - 1)
        row = np.empty_like(after)
        row[: served + 1] = after[0]
        row[served + 1 :] = after[1 : self.width - served]
        return row

    def _waiting_costs(self, largest: int) -> NDArray[np.int64]:
        """The cost of the waiting weights, by B, if none needs more than `largest` chunks."""
        found = self._waits.get(largest)
        if found is None:
            pending = np.arange(self.width, dtype=np.int64)
            found = self._waits[largest] = self.program.paper.distance_cost * -(-pending // largest)
        return found


class _Lightest:
    """The chunks that may be pending at a layer, the lightest first, to find how many of them fit a number of bytes."""

    def __init__(self) -> None:
        self.chunks: list[int] = [0]
        self.nbytes: list[float] = [0.0]

    def add(self, chunks: int, weighs: float) -> None:
        """Add the chunks of a weight, which must be at least as heavy as those added before."""
        self.chunks.append(self.chunks[-1] + chunks)
        self.nbytes.append(self.nbytes[-1] + chunks * weighs)

    def most(self, room: int) -> int:
        """The most chunks that fit `room` bytes, at least 0."""
        full = room * (1 + 1e-12)
        at = bisect_right(self.nbytes, full)
        if at == len(self.nbytes):
            return self.chunks[-1]
        share = (full - self.nbytes[at - 1]) / (self.nbytes[at] - self.nbytes[at - 1])
        return self.chunks[at - 1] + math.floor(share * (self.chunks[at] - self.chunks[at - 1]))


def _greatest_values(spans: list[tuple[int, int, float]], layers: int, otherwise: float) -> list[float]:
    """By layer (index l), the greatest value of the spans (first, last, value) that contain it; `otherwise` if none does."""
    queue = sorted(spans, reverse=True)
    open_spans: list[tuple[float, int]] = []  # (-value, last)
    found = [otherwise] * (layers + 1)
    for layer in range(1, layers + 1):
        while queue and queue[-1][0] <= layer:
            _, last, value = queue.pop()
            heapq.heappush(open_spans, (-value, last))
        while open_spans and open_spans[0][1] < layer:
            heapq.heappop(open_spans)
        if open_spans:
            found[layer] = -open_spans[0][0]
    return found
