"""Proven lower bounds on the integrated latency of every plan with a given W inside M_peak.

docs/reference/internals/planner.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec

_SCAN = 512
_SCANS = 8
"""Layers per step, and the most steps, of the search for the earliest release time of a weight."""

_WINDOW = 2048
"""The number of layers back from which delayed reads count. Fewer reads still give a valid bound."""

_CHECKPOINTS = 16
_FIRST = 8
"""The number of layers between which the cost of moves is computed, and the number of first layers that are included."""


def fastest_seconds(instance: Instance, preload: Collection[str]) -> float:
    """A proven lower bound on the integrated latency of every plan that preloads `preload` and keeps to M_peak.

    The bound holds for any order of reads. Layer l cannot start before all bytes first used by layers 1..l are loaded, and:

    - the bytes loaded never exceed M_peak plus the bytes that finished layers freed;
    - a slice occupies its whole size from its release time on. So its read begins no sooner than at a layer where it fits
      beside the weights that this layer and the next ones use;
    - the host passes on bytes at its rate, from when the session is open;
    - moves slow layers down by at least the cost with every byte at the cheapest layer.

    M_peak must be at least `smallest_m_peak`.
    """
    if not instance.layers:
        return instance.opening_seconds
    streamed = [w for w in instance.weights if w.name not in preload]
    needed = needed_weights(instance, preload)
    unit = math.gcd(0, *(w.nbytes for w in streamed)) or 1
    disk = _Disk(instance, streamed, instance.m_peak // unit * unit)
    slowdowns = _Slowdowns(instance, streamed)
    done = [instance.opening_seconds]
    handed = instance.opening_seconds
    last = _LastRead(instance)
    for layer, spec in enumerate(instance.layers, start=1):
        start = done[-1]
        after = last.until(layer, needed[layer])
        if needed[layer]:
            for w in needed[layer]:
                disk.read(w, done, resident=w.name in preload)
                handed += w.nbytes / instance.host_bandwidth
            start = max(start, handed, disk.arrival(layer, done) + after)
        done.append(slowdowns.done(layer, start, start + spec.seconds))
    return done[-1]


class _LastRead:
    """The least time from the end of all reads that a layer needs to its start.

    Some weight is the last to be read. Its last piece is handed on. If an earlier layer needs it, that layer and those after it
    run as well.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._after = math.inf

    def until(self, layer: int, needed: Sequence[WeightSpec]) -> float:
        """That time for `layer`, which needs these weights. Layers are asked for in order."""
        instance = self._instance
        if layer > 1:
            self._after += instance.layers[layer - 2].seconds
        pieces = (min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth for w in needed)
        self._after = min((self._after, *pieces))
        return self._after


def ready_without_limit(instance: Instance, preload: Collection[str]) -> list[float]:
    """By layer (index l - 1), the earliest time at which all that it needs can be read, whatever the memory; 0 for nothing."""
    found = []
    handed = instance.opening_seconds
    disk = 0.0
    last = _LastRead(instance)
    for layer, needed in enumerate(needed_weights(instance, preload)[1:], start=1):
        after = last.until(layer, needed)
        for w in needed:
            disk += w.nbytes / instance.load_bandwidth
            handed += w.nbytes / instance.host_bandwidth
        found.append(max(handed, disk + after) if needed else 0.0)
    return found


def needed_weights(instance: Instance, preload: Collection[str]) -> list[list[WeightSpec]]:
    """By layer (index l), the weights that it is the first to wait for; index 0 is unused."""
    needed: list[list[WeightSpec]] = [[] for _ in range(len(instance.layers) + 1)]
    for w in instance.weights:
        before = 1 if instance.transfer.by_kernels and w.name not in preload else 0  # the layer that moves it waits for it
        needed[max(1, w.first_use - before)].append(w)
    return needed


class _Disk:
    """The earliest time at which the disk can have loaded the weights requested so far, in the order of need."""

    def __init__(self, instance: Instance, streamed: Sequence[WeightSpec], limit: int) -> None:
        layers = len(instance.layers)
        self.rate = instance.load_bandwidth
        self.ready = 0.0  # end of the reads, if bytes inside `limit` could be divided at will
        self.room = limit  # bytes that may still be loaded
        self.layer = 0  # layers known to be done
        self.freed = [0] * (layers + 2)
        for w in streamed:
            self.freed[w.last_use] += w.nbytes
        self.opens = earliest_opens(layers, streamed, limit)
        self.behind: NDArray[np.float64] = np.zeros(layers + 2)  # requested bytes with release times at or after layer l

    def read(self, w: WeightSpec, done: Sequence[float], *, resident: bool) -> None:
        """Request a read of all of `w`."""
        left = w.nbytes
        if resident:
            self.ready += left / self.rate
            return
        while left:
            part = min(left, self.room)
            if part:
                self.ready += part / self.rate
                left -= part
                self.room -= part
            if left:
                self.layer += 1
                self.ready = max(self.ready, done[self.layer])
                self.room += self.freed[self.layer]
        opens = self.opens[w.name]
        if opens > 1:
            self.behind[max(2, opens - _WINDOW) : opens + 1] += w.nbytes

    def arrival(self, layer: int, done: Sequence[float]) -> float:
        """The earliest time at which all requested bytes can be loaded, before `layer` starts."""
        low = max(2, layer - _WINDOW // 2)
        if layer < low:
            return self.ready
        behind = self.behind[low : layer + 1]
        asked = np.flatnonzero(behind)
        if not asked.size:
            return self.ready
        opened = np.array(done[low - 1 : low + int(asked[-1])])
        return max(self.ready, float(np.max(opened[asked] + behind[asked] / self.rate)))


def earliest_opens(layers: int, streamed: Sequence[WeightSpec], limit: int) -> dict[str, int]:
    """By weight, a lower bound on its release time for every plan inside `limit` bytes.

    Each layer holds at least the weights that it uses and those first used at the next layer. A weight that does not fit
    together with them cannot be in memory yet.
    """
    change = np.zeros(layers + 3, np.int64)
    for w in streamed:
        change[max(1, w.first_use - 1)] += w.nbytes
        change[w.last_use + 1] -= w.nbytes
    least = np.cumsum(change)
    opens: dict[str, int] = {}
    for w in streamed:
        last = release = max(1, w.first_use - 1)
        opens[w.name] = 1
        for _ in range(_SCANS):
            if release <= 1:
                break
            low = max(1, release - _SCAN)
            full = np.flatnonzero(least[low:release] + w.nbytes > limit)
            if full.size:
                opens[w.name] = min(last, low + int(full[-1]) + 1)
                break
            release = low
    return opens


class _Slowdowns:
    """Lower bounds on the ends of some layers, with the slowdown by the bytes that must be moved by then."""

    def __init__(self, instance: Instance, streamed: Sequence[WeightSpec]) -> None:
        layers = len(instance.layers)
        self.m_peak = instance.m_peak
        step = -(-layers // _CHECKPOINTS)
        self.points = {*range(2, min(_FIRST, layers)), *range(step, layers, step), layers}
        self.before: list[tuple[int, float]] = [(1, instance.opening_seconds)]  # (layer, its start)
        self.alone = [0.0, *accumulate(spec.seconds for spec in instance.layers)]
        first = [0] * (layers + 1)
        for w in streamed:
            first[w.first_use] += w.nbytes
        self.first_used = list(accumulate(first))
        kinds: dict[tuple[float, tuple[tuple[float, float], ...]], int] = {}
        self.kind = [kinds.setdefault((spec.seconds, spec.beside), len(kinds)) for spec in instance.layers]
        self.curves = [cheapest_pieces(*each) for each in kinds]
        self.free = not all(spec.beside for spec in instance.layers)

    def done(self, layer: int, start: float, end: float) -> float:
        """The earliest end of `layer`, if it starts no sooner than `start` and ends at `end` without slowdown."""
        if self.free or layer not in self.points:
            return end
        best = end
        for first, begun in self.before:
            moved = self.first_used[layer] - self.first_used[first]
            if first > 1:  # up to M_peak bytes may have been moved before the layer `first`
                moved -= self.m_peak
            at_least = begun + self.alone[layer] - self.alone[first - 1]
            if moved > 0 and layer > first:
                counts = np.bincount(self.kind[first - 1 : layer - 1], minlength=len(self.curves))
                at_least += cost_of(
                    moved, [(p, int(n) * q) for ps, n in zip(self.curves, counts, strict=True) if n for p, q in ps]
                )
            best = max(best, at_least)
        self.before.append((layer, start))
        return best


def cheapest_pieces(seconds: float, beside: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lower convex hull of a slowdown curve, as pieces (seconds per byte, bytes), the cheapest first.

    Beyond its last point the curve keeps its last slope, so no piece of the hull is steeper than that.
    """
    pieces: list[tuple[float, float]] = []
    steepest = (beside[-1][1] - beside[-2][1]) / (beside[-1][0] - beside[-2][0]) if len(beside) > 1 else 0.0
    at = 0
    while at < len(beside) - 1:
        slopes = [
            ((factor - beside[at][1]) / (reach - beside[at][0]), nth)
            for nth, (reach, factor) in enumerate(beside[at + 1 :], start=at + 1)
        ]
        slope, after = min(slopes, key=lambda each: (each[0], -each[1]))
        if slope >= steepest:
            return [*pieces, (seconds * steepest, math.inf)]
        length = beside[after][0] - beside[at][0] if after < len(beside) - 1 else math.inf
        pieces.append((seconds * slope, length))
        at = after
    return pieces


def hull_lines(spec: LayerSpec, chunk_bytes: int, scale: float) -> Iterator[tuple[float, float]]:
    """Lines (value at 0 chunks, slope a chunk), times `scale`. Their maximum is the hull of a layer's seconds by chunks."""
    reached = 0.0
    cost = 0.0
    for price, length in cheapest_pieces(spec.seconds, spec.beside) if spec.beside else ():
        if price:
            yield scale * (spec.seconds + cost - price * reached), scale * price * chunk_bytes
        reached += length
        cost += price * length


def cost_of(nbytes: float, pieces: Sequence[tuple[float, float]]) -> float:
    """The least cost in seconds of `nbytes`, with the cheapest of `pieces` (seconds per byte, bytes) used first."""
    cost = 0.0
    left = float(nbytes)
    for price, length in sorted(pieces):
        taken = min(left, length)
        cost += price * taken
        left -= taken
        if left <= 0:
            break
    return cost
