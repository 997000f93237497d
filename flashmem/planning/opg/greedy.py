"""C4 without CP-SAT: the fallback tiers that always come to an end (FlashMem section 3.2).

Soft threshold: capacities may be exceeded a little. Incremental preload: where a layer still holds too much, the heaviest
offender goes to W. Greedy: capacities no longer bind, every weight is moved as late as it must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmem.planning.latency.first_answer import require_m_peak
from flashmem.planning.opg.srpt import SrptPlan, offenders, srpt
from flashmem.schedule.instance import Instance


def soft_ceiling(instance: Instance) -> tuple[int, ...]:
    """How far the soft threshold lets C_l go: twice its value and one chunk more; not at all beside hierarchical operators."""
    return tuple(spec.capacity if spec.operator_class == "hierarchical" else 2 * spec.capacity + 1 for spec in instance.layers)


def incremental_preload(
    instance: Instance, preload: frozenset[str], ceiling: Sequence[int] | None, preload_limit: int | None
) -> tuple[frozenset[str], SrptPlan] | None:
    """W grown from `preload`, heaviest offender first, until SRPT (with `ceiling`) fits M_peak; None if W may not grow enough.

    `preload_limit`: most bytes W may take.
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
    """W = `preload`, and any C_l raised as far as M_peak demands: the plan of last resort.

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`, so no capacities would do.
    """
    require_m_peak(instance, preload)
    if instance.mode == "interleave":  # nothing stays in staging for longer than the layer that moves it
        moves = {w.name: ((w.first_use - 1, instance.chunks(w)),) for w in instance.weights if w.name not in preload}
        return SrptPlan(moves, feasible=True)
    plan = srpt(instance, preload, ceiling=(sum(instance.chunks(w) for w in instance.weights),) * len(instance.layers))
    assert plan.feasible, "moving every weight at the layer before its use keeps to the smallest M_peak"
    return plan
