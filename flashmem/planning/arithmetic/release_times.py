"""Read gates g_w: which layer's start opens the read of each weight, so that reads run ahead of what waits for them.

`earliest_gates` opens reads as early as memory permits, in use order, before moves are known. `gates_ahead` does the same for
moves that are already decided. `settled` then lets the weights of W be read in turn with the others (`in_turn`), and closes
gates again where the clock says that nobody would notice (`closed_late`): the same answer with less in memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from flashmem.planning.arithmetic.clock import Clock, Moves, Timing
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import LOADER_THREADS

MARGIN = 1.25
"""How many times as long as predicted a read may take before a gate that was closed late would be noticed."""

LEAD_BYTES = 16 << 20
"""What is to be waiting for the disk before a weight: as much as Linux lets wait (docs/simulation.md)."""

_SCAN = 256
"""Layers looked at in one step when a gate is moved to the front."""


def held_bytes(instance: Instance, gates: Mapping[str, int], moves: Moves, keep: Collection[str] = ()) -> NDArray[np.int64]:
    """Bytes that C2 counts at each layer, index l (0 and N + 1 are unused): see docs/planner.md.

    Weights without moves are of W and do not count.
    """
    layers = len(instance.layers)
    change = np.zeros(layers + 3, np.int64)
    for w in instance.weights:
        if w.name not in moves:
            continue
        home = gate = gates[w.name]
        if instance.mode == "interleave":
            home = moves[w.name][0][0]
            change[gate] += w.nbytes
            change[moves[w.name][-1][0] + 1] -= w.nbytes
        change[1 if w.name in keep else home] += w.nbytes
        change[(layers if w.name in keep else w.last_use) + 1] -= w.nbytes
    held: NDArray[np.int64] = np.cumsum(change)
    return held


def earliest_gates(instance: Instance, preload: Collection[str], limit: int) -> dict[str, int]:
    """g_w of every weight (0 for W): in use order, each as early as whole slices from g_w to the last use fit `limit` bytes.

    `limit` must be at least what the uses themselves need (`latency.least_in_use`).
    """
    gates = {w.name: 0 for w in instance.weights if w.name in preload}
    freed = [0] * (len(instance.layers) + 1)
    layer, resident = 1, 0  # bytes of the weights placed so far whose last use is at `layer` or later
    for w in sorted((w for w in instance.weights if w.name not in preload), key=lambda w: w.first_use):
        while resident + w.nbytes > limit:
            resident -= freed[layer]
            layer += 1
        gates[w.name] = layer
        resident += w.nbytes
        freed[w.last_use] += w.nbytes
    return gates


def gates_ahead(
    instance: Instance, preload: Collection[str], moves: Moves, limit: int, *, staging: bool = False
) -> dict[str, int]:
    """g_w of every weight (0 for W) for moves that are decided: in the order of z_w, each as early as `limit` bytes permit.

    They limit what C2 counts; with `staging` (mode `interleave`) only what waits to be moved. Without room to read ahead,
    g_w = z_w.
    """
    gates = {w.name: 0 if w.name in preload else moves[w.name][0][0] for w in instance.weights}
    held = staged_bytes(instance, moves) if staging else held_bytes(instance, gates, moves)
    earliest = 1
    for w in sorted((w for w in instance.weights if w.name not in preload), key=lambda w: (gates[w.name], w.first_use)):
        gate = gates[w.name]
        while gate > earliest:
            low = max(earliest, gate - _SCAN)
            full = np.flatnonzero(held[low:gate] + w.nbytes > limit)
            opened = low + int(full[-1]) + 1 if full.size else low
            held[opened:gate] += w.nbytes
            gate = opened
            if full.size:
                break
        gates[w.name] = earliest = gate
    return gates


def staged_bytes(instance: Instance, moves: Moves) -> NDArray[np.int64]:
    """Bytes that are in staging at each layer, index l, if every read gate is at the first move (mode `interleave`)."""
    change = np.zeros(len(instance.layers) + 3, np.int64)
    for w in instance.weights:
        if parts := moves.get(w.name):
            change[parts[0][0]] += w.nbytes
            change[parts[-1][0] + 1] -= w.nbytes
    staged: NDArray[np.int64] = np.cumsum(change)
    return staged


def settled(timing: Timing, preload: Collection[str], gates: Mapping[str, int]) -> tuple[dict[str, int], Clock]:
    """Gates of a plan, with those of W, from the earliest `gates` of its streamed weights; and the clock that they give."""
    gates = in_turn(timing, preload, gates)
    clock = timing.play(gates)
    late = in_turn(timing, preload, closed_late(timing, gates, clock))
    closed = timing.play(late)
    return (late, closed) if closed.seconds <= clock.seconds * (1 + _NOTICED) else (dict(gates), clock)


_NOTICED = 1e-9
"""A share of the latency that closing gates late may cost: rounding."""


def closed_late(timing: Timing, gates: Mapping[str, int], clock: Clock, margin: float = MARGIN) -> dict[str, int]:
    """`gates`, each as late as every layer still starts in time if reads take `margin` times as long as predicted.

    In time is when `clock` says, and what the clock says of a file in the page cache, where layers are less far apart. A loader
    thread is never without an open gate while a layer waits. Where layers wait for the disk, a gate need not be open much
    sooner than the disk comes to it. No gate becomes earlier, none passes z_w, and those of W stay.
    """
    instance = timing.instance
    handing = 1 / instance.host_bandwidth
    closed = _closed_late(timing, gates, clock, margin * (1 / instance.load_bandwidth + handing))
    if instance.host_bandwidth == math.inf:
        return closed
    also = _closed_late(timing, gates, timing.play(gates, in_cache=True), margin * handing)
    return {name: min(gate, also[name]) for name, gate in closed.items()}


def _closed_late(timing: Timing, gates: Mapping[str, int], clock: Clock, seconds_per_byte: float) -> dict[str, int]:
    needs, moves = timing.needs, timing.moves
    later = dict(gates)
    begin = clock.done[-1] if clock.done else 0.0
    done = (timing.instance.opening_seconds, *clock.done)  # index l: when layer l is done
    bound = len(timing.durations)
    order = [w for w in timing.order(gates) if w.name in moves]
    for nth in range(len(order) - 1, -1, -1):
        w = order[nth]
        due = min(begin, clock.started[needs[w.name] - 1])
        begin = max(due - w.nbytes * seconds_per_byte, clock.read[w.name] - (w.nbytes + LEAD_BYTES) * seconds_per_byte)
        # The last layer whose end is no later than that opens the gate of the one behind it.
        opened = bisect_right(done, begin)
        if nth > LOADER_THREADS:
            opened = min(opened, needs[order[nth - LOADER_THREADS - 1].name])
        later[w.name] = bound = min(bound, moves[w.name][0][0], max(gates[w.name], opened))
    return later


def in_turn(timing: Timing, preload: Collection[str], gates: Mapping[str, int]) -> dict[str, int]:
    """`gates` with those of W, which is read in turn with the streamed weights instead of before them: 0 or a layer.

    Whenever the disk is free, it reads of the weights whose gates are open the one that is needed first; memory says nothing
    about W, whose places are its own. Of that order for a file on disk, the one for a file in the page cache, and W before
    everything, the one is taken that answers first in both cases together.
    """
    instance = timing.instance
    first = {**gates, **dict.fromkeys(preload, 0)}
    resident = [w for w in instance.weights if w.name in preload and w.first_use > 1]
    if not resident or not timing.moves:
        return first
    handing = 1 / instance.host_bandwidth
    orders = [first, _in_turn(timing, resident, first, max(1 / instance.load_bandwidth, handing))]
    if instance.host_bandwidth < math.inf:
        orders.append(_in_turn(timing, resident, first, handing))
    return min(orders, key=lambda order: timing.seconds(order) + timing.seconds(order, in_cache=True))


def _in_turn(timing: Timing, resident: list[WeightSpec], gates: Mapping[str, int], seconds_per_byte: float) -> dict[str, int]:
    needs, compute = timing.needs, timing.compute()
    streamed = [w for w in timing.order(gates) if w.name in timing.moves]
    waiting = sorted(resident, key=lambda w: w.first_use)
    found = dict(gates)
    now, gate, at = 0.0, 1, 0
    for w in timing.instance.weights:  # of W, what layer 1 uses
        if w.first_use == 1:
            now += w.nbytes * seconds_per_byte
    for w in streamed:
        while at < len(waiting):
            other = waiting[at]
            if gates[w.name] <= other.first_use:  # else the gate waits for it
                opens = compute.until(gates[w.name] - 1) if gates[w.name] > 1 else 0.0
                if opens <= now and needs[w.name] <= other.first_use:
                    break
                if opens > now and opens - now < other.nbytes * seconds_per_byte / 2 and needs[w.name] <= other.first_use:
                    break  # it is opened while the other one would be read
            now += other.nbytes * seconds_per_byte
            compute.ready[other.first_use] = max(compute.ready[other.first_use], now)
            found[other.name] = gate
            at += 1
        gate = max(gate, gates[w.name])
        opens = compute.until(gates[w.name] - 1) if gates[w.name] > 1 else 0.0
        now = max(now, opens) + w.nbytes * seconds_per_byte
        need = needs[w.name]
        compute.ready[need] = max(compute.ready[need], now)
    for other in waiting[at:]:
        found[other.name] = min(gate, other.first_use)
    return found
