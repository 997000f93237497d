"""From a program and the user's limits to a plan: which objective, which M_peak, and what a budget has to cover.

*Budget* is the most that flashmem holds at any moment on the device and in host staging: preloaded and in-flight weights with
their padding, staging, activations, constants, and the arrays it hands back.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import BudgetError, UserError
from flashmem.planning.baselines import Baseline, fastest, fastest_within, operators_of
from flashmem.planning.budget import Measure
from flashmem.planning.latency import smallest_m_peak
from flashmem.planning.lc_opg import solve, with_room
from flashmem.planning.limits import Limits
from flashmem.planning.memory_layout import lay_out_pools
from flashmem.planning.plan import PASSING_BYTES, OverlapPlan, Units
from flashmem.planning.problem import Problem, build_problem
from flashmem.program import Program, fixed_bytes


def planning_problem(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> Problem:
    """The problem that `make_plan` solves; without an M_peak, all weights may be in flight."""
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(2 * total, 1)  # of which one mode holds every byte twice
    problem = build_problem(program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode)
    limit = limits.m_peak or limits.budget
    return problem if limit is None else replace(problem, piece_bytes=max(1, min(PASSING_BYTES, limit // _PIECES)))


_PIECES = 32
"""A piece that passes through staging is no more than this part of the limit: staging must not take the place of weights."""


def make_plan(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `program` within `limits`, for transfer `mode`, without its layouts.

    Raises:
        BudgetError: nothing fits; it names the smallest budget (or M_peak) that works, and what binds it.
        UserError: an unknown name to preload.
    """
    return plan_problem(planning_problem(program, descriptor, mode, limits), program, mode, limits)


def plan_problem(problem: Problem, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `problem`, which is `program`'s, as `make_plan` makes it. It has passed `OverlapPlan.check`."""
    try:
        plan = _plan(problem, program, mode, limits)
    except BudgetError:  # staging is given as little as it can do with
        plan = _plan(replace(problem, piece_bytes=1), program, mode, limits)
    in_flight = lay_out_pools(program.slices, plan, [mode])[mode].in_flight_bytes
    plan = replace(plan, m_peak=max(in_flight, limits.m_peak or plan.m_peak))
    plan.check(replace(problem, m_peak=plan.m_peak))
    return plan


def _plan(problem: Problem, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    preload = _slices_of(program, limits.preload)
    objective, lambda_ = limits.resolved_objective, limits.resolved_lambda
    fixed = fixed_bytes(program)

    def in_all(plan: OverlapPlan) -> int:
        return fixed + lay_out_pools(program.slices, plan, [mode])[mode].total_bytes

    def in_flight(plan: OverlapPlan) -> int:
        return lay_out_pools(program.slices, plan, [mode])[mode].in_flight_bytes

    if limits.strategy != "stream":
        return _baseline(problem, program, limits, preload, in_all)
    if objective == "first" and limits.budget is not None:
        return fastest_within(problem, operators_of(program), limits.budget, in_all, preload, lambda_)
    if objective == "first" and limits.m_peak is not None:
        return fastest_within(
            problem, operators_of(program), limits.m_peak, in_flight, preload, lambda_, counts_w=False
        )
    if objective == "first":
        return fastest(problem, operators_of(program), preload, lambda_)
    if limits.budget is None:
        return _paper_plan_inside(problem, preload, lambda_, limits.units, in_flight, limited=limits.m_peak is not None)
    return _paper_plan_within(problem, program, limits, preload, in_all)


def _paper_plan_inside(
    problem: Problem, preload: frozenset[str], lambda_: float, units: Units, in_flight: Measure, *, limited: bool
) -> OverlapPlan:
    """The paper's plan whose layout, with what it wastes and with staging, takes no more than M_peak.

    First the reads are given less room to run ahead; then the plan itself.

    Raises:
        BudgetError: nothing fits; it names what the plan with the least takes.
    """
    plan = solve(problem, objective="paper", lambda_=lambda_, preload=preload, units=units)
    if not limited:
        return plan
    least = needed = in_flight(plan)
    for share in _READ_AHEAD:
        if needed <= problem.m_peak:
            return plan
        plan = with_room(problem, plan, int(problem.m_peak * share))
        needed = in_flight(plan)
        least = min(least, needed)
    for share in _SHARES:
        try:
            smaller = solve(
                replace(problem, m_peak=int(problem.m_peak * share)), objective="paper", lambda_=lambda_, preload=preload,
                time_limit=_SECONDS_EACH, units=units,
            )  # fmt: skip
        except BudgetError:
            break
        smaller = replace(smaller, m_peak=problem.m_peak, bound=min(plan.bound, smaller.objective))
        needed = in_flight(smaller)
        least = min(least, needed)
        if needed <= problem.m_peak:
            return replace(smaller, status="OPTIMAL" if smaller.bound >= smaller.objective else "FEASIBLE")
    raise BudgetError(
        f"M_peak of {problem.m_peak} bytes is too small: {least} bytes are in flight with what staging and the layout take; "
        f"raise the limit to {least} bytes or more",
        smallest_bytes=least,
        binding="",
    )


_READ_AHEAD = (0.9, 0.75, 0.5, 0.25, 0.0)
"""Parts of M_peak within which reads may run ahead, where a layout wastes the rest."""


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
    baseline = Baseline(limits.strategy, operators_of(program), preload, limits.resolved_lambda)
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
            lambda_=limits.resolved_lambda,
            preload=preload,
            time_limit=_SECONDS_EACH,
            preload_limit=max(0, limits.budget - m_peak),
            units=limits.units,
        )
        for ahead in (None, *_READ_AHEAD):
            roomy = plan if ahead is None else with_room(replace(program_problem, m_peak=m_peak), plan, int(m_peak * ahead))
            if measure(roomy) <= limits.budget:
                return roomy
    # The other planner knows the smallest budget, or finds the plan that the shares above stepped over.
    plan = fastest_within(program_problem, operators_of(program), limits.budget, measure, preload, 0.0)
    return replace(plan, notes=(*plan.notes, "no plan of the paper's objective fits the budget; this one is for the first answer"))


_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
_SECONDS_EACH = 4.0
