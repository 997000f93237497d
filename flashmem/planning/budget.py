"""From a budget to M_peak: search for the fastest plan whose total bytes, as the caller counts them, fit the budget.

A budget covers W, bytes in flight, staging, activations and the padding of a layout. The share of each depends on the plan and
the transfer mode. So M_peak is searched: the largest for which the finished plan measures no more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.pose import with_less_staging
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

_STEPS = 8
"""Maximum number of bisections of the range of M_peak."""

_FULL = 0.99
"""Stop the search at a plan that uses this part of the budget."""

_GUESSES = 3
_BELOW = 0.995
"""How often to guess a smaller M_peak from the bytes of a larger one, and the factor below the proportional guess."""


def plan_within(
    instance: Instance,
    budget: int,
    measure: Measure,
    *,
    preload: Collection[str] = (),
    quick: bool = False,
) -> tuple[OverlapPlan, Instance]:
    """The latency plan for the largest M_peak found with `measure(plan) <= budget`, and the instance with that M_peak.

    `instance.m_peak` is ignored. `quick`: as in `first_plan`.

    Raises:
        BudgetError: even the smallest M_peak measures more; the error names a budget that works and the layer that requires it.
    """
    chosen = forced_preload(instance, preload)
    plan = largest_within(
        instance,
        budget,
        measure,
        lambda limited: first_plan(limited, preload, quick=quick),
        smallest_m_peak(instance, preload),
        chosen,
    )
    return plan, replace(instance, m_peak=plan.m_peak)


def with_staging_that_fits(
    instance: Instance, limit: int | None, make: Callable[[Instance], OverlapPlan]
) -> tuple[Instance, OverlapPlan]:
    """Plan with `make` and the staging of `instance`, or less staging if `limit` bytes cannot hold it; also the instance used.

    Raises:
        BudgetError: no plan fits even with the least staging; the error names a budget that works.
    """
    while True:
        try:
            return instance, make(instance)
        except BudgetError as error:
            less = with_less_staging(instance, error.smallest_bytes - (limit or 0))
            if less is None:
                raise
            instance = less


def largest_within(
    instance: Instance,
    budget: int,
    measure: Measure,
    make: Callable[[Instance], OverlapPlan],
    smallest: tuple[int, str],
    preload: Collection[str],
) -> OverlapPlan:
    """The plan that `make` returns for the largest M_peak found with `measure(plan) <= budget`.

    `smallest`: the least M_peak that `make` accepts, and the layer that requires it. `preload`: W, which M_peak does not cover.

    Raises:
        BudgetError: even the smallest M_peak measures more; the error names a budget that works and the layer that requires it.
    """
    streamed = sum(w.nbytes for w in instance.weights if w.name not in preload)

    def attempt(m_peak: int) -> tuple[OverlapPlan, int]:
        plan = make(replace(instance, m_peak=m_peak))
        return plan, measure(plan)

    low, binding = smallest
    high = max(low, min(2 * streamed, budget))  # some modes keep two copies of a slice
    best, needed = attempt(high)
    if needed <= budget:
        return best
    best, needed_least = attempt(low) if low < high else (best, needed)
    if needed_least > budget:
        raise BudgetError(
            f"budget of {budget} bytes is too small: {needed_least} bytes are needed, bound by layer {binding!r} and the loads "
            f"for the next layer; raise the budget to {needed_least} bytes or more",
            smallest_bytes=needed_least,
            binding=binding,
        )
    for _ in range(_GUESSES):  # the bytes of a layout are about proportional to M_peak
        guess = min(high - 1, int(high * budget / needed * _BELOW))
        if guess <= low:
            break
        plan, needed = attempt(guess)
        if needed <= budget:
            low = guess
            best = plan
            if needed >= _FULL * budget:
                return best
            break
        high = guess
    for _ in range(_STEPS):
        middle = (low + high) // 2
        plan, needed = attempt(middle)
        if needed > budget:
            high = middle
            continue
        low = middle
        best = plan
        if needed >= _FULL * budget:
            break
    return best
