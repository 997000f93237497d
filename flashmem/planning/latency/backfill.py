"""Reads out of turn: while the disk waits for memory, it reads a slice of a later layer that fits (docs/planner.md).

In use order the disk stands still until the next slice fits as a whole. What is left of M_peak until then often holds a smaller
slice that is needed later. Such slices are released earlier, one at a time, where the clock says that the answer comes sooner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from flashmem.planning.arithmetic.clock import Clock, Moves, Timing, play
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.schedule.instance import Instance, WeightSpec

_WORK = 20_000
"""Weights that the clock looks at in all: so many tries times the weights of the plan."""

_LOOKAHEAD, _CANDIDATES = 64, 4
"""Weights behind a stall among which those that fit are looked for, and how many are tried."""

_GAIN = 1e-7
"""A share of the latency below which a gain is rounding."""


@dataclass(frozen=True)
class Stall:
    """The disk, free at `begin`, waits for the release time of the weight at place `at` of the order of reads, until `end`."""

    at: int
    begin: float
    end: float


def stalls(instance: Instance, order: list[WeightSpec], clock: Clock) -> list[Stall]:
    """Where the disk waits for memory, in the order of time."""
    found, free = [], 0.0
    for at, w in enumerate(order):
        begin = clock.read[w.name]
        if begin > free:
            found.append(Stall(at, free, begin))
        free = begin + w.nbytes / instance.load_bandwidth
    return found


Moving = Callable[[Mapping[str, int]], Moves]
"""Moves for release times."""


def filled(
    instance: Instance, releases: Mapping[str, int], moves: Moves, limit: int, moving: Moving | None = None
) -> tuple[dict[str, int], Moves]:
    """Release times and moves that never hold more than `limit` bytes, and answer no later than `releases` and `moves`.

    A slice that is read out of turn is released where the disk stops. Either the other release times stay, or all slices to be
    read behind it are released again in their order, as early as there is room. `moving` makes the moves for such release
    times; without it they stay.
    """
    best = dict(releases)
    timing = Timing(instance, moves)
    clock = timing.play(best)
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
            played = [(play(instance, *trial).seconds, trial) for trial in trials if trial is not None]
            seconds, trial = min(played, key=lambda each: each[0], default=(clock.seconds, (best, moves)))
            if seconds < clock.seconds * (1 - _GAIN):
                best, moves = trial
                timing = Timing(instance, moves)
                clock, held = timing.play(best), held_bytes(instance, best, moves)
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
    """`releases` with `first` read before place `at` of the order of reads, at `release`, and what is behind it as early as
    there is room; None if a weight has none in time. What lies at home in `interleave` stays as it is.
    """
    rest = [first, *(w for w in order[at:] if w is not first and w.name in moves)]
    found = dict(releases)
    held = held_bytes(instance, releases, moves)
    for w in rest:
        held[releases[w.name] : _waits_until(instance, w, moves)] -= w.nbytes
    for w in rest:
        until = _waits_until(instance, w, moves)
        full = np.flatnonzero(held[release:until] + w.nbytes > limit)
        release = release + int(full[-1]) + 1 if full.size else release
        if release > (moves[w.name][0][0] if moving is None else w.first_use - 1):
            return None
        held[release:until] += w.nbytes
        found[w.name] = release
    return found, moves if moving is None else moving(found)


def _waits_until(instance: Instance, w: WeightSpec, moves: Moves) -> int:
    """The layer before which a weight is freed: from staging after the last move, from its place after the last use."""
    return (moves[w.name][-1][0] if instance.mode == "interleave" else w.last_use) + 1
