"""The LC-OPG planner: `solve` makes the overlap plan (FlashMem, section 3).

For the paper's objective, W is the only choice: for a given W, SRPT (`planning.opg.srpt`) is the exact plan. The tiers:

- dynamic program: the walk over the layers from the last to the first, with a bound (`planning.opg.preload_dp`). It solves most
  problems, up to 10^5 slices, within seconds.
- CP-SAT, if the walk leaves a gap (`planning.opg.cp_sat`).
- If no plan keeps every C_l, the heuristic tiers of C4 follow (`planning.opg.objective`).

This is the paper's hybrid execution: if a tier is infeasible, or unproven at the end of its time, the next tier continues.
Only `planning.opg.cp_sat` and `planning.opg.cp_models`
use OR-tools. They are imported if the dynamic program leaves a gap: most plans need neither.
"""

from __future__ import annotations

import time
from dataclasses import replace

from flashmem.base.errors import UserError
from flashmem.planning.arithmetic.assemble import assemble, slowdown
from flashmem.planning.arithmetic.clock import TimingModel, unlimited_seconds
from flashmem.planning.arithmetic.release_times import final_releases, releases_ahead
from flashmem.planning.latency.first_answer import forced_preload
from flashmem.planning.opg.objective import Decision, PaperInstance
from flashmem.planning.opg.preload_dp import choose_preload
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance
from flashmem.schedule.objectives import PAPER
from flashmem.schedule.plan import OverlapPlan, Solver, Tier, Units


def solve(
    instance: Instance,
    *,
    lambda_: float = 0.9,
    preload: frozenset[str] = frozenset(),
    time_limit: float = 10.0,
    workers: int = 2,
    preload_limit: int | None = None,
    units: Units = "printed",
    ahead: bool = True,
) -> OverlapPlan:
    """The overlap plan of `instance`; it has passed `schedule.check`.

    It minimises lambda * sum over W of T(w) + (1 - lambda) * sum of i_w - z_w over the streamed weights.

    Args:
        instance: the problem; the weights of layer 1 are preloaded in every plan.
        lambda_: from 0 to 1.
        preload: weights that must be in W.
        time_limit: seconds for the dynamic program and CP-SAT together; the heuristic tiers need additional time.
        workers: threads of CP-SAT; 0 disables it.
        preload_limit: the most bytes in W beyond the weights that must be in it; None for no limit.
        units: shares of all chunks and all layers, or chunks and layers as printed.
        ahead: whether reads start as early as M_peak permits. The objective does not require it. If not, each
            read begins with its first move, and `ReadAhead` can start it sooner.

    Raises:
        UserError: lambda is out of range, or `preload` names an unknown weight.
        BudgetError: no plan fits M_peak; the error names the smallest M_peak that works and the layer that requires it.
    """
    if not 0 <= lambda_ <= 1:
        raise UserError(f"lambda {lambda_} is not between 0 and 1; 0.9 favours memory, small values favour early loading")
    unknown = sorted(preload - {w.name for w in instance.weights})
    if unknown:
        raise UserError(f"weight {unknown[0]!r} cannot be preloaded: the model has no weight of that name; correct the name")
    forced = forced_preload(instance, preload)
    plan = _solve_paper(
        PaperInstance(instance, forced, lambda_, preload_limit, units), preload, lambda_, units, time_limit, workers
    )
    if ahead:
        plan = ReadAhead(instance, plan).within(instance.m_peak)
    check(plan, instance)
    return plan


def proven_bound(
    instance: Instance, preload: frozenset[str], lambda_: float, preload_limit: int, units: Units, seconds: float
) -> float:
    """A proven bound on the paper's objective of any plan of `instance`, found in `seconds` by the dynamic program."""
    paper = PaperInstance(instance, forced_preload(instance, preload), lambda_, preload_limit, units)
    return choose_preload(paper, time.monotonic() + seconds)[1] / paper.scale


def _solve_paper(
    paper: PaperInstance, asked: frozenset[str], lambda_: float, units: Units, time_limit: float, workers: int
) -> OverlapPlan:
    started = time.monotonic()
    solver: Solver = "none"
    decision: Decision | None = None
    tier: Tier | None = None
    bound = 0
    if time_limit > 0:
        decision, bound, tier, solver = _keeping_capacities(paper, started + time_limit, workers)
    if decision is None or tier is None:
        decision, tier, bound = paper.fallback()
    instance = paper.instance
    distance = sum(w.first_use - decision.moves[w.name][0][0] for w in instance.weights if w.name not in decision.preload)
    preloaded = sum(paper.chunks[name] for name in decision.preload)
    objective = lambda_ * preloaded + (1 - lambda_) * distance
    if units == "share":
        chunks = max(1, sum(paper.chunks.values()))
        distances = max(1, len(instance.layers) * len(instance.weights))
        objective = lambda_ * preloaded / chunks + (1 - lambda_) * distance / distances
    missing = solver == "dynamic-program" and workers and decision.cost > bound
    notes = ("OR-tools is not installed: CP-SAT did not search the gap",) if missing else ()
    releases = {name: 0 if name in decision.preload else parts[0][0] for name, parts in decision.moves.items()}
    plan = assemble(
        instance, decision.preload, releases, decision.moves, kind=PAPER, lambda_=lambda_,
        objective=objective, bound=objective if bound >= decision.cost else min(objective, bound / paper.scale),
        bound_scope="problem", tier=tier, started=started, notes=notes, base=paper.forced, asked=asked,
    )  # fmt: skip
    return replace(plan, units=units, solver=solver)


class ReadAhead:
    """Early reads for a plan in which every read begins with its first move."""

    def __init__(self, instance: Instance, plan: OverlapPlan) -> None:
        self._instance = instance
        self._plan = plan
        self._preload = frozenset(w.name for w in plan.weights if w.preload)
        self._timing = TimingModel(instance, {w.name: w.moves for w in plan.weights if not w.preload})
        self._fastest = unlimited_seconds(instance, forced_preload(instance, plan.asked))

    def within(self, limit: int, *, staging: bool = False) -> OverlapPlan:
        """The plan with reads as early as `limit` bytes (in flight, or in staging) permit, then as late as costs no latency."""
        ahead = releases_ahead(self._instance, self._preload, self._timing.moves, limit, staging=staging)
        releases, clock = final_releases(self._timing, self._preload, ahead)
        weights = tuple(replace(w, read_layer=releases[w.name]) for w in self._plan.weights)
        return replace(self._plan, weights=weights, expected_slowdown=slowdown(clock.seconds, self._fastest))


def _keeping_capacities(
    paper: PaperInstance, deadline: float, workers: int
) -> tuple[Decision | None, int, Tier | None, Solver]:
    """The best plan of the tiers that keep every C_l, a proven bound on its cost, its tier, and the last solver."""
    # If the walk cannot finish, CP-SAT gets half of the time.
    best, bound = choose_preload(paper, 0.5 * (time.monotonic() + deadline))
    if (best is not None and best.cost <= bound) or not workers:
        return best, bound, "dynamic-program", "dynamic-program"
    try:
        from flashmem.planning.opg.cp_sat import CpSat
    except ModuleNotFoundError as error:
        if best is not None:
            return best, bound, "dynamic-program", "dynamic-program"
        raise UserError(f"this plan needs {error.name}; install flashmem with its `compile` or `desktop` extra") from error
    improved, bound = CpSat(paper, deadline, workers).improve(best, bound)
    return improved, bound, "dynamic-program" if improved is best else "cp-sat", "cp-sat"
