"""From a program and the user's limits to a plan: which objective, which M_peak, and what a budget has to cover.

*Budget* is the most that flashmem holds at any moment on the device and in host staging: preloaded and in-flight weights with
their padding, staging, activations, constants, and arrays that outputs are copied to.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import UserError
from flashmem.planning.baselines import Baseline, fastest, fastest_within, operators_of
from flashmem.planning.budget import Measure
from flashmem.planning.latency import smallest_m_peak
from flashmem.planning.lc_opg import solve
from flashmem.planning.limits import Limits
from flashmem.planning.memory_layout import lay_out_pools
from flashmem.planning.plan import OverlapPlan
from flashmem.planning.problem import Problem, build_problem
from flashmem.program import Program, fixed_bytes


def planning_problem(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> Problem:
    """The problem that `make_plan` solves; without an M_peak, all weights may be in flight."""
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(total, 1)
    return build_problem(program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode)


def make_plan(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `program` within `limits`, for transfer `mode`, without its layouts.

    Raises:
        BudgetError: nothing fits; it names the smallest budget (or M_peak) that works, and what binds it.
        UserError: an unknown name to preload.
    """
    return plan_problem(planning_problem(program, descriptor, mode, limits), program, mode, limits)


def plan_problem(problem: Problem, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `problem`, which is `program`'s, as `make_plan` makes it. It has passed `OverlapPlan.check`."""
    plan = _plan(problem, program, mode, limits)
    plan.check(replace(problem, m_peak=plan.m_peak))
    return plan


def _plan(problem: Problem, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    preload = _slices_of(program, limits.preload)
    objective = limits.resolved_objective
    fixed = fixed_bytes(program)

    def measure(plan: OverlapPlan) -> int:
        return fixed + lay_out_pools(program.slices, plan, [mode])[mode].total_bytes

    if limits.strategy != "stream":
        return _baseline(problem, program, limits, preload, measure)
    if objective == "latency" and limits.budget is None:
        return fastest(problem, operators_of(program), preload, limits.lambda_)
    if limits.budget is None:
        return solve(problem, objective=objective, lambda_=limits.lambda_, preload=preload)
    if objective == "latency":
        return fastest_within(problem, operators_of(program), limits.budget, measure, preload, limits.lambda_)
    return _paper_plan_within(problem, program, limits, preload, measure)


def _slices_of(program: Program, names: tuple[str, ...]) -> frozenset[str]:
    """Slices named by themselves or by their weight.

    Raises:
        UserError: a name that is neither's.
    """
    chosen: set[str] = set()
    for name in names:
        meant = {part.name for part in program.slices if name in (part.name, part.weight)}
        if not meant:
            raise UserError(f"weight {name!r} cannot be preloaded: the model has no weight of that name; correct the name")
        chosen |= meant
    return frozenset(chosen)


def _baseline(problem: Problem, program: Program, limits: Limits, preload: frozenset[str], measure: Measure) -> OverlapPlan:
    """The plan of a strategy that others use."""
    baseline = Baseline(limits.strategy, operators_of(program), preload, limits.lambda_)
    if limits.budget is not None:
        return baseline.within(problem, limits.budget, measure)
    if limits.strategy == "resident-first":
        raise UserError("strategy resident-first fills a budget; name one with --budget")
    return baseline.plan(problem)


def _paper_plan_within(
    program_problem: Problem, program: Program, limits: Limits, preload: frozenset[str], measure: Measure
) -> OverlapPlan:
    """The paper's objective under a budget: W and M_peak share it, the largest share for M_peak that works."""
    assert limits.budget is not None
    smallest, _ = smallest_m_peak(program_problem, preload)
    for share in _SHARES:
        m_peak = max(smallest, int(limits.budget * share))
        plan = solve(
            replace(program_problem, m_peak=m_peak),
            objective="paper",
            lambda_=limits.lambda_,
            preload=preload,
            time_limit=_SECONDS_EACH,
            preload_limit=max(0, limits.budget - m_peak),
        )
        if measure(plan) <= limits.budget:
            return plan
    # The latency planner knows the smallest budget, or finds the plan that the shares above stepped over.
    plan = fastest_within(program_problem, operators_of(program), limits.budget, measure, preload, limits.lambda_)
    return replace(plan, notes=(*plan.notes, "no plan of the paper's objective fits the budget; this one is for latency"))


_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
_SECONDS_EACH = 4.0
