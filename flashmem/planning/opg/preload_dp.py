"""The choice of W as a dynamic program over the backward walk (DESIGN section 4): fast enough for 10^5 slices, and a proof.

SRPT (`planning.opg.srpt`) is the best plan for a given W, so only W is to be chosen: walking from the last layer to the
first, each weight is streamed or preloaded when the walk comes to its first use. What has been decided matters for the rest
only through the chunks each pending weight still needs.

*Cost to go.* Of that state keep only B, the chunks pending in all. A layer then costs at least
ceil(B / largest T(w) that may be pending) waiting weights, and holds at least B times the fewest bytes a chunk stands for. The
least cost from (layer, B) down to layer 1 is a table, computed upwards from layer 1. Where all weights that can be pending at
once have the same number of chunks, nothing was relaxed (SRPT finishes them one after the other) and the table is exact.

*Labels.* The full state is the sorted tuple of remaining chunks. Labels (state, cost so far) are carried through the layers;
one is dropped where its cost so far and the table's cost to go reach the best plan known. If more are left than time admits,
the best are kept and the smallest estimate among those dropped is the bound that is proven.

*A window.* In a best plan no streamed weight waits longer than (lambda / (1 - lambda)) T(w) layers: preloading it would cost
less and delay no other. So only weights used within that many layers can be pending: this bounds B, and makes T(w) local.

Two relaxations are left to the caller to check, by running SRPT on the W found: a weight used again later is counted until its
first use only, and partly filled chunks count as the lightest of their kind.
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
"""The cost of what cannot be; far above any plan's, and sums of a few stay below 2**63."""

_TABLE_ENTRIES = 20_000_000
"""Entries of the table kept at once (160 MB); of larger ones some rows are kept, the others computed again when needed."""

_TABLE_MOST = 2_000_000_000
"""Entries of a table that is worth computing: some ten seconds."""

_FIRST_WIDTH, _WIDER = 16, 8
"""Most labels of a layer in the first pass, and how many times more in each next one: better plans cut off more labels."""

_LABEL_SECONDS = 3e-6
"""About what one label costs at one layer."""

_COUNTED_WEIGHTS = 2000
"""Most weights whose chunks are sorted by what they weigh at each layer; of more the lightest one speaks for all."""

_PEAK = 4
"""How many times the average a layer may have of labels; should all layers use that, later ones get fewer."""

State = tuple[int, ...]
"""Chunks still needed by each pending weight, fewest first."""


@dataclass(frozen=True)
class Choice:
    """W (None if no better one was found), its cost to the walk, and a proven bound; all without weights that must be in W."""

    preload: frozenset[str] | None
    cost: int
    bound: int


def choose_preload(paper: PaperInstance, deadline: float) -> tuple[Decision | None, int]:
    """The best plan found until `deadline` (of `time.monotonic`), and a proven bound on the cost of any.

    No plan if `paper.limit` is less than the W of every plan tried, or if the table would take too long.
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
"""How full partly filled chunks are taken to be: 0 for the bound; where M_peak binds, the others lead to better plans."""


def _better(one: Decision | None, other: Decision | None) -> Decision | None:
    return other if one is None or (other is not None and other.cost < one.cost) else one


class PreloadDynamicProgram:
    """The dynamic program for the weights in `free`; all others are in W.

    Pending chunks stand for the fewest bytes that so many chunks of weights that may be pending there can stand for, at
    `fullness` 0, and for S bytes each at `fullness` 1. What is proven holds for all plans at 0 only.
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
        """Of weights that may be pending at layer l (index l): the `largest` T(w), what a chunk `weighs`; the `most` chunks."""
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
        self.largest = [int(value) for value in _greatest(largest, self.layers, 1)]
        self.weighs = [-value + fullness * (chunk + value) for value in _greatest(lightest, self.layers, -chunk)]
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
        """Most chunks pending at a layer whose own streamed weights take `nbytes`; negative if these alone are too many."""
        room = self.paper.instance.m_peak - nbytes
        if self.lightest_first and room >= 0:
            return self.lightest_first[layer].most(room)
        return math.floor(room / self.weighs[layer] * (1 + 1e-12))

    def bound(self) -> int:
        """A proven bound: the table's cost of everything."""
        return int(self.table.row(self.layers)[0])

    def search(self, best: int, width: int, deadline: float) -> Choice:
        """The W of the cheapest walk below `best`, the cost of a plan that is known, and what is proven: `best`, at the most.

        At most `width` labels are kept at a layer, fewer if otherwise the walk would not end by `deadline`.
        """
        labels: dict[State, int] = {(): 0}
        origins: list[dict[State, tuple[State, int]]] = []  # from the last layer: where labels came from
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
        return Choice(self._preloaded(origins), labels[()], min(dropped, labels[()]))

    def _options(self, layer: int, left: State, pending: int, arrivals: list[tuple[int, int]]) -> list[tuple[State, int, int]]:
        """Ways to go on: the state before the next layer, the price of what is preloaded, a bit for each weight streamed."""
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

    def _preloaded(self, origins: list[dict[State, tuple[State, int]]]) -> frozenset[str]:
        chosen: set[str] = set()
        state: State = ()
        for layer, origin in enumerate(reversed(origins), start=1):
            state, streamed = origin[state]
            chosen.update(w.name for bit, w in enumerate(self.used_at.get(layer, ())) if not streamed >> bit & 1)
        return frozenset(chosen)


class _Served(dict[tuple[State, int], State]):
    """States after a layer has moved so many chunks, fewest remaining first; remembered, for few differ."""

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
        start[0] = 0  # after layer 1 nothing may be pending
        self.kept: list[NDArray[np.int64]] = [start]  # rows 0, block, 2 block ...
        self.begin, self.rows = 0, [start]
        layers = program.layers
        for begin in range(0, layers, self.block):
            if begin:
                self.kept.append(self.rows[-1])
            self._compute(begin, min(begin + self.block, layers))

    def row(self, layer: int) -> NDArray[np.int64]:
        """The row of `layer`. Asked for from the last layer to the first, each row is computed twice at most."""
        if not self.begin <= layer < self.begin + len(self.rows):
            number = max(0, layer - 1) // self.block
            self._compute(number * self.block, min((number + 1) * self.block, self.program.layers))
        return self.rows[layer - self.begin]

    def _compute(self, begin: int, end: int) -> None:
        self.begin, self.rows = begin, [self.kept[begin // self.block]]
        for layer in range(begin + 1, end + 1):
            self.rows.append(self._next(layer, self.rows[-1]))

    def _next(self, layer: int, below: NDArray[np.int64]) -> NDArray[np.int64]:
        program, paper = self.program, self.program.paper
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
        row += self._waiting(int(program.largest[layer]))
        return row

    def _before(self, after: NDArray[np.int64], served: int) -> NDArray[np.int64]:
        """`after` by what was pending before `served` chunks were moved."""
        served = min(served, self.width - 1)
        row = np.empty_like(after)
        row[: served + 1] = after[0]
        row[served + 1 :] = after[1 : self.width - served]
        return row

    def _waiting(self, largest: int) -> NDArray[np.int64]:
        """The cost of the weights that wait, by B, if none needs more than `largest` chunks."""
        found = self._waits.get(largest)
        if found is None:
            pending = np.arange(self.width, dtype=np.int64)
            found = self._waits[largest] = self.program.paper.distance_cost * -(-pending // largest)
        return found


class _Lightest:
    """The chunks that may be pending at a layer, the lightest first: how many of them so many bytes hold at the most."""

    def __init__(self) -> None:
        self.chunks: list[int] = [0]
        self.nbytes: list[float] = [0.0]

    def add(self, chunks: int, weighs: float) -> None:
        """Chunks of a weight; none that was added before is heavier."""
        self.chunks.append(self.chunks[-1] + chunks)
        self.nbytes.append(self.nbytes[-1] + chunks * weighs)

    def most(self, room: int) -> int:
        """Chunks in `room` bytes, not less than 0."""
        full = room * (1 + 1e-12)
        at = bisect_right(self.nbytes, full)
        if at == len(self.nbytes):
            return self.chunks[-1]
        share = (full - self.nbytes[at - 1]) / (self.nbytes[at] - self.nbytes[at - 1])
        return self.chunks[at - 1] + math.floor(share * (self.chunks[at] - self.chunks[at - 1]))


def _greatest(spans: list[tuple[int, int, float]], layers: int, otherwise: float) -> list[float]:
    """The greatest value of the spans (first, last, value) that hold each layer, index l; `otherwise` where there is none."""
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
