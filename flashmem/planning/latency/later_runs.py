"""Weights kept for later runs, in the memory that the first run does not need.

The first run reads everything, and needs only enough memory to keep its reads ahead of the layers. The rest of a budget holds
weights that later runs then need not read. They have separate places from the start: nothing is moved between two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf

from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.measure import Measure
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan, PlannedWeight


def later_seconds(instance: Instance, plan: OverlapPlan) -> float:
    """Predicted latency of a later run: W and kept weights are resident, the file is in the page cache."""
    streamed = {w.name: w for w in plan.weights if not (w.preload or w.keep)}
    rest = replace(
        instance,
        weights=tuple(w for w in instance.weights if w.name in streamed),
        load_bandwidth=inf if instance.host_bandwidth < inf else instance.load_bandwidth,
        opening_seconds=0.0,
    )
    releases = {name: w.read_layer for name, w in streamed.items()}
    return clock_of(rest, releases, {name: w.moves for name, w in streamed.items()}).seconds


def with_kept(instance: Instance, plan: OverlapPlan, limit: int | None, measure: Measure) -> OverlapPlan:
    """`plan` with as many weights kept as fit `limit` bytes (None: all), chosen to make later runs the fastest.

    `measure`: the bytes of a plan that `limit` covers; those of `plan` are within it.
    """
    streamed = [w for w in plan.weights if not w.preload]
    if not streamed:
        return plan
    if limit is None:
        return _keeping(plan, {w.name for w in streamed})
    if measure(everything := _keeping(plan, {w.name for w in streamed})) <= limit:
        return everything
    filled = [_filled(plan, sorted(streamed, key=order), limit, measure) for order in _ORDERS]
    return min((*filled, plan), key=lambda each: by_later_runs(instance, each))


def by_later_runs(instance: Instance, plan: OverlapPlan) -> tuple[float, int]:
    """Sort key of plans by their later runs: latency in whole microseconds, then bytes read."""
    return round(later_seconds(instance, plan), 6), -sum(w.nbytes for w in plan.weights if w.keep)


_ORDERS: Sequence[Callable[[PlannedWeight], tuple[int, ...]]] = (
    lambda w: (w.first_use,),  # weights that a later run needs before it could read ahead
    lambda w: (-w.nbytes, w.first_use),
)
"""Orders in which weights are kept until the memory is full."""

_TRIES = 5
"""The number of layouts tried for one order: only a layout determines the exact bytes of a place."""


def _filled(plan: OverlapPlan, order: Sequence[PlannedWeight], limit: int, measure: Measure) -> OverlapPlan:
    """`plan` that keeps weights greedily in `order`, as many as fit."""
    best, most = plan, -1
    room = limit - measure(plan)
    for _ in range(_TRIES):
        chosen, left = set[str](), room
        for w in order:
            if w.nbytes <= left:
                chosen.add(w.name)
                left -= w.nbytes
        trial = _keeping(plan, chosen)
        spare = limit - measure(trial)
        if spare >= 0 and room > most:
            best, most = trial, room
        if 0 <= spare <= limit // 100 or not chosen:
            break
        room += spare if spare > 0 else spare * 3 // 2
    return best


def _keeping(plan: OverlapPlan, chosen: Collection[str]) -> OverlapPlan:
    return replace(plan, weights=tuple(replace(w, keep=True) if w.name in chosen else w for w in plan.weights))


def leanest(
    best: OverlapPlan,
    least: int,
    make: Callable[[int], OverlapPlan],
    value: Callable[[OverlapPlan], float],
    near: int = 0,
) -> OverlapPlan:
    """The plan of `make` in the smallest M_peak, at least `least` bytes, that is nearly as good as `best` by `value`.

    The search ends when less than `near` bytes can be gained.
    """
    low, high, chosen = least, best.m_peak, best
    worst = value(best) * (1 + _WORTH)
    for _ in range(_HALVINGS):
        if high - low < near:
            break
        middle = (low + high) // 2
        plan = make(middle)
        if value(plan) <= worst:
            high, chosen = middle, plan
        else:
            low = middle
    return chosen


_WORTH = 0.02
"""The share of the first answer that memory for later runs may cost."""

_HALVINGS = 5
