"""CP-SAT for the objective `first`: neighbourhood search around a plan, and a bound for plans that are small enough.

A neighbourhood is a range of layers. Weights first used in it, and not read before it, may get any release times, in any order;
all other decisions are fixed. Layers, reads and memory follow the clock and C2. A result is accepted only if the clock confirms
it. If one neighbourhood is the whole plan, the same model proves a bound for every order of reads. There, moves do not slow
layers down, and the host needs no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from flashmem.planning.arithmetic.clock import Clock, Moves, Timing
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.arithmetic.solver import cp_solver
from flashmem.planning.latency.backfill import stalls
from flashmem.schedule.instance import Instance, WeightSpec

_MOST_CHOICES = 5000
"""The most pairs in one model of a weight and a layer that may release it."""

_TICKS = 4_000_000
"""The number of time steps (ticks) into which the latency of a plan is divided."""

_FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


@dataclass(frozen=True)
class Improved:
    """Release times (of streamed weights), and a proven bound on the seconds of any plan with the same W; 0: no bound."""

    releases: dict[str, int]
    bound: float


def improve(
    instance: Instance,
    releases: Mapping[str, int],
    moves: Moves,
    limit: int,
    roomiest: int,
    *,
    seconds: float,
    enough: float,
    workers: int = 2,
) -> Improved:
    """Improve `releases` for the same `moves` within `limit` bytes and `seconds` of search. Also prove a bound for all plans
    with this resident set within `roomiest` bytes.

    The search ends when the latency by the clock is at most `enough` seconds, a proven bound.
    """
    deadline = time.monotonic() + seconds
    best = dict(releases)
    timing = Timing(instance, moves)
    clock = timing.play(best)
    whole = (1, len(instance.layers))
    small = _choices(instance, best, moves, *whole) <= _MOST_CHOICES
    ranges = [whole] if small else list(_around_stalls(timing, best, clock))
    for number, (first, last) in enumerate(ranges):
        left = deadline - time.monotonic()
        if left <= 0 or clock.seconds <= enough:
            break
        share = 0.6 if small else 1 / (len(ranges) - number)
        found = _Neighbourhood(timing, best, clock, limit, first, last).solve(left * share, workers)
        if found is not None and int(held_bytes(instance, found, moves).max()) <= limit:
            played = timing.play(found)
            if played.seconds < clock.seconds:
                best, clock = found, played
    left = deadline - time.monotonic()
    bound = 0.0
    if small and left > 0 and clock.seconds > enough:
        bound = _proven(instance, best, moves, clock, roomiest, left, workers)
    return Improved(best, bound)


def _choices(instance: Instance, releases: Mapping[str, int], moves: Moves, first: int, last: int) -> int:
    return sum(moves[w.name][0][0] - first + 1 for w in _free(instance, releases, moves, first, last))


def _free(instance: Instance, releases: Mapping[str, int], moves: Moves, first: int, last: int) -> list[WeightSpec]:
    """The streamed weights whose release times a neighbourhood decides."""
    return [w for w in instance.weights if w.name in moves and first < w.first_use <= last and releases[w.name] >= first]


def _around_stalls(timing: Timing, releases: Mapping[str, int], clock: Clock) -> Iterator[tuple[int, int]]:
    """Ranges of layers around the longest waits of the disk for memory, as long as one model permits."""
    instance, moves, order = timing.instance, timing.moves, timing.order(releases)
    layers = len(instance.layers)
    taken: set[int] = set()
    for stall in sorted(stalls(instance, order, clock), key=lambda s: s.begin - s.end):
        release = max(1, releases[order[stall.at].name])
        if release in taken:
            continue
        first, last, step = max(1, release - 2), release, 8
        while last < layers and _choices(instance, releases, moves, first, min(layers, last + step)) <= _MOST_CHOICES:
            last = min(layers, last + step)
        if last > release:
            taken.update(range(first, last))
            yield first, last


class _Neighbourhood:
    """The CP-SAT model for the weights first used at layers `first` + 1 to `last`. Times are ticks since the session opened."""

    def __init__(self, timing: Timing, releases: Mapping[str, int], clock: Clock, limit: int, first: int, last: int) -> None:
        self.instance, self.moves, self.needs = timing.instance, timing.moves, timing.needs
        self.releases, self.clock = releases, clock
        self.first, self.last = first, last
        self.tick = clock.seconds / _TICKS
        self.took = [self._ticks(seconds) for seconds in timing.durations]
        self.free = _free(self.instance, releases, self.moves, first, last)
        names = {w.name for w in self.free}
        order = timing.order(releases)
        begin = next((at for at, w in enumerate(order) if w.name in names), len(order))
        self.read_before = order[:begin]
        # Fixed weights that are read among the free ones or after them, without those released after the last layer.
        self.others = [w for w in order[begin:] if w.name not in names and releases[w.name] <= last]
        self.model = cp_model.CpModel()
        self._layers()
        self.opens: dict[
            str, list[cp_model.IntVar]
        ] = {}  # of layers first + 1 to z_w: whether the release time is there or later
        self.reads: dict[str, cp_model.IntVar] = {}
        self._reads()
        self._memory(limit)
        ends = [self.reads[w.name] + self._size(w) for w in self.free]
        finish = self.model.new_int_var(0, self.horizon, "finish")
        if last < len(self.instance.layers):
            for end in ends:
                self.model.add(finish >= end)
        self.model.minimize(self.done[last] + finish)

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick)

    def _size(self, w: WeightSpec) -> int:
        return self._ticks(w.nbytes / self.instance.load_bandwidth)

    def _layers(self) -> None:
        """Add the ends of layers; earlier reads are fixed."""
        instance, clock = self.instance, self.clock
        self.horizon = 2 * _TICKS
        opened = clock.done[self.first - 2] if self.first > 1 else instance.opening_seconds
        self.done: dict[int, cp_model.IntVar | int] = {self.first - 1: self._ticks(opened)}
        ready = [0] * (len(instance.layers) + 1)
        for w in self.read_before:
            ready[self.needs[w.name]] = max(ready[self.needs[w.name]], self._ticks(clock.loaded[w.name]))
        for layer in range(self.first, self.last + 1):
            took = self.took[layer - 1]
            end = self.model.new_int_var(ready[layer] + took, self.horizon, f"done {layer}")
            self.model.add(end >= self.done[layer - 1] + took)
            self.model.add_hint(end, self._ticks(clock.done[layer - 1]))
            self.done[layer] = end

    def _reads(self) -> None:
        """Add the reads: sequential, after their release times; layers wait for them."""
        instance, model = self.instance, self.model
        before = self.read_before
        begin = self._ticks(self.clock.read[before[-1].name]) + self._size(before[-1]) if before else 0
        intervals = []
        for w in (*self.free, *self.others):
            start = self.reads[w.name] = model.new_int_var(begin, self.horizon, f"read {w.name}")
            model.add_hint(start, self._ticks(self.clock.read[w.name]))
            size = self._size(w)
            intervals.append(model.new_fixed_size_interval_var(start, size, f"reads {w.name}"))
            piece = self._ticks(min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth)
            need = self.needs[w.name]
            if self.first <= need <= self.last:
                model.add(self.done[need] >= start + size + piece + self.took[need - 1])
        for w in self.others:
            if self.releases[w.name] > self.first:
                model.add(self.reads[w.name] >= self.done[self.releases[w.name] - 1])
        for w in self.free:
            chain = self.opens[w.name] = []
            for layer in range(self.first + 1, self.moves[w.name][0][0] + 1):
                later = model.new_bool_var(f"{w.name} >= {layer}")
                model.add_hint(later, self.releases[w.name] >= layer)
                if chain:
                    model.add_implication(later, chain[-1])
                model.add(self.reads[w.name] >= self.done[layer - 1]).only_enforce_if(later)
                chain.append(later)
            model.add(self.reads[w.name] >= self.done[self.first - 1] if self.first > 1 else self.reads[w.name] >= 0)
        model.add_no_overlap(intervals)

    def _memory(self, limit: int) -> None:
        """Add the limit on bytes that C2 counts, at every layer that a choice affects."""
        held = held_bytes(self.instance, self.releases, self.moves)
        chosen: dict[int, list[cp_model.LinearExpr]] = {}
        fixed = {layer: int(held[layer]) for layer in range(self.first, self.last + 1)}
        for w in self.free:
            for place, later in enumerate(self.opens[w.name]):
                layer = self.first + place  # in memory there unless the release time is at the next layer or later
                chosen.setdefault(layer, []).append(w.nbytes * (1 - later))
                if self.releases[w.name] <= layer:
                    fixed[layer] -= w.nbytes
        for layer, terms in chosen.items():
            self.model.add(cp_model.LinearExpr.sum(terms) <= limit - fixed[layer])

    def solve(self, seconds: float, workers: int) -> dict[str, int] | None:
        """Release times of all weights, in the order of the reads found; None if no solution was found."""
        if not self.free:
            return None
        cp = cp_solver(workers, seconds)
        if cp.solve(self.model) not in _FOUND:
            return None
        found = dict(self.releases)
        latest = 0
        free = {w.name for w in self.free}
        for w in sorted((*self.free, *self.others), key=lambda w: (cp.value(self.reads[w.name]), self.needs[w.name])):
            if w.name in free:
                release = self.first + sum(cp.boolean_value(later) for later in self.opens[w.name])
                found[w.name] = min(max(release, latest), self.moves[w.name][0][0])
            latest = max(latest, found[w.name])
        return found


def _proven(
    instance: Instance, releases: Mapping[str, int], moves: Moves, clock: Clock, limit: int, seconds: float, workers: int
) -> float:
    """A bound on the seconds of every plan with this W and at most `limit` bytes in flight; times are rounded down."""
    model = cp_model.CpModel()
    tick = clock.seconds / _TICKS
    most = _TICKS
    done: list[cp_model.IntVar | int] = [int(instance.opening_seconds / tick)]
    took = [int(spec.seconds / tick) for spec in instance.layers]
    for layer in range(1, len(instance.layers) + 1):
        end = model.new_int_var(0, most, f"done {layer}")
        model.add(end >= done[-1] + took[layer - 1])
        done.append(end)
    intervals = []
    held: list[list[cp_model.LinearExpr]] = [[] for _ in done]
    fixed = np.zeros(len(done) + 1, np.int64)
    for w in instance.weights:
        size = int(w.nbytes / instance.load_bandwidth / tick)
        start = model.new_int_var(0, most, f"read {w.name}")
        model.add_hint(start, int(clock.read[w.name] / tick))
        intervals.append(model.new_fixed_size_interval_var(start, size, f"reads {w.name}"))
        need = w.first_use - (instance.mode == "interleave" and w.name in moves)
        model.add(done[need] >= start + size + took[need - 1])
        if w.name not in moves:
            continue
        chain: list[cp_model.IntVar] = []
        for layer in range(2, w.first_use):
            later = model.new_bool_var(f"{w.name} >= {layer}")
            model.add_hint(later, releases[w.name] >= layer)
            if chain:
                model.add_implication(later, chain[-1])
            model.add(start >= done[layer - 1]).only_enforce_if(later)
            held[layer - 1].append(w.nbytes * (1 - later))
            chain.append(later)
        fixed[w.first_use - 1] += w.nbytes
        fixed[w.last_use + 1] -= w.nbytes
    fixed = np.cumsum(fixed)
    for layer, terms in enumerate(held):
        if terms:
            model.add(cp_model.LinearExpr.sum(terms) <= limit - int(fixed[layer]))
    model.add_no_overlap(intervals)
    model.minimize(done[-1])
    cp = cp_solver(workers, seconds)
    status = cp.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        return 0.0
    return float(cp.best_objective_bound) * tick
