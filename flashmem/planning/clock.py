"""The planner's clock: predicted integrated latency of a plan.

Three resources. The disk reads weights one after the other at `Problem.load_bandwidth`, from the moment the session is opened;
the read of w begins once layer g_w - 1 is done. The host hands on what was read at `Problem.host_bandwidth`, once the session
is open. One compute queue runs the layers in order, each once every weight that it uses (or, in mode `interleave`, is the first
to move) is there; layer l takes t_l * s_l(b_l), b_l being the bytes that the plan moves beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flashmem.planning.problem import Problem

Moves = Mapping[str, tuple[tuple[int, int], ...]]
"""x_{w,l}: by weight, (layer, chunks) in ascending order."""


@dataclass(frozen=True)
class Clock:
    """Seconds since the session was opened: `loaded` by weight, `started` and `done` by layer (index l - 1).

    `read` is when the disk begins to read each weight.
    """

    loaded: dict[str, float]
    started: tuple[float, ...]
    done: tuple[float, ...]
    read: dict[str, float]

    @property
    def seconds(self) -> float:
        """Integrated latency: when the last layer is done."""
        return self.done[-1] if self.done else 0.0


class _Compute:
    """The compute queue, advanced as far as someone asks."""

    def __init__(self, problem: Problem, durations: Sequence[float] | None = None) -> None:
        self.durations = durations or [layer.seconds for layer in problem.layers]
        self.ready = [0.0] * (len(self.durations) + 1)  # when the weights first needed by a layer are all resident
        self.started: list[float] = []
        self.done = [problem.opening_seconds]

    def until(self, layer: int) -> float:
        """When `layer` is done; everything it needs must have been loaded before this is asked."""
        while len(self.done) <= layer:
            at = len(self.done)
            self.started.append(max(self.done[-1], self.ready[at]))
            self.done.append(self.started[-1] + self.durations[at - 1])
        return self.done[layer]


def durations(problem: Problem, moves: Moves) -> list[float]:
    """t_l * s_l(b_l) of every layer, with what `moves` has beside it."""
    beside = [0] * len(problem.layers)
    uses = {w.name: w.first_use for w in problem.weights}
    for name, parts in moves.items():
        for layer, chunks in parts:
            if layer < uses[name]:
                beside[layer - 1] += chunks
    return [spec.loaded_seconds(chunks * problem.chunk_bytes) for spec, chunks in zip(problem.layers, beside, strict=True)]


def needed_at(problem: Problem, moves: Moves | None) -> dict[str, int]:
    """The layer that waits for each weight to be read: the first that uses it or, in `interleave`, that moves it."""
    if moves is None or problem.mode != "interleave":
        return {w.name: w.first_use for w in problem.weights}
    return {w.name: moves[w.name][0][0] if moves.get(w.name) else w.first_use for w in problem.weights}


def play(problem: Problem, gates: Mapping[str, int], moves: Moves | None = None) -> Clock:
    """The clock of a plan: `gates` is g_w of every weight, 0 for those of W. Without `moves` nothing slows a layer down.

    Weights are read in the order (g_w, first use), each as soon as its gate allows; those of W as from layer 1 on.
    """
    compute = _Compute(problem, durations(problem, moves) if moves is not None else None)
    needs = needed_at(problem, moves)
    loaded: dict[str, float] = {}
    read: dict[str, float] = {}
    disk, host = 0.0, problem.opening_seconds
    for w in sorted(problem.weights, key=lambda w: (max(gates[w.name], 1), needs[w.name], w.first_use)):
        gate = gates[w.name]
        opens = compute.until(gate - 1) if gate > 1 else 0.0
        read[w.name] = max(disk, opens)
        disk = read[w.name] + w.nbytes / problem.load_bandwidth
        last_piece = min(w.nbytes, problem.piece_bytes) / problem.host_bandwidth
        host = max(max(host, opens) + w.nbytes / problem.host_bandwidth, disk + last_piece)
        loaded[w.name] = host
        at = needs[w.name]
        if problem.layers:
            compute.ready[at] = max(compute.ready[at], host)
    compute.until(len(problem.layers))
    return Clock(loaded, tuple(compute.started), tuple(compute.done[1:]), read)


def unlimited_seconds(problem: Problem, preload: Collection[str]) -> float:
    """Integrated latency with W = `preload` and no memory limit: every other weight may be loaded from the start."""
    return play(problem, {w.name: 0 if w.name in preload else 1 for w in problem.weights}).seconds


def fastest_seconds(problem: Problem, preload: Collection[str]) -> float:
    """A proven lower bound on the integrated latency of every plan that preloads `preload` and keeps to M_peak.

    Whatever the order and the slicing of the loads, the bytes brought in never exceed M_peak plus what the finished layers
    freed, and layer l cannot start before all bytes first used by layers 1..l are in. This plays exactly that: a fluid of
    bytes in use order; and no plan is faster than the layers with all that is moved beside them where that costs least. M_peak
    must be at least `smallest_m_peak`.
    """
    compute = _Compute(problem)
    rate = problem.load_bandwidth
    loader = 0.0
    freed = [0] * (len(problem.layers) + 2)  # by layer that frees
    for w in problem.weights:
        if w.name not in preload:
            freed[w.last_use] += w.nbytes
    room, layer = problem.m_peak, 0  # bytes that may still come in; layers known to be done
    for w in sorted(problem.weights, key=lambda w: w.first_use):
        left = w.nbytes
        if w.name in preload:
            loader += left / rate
            left = 0
        while left:
            part = min(left, room)
            if part:
                loader += part / rate
                left -= part
                room -= part
            if left:
                layer += 1
                loader = max(loader, compute.until(layer))
                room += freed[layer]
        if problem.layers:
            compute.ready[w.first_use] = max(compute.ready[w.first_use], loader)
    fluid = compute.until(len(problem.layers))
    moved = sum(w.nbytes for w in problem.weights if w.name not in preload)
    alone = problem.opening_seconds + sum(layer.seconds for layer in problem.layers)
    return max(fluid, alone + least_slowdown(problem, moved))


def least_slowdown(problem: Problem, nbytes: int) -> float:
    """A bound on the seconds that `nbytes` moved beside any layers cost: each where it costs least, on curves made convex."""
    curves = Counter((layer.seconds, layer.beside) for layer in problem.layers if layer.beside)
    if sum(curves.values()) < len(problem.layers):
        return 0.0  # a layer that nothing slows down takes everything
    pieces: list[tuple[float, float]] = []  # (seconds per byte, bytes)
    for (seconds, beside), count in curves.items():
        at = 0
        while at < len(beside) - 1:
            slopes = [
                ((factor - beside[at][1]) / (reach - beside[at][0]), nth)
                for nth, (reach, factor) in enumerate(beside[at + 1 :], start=at + 1)
            ]
            slope, after = min(slopes, key=lambda each: (each[0], -each[1]))
            length = beside[after][0] - beside[at][0] if after < len(beside) - 1 else math.inf
            pieces.append((seconds * slope, count * length))
            at = after
    cost, left = 0.0, float(nbytes)
    for price, length in sorted(pieces):
        taken = min(left, length)
        cost += price * taken
        left -= taken
        if left <= 0:
            break
    return cost
