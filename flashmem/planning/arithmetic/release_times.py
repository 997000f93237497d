"""Release times g_w: the layer at whose start the read of a weight may begin, so that reads precede their use.

`earliest_releases` releases reads as early as memory permits, in order of use, before moves are known. `releases_ahead` does
the same for given moves. `final_releases` then interleaves the reads of the resident set with the others (`in_turn`). It delays
release times if the predicted latency does not change (`released_late`): the same answer with less memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from flashmem.planning.arithmetic.clock import Clock, Moves, TimingModel
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import LOADER_THREADS

MARGIN = 1.25
"""How much longer than predicted (a factor) a read may take before a late release time delays a layer."""

LEAD_BYTES = 16 << 20
"""Bytes that should be queued at the disk ahead of a weight: as much as Linux queues (docs/explanation/simulation.md)."""

_SCAN = 256
"""Layers examined in one step when a release time is moved earlier."""


def held_bytes(instance: Instance, releases: Mapping[str, int], moves: Moves, keep: Collection[str] = ()) -> NDArray[np.int64]:
    """Bytes that C2 counts at each layer, index l (0 and N + 1 are unused): see docs/reference/internals/planner.md.

    Weights without moves are in W and do not count.
    """
    layers = len(instance.layers)
    by_kernels = instance.transfer.by_kernels
    spans: list[Span] = []
    for w in instance.weights:
        if w.name not in moves:
            continue
        home = release = releases[w.name]
        if by_kernels:
            home = moves[w.name][0][0]
            spans.append((release, moves[w.name][-1][0] + 1, w.nbytes))
        kept = w.name in keep
        spans.append((1 if kept else home, (layers if kept else w.last_use) + 1, w.nbytes))
    return bytes_in(spans, layers)


Span = tuple[int, int, int]
"""Bytes in memory: the layer from which on, the layer from which on no more, and how many."""


def bytes_in(spans: Iterable[Span], layers: int) -> NDArray[np.int64]:
    """The bytes of `spans` at each of `layers` layers, index l (0 and the two behind the last layer are unused)."""
    change = [0] * (layers + 3)
    for first, end, nbytes in spans:
        change[first] += nbytes
        change[end] -= nbytes
    held: NDArray[np.int64] = np.cumsum(np.array(change, np.int64))
    return held


def earliest_releases(instance: Instance, preload: Collection[str], limit: int) -> dict[str, int]:
    """g_w of every weight (0 for W), in order of use. Each is as early as whole slices, from g_w to the last use, fit `limit`.

    `limit` must be at least the bytes that the uses themselves need (`latency.least_in_use`).
    """
    releases = {w.name: 0 for w in instance.weights if w.name in preload}
    freed = [0] * (len(instance.layers) + 1)
    layer = 1
    resident = 0  # bytes of the weights placed so far with their last use at `layer` or later
    for w in sorted((w for w in instance.weights if w.name not in preload), key=lambda w: w.first_use):
        while resident + w.nbytes > limit:
            resident -= freed[layer]
            layer += 1
        releases[w.name] = layer
        resident += w.nbytes
        freed[w.last_use] += w.nbytes
    return releases


def releases_ahead(
    instance: Instance, preload: Collection[str], moves: Moves, limit: int, *, staging: bool = False
) -> dict[str, int]:
    """Release times g_w (0 for W) for given moves, as early as `limit` bytes permit, assigned in the order of z_w.

    The limit covers the bytes that C2 counts; with `staging` (mode `interleave`), only the bytes that wait to be moved. If no
    room remains for early reads, g_w = z_w.
    """
    releases = {w.name: 0 if w.name in preload else moves[w.name][0][0] for w in instance.weights}
    held = staged_bytes(instance, moves) if staging else held_bytes(instance, releases, moves)
    earliest = 1
    for w in sorted((w for w in instance.weights if w.name not in preload), key=lambda w: (releases[w.name], w.first_use)):
        release = releases[w.name]
        while release > earliest:
            low = max(earliest, release - _SCAN)
            full = np.flatnonzero(held[low:release] + w.nbytes > limit)
            opened = low + int(full[-1]) + 1 if full.size else low
            held[opened:release] += w.nbytes
            release = opened
            if full.size:
                break
        releases[w.name] = earliest = release
    return releases


def staged_bytes(instance: Instance, moves: Moves) -> NDArray[np.int64]:
    """Bytes in staging at each layer, index l, with every release time at the first move (mode `interleave`)."""
    spans = [(parts[0][0], parts[-1][0] + 1, w.nbytes) for w in instance.weights if (parts := moves.get(w.name))]
    return bytes_in(spans, len(instance.layers))


def final_releases(timing: TimingModel, preload: Collection[str], releases: Mapping[str, int]) -> tuple[dict[str, int], Clock]:
    """Final release times, also for the resident set, from the earliest `releases` of streamed weights; and their clock."""
    releases = in_turn(timing, preload, releases)
    clock = timing.clock(releases)
    late = in_turn(timing, preload, released_late(timing, releases, clock))
    closed = timing.clock(late)
    return (late, closed) if closed.seconds <= clock.seconds * (1 + _NOTICED) else (dict(releases), clock)


_NOTICED = 1e-9
"""A share of the latency that late release times may add, to allow for rounding."""


def released_late(timing: TimingModel, releases: Mapping[str, int], clock: Clock, margin: float = MARGIN) -> dict[str, int]:
    """Delay `releases` as far as every layer still starts in time, with reads `margin` times as long as predicted.

    A layer is in time if it starts as in `clock`, and as in the clock for a file in the page cache. In the latter, layers
    follow each other more closely. A loader thread always has a released load while a layer waits. If layers wait for the disk,
    a load need not be released much sooner than the disk reaches it. No release time becomes earlier, none exceeds z_w, and
    those of the resident set do not change.
    """
    instance = timing.instance
    handing = 1 / instance.host_bandwidth
    closed = _released_late(timing, releases, clock, margin * (1 / instance.load_bandwidth + handing))
    if instance.host_bandwidth == math.inf:
        return closed
    also = _released_late(timing, releases, timing.clock(releases, in_cache=True), margin * handing)
    return {name: min(release, also[name]) for name, release in closed.items()}


def _released_late(timing: TimingModel, releases: Mapping[str, int], clock: Clock, seconds_per_byte: float) -> dict[str, int]:
    needs = timing.needs
    moves = timing.moves
    later = dict(releases)
    begin = clock.done[-1] if clock.done else 0.0
    done = (timing.instance.opening_seconds, *clock.done)  # index l: the end of layer l
    bound = len(timing.durations)
    order = [w for w in timing.order(releases) if w.name in moves]
    for nth in range(len(order) - 1, -1, -1):
        w = order[nth]
        due = min(begin, clock.started[needs[w.name] - 1])
        begin = max(due - w.nbytes * seconds_per_byte, clock.read[w.name] - (w.nbytes + LEAD_BYTES) * seconds_per_byte)
        # The last layer that ends by then releases the load at the start of the next one.
        opened = bisect_right(done, begin)
        if nth > LOADER_THREADS:
            opened = min(opened, needs[order[nth - LOADER_THREADS - 1].name])
        later[w.name] = bound = min(bound, moves[w.name][0][0], max(releases[w.name], opened))
    return later


def in_turn(timing: TimingModel, preload: Collection[str], releases: Mapping[str, int]) -> dict[str, int]:
    """`releases` with those of the resident set (0 or a layer), so that its reads alternate with those of streamed weights.

    Whenever the disk is free, it reads the released weight that is needed first. Memory limits no resident weight: each has a
    separate place. Three orders compete: this one for a file on disk, this one for a file in the page cache, and W before
    everything. The order with the least sum of latencies, on disk and in the page cache, is returned.
    """
    instance = timing.instance
    first = {**releases, **dict.fromkeys(preload, 0)}
    resident = [w for w in instance.weights if w.name in preload and w.first_use > 1]
    if not resident or not timing.moves:
        return first
    handing = 1 / instance.host_bandwidth
    orders = [first, _in_turn(timing, resident, first, max(1 / instance.load_bandwidth, handing))]
    if instance.host_bandwidth < math.inf:
        orders.append(_in_turn(timing, resident, first, handing))
    return min(orders, key=lambda order: timing.seconds(order) + timing.seconds(order, in_cache=True))


def _in_turn(
    timing: TimingModel, resident: list[WeightSpec], releases: Mapping[str, int], seconds_per_byte: float
) -> dict[str, int]:
    needs = timing.needs
    compute = timing.compute()
    streamed = [w for w in timing.order(releases) if w.name in timing.moves]
    waiting = sorted(resident, key=lambda w: w.first_use)
    found = dict(releases)
    now = 0.0
    release = 1
    at = 0
    for w in timing.instance.weights:  # the weights of W that layer 1 uses
        if w.first_use == 1:
            now += w.nbytes * seconds_per_byte
    for w in streamed:
        while at < len(waiting):
            other = waiting[at]
            if releases[w.name] <= other.first_use:  # otherwise the release time waits for the resident weight
                opens = compute.until(releases[w.name] - 1) if releases[w.name] > 1 else 0.0
                if opens <= now and needs[w.name] <= other.first_use:
                    break
                if opens > now and opens - now < other.nbytes * seconds_per_byte / 2 and needs[w.name] <= other.first_use:
                    break  # it is released while the other weight would be read
            now += other.nbytes * seconds_per_byte
            compute.ready[other.first_use] = max(compute.ready[other.first_use], now)
            found[other.name] = release
            at += 1
        release = max(release, releases[w.name])
        opens = compute.until(releases[w.name] - 1) if releases[w.name] > 1 else 0.0
        now = max(now, opens) + w.nbytes * seconds_per_byte
        need = needs[w.name]
        compute.ready[need] = max(compute.ready[need], now)
    for other in waiting[at:]:
        found[other.name] = min(release, other.first_use)
    return found
