"""Weights kept for later runs, in the memory that the first run does not need.

The first run reads everything, and needs only enough memory to keep its reads ahead of the layers. The rest of a budget holds
weights that later runs then need not read. They have separate places from the start: nothing is moved between two runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf

from flashmem.planning.arithmetic.clock import TimingModel, clock_of
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.arithmetic.release_times import in_turn
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.latency.tiers import EXACT, expected_seconds, subsets
from flashmem.schedule.host_tier import spread
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan, PlannedWeight


def later_seconds(instance: Instance, plan: OverlapPlan, *, cached: bool = True) -> float:
    """Predicted latency of a later run: W and kept weights are resident, the file is in the page cache, or on the disk if not
    `cached`.
    """
    streamed = {w.name: w for w in plan.weights if not (w.preload or w.keep)}
    releases = {name: w.read_layer for name, w in streamed.items()}
    return clock_of(later_run(instance, plan, cached=cached), releases, {name: w.moves for name, w in streamed.items()}).seconds


def later_run(instance: Instance, plan: OverlapPlan, *, cached: bool = True) -> Instance:
    """The instance of a later run of `plan`: what neither W nor the kept weights hold, from the page cache or the disk."""
    streamed = {w.name for w in plan.weights if not (w.preload or w.keep)}
    return replace(
        instance,
        weights=tuple(w for w in instance.weights if w.name in streamed),
        load_bandwidth=inf if cached and instance.host_bandwidth < inf else instance.load_bandwidth,
        opening_seconds=0.0,
    )


def with_kept(instance: Instance, plan: OverlapPlan, limit: int | None, measure: Measure) -> OverlapPlan:
    """`plan` with as many weights kept as fit `limit` bytes (None: all), chosen to make later runs the fastest.

    `measure`: the bytes of a plan that `limit` covers; those of `plan` are within it.
    """
    streamed = [w for w in plan.weights if not w.preload]
    if not streamed:
        return plan
    if limit is None:
        return keep_weights(plan, {w.name for w in streamed})
    if measure(everything := keep_weights(plan, {w.name for w in streamed})) <= limit:
        return everything
    orders = [sorted(streamed, key=order) for order in _ORDERS]
    if instance.own is not None:
        in_time = sorted(streamed, key=lambda w: w.first_use)
        orders.append([in_time[at] for at in spread([w.nbytes for w in in_time], limit - measure(plan))])
    found = [_keep_greedily(plan, order, limit, measure) for order in orders]
    if instance.own is not None:
        found = [_topped_up(each, order, limit, measure) for each, order in zip(found, orders, strict=True)]
    if instance.own is not None and len(streamed) <= EXACT:  # a layout for each
        every = (keep_weights(plan, chosen) for chosen in subsets([w.name for w in streamed]))
        found += [each for each in every if measure(each) <= limit]
    return min((*found, plan), key=lambda each: by_later_runs(instance, each))


def by_later_runs(instance: Instance, plan: OverlapPlan) -> tuple[float, int]:
    """Sort key of plans by their later runs: latency in whole microseconds, then bytes read.

    On a device with memory of its own the latency is that of `expected_seconds`, because loads may come from the host tier.
    """
    seconds = later_seconds(instance, plan) if instance.own is None else expected_seconds(instance, plan)
    return round(seconds, 6), -sum(w.nbytes for w in plan.weights if w.keep)


def by_cache_and_disk(instance: Instance, plan: OverlapPlan) -> tuple[float, int]:
    """Sort key of plans by their later runs, where memory may or may not hold the file: the product of their latencies with the
    file in the page cache and on the disk, so that no plan is good in one case and bad in the other; then bytes read.

    On a device with memory of its own, that of `by_later_runs`, because the host tier holds loads or not.
    """
    seconds, kept = by_later_runs(instance, plan)
    if instance.own is None:
        seconds *= later_seconds(instance, plan, cached=False)
    return seconds, kept


def ladder(instance: Instance, best: OverlapPlan, least: int, make: Callable[[int], OverlapPlan]) -> list[OverlapPlan]:
    """The plans of `make` in several M_peak, from about `least` bytes to half of what `best` has more.

    Where memory is shared, the first has a 32nd more: in the least memory a loader thread waits until another slice is freed.
    """
    first = 0 if instance.own is not None else 1
    return [make(least + (best.m_peak - least) * part // 32) for part in (first, 4, 8, 16)]


def rooms_for_later_runs(instance: Instance, plan: OverlapPlan, *, several: bool) -> list[OverlapPlan]:
    """`plan`, and plans of the same W that leave more memory for later runs.

    Where memory is shared, the smallest that is nearly as fast. With `several`, those of a ladder of M_peak.
    """
    own = instance.own is not None
    # W of a baseline is as good as kept weights, and here kept ones are chosen.
    chosen = forced_preload(instance, plan.asked) if own else frozenset(w.name for w in plan.weights if w.preload)
    least = smallest_m_peak(instance, chosen)[0]

    def make(m_peak: int) -> OverlapPlan:
        return replace(first_plan(replace(instance, m_peak=m_peak), chosen, quick=own), asked=plan.asked)

    rooms = [plan]
    if len(plan.weights) <= _SEARCHED and plan.m_peak > least:
        if not own:
            rooms.append(smallest_flight(plan, least, make, lambda each: each.objective))
        if several:
            rooms += ladder(instance, plan, least, make)
    return rooms


_SEARCHED = 20_000
"""Plans of more weights are not searched: a search would cost as much time as several plans."""


def fastest_kept(
    instance: Instance,
    rooms: Sequence[OverlapPlan],
    limit: int,
    measure: Measure,
    order: Callable[[Instance, OverlapPlan], tuple[float, int]],
) -> OverlapPlan:
    """Of `rooms` that fit, each with weights kept within `limit` bytes, the first one by `order`."""
    kept = [with_kept(instance, each, limit, measure) for each in rooms if measure(each) <= limit]
    return min(kept, key=lambda each: order(instance, each))


def serving_later_runs(
    instance: Instance, rooms: Sequence[OverlapPlan], limit: int, measure: Measure, soonest: float
) -> OverlapPlan:
    """Of plans for the first answer, with weights kept within `limit` bytes, the one with the fastest later runs.

    For a device with memory of its own. The first answer is at most the share `OWN_WORTH` after `soonest` seconds, or the
    earliest of the plans.
    """
    kept = [read_early(instance, with_kept(instance, each, limit, measure)) for each in rooms if measure(each) <= limit]
    if instance.transfer.by_kernels:
        kept += [made for each in kept if (made := _in_w(instance, each)) is not None and measure(made) <= limit]
    worst = max(min(each.objective for each in kept), soonest * (1 + OWN_WORTH))
    return min((each for each in kept if each.objective <= worst), key=lambda each: by_later_runs(instance, each))


OWN_WORTH = 0.05
"""The share of the first answer that later runs may cost on a device with memory of its own: by the memory they get, and by
slices of other sizes. There a load costs a run far more than the same bytes on the device, so weights that stay gain more than
where later runs find them in the page cache of the same memory."""


def _in_w(instance: Instance, plan: OverlapPlan) -> OverlapPlan | None:
    """`plan`, whose kept weights are in W instead: they are copied to their places without staging, before the disk would wait
    for it. Planned anew with the M_peak of `plan`; None if nothing is kept.
    """
    stays = frozenset(w.name for w in plan.weights if w.preload or w.keep)
    if not any(w.keep for w in plan.weights):
        return None
    note = "weights that stay for later runs are in W: there they need no staging"
    made = first_plan(replace(instance, m_peak=plan.m_peak), stays, quick=True)
    return replace(made, asked=plan.asked, notes=(*made.notes, note))


def read_early(instance: Instance, plan: OverlapPlan) -> OverlapPlan:
    """`plan` for the first answer, whose kept weights are read when the disk would wait for memory of the others.

    They have their own places from the start, so an earlier read needs no memory. Of these and the plan's own release times,
    the faster ones are used. In mode `interleave` nothing changes: there reads wait for staging.
    """
    kept = frozenset(w.name for w in plan.weights if w.keep)
    if not kept or instance.transfer.by_kernels:
        return plan
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    timing = TimingModel(instance, moves)
    others = TimingModel(instance, {name: parts for name, parts in moves.items() if name not in kept})
    others.durations = timing.durations
    resident = kept | {w.name for w in plan.weights if w.preload}
    found = in_turn(others, resident, {w.name: w.read_layer for w in plan.weights})
    releases = {w.name: min(max(1, found[w.name]), w.first_mover) if w.keep else found[w.name] for w in plan.weights}
    seconds = timing.seconds(releases)
    if seconds >= plan.objective:
        return plan
    weights = tuple(replace(w, read_layer=releases[w.name]) for w in plan.weights)
    slowdown = (1 + plan.expected_slowdown) * seconds / plan.objective - 1
    # The bound of `plan` holds in the bytes that it has in flight, and these are more.
    return replace(plan, weights=weights, objective=seconds, expected_slowdown=slowdown, bound=0.0, bound_within=None)


_ORDERS: Sequence[Callable[[PlannedWeight], tuple[int, ...]]] = (
    lambda w: (w.first_use,),  # weights that a later run needs before it could read ahead
    lambda w: (-w.nbytes, w.first_use),
)
"""Orders in which weights are kept until the memory is full."""

_TRIES = 5
"""The number of layouts tried for one order: only a layout determines the exact bytes of a place."""


def _keep_greedily(plan: OverlapPlan, order: Sequence[PlannedWeight], limit: int, measure: Measure) -> OverlapPlan:
    """`plan` that keeps weights greedily in `order`, as many as fit."""
    best = plan
    most = -1
    room = limit - measure(plan)
    for _ in range(_TRIES):
        chosen = set[str]()
        left = room
        for w in order:
            if w.nbytes <= left:
                chosen.add(w.name)
                left -= w.nbytes
        trial = keep_weights(plan, chosen)
        spare = limit - measure(trial)
        if spare >= 0 and room > most:
            best = trial
            most = room
        if 0 <= spare <= limit // 100 or not chosen:
            break
        room += spare if spare > 0 else spare * 3 // 2
    return best


def _topped_up(plan: OverlapPlan, order: Sequence[PlannedWeight], limit: int, measure: Measure) -> OverlapPlan:
    """`plan` that keeps further weights, each one that fits beside those before it; the largest ones first."""
    kept = {w.name for w in plan.weights if w.keep}
    spare = limit - measure(plan)
    tries = 0
    for w in sorted(order, key=lambda w: -w.nbytes):
        if w.name in kept or w.nbytes > spare:
            continue
        trial = keep_weights(plan, {w.name})
        left = limit - measure(trial)
        if left >= 0:
            plan = trial
            spare = left
        tries += 1
        if tries == _TRIES:
            break
    return plan


def keep_weights(plan: OverlapPlan, chosen: Collection[str]) -> OverlapPlan:
    """`plan` that keeps the weights `chosen` too."""
    return replace(plan, weights=tuple(replace(w, keep=True) if w.name in chosen else w for w in plan.weights))


def smallest_flight(
    best: OverlapPlan,
    least: int,
    make: Callable[[int], OverlapPlan],
    value: Callable[[OverlapPlan], float],
    near: int = 0,
) -> OverlapPlan:
    """The plan of `make` in the smallest M_peak, at least `least` bytes, that is nearly as good as `best` by `value`.

    The search ends when less than `near` bytes can be gained.
    """
    low = least
    high = best.m_peak
    chosen = best
    worst = value(best) * (1 + _WORTH)
    for _ in range(_HALVINGS):
        if high - low < near:
            break
        middle = (low + high) // 2
        plan = make(middle)
        if value(plan) <= worst:
            high = middle
            chosen = plan
        else:
            low = middle
    return chosen


_WORTH = 0.02
"""The share of the first answer that memory for later runs may cost."""

_HALVINGS = 5
