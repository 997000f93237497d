"""The LC-OPG planner: `solve` makes the overlap plan (FlashMem section 3; DESIGN section 4).

For the paper's objective only W is to be chosen: given W, SRPT (`planning.srpt`) is the exact plan. The tiers:

- dynamic program: the walk over the layers from the last to the first, with a bound (`planning.preload_dp`). It solves most
  problems, up to 10^5 slices, within seconds.
- CP-SAT, where the walk leaves a gap: M_peak binds among partly filled chunks, a weight is used twice, or W is limited. Small
  problems are solved by the full model over x, z and W. A limit on W needs the choice model, one boolean a weight and three
  integers a layer, of which CP-SAT sees a long model in rolling windows.
- Without a plan that keeps every C_l, the heuristic tiers of C4 follow (`planning.paper`).

This is the paper's hybrid execution: whatever a tier leaves infeasible, or unproven when its time is up, the next one takes.
The latency objective needs no solver (`planning.latency`). OR-tools is known here and in `planning.cp_models` only.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator

from ortools.sat.python import cp_model

from flashmem.errors import UserError
from flashmem.planning.assemble import assemble
from flashmem.planning.cp_models import FullModel, Unit, Window, cp_solver
from flashmem.planning.latency import forced_preload, latency_plan
from flashmem.planning.paper import Decision, PaperProblem
from flashmem.planning.plan import Objective, OverlapPlan, Tier
from flashmem.planning.preload_dp import choose_preload
from flashmem.planning.problem import Problem

_WINDOW = 1000
"""Layers that one window decides."""

_LOOKAHEAD = 250
"""Layers that a window sees beyond those it decides."""

_FULL_MODEL_MOVES = 4000
"""The full model is built for at most that many variables x_{w,l}."""

_POLISHED_WEIGHTS = 2000
"""Plans of more weights are not polished: one exchange takes a walk over all of them."""

_FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


def solve(
    problem: Problem,
    *,
    objective: Objective = "paper",
    lambda_: float = 0.9,
    preload: frozenset[str] = frozenset(),
    time_limit: float = 10.0,
    workers: int = 2,
    preload_limit: int | None = None,
) -> OverlapPlan:
    """The overlap plan of `problem`; it has passed `OverlapPlan.check`.

    "paper" minimises lambda * sum over W of T(w) + (1 - lambda) * sum of i_w - z_w over the streamed weights. "latency"
    minimises the predicted integrated latency in seconds, with W no larger than it must be.

    Args:
        problem: what to plan; the weights of layer 1 are preloaded in every plan.
        objective: which of the two.
        lambda_: from 0 to 1.
        preload: weights that must be in W.
        time_limit: seconds for the dynamic program and CP-SAT together ("paper"); the fallback tiers take theirs in addition.
        workers: threads of CP-SAT.
        preload_limit: most bytes W may take beyond those that must be in it ("paper"); None for no limit.

    Raises:
        UserError: lambda out of range, or `preload` names a weight that is not there.
        BudgetError: nothing fits M_peak; it names the smallest that works and the layer that binds.
    """
    if not 0 <= lambda_ <= 1:
        raise UserError(f"lambda {lambda_} is not between 0 and 1; 0.9 favours memory, small values favour early loading")
    unknown = sorted(preload - {w.name for w in problem.weights})
    if unknown:
        raise UserError(f"weight {unknown[0]!r} cannot be preloaded: the model has no weight of that name; correct the name")
    if objective == "latency":
        plan = latency_plan(problem, preload, lambda_=lambda_)
    else:
        forced = forced_preload(problem, preload)
        plan = _solve_paper(PaperProblem(problem, forced, lambda_, preload_limit), preload, lambda_, time_limit, workers)
    plan.check(problem)
    return plan


def _solve_paper(paper: PaperProblem, asked: frozenset[str], lambda_: float, time_limit: float, workers: int) -> OverlapPlan:
    started = time.monotonic()
    decision, bound, tier = _keeping_capacities(paper, started + time_limit, workers) if time_limit > 0 else (None, 0, None)
    if decision is None or tier is None:
        decision, tier, bound = paper.fallback()
    distance = sum(w.first_use - decision.load_layers[w.name] for w in paper.problem.weights if w.name not in decision.preload)
    objective = lambda_ * sum(paper.chunks[name] for name in decision.preload) + (1 - lambda_) * distance
    return assemble(
        paper.problem, decision.preload, decision.load_layers, decision.moves, kind="paper", lambda_=lambda_,
        objective=objective, bound=objective if bound >= decision.cost else min(objective, bound / paper.scale), tier=tier,
        started=started, notes=(), base=paper.forced, asked=asked,
    )  # fmt: skip


def _keeping_capacities(paper: PaperProblem, deadline: float, workers: int) -> tuple[Decision | None, int, Tier | None]:
    """The tiers that keep every C_l: the best plan, a proven bound on its cost, and the tier that found it."""
    # Where the walk cannot finish, CP-SAT gets half of the time.
    best, bound = choose_preload(paper, 0.5 * (time.monotonic() + deadline))
    if best is not None and best.cost <= bound:
        return best, bound, "dynamic-program"
    improved, bound = _CpSat(paper, deadline, workers).improve(best, bound)
    return improved, bound, "dynamic-program" if improved is best else "cp-sat"


class _CpSat:
    """What the dynamic program leaves to do."""

    def __init__(self, paper: PaperProblem, deadline: float, workers: int) -> None:
        self.paper = paper
        self.deadline = deadline
        self.workers = workers
        self.alone = paper.distances_alone()
        self.fixed = frozenset(paper.sizes.keys() - self.alone.keys())  # in W whatever is chosen

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def improve(self, best: Decision | None, bound: int) -> tuple[Decision | None, int]:
        """A plan no worse than `best`, the same object if no better was found, and a bound no worse than `bound`."""
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
            best = paper.polished(best, self.deadline - (0.8 * self._remaining() if solvable else 0))
        if solvable and self._remaining() > 0 and (best is None or best.cost > bound):
            found, proven = full.solve(best, cp_solver(self.workers, self._remaining()))
            bound = max(bound, proven)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        return best, bound

    def _windows(self) -> Iterator[tuple[int, int]]:
        """(first, last) layer each window decides, from the last layer backwards."""
        last = len(self.paper.problem.layers)
        while last > 0:
            first = max(1, last - _WINDOW + 1)
            first = 1 if first <= _LOOKAHEAD else first
            yield first, last
            last = first - 1

    def _choose(self, hint: frozenset[str]) -> tuple[frozenset[str] | None, int]:
        """W by CP-SAT, and its bound where one window saw it all; None if no window had a solution in time.

        A window that had none takes what `hint` says.
        """
        paper = self.paper
        windows = list(self._windows())
        preload, bound, found = self.fixed, 0, False
        for number, (first, last) in enumerate(windows):
            room = None if paper.limit is None else paper.limit - paper.bytes_of(preload)
            window = Window(paper, self.alone, max(1, first - _LOOKAHEAD), last, self._pending(preload, last + 1), room)
            window.hint(hint)
            cp = cp_solver(self.workers, 0.5 * self._remaining() / (len(windows) - number))
            solved = cp.solve(window.model) in _FOUND
            found |= solved
            preload |= {
                w.name for w in paper.problem.weights
                if w.name in window.chosen and w.first_use > first
                and (cp.boolean_value(window.chosen[w.name]) if solved else w.name in hint)
            }  # fmt: skip
            if solved and len(windows) == 1:
                fixed_cost = paper.preload_cost * sum(paper.chunks[name] for name in self.fixed)
                bound = fixed_cost + math.ceil(cp.best_objective_bound - 1e-6)
        return (preload if found else None), bound

    def _pending(self, preload: frozenset[str], layer: int) -> tuple[int, int]:
        """B and R of the choice model at `layer`, from the weights used after it; nothing is pending after the last layer."""
        problem = self.paper.problem
        unit = Unit.of(problem, [w for w in problem.weights if w.name in self.alone])
        arrivals: defaultdict[int, list[str]] = defaultdict(list)
        for w in problem.weights:
            if w.first_use > layer and w.name not in preload:
                arrivals[w.first_use - 1].append(w.name)
        chunks = nbytes = 0
        for at in range(len(problem.layers), layer - 1, -1):
            served = problem.layers[at].capacity if at < len(problem.layers) else 0
            chunks = max(0, chunks - served) + sum(self.paper.chunks[name] for name in arrivals[at])
            nbytes = max(0, nbytes - served * unit.chunk) + sum(unit.size[name] for name in arrivals[at])
        return chunks, nbytes
