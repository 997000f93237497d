"""From a program and the user's limits to a plan: which objective, which M_peak, and what a budget has to cover.

*Budget* is the most that flashmem holds at any moment on the device and in host staging: preloaded and in-flight weights with
their padding, staging, activations, constants, and the arrays it hands back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.planning.budget import plan_within
from flashmem.planning.latency import smallest_m_peak
from flashmem.planning.lc_opg import solve
from flashmem.planning.memory_layout import lay_out_pools
from flashmem.planning.plan import Objective, OverlapPlan
from flashmem.planning.problem import Problem, build_problem
from flashmem.program import Program, fixed_bytes


@dataclass(frozen=True)
class Limits:
    """The user's limits and wishes, in bytes. `objective` "auto": "paper" if only M_peak is given, else "latency".

    `mu` is the paper's weight of loading distance in the penalty of adaptive unfusion.
    """

    budget: int | None = None
    m_peak: int | None = None
    chunk: int = 1 << 20
    lambda_: float = 0.9
    mu: float = 0.0
    objective: Objective | Literal["auto"] = "auto"
    preload: tuple[str, ...] = ()


def make_plan(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `program` within `limits`, for transfer `mode`, without its layouts.

    Raises:
        BudgetError: nothing fits; it names the smallest budget (or M_peak) that works, and what binds it.
        UserError: lambda out of range, or an unknown name to preload.
    """
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(total, 1)
    problem = build_problem(program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode)
    preload = _slices_of(program, limits.preload)
    objective = limits.objective
    if objective == "auto":
        objective = "paper" if limits.m_peak is not None and limits.budget is None else "latency"
    fixed = fixed_bytes(program)

    def measure(plan: OverlapPlan) -> int:
        return fixed + lay_out_pools(program.slices, plan, [mode])[mode].total_bytes

    if limits.budget is None:
        return solve(problem, objective=objective, lambda_=limits.lambda_, preload=preload)
    if objective == "latency":
        return plan_within(problem, limits.budget, measure, preload=preload, lambda_=limits.lambda_)[0]
    return _paper_plan_within(problem, limits, preload, measure)


def _slices_of(program: Program, names: tuple[str, ...]) -> frozenset[str]:
    """Slices named by themselves or by their weight; unknown names are passed on, for the planner to refuse."""
    chosen: set[str] = set()
    for name in names:
        chosen.update({part.name for part in program.slices if name in (part.name, part.weight)} or {name})
    return frozenset(chosen)


def _paper_plan_within(
    program_problem: Problem, limits: Limits, preload: frozenset[str], measure: Callable[[OverlapPlan], int]
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
    return plan_within(program_problem, limits.budget, measure, preload=preload, lambda_=limits.lambda_)[0]


_SHARES = (0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1)
_SECONDS_EACH = 4.0
