"""A lower bound on later runs within a budget, by a linear program: it chooses the resident bytes and when others are moved.

It is solved by GLOP of OR-tools; import this module only where a search runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from ortools.linear_solver import pywraplp

from flashmem.planning.latency.bounds import hull_lines
from flashmem.schedule.instance import Instance, WeightSpec

_SAFETY = 1e-6
"""A share of the optimum for the tolerances of the solver."""


def least_later_seconds(instance: Instance, room: int, seconds: float) -> float:
    """A bound in seconds on later runs with at most `room` bytes of weights resident, in W or kept; 0 if none is proven.

    Each layer waits for all bytes needed by then that are not resident. They are moved before their use, during layers where
    that costs least by the hulls of the curves. A part of a weight may be resident. `seconds`: those of the search.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    rate = instance.host_bandwidth if instance.host_bandwidth < math.inf else instance.load_bandwidth
    unit = max((w.nbytes for w in instance.weights), default=1)  # of bytes: it keeps numbers near 1
    streams = {w.name: solver.NumVar(0, 1, "") for w in instance.weights}  # the part that a run reads
    resident = solver.Constraint(max(0, sum(w.nbytes for w in instance.weights) - room) / unit, infinity)
    needed: defaultdict[int, list[WeightSpec]] = defaultdict(list)
    due: defaultdict[int, list[WeightSpec]] = defaultdict(list)
    for w in instance.weights:
        resident.SetCoefficient(streams[w.name], w.nbytes / unit)
        needed[max(1, w.first_use - 1) if instance.transfer.by_kernels else w.first_use].append(w)
        due[w.first_use - 1].append(w)
    end: Any = solver.NumVar(0, 0, "")
    read: Any = solver.NumVar(0, 0, "")
    moved: Any = solver.NumVar(0, 0, "")
    due_bytes: Any = solver.NumVar(0, 0, "")
    for layer, spec in enumerate(instance.layers, start=1):
        start = solver.NumVar(0, infinity, "")
        done = solver.NumVar(0, infinity, "")
        beside = solver.NumVar(0, infinity, "")
        solver.Add(start >= end)
        solver.Add(done >= start + spec.seconds)
        for fixed, price in hull_lines(spec, unit, 1.0):
            solver.Add(done >= start + fixed + price * beside)
        if needed[layer]:
            read = _sum_of(solver, read, [(streams[w.name], w.nbytes / rate) for w in needed[layer]])
            solver.Add(start >= read)
        moved = _sum_of(solver, moved, [(beside, 1.0)])
        if due[layer]:
            due_bytes = _sum_of(solver, due_bytes, [(streams[w.name], w.nbytes / unit) for w in due[layer]])
            solver.Add(moved >= due_bytes)
        end = done
    solver.Minimize(end)
    solver.SetTimeLimit(max(1, int(1000 * seconds)))
    optimal = solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(solver.Objective().Value()) * (1 - _SAFETY) if optimal else 0.0


def _sum_of(solver: Any, before: Any, terms: list[tuple[Any, float]]) -> Any:
    """A variable that is `before` and the sum of `terms`, so that no constraint is long."""
    after = solver.NumVar(0, solver.infinity(), "")
    solver.Add(after == before + sum(factor * variable for variable, factor in terms))
    return after
