"""CP-SAT for the problems that the dynamic program leaves open.

There M_peak binds among partly filled chunks, a weight is used twice, or W is limited. The full model over x, z and W solves
small problems. A limit on W needs the choice model, with one boolean for each weight and three integers for each layer. CP-SAT
solves a long choice model in rolling windows.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator

from ortools.sat.python import cp_model

from flashmem.planning.arithmetic.solver import cp_solver
from flashmem.planning.opg.cp_models import FullModel, Unit, Window
from flashmem.planning.opg.objective import Decision, PaperInstance

_WINDOW = 1000
"""The number of layers that one window decides."""

_LOOKAHEAD = 250
"""The number of layers that a window includes beyond those it decides."""

_FULL_MODEL_MOVES = 4000
"""The most variables x_{w,l} for which the full model is built."""

_POLISHED_WEIGHTS = 2000
"""The most weights of a plan that is polished: one exchange requires a walk over all of them."""

_FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


class CpSat:
    """The CP-SAT search until `deadline` (of `time.monotonic`) with `workers` threads."""

    def __init__(self, paper: PaperInstance, deadline: float, workers: int) -> None:
        self.paper = paper
        self.deadline = deadline
        self.workers = workers
        self.alone = paper.distances_alone()
        self.fixed = frozenset(paper.sizes.keys() - self.alone.keys())  # in every W

    def _seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def improve(self, best: Decision | None, bound: int) -> tuple[Decision | None, int]:
        """A plan no worse than `best` (the same object if none is better), and a bound no worse than `bound`."""
        paper = self.paper
        if paper.limit is not None and paper.bytes_of(self.fixed) > paper.limit:
            return None, 0
        full = FullModel(paper, self.fixed)
        solvable = full.size <= _FULL_MODEL_MOVES
        if best is None:
            preload, proven = self._choose(self.fixed)
            if preload is None:
                return None, 0
            bound = max(bound, proven)
            best = paper.repaired(preload)
        if best is not None and best.cost > bound and len(paper.chunks) <= _POLISHED_WEIGHTS:
            best = paper.polished(best, self.deadline - (0.8 * self._seconds_left() if solvable else 0))
        if solvable and self._seconds_left() > 0 and (best is None or best.cost > bound):
            found, proven = full.solve(best, cp_solver(self.workers, self._seconds_left()))
            bound = max(bound, proven)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        return best, bound

    def _windows(self) -> Iterator[tuple[int, int]]:
        """(first, last) layer that each window decides, from the last layer backwards."""
        last = len(self.paper.instance.layers)
        while last > 0:
            first = max(1, last - _WINDOW + 1)
            first = 1 if first <= _LOOKAHEAD else first
            yield first, last
            last = first - 1

    def _choose(self, hint: frozenset[str]) -> tuple[frozenset[str] | None, int]:
        """W by CP-SAT, and its bound if one window covered all layers; None if no window had a solution in time.

        A window without a solution uses the part of `hint` in it.
        """
        paper = self.paper
        windows = list(self._windows())
        preload = self.fixed
        bound = 0
        found = False
        for number, (first, last) in enumerate(windows):
            room = None if paper.limit is None else paper.limit - paper.bytes_of(preload)
            window = Window(paper, self.alone, max(1, first - _LOOKAHEAD), last, self._pending_at(preload, last + 1), room)
            window.hint(hint)
            cp = cp_solver(self.workers, 0.5 * self._seconds_left() / (len(windows) - number))
            solved = cp.solve(window.model) in _FOUND
            found |= solved
            preload |= {
                w.name for w in paper.instance.weights
                if w.name in window.chosen and w.first_use > first
                and (cp.boolean_value(window.chosen[w.name]) if solved else w.name in hint)
            }  # fmt: skip
            if solved and len(windows) == 1:
                fixed_cost = paper.preload_cost * sum(paper.chunks[name] for name in self.fixed)
                bound = fixed_cost + math.ceil(cp.best_objective_bound - 1e-6)
        return (preload if found else None), bound

    def _pending_at(self, preload: frozenset[str], layer: int) -> tuple[int, int]:
        """State of the choice model at `layer`: chunks and units of bytes that wait to be moved for weights used after it."""
        instance = self.paper.instance
        unit = Unit.of(instance, [w for w in instance.weights if w.name in self.alone])
        arrivals: defaultdict[int, list[str]] = defaultdict(list)
        for w in instance.weights:
            if w.first_use > layer and w.name not in preload:
                arrivals[w.first_use - 1].append(w.name)
        chunks = nbytes = 0
        for at in range(len(instance.layers), layer - 1, -1):
            served = instance.layers[at].capacity if at < len(instance.layers) else 0
            chunks = max(0, chunks - served) + sum(self.paper.chunks[name] for name in arrivals[at])
            nbytes = max(0, nbytes - served * unit.chunk) + sum(unit.size[name] for name in arrivals[at])
        return chunks, nbytes
