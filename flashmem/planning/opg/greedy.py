"""Heuristic tiers of C4 without CP-SAT, which always terminate (FlashMem section 3.2).

Soft threshold: a plan may exceed capacities a little. Incremental preload: if a layer still holds too much, its heaviest weight
joins W. Greedy: capacities no longer bind, and every weight is moved as late as possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmem.planning.latency.first_answer import require_m_peak
from flashmem.planning.opg.srpt import SrptPlan, offenders, srpt
from flashmem.schedule.instance import Instance


def soft_ceiling(instance: Instance) -> tuple[int, ...]:
    """C_l raised by the soft threshold: doubled, plus one chunk; unchanged for hierarchical operators."""
    return tuple(spec.capacity if spec.operator_class == "hierarchical" else 2 * spec.capacity + 1 for spec in instance.layers)


def incremental_preload(
    instance: Instance, preload: frozenset[str], ceiling: Sequence[int] | None, preload_limit: int | None
) -> tuple[frozenset[str], SrptPlan] | None:
    """Grow W from `preload`, heaviest weight first, until SRPT (with `ceiling`) fits M_peak; None if W may not grow enough.

    `preload_limit`: the most bytes in W.
    """
    sizes = {w.name: w.nbytes for w in instance.weights}
    while not (plan := srpt(instance, preload, ceiling)).feasible:
        room = None if preload_limit is None else preload_limit - sum(sizes[name] for name in preload)
        added = offenders(instance, preload, ceiling, room)
        if not added:
            return None
        preload |= added
    return preload, plan


def greedy(instance: Instance, preload: frozenset[str]) -> SrptPlan:
    """The plan of last resort: W = `preload`, and any C_l raised as far as M_peak demands.

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`, so no capacities are enough.
    """
    require_m_peak(instance, preload)
    if instance.transfer.by_kernels:  # a weight stays in staging only during the layer that moves it
        moves = {w.name: ((w.first_use - 1, instance.chunks(w)),) for w in instance.weights if w.name not in preload}
        return SrptPlan(moves, feasible=True)
    plan = srpt(instance, preload, ceiling=(sum(instance.chunks(w) for w in instance.weights),) * len(instance.layers))
    assert plan.feasible, "moving every weight at the layer before its use keeps to the smallest M_peak"
    return plan
