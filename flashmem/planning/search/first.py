"""The search for an earlier first answer, or for a better bound on it: CP-SAT chooses when bytes are moved (`search.moves`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flashmem.planning.arithmetic.clock import Moves, TimingModel
from flashmem.planning.arithmetic.release_times import earliest_releases, final_releases, held_bytes
from flashmem.planning.latency.first_answer import least_in_use
from flashmem.planning.latency.front import average_of
from flashmem.planning.latency.later_runs import by_later_runs
from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import ENOUGH, Effort
from flashmem.planning.search.moves import EXACT, HULL, MOST_LAYERS, Curves, MovesModel
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan


def search_first(problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
    """`plan`, or one that answers sooner in no more memory; and the better of its bound and one by CP-SAT."""
    instance = problem.instance
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    if len(instance.layers) > MOST_LAYERS or not moves:
        return within_average(problem, plan, effort)
    best = within_average(problem, plan, effort)
    times = list(_releases(instance, plan))
    for releases, curves in [*((each, HULL) for each in times), *((each, EXACT) for each in times)]:
        if best.gap <= ENOUGH or not effort.left:
            break
        model = MovesModel(instance, releases, moves, best.objective, best.bound, curves)
        found = model.solve(effort.solver(_SHARE[curves]))
        if found is not None:
            before = best
            best = _better(problem, plan, best, _with_moves(instance, best, releases, found))
            if best is not before:
                effort.report(best)
    if best.gap > ENOUGH and effort.left:
        bound = MovesModel(instance, {}, moves, best.objective, best.bound, EXACT, exact=False).bound(
            effort.solver(_SHARE[EXACT])
        )
        if bound > best.bound:
            best = replace(best, bound=min(bound, best.objective), bound_scope="resident-set", bound_within=None)
    return best


def within_average(problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
    """`plan` with a bound for plans that keep the average memory that lambda permits (`latency.average_bound`)."""
    if plan.average_within is None:
        return plan
    from flashmem.planning.latency.average_bound import seconds_within_average

    preload = {w.name for w in plan.weights if w.preload}
    bound = seconds_within_average(problem.instance, preload, plan.average_within, plan.objective, effort.left)
    plan = replace(plan, solver="linear-program")
    return replace(plan, bound=bound, bound_scope="resident-set", bound_within=None) if bound > plan.bound else plan


_SHARE: Mapping[Curves, float] = {HULL: 0.1, EXACT: 0.25}
"""The share of the work of each of four searches for moves, and of that for a bound."""


def _releases(instance: Instance, plan: OverlapPlan) -> Iterator[Mapping[str, int]]:
    """Release times to search with: as early as the bytes in flight of `plan` permit, where reads may be early, and its own."""
    own = {w.name: w.read_layer for w in plan.weights}
    stays = {w.name for w in plan.weights if w.preload or w.keep}
    if not instance.transfer.by_kernels:
        moves = {w.name: w.moves for w in plan.weights if w.name not in stays}
        flight = max(least_in_use(instance, stays), int(held_bytes(instance, own, moves).max(initial=0)))
        early = earliest_releases(instance, stays, flight)
        yield {w.name: 0 if w.preload else 1 if w.keep else early[w.name] for w in plan.weights}
    yield own


def _with_moves(instance: Instance, plan: OverlapPlan, releases: Mapping[str, int], moves: Moves) -> OverlapPlan:
    """`plan` with these moves, and with release times as late as costs no time, from `releases` on."""
    preload = {w.name for w in plan.weights if w.preload}
    late, clock = final_releases(TimingModel(instance, moves), preload, releases)
    weights = tuple(
        replace(w, read_layer=late[w.name]) if w.preload else replace(w, read_layer=late[w.name], moves=moves[w.name])
        for w in plan.weights
    )
    slowdown = max(0.0, (1 + plan.expected_slowdown) * clock.seconds / plan.objective - 1)
    return replace(plan, weights=weights, objective=clock.seconds, expected_slowdown=slowdown)


def _better(problem: Problem, given: OverlapPlan, best: OverlapPlan, tried: OverlapPlan) -> OverlapPlan:
    """`tried` if it answers sooner than `best`, in no more memory than `given`, and later runs are no slower; else `best`."""
    instance = problem.instance
    if tried.objective >= best.objective * (1 - _TIE):
        return best
    if problem.limit is not None and _held(instance, tried) > _held(instance, given):
        return best
    if problem.limit is not None and problem.measure(tried) > problem.limit:
        return best
    if problem.limits.resolved_lambda and average_of(instance, tried) > average_of(instance, given):
        return best
    if by_later_runs(instance, tried) > by_later_runs(instance, given):
        return best
    return tried


_TIE = 1e-9


def _held(instance: Instance, plan: OverlapPlan) -> int:
    """The most bytes in flight of `plan`."""
    releases = {w.name: w.read_layer for w in plan.weights}
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    return int(held_bytes(instance, releases, moves, {w.name for w in plan.weights if w.keep}).max(initial=0))
