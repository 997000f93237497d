"""Linear relaxation of the paper's objective, layer by layer: a bound, and a W to start from (docs/planner.md).

Each streamed weight has two variables between 0 and 1 for each layer: y, whether a part of it was moved at or before the layer,
and f, the share of it moved by then. Memory holds the share y of its bytes at home. In mode `interleave`, staging holds the
difference y - f too. C_l limits the increase of f, and each layer moves at most y times a whole capacity. If W has no limit,
weights stay within the window in which waiting costs no more than W would.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf as infinity
from typing import Any

from ortools.linear_solver import pywraplp

from flashmem.planning.opg.objective import PaperInstance
from flashmem.schedule.instance import WeightSpec

_SLACK = 1e-7
"""The part of the cost of all weights in W that may be a rounding error of the optimum."""

_MOST = 12_000
"""The most pairs of a weight and a layer: some seconds."""

_Terms = list[tuple[Any, float]]
"""Variables and their factors."""


@dataclass(frozen=True)
class Relaxed:
    """A proven bound on the cost of any plan, and the fraction of each weight that the relaxation has in W."""

    bound: int
    preload: dict[str, float]


def relaxed(paper: PaperInstance, alone: Mapping[str, int], seconds: float) -> Relaxed | None:
    """The relaxation's optimum; None if it was not found in time, or if the problem is too large.

    `alone`: the weights that may be streamed, with the least i_w - z_w of each.
    """
    instance = paper.instance
    first = {w.name: _first(paper, w, alone[w.name]) for w in instance.weights if w.name in alone}
    if sum(w.first_use - first[w.name] for w in instance.weights if w.name in alone) > _MOST:
        return None
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetTimeLimit(max(1, int(1000 * seconds)))
    held: defaultdict[int, _Terms] = defaultdict(list)  # by layer, in parts of M_peak
    served: defaultdict[int, _Terms] = defaultdict(list)  # by layer, in chunks
    free: defaultdict[int, float] = defaultdict(lambda: 1.0)  # part of M_peak beside weights that must be in use
    resident: _Terms = []  # bytes of W
    objective = solver.Objective()
    everything = max(1, sum(paper.chunks.values())) * max(1, paper.preload_cost)
    copies = 2 if instance.mode == "interleave" else 1

    def row(least: float, most: float, *terms: tuple[Any, float]) -> None:
        made = solver.Constraint(least, most)
        factors: defaultdict[Any, float] = defaultdict(float)
        for variable, factor in terms:
            factors[variable] += factor
        for variable, factor in factors.items():
            made.SetCoefficient(variable, factor)

    preload = {}
    for w in instance.weights:
        if w.name not in alone:
            continue
        chunks, share = paper.chunks[w.name], w.nbytes / instance.m_peak
        p = preload[w.name] = solver.NumVar(0.0, 1.0, "")
        objective.SetCoefficient(p, paper.preload_cost * chunks / everything)
        resident.append((p, w.nbytes))
        begun: _Terms = []
        before: tuple[Any, Any] | None = None
        for layer in range(first[w.name], w.first_use):
            y, f = solver.NumVar(0.0, 1.0, ""), solver.NumVar(0.0, 1.0, "")
            objective.SetCoefficient(y, paper.distance_cost / everything)
            begun.append((y, 1.0))
            held[layer].append((y, copies * share))
            row(0.0, infinity, (y, 1.0), (f, -1.0))
            capacity = min(chunks, instance.layers[layer - 1].capacity)
            gained = [(f, float(chunks))]
            if before is not None:
                gained.append((before[1], -float(chunks)))
                row(0.0, infinity, (y, 1.0), (before[0], -1.0))
                row(0.0, infinity, (f, 1.0), (before[1], -1.0))
                if copies == 2:
                    held[layer].append((before[1], -share))
            row(-infinity, 0.0, *gained, (y, -float(capacity)))
            served[layer] += gained
            before = y, f
        row(float(alone[w.name]), infinity, (p, float(alone[w.name])), *begun)  # it waits no less than it would alone
        row(1.0, 1.0, (p, 1.0), *([(before[1], 1.0)] if before else []))
        for layer in range(w.first_use, w.last_use + 1):
            held[layer].append((p, -share))
            free[layer] -= share
    for layer, terms in held.items():
        row(-infinity, free[layer], *terms)
    for layer, terms in served.items():
        row(-infinity, instance.layers[layer - 1].capacity, *terms)
    if paper.limit is not None:
        row(-infinity, paper.limit - sum(n for name, n in paper.sizes.items() if name not in alone), *resident)
    objective.SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    fixed = paper.preload_cost * sum(chunks for name, chunks in paper.chunks.items() if name not in alone)
    bound = math.ceil(fixed + everything * (objective.Value() - _SLACK))
    return Relaxed(max(0, bound), {name: p.solution_value() for name, p in preload.items()})


def _first(paper: PaperInstance, w: WeightSpec, alone: int) -> int:
    """The first layer at which a best plan may begin to move `w`."""
    longest = w.first_use
    if paper.distance_cost and paper.limit is None:  # with a limit, a weight that does not fit W waits as long as it must
        longest = max(alone, paper.preload_cost * paper.chunks[w.name] // paper.distance_cost)
    return max(1, w.first_use - longest)
