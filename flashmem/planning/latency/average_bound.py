"""A lower bound on the first answer of plans that keep a limit on average memory, in mode `map`, by linear programs.

A bound within bytes in flight ignores the limit that lambda sets there: pages are in memory from their read to their last use,
so only the time between the two counts. A linear program chooses when each layer and each read begins. It needs no other order
of reads than that of use: a swap of two equal parts of reads changes no sum of bytes x seconds. It is solved by GLOP of
OR-tools; import this module only where a search runs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from ortools.linear_solver import pywraplp

from flashmem.planning.latency.bounds import cheapest_pieces
from flashmem.schedule.instance import Instance, WeightSpec

_SAFETY = 1e-6
"""A share of the optimum for the tolerances of the solver."""


def seconds_within_average(instance: Instance, preload: Collection[str], average: int, reached: float, seconds: float) -> float:
    """A proven lower bound on the latency of every plan with W = `preload` and at most `average` bytes of pages beside W.

    What is read before the session is open costs no memory until then. So there is a program for each number of weights whose
    bytes can be read before, and the least of their optima is the bound. It is at most `reached`, the latency of a known plan,
    and 0 if the programs are not solved in `seconds`.
    """
    deadline = time.monotonic() + seconds
    program = _Program(instance, preload, average, reached)
    least = reached
    ahead = program.first_seconds
    for early in range(len(program.streamed) + 1):
        if early and ahead > instance.opening_seconds:
            break
        for cut in (False, True):
            found = program.optimum(early, deadline, cut=cut)
            if found is None:
                return 0.0
            least = min(least, found)
        if early < len(program.streamed):
            ahead += program.streamed[early].nbytes / instance.load_bandwidth
    return least * (1 - _SAFETY)


def _longest_early_read(instance: Instance, streamed: Sequence[WeightSpec], average: int, reached: float) -> float:
    """The most seconds of a read that can begin before the session is open in a plan of `average` bytes and `reached` seconds.

    From the opening to its use it is in memory, and before its use all bytes used earlier are read.
    """
    opening = instance.opening_seconds
    rate = instance.load_bandwidth
    begun = list(accumulate((spec.seconds for spec in instance.layers), initial=opening))
    longest = 0.0
    before = 0
    for w in streamed:
        used = max(begun[w.first_use - 1], before / rate)
        if w.nbytes * (used - opening) <= average * reached:
            longest = max(longest, w.nbytes / rate)
        before += w.nbytes
    return longest


class _Program:
    """The linear program for plans that read the bytes of a number of weights before the opening; with `cut`, part of one more.

    A weight counts from the start of its read. In the program each of its bytes counts from its own, half the read later on
    average, so that a swap of parts is free. The difference is added for all bytes but those that are read before the opening,
    by reads of at most `_longest` seconds. Only numbers differ between the programs, so one is solved again and again.
    """

    def __init__(self, instance: Instance, preload: Collection[str], average: int, reached: float) -> None:
        self._instance = instance
        self.streamed = sorted((w for w in instance.weights if w.name not in preload), key=lambda w: w.first_use)
        self._first = sum(w.nbytes for w in instance.weights if w.name in preload and w.first_use == 1)
        self._unit = max((w.nbytes for w in self.streamed), default=1)  # of bytes: it keeps numbers near 1
        self._longest = _longest_early_read(instance, self.streamed, average, reached)
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._layers()
        self._moves()
        self._reads()
        self._limit = self._solver.Constraint(-self._solver.infinity(), 0.0)
        for w in self.streamed:
            self._add(self._ends[w.last_use - 1], w.nbytes / self._unit)
        self._add(self._ends[-1], -(average + 0.5) / self._unit)  # the average is rounded
        self._solver.Minimize(self._ends[-1])

    @property
    def first_seconds(self) -> float:
        """The time at which the disk has read the weights of W that layer 1 uses."""
        return self._first / self._instance.load_bandwidth

    def _add(self, variable: Any, coefficient: float) -> None:
        self._limit.SetCoefficient(variable, self._limit.GetCoefficient(variable) + coefficient)

    def optimum(self, early: int, deadline: float, *, cut: bool) -> float | None:
        """The least latency with the bytes of `early` weights read early; infinite if there is none, None if the time ends."""
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        solver = self._solver
        opening = self._instance.opening_seconds
        rate = self._instance.load_bandwidth
        ahead = sum(w.nbytes for w in self.streamed[: early + 1]) / rate + self._longest
        known = ahead * self._longest * rate / self._unit / 2
        for at, (w, read) in enumerate(zip(self.streamed, self._read, strict=True)):
            seconds = w.nbytes / rate
            size = w.nbytes / self._unit
            known -= size * seconds / 2
            if at < early:
                read.SetBounds(0.0, max(0.0, opening - seconds))
                self._limit.SetCoefficient(read, 0.0)
                known += size * opening
            elif cut and at == early:
                read.SetBounds(0.0, opening)
                self._limit.SetCoefficient(read, -size / 2)
                known += size * (seconds + opening) / 2
            else:
                read.SetBounds(opening, solver.infinity())
                self._limit.SetCoefficient(read, -size)
                known += size * seconds / 2
        self._limit.SetUb(known)
        solver.SetTimeLimit(max(1, int(1000 * left)))
        status = solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return math.inf
        return float(solver.Objective().Value()) if status == pywraplp.Solver.OPTIMAL else None

    def _layers(self) -> None:
        """Layers run in order, each at least as long as it and the bytes moved during it take on the hull of its curve."""
        solver = self._solver
        opening = self._instance.opening_seconds
        count = len(self._instance.layers)
        self._starts = [solver.NumVar(opening, solver.infinity(), "") for _ in range(count)]
        self._ends = [solver.NumVar(opening, solver.infinity(), "") for _ in range(count)]
        self._moved = [solver.NumVar(0, solver.infinity(), "") for _ in range(count)]
        for at, spec in enumerate(self._instance.layers):
            alone = self._starts[at] + spec.seconds
            solver.Add(self._ends[at] >= alone)
            if at:
                solver.Add(self._starts[at] >= self._ends[at - 1])
            reached = cost = 0.0
            for price, length in cheapest_pieces(spec.seconds, spec.beside) if spec.beside else ():
                solver.Add(self._ends[at] >= alone + (cost - price * reached) + price * self._unit * self._moved[at])
                if math.isinf(length):
                    break
                reached += length
                cost += price * length

    def _moves(self) -> None:
        """Every byte is moved during a layer before its first use."""
        solver = self._solver
        first_used: defaultdict[int, int] = defaultdict(int)
        for w in self.streamed:
            first_used[w.first_use] += w.nbytes
        before = solver.NumVar(0, 0, "")
        needed = 0
        for layer in range(1, len(self._instance.layers) + 1):
            if layer in first_used:
                needed += first_used[layer]
                solver.Add(before >= needed / self._unit)
            after = solver.NumVar(0, solver.infinity(), "")
            solver.Add(after == before + self._moved[layer - 1])
            before = after

    def _reads(self) -> None:
        """The disk reads weights in the order of use after those of W that layer 1 uses, and the host hands them on."""
        solver = self._solver
        instance = self._instance
        handed = instance.opening_seconds + self._first / instance.host_bandwidth
        free = solver.NumVar(0, solver.infinity(), "")
        solver.Add(free >= self.first_seconds)
        self._read = []
        for w in self.streamed:
            read = solver.NumVar(0, solver.infinity(), "")
            solver.Add(read >= free)
            free = read + w.nbytes / instance.load_bandwidth
            handed += w.nbytes / instance.host_bandwidth
            start = self._starts[w.first_use - 1]
            solver.Add(start >= free + min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth)
            solver.Add(start >= handed)
            self._read.append(read)
