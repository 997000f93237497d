"""CP-SAT for `steady`: which weights later runs keep, with release times and moves as they are.

A later run reads what is not kept, one weight after the other in the order of need, each once its release time permits. There
are two such runs, with the file in the page cache and on the disk. Their latencies count by their ratios to those of the known
plan, whose product decides (`by_cache_and_disk`). A plan is accepted only when the clock confirms it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ortools.sat.python import cp_model

from flashmem.planning.arithmetic.clock import needed_at
from flashmem.planning.latency.bounds import hull_lines
from flashmem.planning.latency.later_runs import by_cache_and_disk, keep_weights, later_run, later_seconds
from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import ENOUGH, Effort
from flashmem.planning.search.later_bound import least_later_seconds
from flashmem.planning.search.moves import HULL, MOST_LAYERS, MovesModel
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan, PlannedWeight

_TICKS = 200_000
"""The number of time steps (ticks) into which the latency of a later run is divided."""

_FINE = 64
"""Parts of a tick in which prices are stated."""

_MOST = 3000
"""The most layers and weights of one model."""

_TRIES = 3
"""How often a set is sought again in less memory, because its layout did not fit."""

_FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


def search_kept(problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
    """`plan`, or one that keeps other weights within the same limit and whose later runs are faster; with the better bound."""
    instance = problem.instance
    limit = problem.limit
    if limit is None or len(instance.layers) + len(plan.weights) > _MOST:
        return plan
    best = plan = _with_moves(problem, plan, effort)
    budget = problem.limits.budget
    if best.gap > ENOUGH and budget is not None:
        bound = least_later_seconds(instance, budget - problem.fixed, effort.left)
        if bound > best.bound:
            best = plan = replace(plan, bound=min(bound, plan.objective), bound_scope="problem")
    effort.report(best)
    bare = replace(plan, weights=tuple(replace(w, keep=False) for w in plan.weights))
    room = limit - problem.measure(bare)
    for _ in range(_TRIES if instance.own is None else 0):
        if best.gap <= ENOUGH or not effort.left:
            break
        chosen = _LaterRuns(instance, plan, room).choose(effort.solver(_SHARE))
        if chosen is None:
            break
        tried = keep_weights(bare, chosen)
        lack = problem.measure(tried) - limit
        if lack > 0:
            room -= lack
            continue
        if by_cache_and_disk(instance, tried) < by_cache_and_disk(instance, best):
            best = replace(tried, objective=later_seconds(instance, tried))
        break
    best = _with_moves(problem, best, effort)
    return best


_SHARE = 0.25
"""The share of the work of each part of the search."""


def _with_moves(problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
    """`plan`, or the same with moves during other layers, whose later runs are faster."""
    instance = problem.instance
    streamed = {w.name: w for w in plan.weights if not (w.preload or w.keep)}
    if not streamed or plan.gap <= ENOUGH or not effort.left or len(instance.layers) > MOST_LAYERS:
        return plan
    run = later_run(instance, plan)
    releases = {name: w.read_layer for name, w in streamed.items()}
    moves = {name: w.moves for name, w in streamed.items()}
    found = MovesModel(run, releases, moves, plan.objective, plan.bound, HULL).solve(effort.solver(_SHARE / 2))
    if found is None:
        return plan
    tried = replace(plan, weights=tuple(replace(w, moves=found.get(w.name, w.moves)) for w in plan.weights))
    tried = replace(tried, objective=later_seconds(instance, tried))
    return tried if by_cache_and_disk(instance, tried) < by_cache_and_disk(instance, plan) else plan


class _LaterRuns:
    """The model of the weights to keep in `room` bytes beside W and the bytes in flight of `plan`."""

    def __init__(self, instance: Instance, plan: OverlapPlan, room: int) -> None:
        self._instance = instance
        self._model = cp_model.CpModel()
        streamed = [w for w in plan.weights if not w.preload]
        self._kept = {w.name: self._model.new_bool_var(f"keep {w.name}") for w in streamed}
        for w in streamed:
            self._model.add_hint(self._kept[w.name], w.keep)
        unit = math.gcd(*(w.nbytes for w in streamed))
        self._model.add(_weighted(self._kept, {w.name: w.nbytes // unit for w in streamed}) <= room // unit)
        rates = [instance.host_bandwidth] if instance.host_bandwidth < math.inf else []
        costs = []
        for rate in (*rates, min(instance.load_bandwidth, instance.host_bandwidth)):
            known = later_seconds(instance, plan, cached=rate == instance.host_bandwidth)
            costs.append(self._run(streamed, rate, known / _TICKS))
        self._model.minimize(sum(costs))

    def _run(self, streamed: Sequence[PlannedWeight], rate: float, tick: float) -> cp_model.IntVar:
        """Add a later run that reads at `rate` bytes per second. Returns its end."""
        instance = self._instance
        model = self._model
        moves = {w.name: w.moves for w in streamed}
        needs = needed_at(instance, moves)
        ends = [model.new_int_var(0, 0, "begin")]
        starts = list(ends)
        movers: defaultdict[int, list[tuple[PlannedWeight, int]]] = defaultdict(list)
        for w in streamed:
            for layer, chunks in w.moves:
                movers[layer].append((w, chunks))
        for layer, spec in enumerate(instance.layers, start=1):
            start = model.new_int_var(0, _HORIZON, f"start {layer}")
            end = model.new_int_var(0, _HORIZON, f"end {layer}")
            model.add(start >= ends[-1])
            model.add(end >= start + round(spec.seconds / tick))
            of = {w.name: chunks for w, chunks in movers[layer]}
            moved = sum(of.values()) - _weighted(self._kept, of)
            for fixed, each in hull_lines(spec, instance.chunk_bytes, _FINE / tick) if movers[layer] else ():
                model.add(_FINE * end >= _FINE * start + round(fixed) + round(each) * moved)
            starts.append(start)
            ends.append(end)
        read = ends[0]
        for w in sorted(streamed, key=lambda w: (w.read_layer, needs[w.name], w.first_use)):
            streams = 1 - self._kept[w.name]
            done = model.new_int_var(0, _HORIZON, f"read {w.name}")
            model.add(done >= read + round(w.nbytes / rate / tick) * streams)
            if w.read_layer > 1:
                model.add(done >= ends[w.read_layer - 1] + round(w.nbytes / rate / tick)).only_enforce_if(
                    self._kept[w.name].negated()
                )
            piece = round(min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth / tick)
            model.add(starts[needs[w.name]] >= done + piece).only_enforce_if(self._kept[w.name].negated())
            read = done
        return ends[-1]

    def choose(self, cp: cp_model.CpSolver) -> set[str] | None:
        """The weights to keep; None if no set was found."""
        if cp.solve(self._model) not in _FOUND:
            return None
        return {name for name, kept in self._kept.items() if cp.boolean_value(kept)}


_HORIZON = 8 * _TICKS


def _weighted(stays: Mapping[str, cp_model.IntVar], sizes: Mapping[str, int]) -> cp_model.LinearExpr:
    return cp_model.LinearExpr.weighted_sum([stays[name] for name in sizes], list(sizes.values()))
