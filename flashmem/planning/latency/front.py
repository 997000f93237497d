"""The front of latency and average memory that lambda follows.

Lambda is a limit on average memory: in proportion to lambda, between the average of the fastest plan (0) and that of the
smallest (1). The plan is the fastest one within that limit, of plans for a ladder of limits on the bytes in flight. The ladder
depends neither on lambda nor on the user's limit. So latency never falls and the average never rises with lambda, and a plan
of the ladder that fits a smaller limit too is found under it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import islice

from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.latency.first_answer import (
    average_bytes,
    first_plan,
    forced_preload,
    judged,
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


def rungs(instance: Instance, preload: Collection[str]) -> Iterator[OverlapPlan]:
    """Plans with W = `preload` for limits on the bytes in flight, from all that a plan can use to the least."""
    copies = instance.transfer.places_in_flight
    smallest, _ = smallest_m_peak(instance, preload)

    def make(m_peak: int) -> OverlapPlan:
        return first_plan(replace(instance, m_peak=max(1, m_peak)), preload, quick=True)

    roomy = make(max(smallest, copies * sum(w.nbytes for w in instance.weights)))
    yield roomy
    moves = {w.name: w.moves for w in roomy.weights if not w.preload}
    most = int(held_bytes(instance, {w.name: w.read_layer for w in roomy.weights}, moves).max(initial=0))
    count = len(instance.weights)
    steps = next(steps for most_weights, steps in _STEPS if count <= most_weights)
    if most > smallest:
        yield from (make(most - (most - smallest) * step // steps) for step in range(1, steps + 1))


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
    faster = (each for each in tried if each.objective < plan.objective and fits(each))
    return min(faster, key=lambda each: each.objective, default=plan)


def leaner(
    instance: Instance, fastest: OverlapPlan, lambda_: float, fits: Fits, roomiest: Callable[[OverlapPlan], Instance]
) -> OverlapPlan:
    """The plan at `lambda_`, if `fastest` is the one at 0.

    `fastest` has large slices in W if the limits need that; then the others have them too. `roomiest`: the instance with the
    largest M_peak that any plan with the W of a plan can have. The bound holds within the part of it that lambda permits.
    """
    plans = [plan for plan in rungs(instance, forced_preload(instance, fastest.asked)) if fits(plan)]
    if not plans:
        resident = {w.name for w in fastest.weights if w.preload}
        plans = [replace(plan, asked=fastest.asked) for plan in rungs(instance, resident) if fits(plan)]
    averages = {id(plan): average_of(instance, plan) for plan in (fastest, *plans)}
    smallest = min(averages.values())
    allowed = smallest + int((averages[id(fastest)] - smallest) * (1 - lambda_))
    permitted = [plan for plan in (fastest, *plans) if averages[id(plan)] <= allowed]
    chosen = min(permitted, key=lambda plan: (plan.objective, averages[id(plan)]))
    inside = roomiest(chosen)
    if (
        not instance.transfer.by_pages
    ):  # places are always allocated, so the average limits the bytes in flight; that of pages does not
        resident_bytes = sum(w.nbytes for w in chosen.weights if w.preload)
        inside = replace(inside, m_peak=min(inside.m_peak, allowed - resident_bytes))
    return judged(inside, replace(chosen, lambda_=lambda_))
