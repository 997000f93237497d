"""The front of latency and average memory that lambda follows.

Lambda is a limit on average memory: in proportion to lambda, between the average of the fastest plan (0) and that of the
smallest (1). The plan is the fastest one within that limit, of plans for a ladder of limits on the bytes in flight. The ladder
depends neither on lambda nor on the user's limit. So latency never falls and the average never rises with lambda, and a plan
of the ladder that fits a smaller limit too is found under it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.latency.first_answer import (
    average_bytes,
    first_plan,
    forced_preload,
    judge_first_answer,
    smallest_m_peak,
)
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

Fits = Callable[[OverlapPlan], bool]
"""Whether a plan is within the user's limits."""


def average_of(instance: Instance, plan: OverlapPlan) -> int:
    """Bytes of weights in memory, on average over the first run of `plan`."""
    releases = {w.name: w.read_layer for w in plan.weights}
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    return average_bytes(instance, releases, moves, clock_of(instance, releases, moves))


def rungs(instance: Instance, preload: Collection[str]) -> Iterator[tuple[int, OverlapPlan]]:
    """Limits on the bytes in flight, from all that a plan can use to the least, and the plan for each with W = `preload`."""
    copies = instance.transfer.places_in_flight
    smallest, _ = smallest_m_peak(instance, preload)
    everything = max(smallest, copies * sum(w.nbytes for w in instance.weights))
    roomy = _inside(instance, preload, everything)
    moves = {w.name: w.moves for w in roomy.weights if not w.preload}
    most = int(held_bytes(instance, {w.name: w.read_layer for w in roomy.weights}, moves).max(initial=0))
    yield max(smallest, most), roomy
    count = len(instance.weights)
    steps = next(steps for most_weights, steps in _STEPS if count <= most_weights)
    for step in range(1, steps + 1 if most > smallest else 1):
        limit = most - (most - smallest) * step // steps
        yield limit, _inside(instance, preload, limit)


def _inside(instance: Instance, preload: Collection[str], limit: int) -> OverlapPlan:
    return first_plan(replace(instance, m_peak=max(1, limit)), preload, quick=True)


_STEPS = ((64, 20), (1500, 10), (1 << 62, 4))
"""The steps of a ladder for plans of at most so many weights."""


def sooner(instance: Instance, plan: OverlapPlan, fits: Fits) -> OverlapPlan:
    """`plan`, or the fastest one of its ladder that fits, if it is not proven to be the best.

    For many weights only the plan without a limit is tried: late release times may leave it in a small one.
    """
    if plan.status.startswith("optimal"):
        return plan
    plans = rungs(instance, forced_preload(instance, plan.asked))
    tried = plans if len(instance.weights) <= _STEPS[0][0] else islice(plans, 1)
    faster = (each for _, each in tried if each.objective < plan.objective and fits(each))
    return min(faster, key=lambda each: each.objective, default=plan)


def leaner(
    instance: Instance, fastest: OverlapPlan, lambda_: float, fits: Fits, roomiest: Callable[[OverlapPlan], Instance]
) -> OverlapPlan:
    """The plan at `lambda_`, if `fastest` is the one at 0.

    `fastest` has large slices in W if the limits need that; then the others have them too. `roomiest`: the instance with the
    largest M_peak that any plan with the W of a plan can have. The bound holds within the part of it that lambda permits.
    """
    preload: Collection[str] = forced_preload(instance, fastest.asked)
    found = [_Rung(limit, plan, average_of(instance, plan)) for limit, plan in rungs(instance, preload) if fits(plan)]
    if not found:
        preload = {w.name for w in fastest.weights if w.preload}
        found = [_Rung(limit, plan, average_of(instance, plan)) for limit, plan in rungs(instance, preload) if fits(plan)]
    first = _Rung(fastest.m_peak, fastest, average_of(instance, fastest))
    # At lambda 0, few rungs are tried for many weights. One that is sooner all the same would let latency fall with lambda.
    found = [each for each in found if each.plan.objective >= fastest.objective]
    smallest = min(each.average for each in (first, *found))
    allowed = smallest + int((first.average - smallest) * (1 - lambda_))
    permitted = [each for each in (first, *found) if each.average <= allowed]
    best = min(permitted, key=_Rung.order)
    above = [each for each in (first, *found) if each.average > allowed]
    between = [] if not above else _between(instance, preload, best, min(above, key=lambda each: each.average), fits)
    chosen = min((best, *(each for each in between if each.average <= allowed)), key=_Rung.order).plan
    chosen = replace(chosen, asked=fastest.asked)
    inside = roomiest(chosen)
    by_pages = instance.transfer.by_pages
    room = allowed - chosen.resident_bytes
    if not by_pages:  # places are always allocated, so the average limits the bytes in flight; that of pages does not
        inside = replace(inside, m_peak=min(inside.m_peak, room))
    return judge_first_answer(inside, replace(chosen, lambda_=lambda_, average_within=room if by_pages else None))


@dataclass(frozen=True)
class _Rung:
    """A plan of the ladder: the limit it was made in, and its average."""

    limit: int
    plan: OverlapPlan
    average: int

    def order(self) -> tuple[float, int]:
        return self.plan.objective, self.average


def _between(instance: Instance, preload: Collection[str], below: _Rung, above: _Rung, fits: Fits) -> list[_Rung]:
    """Rungs between two of the ladder that are neighbours in memory.

    They are no faster than the one above, so that they keep the order of the ladder.
    """
    found = []
    for step in range(1, _BETWEEN):
        limit = below.limit + (above.limit - below.limit) * step // _BETWEEN
        plan = _inside(instance, preload, limit)
        if plan.objective >= above.plan.objective and fits(plan):
            found.append(_Rung(limit, plan, average_of(instance, plan)))
    return found


_BETWEEN = 8
"""The parts into which the memory between two rungs is divided for a plan at lambda."""
