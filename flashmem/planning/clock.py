"""The planner's clock: predicted integrated latency of a plan.

One loader brings weights in one after the other at `Problem.load_bandwidth`; one compute queue runs the layers in order. The
load of w begins once layer z_w - 1 is done, a layer starts once every weight it uses is resident, layer l takes `seconds`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flashmem.planning.problem import Problem, WeightSpec


@dataclass(frozen=True)
class Clock:
    """Seconds since nothing was loaded: `loaded` by weight, `started` and `done` by layer (index l - 1)."""

    loaded: dict[str, float]
    started: tuple[float, ...]
    done: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Integrated latency: when the last layer is done."""
        return self.done[-1] if self.done else 0.0


class _Compute:
    """The compute queue, advanced as far as someone asks."""

    def __init__(self, problem: Problem) -> None:
        self.durations = [layer.seconds for layer in problem.layers]
        self.ready = [0.0] * (len(self.durations) + 1)  # when the weights first used by a layer are all resident
        self.started: list[float] = []
        self.done = [0.0]

    def until(self, layer: int) -> float:
        """When `layer` is done; everything it needs must have been loaded before this is asked."""
        while len(self.done) <= layer:
            at = len(self.done)
            self.started.append(max(self.done[-1], self.ready[at]))
            self.done.append(self.started[-1] + self.durations[at - 1])
        return self.done[layer]


def play(problem: Problem, load_layers: Mapping[str, int]) -> Clock:
    """The clock of a plan: `load_layers` is z_w of every weight, 0 for those of W.

    Weights are loaded in the order (z_w, first use): W before layer 1, then each as soon as its layer allows.
    """
    compute = _Compute(problem)
    loaded: dict[str, float] = {}
    loader = 0.0
    for w in sorted(problem.weights, key=lambda w: (load_layers[w.name], w.first_use)):
        gate = load_layers[w.name]
        begin = max(loader, compute.until(gate - 1)) if gate else loader
        loader = begin + w.nbytes / problem.load_bandwidth
        loaded[w.name] = loader
        needed_at = w.first_use if gate else 1
        if problem.layers:
            compute.ready[needed_at] = max(compute.ready[needed_at], loader)
    compute.until(len(problem.layers))
    return Clock(loaded, tuple(compute.started), tuple(compute.done[1:]))


def unlimited_seconds(problem: Problem, preload: Collection[str]) -> float:
    """Integrated latency with W = `preload` and no memory limit: every other weight may be loaded from the start."""
    return play(problem, {w.name: 0 if w.name in preload else 1 for w in problem.weights}).seconds


def fastest_seconds(problem: Problem, preload: Collection[str]) -> float:
    """A proven lower bound on the integrated latency of every plan that preloads `preload` and keeps to M_peak.

    Whatever the order and the slicing of the loads, the bytes brought in never exceed M_peak plus what the finished layers
    freed, and layer l cannot start before all bytes first used by layers 1..l are in. This plays exactly that: a fluid of
    bytes in use order. M_peak must be at least `smallest_m_peak`.
    """
    compute = _Compute(problem)
    rate = problem.load_bandwidth
    loader = sum(w.nbytes for w in problem.weights if w.name in preload) / rate
    if problem.layers:
        compute.ready[1] = loader
    freed = [0] * (len(problem.layers) + 2)  # by layer that frees
    streamed: list[WeightSpec] = []
    for w in problem.weights:
        if w.name not in preload:
            streamed.append(w)
            freed[w.last_use] += w.nbytes
    room, layer = problem.m_peak, 0  # bytes that may still come in; layers known to be done
    for w in sorted(streamed, key=lambda w: w.first_use):
        left = w.nbytes
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
        compute.ready[w.first_use] = max(compute.ready[w.first_use], loader)
    return compute.until(len(problem.layers))
