"""The LC-OPG planner: `solve` makes the overlap plan (FlashMem section 3; DESIGN section 4).

For the paper's objective CP-SAT has only W to choose: given W, what is pending at each layer follows a recurrence, and SRPT
(`planning.srpt`) is the exact plan. So the choice model has one boolean a weight and three integers a layer, and is a
relaxation: its bound holds for the true objective. Small problems are then settled by the full model over x, z and W. When
CP-SAT has no plan, the tiers of C4 follow (`planning.greedy`). The latency objective needs no solver (`planning.latency`).

This is the only module that knows OR-tools.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from ortools.sat.python import cp_model

from flashmem.errors import UserError
from flashmem.planning.assemble import Moves, assemble
from flashmem.planning.greedy import greedy, incremental_preload, soft_ceiling
from flashmem.planning.latency import forced_preload, latency_plan
from flashmem.planning.plan import Objective, OverlapPlan, Tier
from flashmem.planning.problem import Problem
from flashmem.planning.srpt import SrptPlan, srpt

_FULL_MODEL_MOVES = 4000
"""The full model is built for at most that many variables x_{w,l}."""


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
        time_limit: seconds for CP-SAT and what improves on it; the fallback tiers take theirs in addition.
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
    started = time.monotonic()
    forced = forced_preload(problem, preload)
    if objective == "latency":
        plan = latency_plan(problem, preload, lambda_=lambda_)
    else:
        plan = _PaperSolver(problem, forced, lambda_, started + time_limit, workers, preload_limit).solve(started)
    plan.check(problem)
    return plan


@dataclass(frozen=True)
class _Decision:
    """W, z and x; `cost` is the objective times the denominator of lambda."""

    preload: frozenset[str]
    load_layers: Mapping[str, int]
    moves: Moves
    cost: int


class _PaperSolver:
    """One solve for the paper's objective. Costs are integers: the objective times the denominator of lambda."""

    def __init__(
        self, problem: Problem, forced: frozenset[str], lambda_: float, deadline: float, workers: int, preload_limit: int | None
    ) -> None:
        self.problem = problem
        self.forced = forced
        self.lambda_ = lambda_
        self.deadline = deadline
        self.workers = workers
        self.sizes = {w.name: w.nbytes for w in problem.weights}
        self.chunks = {w.name: problem.chunks(w) for w in problem.weights}
        self.limit = None if preload_limit is None else preload_limit + sum(self.sizes[name] for name in forced)
        share = Fraction(lambda_).limit_denominator(10**6)
        self.preload_cost, self.distance_cost, self.scale = (
            share.numerator,
            share.denominator - share.numerator,
            share.denominator,
        )

    def solve(self, started: float) -> OverlapPlan:
        """The best plan of the first tier that has one."""
        decision, tier, bound = self._first_tier()
        objective = self.lambda_ * sum(self.chunks[name] for name in decision.preload) + (1 - self.lambda_) * sum(
            w.first_use - decision.load_layers[w.name] for w in self.problem.weights if w.name not in decision.preload
        )
        return assemble(
            self.problem, decision.preload, decision.load_layers, decision.moves, kind="paper", lambda_=self.lambda_,
            objective=objective, bound=objective if bound >= decision.cost else min(objective, bound / self.scale), tier=tier,
            started=started, notes=(), base=self.forced,
        )  # fmt: skip

    def _first_tier(self) -> tuple[_Decision, Tier, int]:
        """The tiers of C4 in order; a bound for a tier that relaxes C_l supposes C_l without limit."""
        if self.deadline > time.monotonic():
            decision, bound = self._cp_sat()
            if decision is not None:
                return decision, "cp-sat", bound
        loose = sum(
            self.preload_cost * self.chunks[w.name]
            if w.name in self.forced
            else min(self.preload_cost * self.chunks[w.name], self.distance_cost)
            for w in self.problem.weights
        )
        ceiling = soft_ceiling(self.problem)
        soft = srpt(self.problem, self.forced, ceiling)
        if soft.feasible:
            return self._decision(self.forced, soft), "soft-threshold", loose
        grown = incremental_preload(self.problem, self.forced, ceiling, self.limit)
        if grown is not None:
            return self._decision(*grown), "incremental-preload", loose
        return self._decision(self.forced, greedy(self.problem, self.forced)), "greedy", loose

    def _decision(self, preload: frozenset[str], plan: SrptPlan) -> _Decision:
        cost = self.preload_cost * sum(self.chunks[name] for name in preload) + self.distance_cost * plan.distance(self.problem)
        return _Decision(preload, plan.load_layers, plan.moves, cost)

    def _repaired(self, preload: frozenset[str]) -> _Decision | None:
        """SRPT for W; W grows where only the last, partly filled chunks break M_peak."""
        grown = incremental_preload(self.problem, preload, None, self.limit)
        return None if grown is None else self._decision(*grown)

    def _remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def _cp_sat(self) -> tuple[_Decision | None, int]:
        """The best plan with every C_l kept, and a proven bound on its cost; no plan if there is none or time ran out."""
        choice = _ChoiceModel(self)
        best = self._repaired(choice.forced)
        preloads, bound = choice.solve(best.preload if best else None, 0.6 * self._remaining())
        if bound is None:
            return None, 0
        for candidate in filter(None, map(self._repaired, preloads)):
            if best is None or candidate.cost < best.cost:
                best = candidate
        if best is not None and best.cost > bound:
            best = self._polished(best, self.deadline - 0.5 * self._remaining(), choice.forced)
        if best is None or best.cost > bound:
            full = _FullModel(self, choice.forced)
            if full.size <= _FULL_MODEL_MOVES and self._remaining() > 0:
                found, proven = full.solve(best, self._remaining())
                bound = max(bound, proven)
                if found is not None and (best is None or found.cost < best.cost):
                    best = found
        return best, bound

    def _polished(self, best: _Decision, until: float, fixed: frozenset[str]) -> _Decision:
        """Weights moved in and out of W one at a time while that lowers the cost."""
        improved = True
        while improved:
            improved = False
            for w in self._exchange_order(best, fixed):
                if time.monotonic() > until:
                    return best
                preload = best.preload ^ {w}
                if self.limit is not None and sum(self.sizes[name] for name in preload) > self.limit:
                    continue
                plan = srpt(self.problem, preload)
                if plan.feasible and (candidate := self._decision(preload, plan)).cost < best.cost:
                    best, improved = candidate, True
        return best

    def _exchange_order(self, best: _Decision, fixed: frozenset[str]) -> list[str]:
        """Weights whose change of side promises most, by what each costs now and would cost if it stood alone."""
        promise: dict[str, int] = {}
        for w in self.problem.weights:
            if w.name in fixed:
                continue
            inside = self.preload_cost * self.chunks[w.name]
            distance = 1 if w.name in best.preload else w.first_use - best.load_layers[w.name]
            outside = self.distance_cost * distance
            promise[w.name] = inside - outside if w.name in best.preload else outside - inside
        return sorted(promise, key=lambda name: -promise[name])


class _ChoiceModel:
    """Which weights to preload: p_w, and by layer the chunks B_l, bytes R_l and weights n_l that must still be pending.

    B_l and R_l follow the recurrence of the backward walk, in whole chunks and in true bytes; both are lower bounds of what any
    plan holds. n_l, whose sum is the sum of loading distances, is at least B_l over the largest weight, and counts w for the
    distance it would need if it were alone.
    """

    def __init__(self, solver: _PaperSolver) -> None:
        self.solver = solver
        problem = solver.problem
        capacity = [0, *accumulate(spec.capacity for spec in problem.layers)]
        self.alone: dict[str, int] = {}
        forced = set(solver.forced)
        for w in problem.weights:
            spare = capacity[w.first_use - 1] - solver.chunks[w.name]
            if w.name in forced or spare < 0 or w.nbytes > problem.m_peak:
                forced.add(w.name)
            else:
                self.alone[w.name] = w.first_use - bisect_right(capacity, spare, 0, w.first_use)
        self.forced = frozenset(forced)

    def solve(self, hint: frozenset[str] | None, seconds: float) -> tuple[list[frozenset[str]], int | None]:
        """Preload sets found, best last, and a proven bound on the cost; no bound if nothing was found in time."""
        solver = self.solver
        if solver.limit is not None and sum(solver.sizes[name] for name in self.forced) > solver.limit:
            return [], None
        model = cp_model.CpModel()
        chosen = {name: model.new_bool_var(f"p {name}") for name in self.alone}
        cost = self._constrain(model, chosen)
        for name, var in chosen.items():
            if hint is not None:
                model.add_hint(var, name in hint)
        model.minimize(cost)
        cp = _cp_solver(solver.workers, seconds)
        sets = _PreloadSets(chosen, self.forced)
        if cp.solve(model, sets) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return [], None
        return sets.found, math.ceil(cp.best_objective_bound - 1e-6)

    def _constrain(self, model: cp_model.CpModel, chosen: dict[str, cp_model.IntVar]) -> cp_model.LinearExpr:
        solver, problem = self.solver, self.solver.problem
        unit = math.gcd(problem.chunk_bytes, *(solver.sizes[name] for name in chosen)) if chosen else 1
        unit = max(unit, problem.chunk_bytes // 64, 1)  # rounding sizes down and M_peak up keeps this a relaxation
        size = {name: solver.sizes[name] // unit for name in chosen}
        whole_chunks = all(solver.sizes[name] % problem.chunk_bytes == 0 for name in chosen)
        m_peak = -(-problem.m_peak // unit) if any(solver.sizes[name] % unit for name in chosen) else problem.m_peak // unit
        arrivals: defaultdict[int, list[str]] = defaultdict(list)
        held: defaultdict[int, list[str]] = defaultdict(list)
        alone: defaultdict[int, list[str]] = defaultdict(list)
        for w in problem.weights:
            if w.name in chosen:
                arrivals[w.first_use - 1].append(w.name)
                for layer in range(w.first_use, w.last_use + 1):
                    held[layer].append(w.name)
                for layer in range(w.first_use - self.alone[w.name], w.first_use):
                    alone[layer].append(w.name)

        def streamed(names: list[str], value: Mapping[str, int]) -> cp_model.LinearExpr:
            values = [value[name] for name in names]
            return cp_model.LinearExpr.weighted_sum([chosen[name] for name in names], [-v for v in values]) + sum(values)

        most_chunks = sum(solver.chunks[name] for name in chosen)
        chunks_above = cp_model.LinearExpr.constant(0)
        bytes_above = cp_model.LinearExpr.constant(0)
        one = dict.fromkeys(chosen, 1)
        largest, distance = 1, []
        for layer in range(len(problem.layers), 0, -1):
            new = arrivals[layer]
            largest = max([largest, *(solver.chunks[name] for name in new)])
            served = problem.layers[layer].capacity if layer < len(problem.layers) else 0
            chunks = model.new_int_var(0, most_chunks, f"B {layer}")
            model.add(chunks >= streamed(new, solver.chunks))
            model.add(chunks >= streamed(new, solver.chunks) + chunks_above - served)
            if whole_chunks:
                pending: cp_model.LinearExpr = chunks * (problem.chunk_bytes // unit)
            else:
                pending = model.new_int_var(0, max(0, m_peak), f"R {layer}")
                model.add(pending >= streamed(new, size))
                # a chunk moved frees at most S bytes, S // unit + 1 after rounding
                model.add(pending >= streamed(new, size) + bytes_above - served * -(-problem.chunk_bytes // unit))
            model.add(pending + streamed(held[layer], size) <= m_peak)
            count = model.new_int_var(0, len(chosen), f"n {layer}")
            model.add(count * largest >= chunks)
            if alone[layer]:
                model.add(count >= streamed(alone[layer], one))
            distance.append(count)
            chunks_above, bytes_above = chunks, pending
        if problem.layers:
            model.add(chunks_above <= problem.layers[0].capacity)
        if solver.limit is not None:
            names = list(chosen)
            fixed = sum(solver.sizes[name] for name in self.forced)
            bytes_chosen = cp_model.LinearExpr.weighted_sum([chosen[n] for n in names], [solver.sizes[n] for n in names])
            model.add(bytes_chosen <= solver.limit - fixed)
        fixed_cost = solver.preload_cost * sum(solver.chunks[name] for name in self.forced)
        names = list(chosen)
        preload_cost = cp_model.LinearExpr.weighted_sum(
            [chosen[n] for n in names], [solver.preload_cost * solver.chunks[n] for n in names]
        )
        return preload_cost + solver.distance_cost * cp_model.LinearExpr.sum(distance) + fixed_cost


class _PreloadSets(cp_model.CpSolverSolutionCallback):
    """Remembers the preload set of each solution."""

    def __init__(self, chosen: dict[str, cp_model.IntVar], forced: frozenset[str]) -> None:
        super().__init__()
        self.chosen = chosen
        self.forced = forced
        self.found: list[frozenset[str]] = []

    def on_solution_callback(self) -> None:
        """Called by CP-SAT with each better solution."""
        self.found = [*self.found[-7:], self.forced | {name for name, var in self.chosen.items() if self.boolean_value(var)}]


class _FullModel:
    """x_{w,l}, z_w and W at once, for problems small enough: what it proves, it proves of the true objective."""

    def __init__(self, solver: _PaperSolver, forced: frozenset[str]) -> None:
        self.solver = solver
        self.forced = forced
        self.weights = [w for w in solver.problem.weights if w.name not in forced]
        self.size = sum(w.first_use - 1 for w in self.weights)

    def solve(self, hint: _Decision | None, seconds: float) -> tuple[_Decision | None, int]:
        """The best plan found, if any, and a proven bound on the cost."""
        solver, problem = self.solver, self.solver.problem
        model = cp_model.CpModel()
        layers = range(1, len(problem.layers) + 1)
        moved_at: defaultdict[int, list[cp_model.IntVar]] = defaultdict(list)
        in_flight: defaultdict[int, list[cp_model.LinearExpr]] = defaultdict(list)
        fixed_cost = solver.preload_cost * sum(solver.chunks[name] for name in self.forced)
        cost = [cp_model.LinearExpr.constant(fixed_cost)]
        chosen: dict[str, cp_model.IntVar] = {}
        moves: dict[tuple[str, int], cp_model.IntVar] = {}
        preloaded: list[cp_model.LinearExpr] = []
        unit = math.gcd(problem.chunk_bytes, *(w.nbytes for w in self.weights))
        for w in self.weights:
            total, slack = solver.chunks[w.name], solver.chunks[w.name] * problem.chunk_bytes - w.nbytes
            p = chosen[w.name] = model.new_bool_var(f"p {w.name}")
            hinted = hint is not None and w.name in hint.preload
            if hint is not None:
                model.add_hint(p, hinted)
            planned = dict(hint.moves[w.name]) if hint is not None and not hinted else {}
            done = cp_model.LinearExpr.constant(0)
            earlier: cp_model.IntVar | None = None
            for layer in range(1, w.first_use):
                most = min(total, problem.layers[layer - 1].capacity)
                x = moves[w.name, layer] = model.new_int_var(0, most, f"x {w.name} {layer}")
                loading = model.new_bool_var(f"z {w.name} <= {layer}")
                model.add(x <= most * loading)
                if earlier is not None:
                    model.add_implication(earlier, loading)
                if hint is not None:
                    model.add_hint(x, planned.get(layer, 0))
                    model.add_hint(loading, not hinted and hint.load_layers[w.name] <= layer)
                done = done + x
                nbytes: cp_model.LinearExpr = done * (problem.chunk_bytes // unit)
                if slack:
                    complete = model.new_bool_var(f"all of {w.name} by {layer}")
                    model.add(done >= total * complete)
                    nbytes = nbytes - complete * (slack // unit)
                in_flight[layer].append(nbytes)
                moved_at[layer].append(x)
                cost.append(solver.distance_cost * loading)
                earlier = loading
            model.add(done + total * p == total)
            for layer in range(w.first_use, w.last_use + 1):
                in_flight[layer].append((1 - p) * (w.nbytes // unit))
            preloaded.append(p * w.nbytes)
            cost.append(solver.preload_cost * total * p)
        for layer in layers:
            if in_flight[layer]:
                model.add(cp_model.LinearExpr.sum(in_flight[layer]) <= problem.m_peak // unit)
            if moved_at[layer]:
                model.add(cp_model.LinearExpr.sum(moved_at[layer]) <= problem.layers[layer - 1].capacity)
        if solver.limit is not None and preloaded:
            fixed = sum(solver.sizes[name] for name in self.forced)
            model.add(cp_model.LinearExpr.sum(preloaded) <= solver.limit - fixed)
        model.minimize(cp_model.LinearExpr.sum(cost))
        cp = _cp_solver(solver.workers, seconds)
        if cp.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, 0
        preload = self.forced | {name for name, p in chosen.items() if cp.boolean_value(p)}
        found = {
            w.name: tuple((layer, n) for layer in range(1, w.first_use) if (n := cp.value(moves[w.name, layer])))
            for w in self.weights
            if w.name not in preload
        }
        decision = _Decision(preload, {name: parts[0][0] for name, parts in found.items()}, found, round(cp.objective_value))
        return decision, math.ceil(cp.best_objective_bound - 1e-6)


def _cp_solver(workers: int, seconds: float) -> cp_model.CpSolver:
    cp = cp_model.CpSolver()
    cp.parameters.max_time_in_seconds = max(seconds, 0.01)
    cp.parameters.num_workers = workers
    cp.parameters.random_seed = 1
    return cp
