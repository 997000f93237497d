"""The exact moves for a given W: shortest remaining processing time, walking the layers backwards.

docs/reference/internals/planner.md has the problem.

Seen from the last layer, weight w is released at i_w and needs T(w) chunks. Layer l serves C_l of them, and i_w - z_w is the
weight's flow time. Serving the weight with the fewest remaining chunks first never idles and leaves the fewest weights
unfinished at every layer. So it minimises the sum of loading distances. It holds whole slices, each from z_w to its last use.
Among weights of one size no other order holds less. Release times are computed afterwards
(`planning.arithmetic.release_times`).

The same walk serves the soft threshold of C4. If a layer holds more than M_peak, chunks are moved to later layers above their
capacity, up to a ceiling, where the cost is least.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashmem.schedule.instance import Instance

_SENSITIVITY = {"elemental": 1.0, "reusable": 1.0, "hierarchical": 8.0}
"""The cost factor of a chunk above capacity during each class of operators (FlashMem Figure 4: hierarchical ones suffer)."""

_SCAN = 32
"""The number of layers, nearest to its use, that may move a chunk above capacity."""


@dataclass(frozen=True)
class SrptPlan:
    """The decisions of SRPT for one W, of the streamed weights. A plan that is not `feasible` is incomplete."""

    moves: Mapping[str, tuple[tuple[int, int], ...]]
    feasible: bool

    def distance(self, instance: Instance) -> int:
        """Sum of i_w - z_w over the streamed weights."""
        return sum(w.first_use - parts[0][0] for w in instance.weights if (parts := self.moves.get(w.name)))


def srpt(instance: Instance, preload: Collection[str], ceiling: Sequence[int] | None = None) -> SrptPlan:
    """Plan all weights outside `preload`. `ceiling[l - 1]` is the most C_l may be raised to; without it no C_l is raised."""
    walk = _Walk(instance, preload, ceiling)
    excess = walk.run()
    moves = {w.name: tuple(sorted(walk.moved[w.name].items())) for w in walk.streamed}
    return SrptPlan(moves, feasible=excess == 0)


def offenders(
    instance: Instance, preload: Collection[str], ceiling: Sequence[int] | None = None, room: int | None = None
) -> frozenset[str]:
    """Weights to add to `preload` so that the walk completes: the heaviest in flight wherever it would stop.

    `room`: the most bytes of these weights. If it is too small, they do not suffice.
    """
    walk = _Walk(instance, preload, ceiling)
    walk.room = sum(w.nbytes for w in walk.streamed) if room is None else room
    walk.run()
    return frozenset(walk.evicted)


class _Walk:
    """State of the backward walk. A heap entry is (remaining chunks, untouched, -bytes, index into `streamed`)."""

    def __init__(self, instance: Instance, preload: Collection[str], ceiling: Sequence[int] | None) -> None:
        self.layers = instance.layers
        self.m_peak = instance.m_peak
        self.ceiling = ceiling
        self.weight_above = [_SENSITIVITY[spec.operator_class] / max(spec.seconds, 1e-9) for spec in instance.layers]
        self.streamed = [w for w in instance.weights if w.name not in preload]
        self.chunks = [instance.chunks(w) for w in self.streamed]
        self.moved: dict[str, dict[int, int]] = {w.name: {} for w in self.streamed}
        self.used = [0] * (len(instance.layers) + 1)
        self.pending: list[tuple[int, bool, int, int]] = []
        self.pending_bytes = 0
        self.in_use: set[int] = set()  # first used at or before this layer, last used at or after it
        self.room = 0  # bytes that may be evicted to W
        self.evicted: list[str] = []

    def run(self) -> int:
        """Walk to layer 1. Return the excess bytes at the layer where the walk stopped, 0 if it completed."""
        arrivals: defaultdict[int, list[int]] = defaultdict(list)
        last_uses: defaultdict[int, list[int]] = defaultdict(list)
        for index, w in enumerate(self.streamed):
            arrivals[w.first_use].append(index)
            last_uses[w.last_use].append(index)
        for layer in range(len(self.layers), 0, -1):
            self.in_use.update(last_uses[layer])
            new = [index for index in arrivals[layer + 1] if index in self.in_use]
            excess = self.pending_bytes + sum(self.streamed[index].nbytes for index in self.in_use) - self.m_peak
            if excess > 0 and self.ceiling is not None:
                excess = self._move_above_capacity(layer + 1, excess)
            if excess > 0:
                excess = self._evict(excess)
            if excess > 0:
                return excess
            for index in new:
                if index in self.in_use:
                    self._release(index)
            self._serve(layer)
        if self.pending and self.ceiling is not None:
            self._move_above_capacity(1, self.pending_bytes)
        excess = self.pending_bytes + sum(self.streamed[index].nbytes for index in arrivals[1])
        return self._evict(excess) if excess else 0

    def _evict(self, excess: int) -> int:
        """Move the heaviest weights in flight to W until `excess` bytes are removed. Return the rest of `excess`."""
        in_flight = {index: self._bytes(index, remaining) for remaining, _, _, index in self.pending}
        in_flight.update({index: self.streamed[index].nbytes for index in self.in_use})
        for index in sorted(in_flight, key=lambda index: (-in_flight[index], index)):
            w = self.streamed[index]
            if excess > 0 and w.nbytes <= self.room:
                self.room -= w.nbytes
                self.evicted.append(w.name)
                excess -= in_flight[index]
                if index in self.in_use:
                    self.in_use.remove(index)
                else:
                    self.pending_bytes -= in_flight[index]
                    self.pending = [entry for entry in self.pending if entry[3] != index]
        heapq.heapify(self.pending)
        return max(0, excess)

    def _bytes(self, index: int, remaining: int) -> int:
        """Bytes of a weight before the layers that move its `remaining` chunks: the whole weight, or 0."""
        return self.streamed[index].nbytes if remaining else 0

    def _release(self, index: int) -> None:
        self.in_use.remove(index)
        nbytes = self.streamed[index].nbytes
        heapq.heappush(self.pending, (self.chunks[index], True, -nbytes, index))
        self.pending_bytes += nbytes

    def _serve(self, layer: int) -> None:
        left = self.layers[layer - 1].capacity - self.used[layer]
        while left > 0 and self.pending:
            remaining, _, _, index = heapq.heappop(self.pending)
            taken = min(left, remaining)
            left -= taken
            self._take(index, remaining, taken, layer)
            if taken < remaining:
                heapq.heappush(self.pending, (remaining - taken, False, -self.streamed[index].nbytes, index))

    def _take(self, index: int, remaining: int, taken: int, layer: int) -> None:
        w = self.streamed[index]
        parts = self.moved[w.name]
        parts[layer] = parts.get(layer, 0) + taken
        self.used[layer] += taken
        self.pending_bytes -= self._bytes(index, remaining) - self._bytes(index, remaining - taken)

    def _move_above_capacity(self, earliest: int, excess: int) -> int:
        """Move pending chunks, fewest remaining first, to layers from `earliest` on, until `excess` bytes are removed.

        Every layer up to the use of a weight that still waits here is full, so these moves are above capacity.
        """
        assert self.ceiling is not None
        target = self.pending_bytes - excess
        waiting = sorted(self.pending)
        self.pending = []
        for remaining, untouched, size, index in waiting:
            left = remaining
            last = self.streamed[index].first_use - 1
            while left and self.pending_bytes > target:
                layer = self._cheapest_layer(earliest, last)
                if layer is None:
                    break
                taken = min(left, max(1, left // 8), self.ceiling[layer - 1] - self.used[layer])
                self._take(index, left, taken, layer)
                left -= taken
            if left:
                self.pending.append((left, untouched and left == remaining, size, index))
        heapq.heapify(self.pending)
        return max(0, self.pending_bytes - target)

    def _cheapest_layer(self, first: int, last: int) -> int | None:
        """The layer where one more chunk above capacity costs least relative to the layer's latency; the latest of equals."""
        assert self.ceiling is not None
        best = None
        least = math.inf
        for layer in range(last, max(first, last - _SCAN + 1) - 1, -1):
            used = self.used[layer]
            if used < self.ceiling[layer - 1]:
                cost = (used + 1 - self.layers[layer - 1].capacity) * self.weight_above[layer - 1]
                if cost < least:
                    best = layer
                    least = cost
        return best
