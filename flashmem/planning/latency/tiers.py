"""Later runs on a device with memory of its own: weights on the device, in pinned host memory, or in the page cache.

A later run moves the weights that the device does not keep. Those in pinned memory (the host tier) are only copied. The others
are read into pinned memory first. Reads and copies are the work of two engines, at two rates, and run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations

from flashmem.planning.arithmetic.clock import Compute, durations, needed_at
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.schedule.host_tier import spread
from flashmem.schedule.instance import Instance, OwnMemory
from flashmem.schedule.plan import OverlapPlan, PlannedWeight


def tiered_seconds(instance: Instance, plan: OverlapPlan, pinned: Collection[str]) -> float:
    """Predicted seconds of a later run, with the weights `pinned` in the host tier and the others in the page cache.

    A load is issued when its place is free, and loads are issued in the order of their need. `plan` says what the device keeps,
    and the bytes in flight. Issuing, reading and copying are each done for one load at a time.

    Raises:
        ValueError: `instance` is of a device that shares the host's memory.
    """
    return _LaterRun(instance, plan).seconds(pinned)


class _LaterRun:
    """The later runs of one plan, for any contents of the host tier."""

    def __init__(self, instance: Instance, plan: OverlapPlan) -> None:
        if instance.own is None:
            raise ValueError("the device shares the host's memory")
        self.own: OwnMemory = instance.own
        self.piece = instance.piece_bytes
        moves = {w.name: w.moves for w in plan.weights if not (w.preload or w.keep)}
        needs = needed_at(instance, moves)
        self.needs = needs
        self.streamed = sorted((w for w in plan.weights if w.name in moves), key=lambda w: (needs[w.name], w.first_use))
        self.durations = durations(instance, moves)
        releases = {w.name: w.read_layer for w in self.streamed}
        if instance.transfer.by_kernels:
            self.opened = [w.read_layer for w in self.streamed]
        else:
            self.opened = _opened(
                self.streamed, int(held_bytes(instance, releases, moves).max(initial=0)), len(instance.layers)
            )

    def pinned(self, room: int) -> frozenset[str]:
        """The weights to keep within `room` bytes of pinned memory."""
        nbytes = {w.name: w.nbytes for w in self.streamed}
        if sum(nbytes.values()) <= room:
            return frozenset(nbytes)
        if len(self.streamed) <= EXACT:
            found = [names for names in subsets(list(nbytes)) if sum(map(nbytes.__getitem__, names)) <= room]
        else:
            spaced = [self.streamed[at] for at in spread([w.nbytes for w in self.streamed], room)]
            largest = sorted(self.streamed, key=lambda w: -w.nbytes)
            found = [_take_in_order(order, room) for order in (spaced, self.streamed, self.streamed[::-1], largest)]
        return min(found, key=lambda names: (round(self.seconds(names), 9), -sum(map(nbytes.__getitem__, names))))

    def seconds(self, pinned: Collection[str]) -> float:
        own = self.own
        compute = Compute(self.durations, 0.0)
        issued = read = copied = 0.0
        for w, release in zip(self.streamed, self.opened, strict=True):
            issued = max(issued, compute.until(release - 1)) + own.load_seconds
            whole = w.nbytes / own.copy_bandwidth
            if w.name in pinned:
                copied = max(copied, issued) + whole
            else:
                read = max(read, issued) + w.nbytes / own.read_bandwidth
                copied = max(max(copied, issued) + whole, read + min(w.nbytes, self.piece) / own.copy_bandwidth)
            need = self.needs[w.name]
            compute.ready[need] = max(compute.ready[need], copied)
        return compute.until(len(self.durations))


def _take_in_order(order: Sequence[PlannedWeight], room: int) -> frozenset[str]:
    """The weights that fit `room` bytes, taken in `order`."""
    chosen = set[str]()
    for w in order:
        if w.nbytes <= room:
            chosen.add(w.name)
            room -= w.nbytes
    return frozenset(chosen)


def _opened(streamed: Sequence[PlannedWeight], limit: int, layers: int) -> list[int]:
    """By weight, in the order of need, the first layer at which it fits `limit` bytes beside those before it."""
    freed = [0] * (layers + 1)
    layer = 1
    held = 0
    opened = []
    for w in streamed:
        while held + w.nbytes > limit and layer < w.first_use:
            held -= freed[layer]
            layer += 1
        opened.append(layer)
        held += w.nbytes
        freed[w.last_use] += w.nbytes
    return opened


def expected_seconds(instance: Instance, plan: OverlapPlan) -> float:
    """Predicted seconds of a later run with the host tier that serves it best (`pinned_weights`).

    Where no host budget is known, the geometric mean of a run without a tier, and of one with all that it loads in the tier:
    both count alike.
    """
    run = _LaterRun(instance, plan)
    if run.own.host_bytes is not None:
        return run.seconds(run.pinned(run.own.host_bytes))
    return math.sqrt(run.seconds(()) * run.seconds({w.name for w in run.streamed}))


def pinned_weights(instance: Instance, plan: OverlapPlan) -> frozenset[str]:
    """The streamed weights of `plan` to keep in pinned host memory, within the bytes that `instance` has for them.

    Those with which a later run is the fastest: of up to `EXACT` weights of every choice, otherwise of several orders.
    """
    run = _LaterRun(instance, plan)
    return frozenset() if run.own.host_bytes is None else run.pinned(run.own.host_bytes)


def with_pinned(instance: Instance, plan: OverlapPlan) -> OverlapPlan:
    """`plan` with its `pinned_weights` named, on a device with memory of its own."""
    if instance.own is None:
        return plan
    chosen = pinned_weights(instance, plan)
    return replace(plan, weights=tuple(replace(w, pinned=w.name in chosen) for w in plan.weights))


EXACT = 6
"""The most streamed weights of which every choice is tried."""


def least_expected_seconds(instance: Instance, room: int) -> float:
    """A lower bound of `expected_seconds` for every plan of `instance` that has at most `room` bytes of weights on the device.

    What does not fit is issued, read and copied in each run. The fewest loads are those of the largest weights.
    """
    assert instance.own is not None
    own = instance.own
    sizes = sorted((w.nbytes for w in instance.weights), reverse=True)
    rest = max(0, sum(sizes) - room)
    loads = next((count for count, nbytes in enumerate(accumulate(sizes, initial=0)) if nbytes >= rest), len(sizes))
    compute = sum(layer.seconds for layer in instance.layers)
    tier = max(compute, loads * own.load_seconds, rest / own.copy_bandwidth)
    if own.host_bytes is not None:
        return max(tier, (rest - own.host_bytes) / own.read_bandwidth)
    return math.sqrt(tier * max(tier, rest / own.read_bandwidth))


def subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    """Every set of `names`."""
    for size in range(len(names) + 1):
        yield from map(frozenset, combinations(names, size))
