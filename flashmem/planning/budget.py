"""From a budget to M_peak: the fastest plan whose every byte, as the caller counts bytes, fits.

A budget covers W, what is in flight, staging, activations and the padding of a layout, and how much each takes depends on the
plan and the transfer mode. So M_peak is searched: the largest for which the finished plan measures no more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from flashmem.errors import BudgetError
from flashmem.planning.latency import forced_preload, latency_plan, smallest_m_peak
from flashmem.planning.plan import OverlapPlan
from flashmem.planning.problem import Problem

_STEPS = 10
"""Halvings of the range of M_peak: the plan uses all but about a thousandth of what it could."""


def plan_within(
    problem: Problem,
    budget: int,
    measure: Callable[[OverlapPlan], int],
    *,
    preload: Collection[str] = (),
    lambda_: float = 0.9,
) -> tuple[OverlapPlan, Problem]:
    """The latency plan for the largest M_peak found with `measure(plan) <= budget`, and the problem with that M_peak.

    `measure` gives the bytes a plan takes in all, in the caller's meaning of `budget`; `problem.m_peak` is ignored.

    Raises:
        BudgetError: even the smallest M_peak measures more; it names a budget that works and the layer that binds.
    """
    smallest, binding = smallest_m_peak(problem, preload)
    chosen = forced_preload(problem, preload)
    streamed = sum(w.nbytes for w in problem.weights if w.name not in chosen)

    def attempt(m_peak: int) -> tuple[OverlapPlan, Problem, int]:
        candidate = replace(problem, m_peak=m_peak)
        plan = latency_plan(candidate, preload, lambda_=lambda_)
        return plan, candidate, measure(plan)

    low, high = smallest, max(smallest, min(streamed, budget))
    best = attempt(high)
    if best[2] <= budget:
        return best[:2]
    best = attempt(low)
    if best[2] > budget:
        raise BudgetError(
            f"budget of {budget} bytes is too small: {best[2]} bytes are needed, bound by layer {binding!r} and the loads for "
            f"the next layer; raise the budget to {best[2]} bytes or more",
            smallest_bytes=best[2],
            binding=binding,
        )
    for _ in range(_STEPS):
        middle = (low + high) // 2
        if (found := attempt(middle))[2] <= budget:
            low, best = middle, found
        else:
            high = middle
    return best[:2]
