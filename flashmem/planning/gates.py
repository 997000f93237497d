"""Read gates g_w: which layer's start opens the read of each weight, so that reads run ahead of what waits for them.

`earliest_gates` opens reads as early as memory permits, in use order, before moves are known. `gates_ahead` does the same for
moves that are already decided. `closed_late` then closes gates again where the clock says that nobody would notice: the same
answer with less in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from flashmem.planning.clock import Clock, Moves, needed_at
from flashmem.planning.problem import Problem

MARGIN = 1.25
"""How many times as long as predicted a read may take before a gate that was closed late would be noticed."""

LEAD_BYTES = 16 << 20
"""What is to be waiting for the disk before a weight: as much as Linux lets wait (docs/simulation.md)."""

_SCAN = 256
"""Layers looked at in one step when a gate is moved to the front."""


def held_bytes(problem: Problem, gates: Mapping[str, int], moves: Moves, keep: Collection[str] = ()) -> NDArray[np.int64]:
    """Bytes that C2 counts at each layer, index l (0 and N + 1 are unused): see docs/planner.md.

    Weights with gate 0 are of W and do not count.
    """
    layers = len(problem.layers)
    change = np.zeros(layers + 3, np.int64)
    for w in problem.weights:
        gate = gates[w.name]
        if not gate:
            continue
        home = gate
        if problem.mode == "interleave":
            home = moves[w.name][0][0]
            change[gate] += w.nbytes
            change[moves[w.name][-1][0] + 1] -= w.nbytes
        change[1 if w.name in keep else home] += w.nbytes
        change[(layers if w.name in keep else w.last_use) + 1] -= w.nbytes
    held: NDArray[np.int64] = np.cumsum(change)
    return held


def earliest_gates(problem: Problem, preload: Collection[str], limit: int) -> dict[str, int]:
    """g_w of every weight (0 for W): in use order, each as early as whole slices from g_w to the last use fit `limit` bytes.

    `limit` must be at least what the uses themselves need (`latency.least_in_use`).
    """
    gates = {w.name: 0 for w in problem.weights if w.name in preload}
    freed = [0] * (len(problem.layers) + 1)
    layer, resident = 1, 0  # bytes of the weights placed so far whose last use is at `layer` or later
    for w in sorted((w for w in problem.weights if w.name not in preload), key=lambda w: w.first_use):
        while resident + w.nbytes > limit:
            resident -= freed[layer]
            layer += 1
        gates[w.name] = layer
        resident += w.nbytes
        freed[w.last_use] += w.nbytes
    return gates


def gates_ahead(
    problem: Problem, preload: Collection[str], moves: Moves, limit: int, *, staging: bool = False
) -> dict[str, int]:
    """g_w of every weight (0 for W) for moves that are decided: in the order of z_w, each as early as `limit` bytes permit.

    They limit what C2 counts; with `staging` (mode `interleave`) only what waits to be moved. Without room to read ahead,
    g_w = z_w.
    """
    gates = {w.name: 0 if w.name in preload else moves[w.name][0][0] for w in problem.weights}
    held = staged_bytes(problem, moves) if staging else held_bytes(problem, gates, moves)
    earliest = 1
    for w in sorted((w for w in problem.weights if w.name not in preload), key=lambda w: (gates[w.name], w.first_use)):
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


def staged_bytes(problem: Problem, moves: Moves) -> NDArray[np.int64]:
    """Bytes that are in staging at each layer, index l, if every read gate is at the first move (mode `interleave`)."""
    change = np.zeros(len(problem.layers) + 3, np.int64)
    for w in problem.weights:
        if parts := moves.get(w.name):
            change[parts[0][0]] += w.nbytes
            change[parts[-1][0] + 1] -= w.nbytes
    staged: NDArray[np.int64] = np.cumsum(change)
    return staged


def closed_late(
    problem: Problem, gates: Mapping[str, int], moves: Moves, clock: Clock, margin: float = MARGIN, *, queued: bool = True
) -> dict[str, int]:
    """`gates`, each as late as every layer of `clock` still starts in time if reads take `margin` times as long as predicted.

    Where layers wait for the disk none starts in time then. `queued`: a gate need not be open sooner than `margin` times what
    it takes to read the weight, and `LEAD_BYTES` before it, ahead of when the disk comes to it, which is busy until then. No
    gate becomes earlier, and none passes z_w.
    """
    needs = needed_at(problem, moves)
    later = dict(gates)
    rate = 1 / problem.load_bandwidth + 1 / problem.host_bandwidth
    begin = clock.done[-1] if clock.done else 0.0
    streamed = [w for w in problem.weights if gates[w.name]]
    done = (problem.opening_seconds, *clock.done)  # index l: when layer l is done
    bound = len(problem.layers)
    for w in sorted(streamed, key=lambda w: (gates[w.name], needs[w.name], w.first_use), reverse=True):
        due = min(begin, clock.started[needs[w.name] - 1])
        begin = due - margin * w.nbytes * rate
        if queued:
            begin = max(begin, clock.read[w.name] - margin * (w.nbytes + LEAD_BYTES) * rate)
        # The last layer whose end is no later than that opens the gate of the one behind it.
        opened = bisect_right(done, begin)
        later[w.name] = bound = min(bound, moves[w.name][0][0], max(gates[w.name], opened))
    return later
