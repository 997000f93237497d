"""The planner's clock: predicted integrated latency of a plan.

Three resources. The disk reads weights one after the other at `Problem.load_bandwidth`, from the moment the session is opened;
the read of w begins once layer g_w - 1 is done. The host hands on what was read at `Problem.host_bandwidth`, once the session
is open. One compute queue runs the layers in order, each once every weight that it uses (or, in mode `interleave`, is the first
to move) is there; layer l takes t_l * s_l(b_l), b_l being the bytes that the plan moves beside it.
"""

from __future__ import annotations

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


class Compute:
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
    """The clock of a plan: `gates` is g_w of every weight. Without `moves` nothing slows a layer down.

    Weights are read in the order (g_w, first use), each as soon as its gate allows; gate 0 (of W) is as gate 1.
    """
    compute = Compute(problem, durations(problem, moves) if moves is not None else None)
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
