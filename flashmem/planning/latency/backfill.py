"""Backfilling: while the next read waits for memory, read a later slice that fits (docs/reference/internals/planner.md).

In order of use, the disk is idle until the next slice fits as a whole. Until then, the rest of M_peak often has room for a
smaller slice that is needed later. Such slices are released earlier, one at a time, if the clock predicts an earlier answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashmem.planning.arithmetic.clock import Clock, Moves, TimingModel
from flashmem.planning.arithmetic.release_times import bytes_in, held_bytes
from flashmem.schedule.instance import Instance, WeightSpec

_WORK = 20_000
"""The limit on the search: tries times the weights of the plan, each of which the clock evaluates."""

_LOOKAHEAD = 64
_CANDIDATES = 4
"""The number of weights after a stall to search for ones that fit, and the number of these to try."""

_GAIN = 1e-7
"""The share of the latency below which a gain counts as rounding."""


@dataclass(frozen=True)
class Stall:
    """A wait of the disk, from `begin` to `end`, for the release time of the weight at position `at` in the order of reads."""

    at: int
    begin: float
    end: float


def stalls(instance: Instance, order: list[WeightSpec], clock: Clock) -> list[Stall]:
    """The waits of the disk for memory, in order of time."""
    found = []
    free = 0.0
    for at, w in enumerate(order):
        begin = clock.read[w.name]
        if begin > free:
            found.append(Stall(at, free, begin))
        free = begin + w.nbytes / instance.load_bandwidth
    return found


Moving = Callable[[Mapping[str, int]], Moves]
"""A function that computes moves for release times."""


def backfill(
    instance: Instance, releases: Mapping[str, int], moves: Moves, limit: int, moving: Moving | None = None
) -> tuple[dict[str, int], Moves]:
    """Improve release times and moves by backfilling: at most `limit` bytes in flight, and an answer no later than before.

    A backfilled slice is released where the disk stops. The other release times may stay unchanged. Otherwise the slices read
    after it are released again in their order, as early as there is room. `moving` computes moves for new release times;
    without it the moves do not change.
    """
    best = dict(releases)
    timing = TimingModel(instance, moves)
    clock = timing.clock(best)
    held = held_bytes(instance, best, moves)
    tries = _WORK // max(1, len(instance.weights))
    given_up: set[str] = set()
    while tries > 0:
        order = timing.order(best)
        stall = next((s for s in stalls(instance, order, clock) if order[s.at].name not in given_up), None)
        if stall is None:
            break
        release = bisect_right(clock.done, stall.begin) + 1
        room = (stall.end - stall.begin) * instance.load_bandwidth
        free = limit - int(held[release])
        behind = [
            w for w in order[stall.at + 1 : stall.at + 1 + _LOOKAHEAD]
            if w.name in moves and best[w.name] > release and w.nbytes <= free
        ]  # fmt: skip
        behind.sort(key=lambda w: (w.nbytes > room, w.nbytes if w.nbytes > room else -w.nbytes, w.first_use))
        for w in behind[:_CANDIDATES]:
            tries -= 2
            trials = [_opened_again(instance, order, stall.at, w, release, best, moves, limit, moving)]
            if int(held[release : best[w.name]].max()) + w.nbytes <= limit:
                trials.append(({**best, w.name: release}, moves))
            timed = [(timing.with_moves(trial[1]).seconds(trial[0]), trial) for trial in trials if trial is not None]
            seconds, trial = min(timed, key=lambda each: each[0], default=(clock.seconds, (best, moves)))
            if seconds < clock.seconds * (1 - _GAIN):
                best, moves = trial
                timing = timing.with_moves(moves)
                clock = timing.clock(best)
                held = held_bytes(instance, best, moves)
                break
        else:
            given_up.add(order[stall.at].name)
    return best, moves


def _opened_again(
    instance: Instance,
    order: list[WeightSpec],
    at: int,
    first: WeightSpec,
    release: int,
    releases: Mapping[str, int],
    moves: Moves,
    limit: int,
    moving: Moving | None,
) -> tuple[dict[str, int], Moves] | None:
    """Release times with `first` read before position `at` of the order of reads, at `release`. The slices after it are read as
    early as there is room. None if a weight has no room in time. In `interleave`, weights in their final places do not change.
    """
    rest = [first, *(w for w in order[at:] if w is not first and w.name in moves)]
    found = dict(releases)
    ends = [_waits_until(instance, w, moves) for w in rest]
    waiting = [(releases[w.name], end, w.nbytes) for w, end in zip(rest, ends, strict=True)]
    held = held_bytes(instance, releases, moves) - bytes_in(waiting, len(instance.layers))
    for w, until in zip(rest, ends, strict=True):
        [full] = (held[release:until] > limit - w.nbytes).nonzero()
        release = release + int(full[-1]) + 1 if full.size else release
        if release > (moves[w.name][0][0] if moving is None else w.first_use - 1):
            return None
        held[release:until] += w.nbytes
        found[w.name] = release
    return found, moves if moving is None else moving(found)


def _waits_until(instance: Instance, w: WeightSpec, moves: Moves) -> int:
    """The layer before which a weight is freed: from staging after the last move, from its place after the last use."""
    return (moves[w.name][-1][0] if instance.transfer.by_kernels else w.last_use) + 1
