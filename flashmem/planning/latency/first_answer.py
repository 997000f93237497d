"""Planner for the objective `first`: the plan with the earliest answer inside M_peak, then with the least memory on average.

W contains only the weights needed before layer 1 (and those that the caller requests): a preloaded weight delays layer 1 and
occupies its bytes permanently. Every other weight is read in order of use, as early as memory permits. Among plans that read
whole slices in order of use no plan is faster, except for the slowdown by moves. If the disk waits for memory, backfilling
(`filled`) changes that order. Then each release time is as late as costs no time. This takes O(n log n), so a plan can be made
again whenever the budget changes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from flashmem.base.errors import BudgetError
from flashmem.planning.arithmetic.assemble import assemble
from flashmem.planning.arithmetic.clock import Clock, Moves, TimingModel, clock_of
from flashmem.planning.arithmetic.release_times import earliest_releases, final_releases, held_bytes, releases_ahead
from flashmem.planning.latency.backfill import backfill
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.objectives import FIRST
from flashmem.schedule.plan import OverlapPlan


def forced_preload(instance: Instance, preload: Collection[str] = ()) -> frozenset[str]:
    """The least W: `preload` and the weights of layer 1, which no earlier layer can load."""
    return frozenset(preload) | {w.name for w in instance.weights if w.first_use == 1}


def smallest_m_peak(instance: Instance, preload: Collection[str] = ()) -> tuple[int, str]:
    """The smallest M_peak (bytes) for which the planner makes a plan with W = `forced_preload`, and the layer that requires it.

    All of a weight is moved before the layer that uses it. So at layer l its own weights are in flight together with those
    first used at layer l + 1. Load capacities do not count, because they can be relaxed. In mode `interleave`, weights are
    moved in the layer before their use, and are in staging there as well. In other modes no plan needs less.
    """
    return _in_use(instance, forced_preload(instance, preload), instance.transfer.places_in_flight)


def least_in_use(instance: Instance, preload: Collection[str] = ()) -> int:
    """The same without staging: the bytes that `earliest_releases` needs."""
    return _in_use(instance, forced_preload(instance, preload), 1)[0]


def _in_use(instance: Instance, chosen: frozenset[str], copies: int) -> tuple[int, str]:
    """Bytes in use at the layer that needs most. `copies`: of a weight at the layer before its first use."""
    change = [0] * (len(instance.layers) + 2)
    for w in instance.weights:
        if w.name not in chosen:
            change[w.first_use - 1] += copies * w.nbytes
            change[w.first_use] -= (copies - 1) * w.nbytes
            change[w.last_use + 1] -= w.nbytes
    needed = list(accumulate(change))[1 : len(instance.layers) + 1]
    if not needed:
        return 0, ""
    layer = max(range(len(needed)), key=needed.__getitem__)
    return needed[layer], instance.layers[layer].name


def require_m_peak(instance: Instance, preload: Collection[str]) -> None:
    """Check that M_peak is enough for some plan.

    Raises:
        BudgetError: M_peak is too small.
    """
    smallest, binding = smallest_m_peak(instance, preload)
    if instance.m_peak < smallest:
        twice = ", twice while they are moved," if instance.transfer.by_kernels else ""
        raise BudgetError(
            f"M_peak of {instance.m_peak} bytes is too small: layer {binding!r} and the loads for the next layer{twice} need "
            f"{smallest} bytes in flight at once; raise the limit to {smallest} bytes or more",
            smallest_bytes=smallest,
            binding=binding,
        )


def late_moves(
    instance: Instance, releases: Mapping[str, int], clock: Clock, near: int
) -> dict[str, tuple[tuple[int, int], ...]]:
    """x_{w,l} of the streamed weights: within C_l if possible, above it where the cost is least.

    A chunk is moved between g_w (in mode `interleave`: the layer that first starts with its weight read) and i_w - 1. These
    windows open and close in order of use. So serving the latest use first, walking backwards, keeps most chunks within
    capacity. Remaining chunks are moved during layers whose successors wait anyway, by `clock`, as far as they fit. The rest is
    spread over the last `near` layers of the window in proportion to their latency. Hierarchical operators get chunks only if
    the window has no other layers.
    """
    queue = sorted((w for w in instance.weights if releases[w.name]), key=lambda w: w.first_use)
    waits = instance.transfer.by_kernels
    opens = [
        min(w.first_use - 1, max(releases[w.name], bisect_left(clock.started, clock.loaded[w.name]) + 1 if waits else 0))
        for w in queue
    ]
    left = [instance.chunks(w) for w in queue]
    moves: list[dict[int, int]] = [{} for _ in queue]
    within = [spec.capacity for spec in instance.layers]
    _serve(queue, opens, left, moves, within)
    if any(left):
        _serve(queue, opens, left, moves, _free_chunks(instance, clock, moves))
    spread = _Spread(instance)
    for index, w in enumerate(queue):
        if left[index]:
            spread.add(moves[index], left[index], max(opens[index], w.first_use - near), w)
    return {w.name: tuple(sorted(parts.items())) for w, parts in zip(queue, moves, strict=True)}


def _serve(
    queue: Sequence[WeightSpec], opens: Sequence[int], left: list[int], moves: list[dict[int, int]], rooms: Sequence[int]
) -> None:
    """Move the chunks `left` of `queue` (in order of use) during layers with capacity `rooms`, walking backwards."""
    waiting: list[int] = []  # latest use first; entries before `head` are finished, or their window has closed
    head = 0
    unseen = len(queue) - 1
    for layer in range(len(rooms), 0, -1):
        while unseen >= 0 and queue[unseen].first_use > layer:
            waiting.append(unseen)
            unseen -= 1
        room = rooms[layer - 1]
        while room and head < len(waiting):
            index = waiting[head]
            if layer < opens[index] or not left[index]:
                head += 1
                continue
            taken = min(room, left[index])
            moves[index][layer] = moves[index].get(layer, 0) + taken
            left[index] -= taken
            room -= taken


def _free_chunks(instance: Instance, clock: Clock, moves: Sequence[Mapping[int, int]]) -> list[int]:
    """By layer, the chunks that can be moved there in addition to `moves` while the next layer waits for its weights."""
    moved = [0] * (len(instance.layers) + 1)
    for parts in moves:
        for layer, chunks in parts.items():
            moved[layer] += chunks
    rooms = []
    for layer, spec in enumerate(instance.layers, start=1):
        idle = clock.started[layer] - clock.done[layer - 1] if layer < len(instance.layers) else 0.0
        able = spec.operator_class != "hierarchical" and idle > 0
        most = int(spec.bytes_within(spec.seconds + idle) // instance.chunk_bytes) if able else 0
        rooms.append(max(0, most - moved[layer]))
    return rooms


class _Spread:
    """Distribute chunks among the layers of a window in proportion to their latency."""

    def __init__(self, instance: Instance) -> None:
        able = [0.0 if spec.operator_class == "hierarchical" else spec.seconds for spec in instance.layers]
        self.able = np.array([0.0, *accumulate(able)])
        self.any = np.array([0.0, *accumulate(spec.seconds for spec in instance.layers)])

    def add(self, moves: dict[int, int], chunks: int, opens: int, w: WeightSpec) -> None:
        """Add `chunks` to `moves`, at layers `opens` to i_w - 1."""
        last = w.first_use - 1
        reach = self.able if self.able[last] > self.able[opens - 1] else self.any
        low = reach[opens - 1]
        high = reach[last]
        wished = low + (high - low) * (np.arange(chunks) + 0.5) / chunks
        shares = np.bincount(reach[opens:last].searchsorted(wished))
        [layers] = shares.nonzero()
        for layer, share in zip((opens + layers).tolist(), shares[layers].tolist(), strict=True):
            moves[layer] = moves.get(layer, 0) + share


def read_and_move(instance: Instance, preload: frozenset[str], limit: int) -> tuple[dict[str, int], Moves, Clock]:
    """Release times, moves and their clock for W = `preload` with at most `limit` bytes in flight.

    `limit` must be at least `smallest_m_peak`. Weights are released as early as whole slices fit. If staging then exceeds
    `limit`, a smaller part of it is used.
    """
    best: tuple[dict[str, int], Moves, Clock] | None = None
    for near in _NEAR:
        found = _read_and_move(instance, preload, limit, near)
        if best is None or found[2].seconds < best[2].seconds * (1 - _TIE):
            best = found
        releases, _, clock = best
        if clock.seconds <= clock_of(instance, releases).seconds * (1 + _TIE):
            break  # the moves cost no time
    assert best is not None
    return best


_NEAR = (1 << 30, 1)
"""Number of layers before its use that share the chunks of a weight above capacity: all, or the one that delays no other."""

_TIE = 1e-9


def _read_and_move(instance: Instance, preload: frozenset[str], limit: int, near: int) -> tuple[dict[str, int], Moves, Clock]:
    unmoved = TimingModel(instance)

    def moving(releases: Mapping[str, int]) -> Moves:
        return late_moves(instance, releases, unmoved.clock(releases), near)

    least = least_in_use(instance, preload)
    for step in range(_STEPS + 1):
        releases = earliest_releases(instance, preload, limit - (limit - least) * step // _STEPS)
        moves = moving(releases)
        if not instance.transfer.by_kernels or int(held_bytes(instance, releases, moves).max()) <= limit:
            break
    else:  # move every weight in the layer before its use, and read it as early as there is room
        moves = {w.name: ((w.first_use - 1, instance.chunks(w)),) for w in instance.weights if w.name not in preload}
        releases = releases_ahead(instance, preload, moves, limit)
    releases, moves = backfill(instance, releases, moves, limit, None if instance.transfer.by_kernels else moving)
    releases, clock = final_releases(TimingModel(instance, moves), preload, releases)
    return releases, moves, clock


_STEPS = 8
"""Number of parts of the limit to try for weights in their final places; staging needs memory in addition."""


@dataclass(frozen=True)
class LimitedDecisions:
    """The decisions of `read_and_move` inside some bytes, and the average bytes of weights in memory during a session."""

    releases: dict[str, int]
    moves: Moves
    clock: Clock
    held: int  # maximum, outside W
    average: int


def candidate(instance: Instance, preload: frozenset[str], limit: int) -> LimitedDecisions:
    """The plan inside `limit` bytes."""
    releases, moves, clock = read_and_move(instance, preload, limit)
    held = int(held_bytes(instance, releases, moves).max(initial=0))
    return LimitedDecisions(releases, moves, clock, held, average_bytes(instance, releases, moves, clock))


def average_bytes(instance: Instance, releases: Mapping[str, int], moves: Moves, clock: Clock) -> int:
    """Bytes of weights in memory, on average over the first run.

    Places are allocated for the whole session, so W and the most bytes in flight count in full. In mode `map` pages are not.
    """
    resident = sum(w.nbytes for w in instance.weights if w.name not in moves)
    if not instance.transfer.by_pages or not clock.seconds:
        return resident + int(held_bytes(instance, releases, moves).max(initial=0))
    entered = (
        (clock.done[w.last_use - 1] - max(instance.opening_seconds, clock.read[w.name])) * w.nbytes
        for w in instance.weights if w.name in moves
    )  # fmt: skip
    return resident + round(sum(entered) / clock.seconds)


def fastest_decisions(instance: Instance, preload: frozenset[str], *, quick: bool = False) -> LimitedDecisions:
    """The candidate with the earliest answer inside M_peak. For many weights, or if `quick`, only that for all of M_peak."""
    smallest, _ = smallest_m_peak(instance, preload)
    if quick or len(instance.weights) > _THOROUGH_WEIGHTS:
        copies = instance.transfer.places_in_flight
        streamed = copies * sum(w.nbytes for w in instance.weights if w.name not in preload)
        return candidate(instance, preload, min(instance.m_peak, max(smallest, streamed)))
    roomy = candidate(instance, preload, instance.m_peak)
    if instance.m_peak <= smallest or roomy.clock.seconds <= fastest_seconds(instance, preload) * (1 + _TIE):
        return roomy
    most = max(smallest, roomy.held)
    steps = [candidate(instance, preload, most - int((most - smallest) * step / _RUNGS)) for step in range(1, _RUNGS + 1)]
    return min((roomy, *steps), key=lambda one: (one.clock.seconds, one.average))


_RUNGS = 10
"""Steps of the ladder below the plan with the largest limit."""

_THOROUGH_WEIGHTS = 64
"""The most weights for which all limits are tried. The largest limit is nearly always fastest."""


def first_plan(instance: Instance, preload: Collection[str] = (), *, quick: bool = False) -> OverlapPlan:
    """The fastest plan inside M_peak; `objective` and `bound` are integrated latency in seconds.

    The bound holds at least for every plan of this W inside M_peak: see `judged`. `quick`: as in `fastest_decisions`.

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`.
    """
    begun = time.monotonic()
    require_m_peak(instance, preload)
    chosen = forced_preload(instance, preload)
    made = fastest_decisions(instance, chosen, quick=quick)
    return judge_first_answer(instance, assemble(
        instance, chosen, made.releases, made.moves, kind=FIRST, lambda_=0.0, objective=made.clock.seconds, bound=0.0,
        bound_scope="resident-set", tier="greedy", started=begun, base=chosen, asked=preload,
        notes=("read in use order, as early as M_peak permits, but where the disk would wait",),
    ))  # fmt: skip


def judge_first_answer(instance: Instance, plan: OverlapPlan) -> OverlapPlan:
    """`plan` for the first answer with the bound that holds for every plan with its W inside the M_peak of `instance`.

    A plan as fast as without a memory limit is the best for every W. Plans that move weights at the layer that uses them
    ("on-demand") get no bound.
    """
    if plan.strategy == "on-demand":
        return plan
    meets = plan.objective * (1 - _TIE)
    if fastest_seconds(instance, {w.name for w in instance.weights}) >= meets:
        return replace(plan, bound=plan.objective, bound_scope="problem", bound_within=None)
    bound = fastest_seconds(instance, {w.name for w in plan.weights if w.preload})
    bound = plan.objective if bound >= meets else bound
    return replace(plan, bound=bound, bound_scope="resident-set", bound_within=instance.m_peak)
