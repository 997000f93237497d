"""The planner's clock: predicted integrated latency of a plan.

It models three resources. The disk reads weights one after the other at `Instance.load_bandwidth`, from the moment the session
is opened. The read of w begins once layer g_w - 1 is done. The host passes on the bytes at `Instance.host_bandwidth`, once the
session is open. One compute queue runs the layers in order. A layer starts when every weight that it uses (or, in mode
`interleave`, is the first to move) is loaded. Layer l needs t_l * s_l(b_l), where b_l is the bytes that the plan moves beside
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from flashmem.schedule.instance import Instance, WeightSpec

Moves = Mapping[str, tuple[tuple[int, int], ...]]
"""x_{w,l}: by weight, (layer, chunks) in ascending order."""


@dataclass(frozen=True)
class Clock:
    """Times in seconds since the session was opened: `loaded` by weight, `started` and `done` by layer (index l - 1).

    `read` is the time at which the disk begins to read each weight.
    """

    loaded: dict[str, float]
    started: tuple[float, ...]
    done: tuple[float, ...]
    read: dict[str, float]

    @property
    def seconds(self) -> float:
        """Integrated latency: the end of the last layer."""
        return self.done[-1] if self.done else 0.0


class Compute:
    """The compute queue, computed up to the layer requested. `durations`: seconds by layer; it begins at `opening` seconds."""

    def __init__(self, durations: Sequence[float], opening: float) -> None:
        self.durations = durations
        self.ready = [0.0] * (len(durations) + 1)  # time at which all weights first needed by a layer are resident
        self.started: list[float] = []
        self.done = [opening]

    def until(self, layer: int) -> float:
        """The time at which `layer` is done. The loads that it needs must have been added before."""
        now = self.done[-1]
        for at in range(len(self.done), layer + 1):
            now = max(now, self.ready[at])
            self.started.append(now)
            now += self.durations[at - 1]
            self.done.append(now)
        return self.done[layer]


class Durations:
    """t_l * s_l(b_l) of the layers of `instance`, for the many moves that a planner compares: each is computed once."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._uses = {w.name: w.first_use for w in instance.weights}
        self._alone = [spec.seconds for spec in instance.layers]
        self._known: dict[tuple[int, int], float] = {}  # by layer (index l - 1) and chunks

    def of(self, moves: Moves) -> list[float]:
        """The seconds of every layer, with the bytes that are moved during it."""
        beside: dict[int, int] = {}
        for name, parts in moves.items():
            use = self._uses[name]
            for layer, chunks in parts:
                if layer < use:
                    beside[layer - 1] = beside.get(layer - 1, 0) + chunks
        known = self._known
        found = list(self._alone)
        for loaded in beside.items():
            if loaded not in known:
                at, chunks = loaded
                known[loaded] = self._instance.layers[at].loaded_seconds(chunks * self._instance.chunk_bytes)
            found[loaded[0]] = known[loaded]
        return found


def durations(instance: Instance, moves: Moves) -> list[float]:
    """t_l * s_l(b_l) of every layer, with the bytes that are moved during it."""
    return Durations(instance).of(moves)


def needed_at(instance: Instance, moves: Moves | None) -> dict[str, int]:
    """By weight, the layer that waits for its read: the first that uses it or, in `interleave`, that moves it."""
    if moves is None or not instance.transfer.by_kernels:
        return {w.name: w.first_use for w in instance.weights}
    return {w.name: moves[w.name][0][0] if moves.get(w.name) else w.first_use for w in instance.weights}


class TimingModel:
    """The clock of `instance` with fixed `moves`, for the many release times that a planner compares.

    Without `moves` no layer is slowed down. Weights are read in the order (g_w, first need, first use), each as soon as its
    release time allows. Release time 0 (of W) equals release time 1.
    """

    def __init__(self, instance: Instance, moves: Moves | None = None, durations: Durations | None = None) -> None:
        self.instance = instance
        self.moves = moves or {}
        self.needs = needed_at(instance, moves)
        self._durations = durations or Durations(instance)
        self.durations = self._durations.of(self.moves)
        self._by_need = sorted(instance.weights, key=lambda w: (self.needs[w.name], w.first_use))
        self._needed = [min(self.needs[w.name], len(instance.layers)) for w in self._by_need]
        self._handed = [w.nbytes / instance.host_bandwidth for w in self._by_need]
        self._last_piece = [min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth for w in self._by_need]
        self._read = [w.nbytes / instance.load_bandwidth for w in self._by_need]
        self._in_cache = [0.0] * len(self._by_need)

    def with_moves(self, moves: Moves) -> TimingModel:
        """The same for other moves."""
        if self.instance.transfer.by_kernels:  # they change what a layer waits for
            return TimingModel(self.instance, moves, self._durations)
        made = copy(self)
        made.moves = moves
        made.durations = self._durations.of(moves)
        return made

    def order(self, releases: Mapping[str, int]) -> list[WeightSpec]:
        """The weights in the order of their reads."""
        return [self._by_need[at] for at in self._order([releases[w.name] or 1 for w in self._by_need])]

    def _order(self, opened: Sequence[int]) -> list[int]:
        return sorted(range(len(opened)), key=opened.__getitem__)  # the sort must be stable

    def compute(self) -> Compute:
        """The compute queue before any read."""
        return Compute(self.durations, self.instance.opening_seconds)

    def clock(self, releases: Mapping[str, int], *, in_cache: bool = False) -> Clock:
        """The clock for g_w by weight. `in_cache`: the file is in the page cache, so a read takes only the host's time."""
        loaded, read, compute = self._run(releases, in_cache)
        names = [w.name for w in self._by_need]
        return Clock(
            dict(zip(names, loaded, strict=True)), tuple(compute.started), tuple(compute.done[1:]),
            dict(zip(names, read, strict=True)),
        )  # fmt: skip

    def seconds(self, releases: Mapping[str, int], *, in_cache: bool = False) -> float:
        """Integrated latency alone, as in `clock`."""
        return self._run(releases, in_cache)[2].done[-1] if self.durations else 0.0

    def _run(self, releases: Mapping[str, int], in_cache: bool) -> tuple[list[float], list[float], Compute]:
        """The end of each load and the start of each read, in the order of needs; and the compute queue."""
        opened = [releases[w.name] or 1 for w in self._by_need]
        order = self._order(opened)
        reading = self._in_cache if in_cache else self._read
        handed = self._handed
        last_piece = self._last_piece
        needed = self._needed
        compute = self.compute()
        ready = compute.ready
        done = compute.done
        loaded = [0.0] * len(order)
        read = [0.0] * len(order)
        disk = 0.0
        host = self.instance.opening_seconds
        for at in order:
            release = opened[at]
            if release > 1:
                if release > len(done):
                    compute.until(release - 1)
                opens = done[release - 1]
                disk = max(disk, opens)
                host = max(host, opens)
            read[at] = disk
            disk += reading[at]
            loaded[at] = host = max(host + handed[at], disk + last_piece[at])
            need = needed[at]
            if host > ready[need]:
                ready[need] = host
        compute.until(len(self.durations))
        return loaded, read, compute


def clock_of(instance: Instance, releases: Mapping[str, int], moves: Moves | None = None) -> Clock:
    """The clock of one plan: see `TimingModel`."""
    return TimingModel(instance, moves).clock(releases)


def unlimited_seconds(instance: Instance, preload: Collection[str]) -> float:
    """Integrated latency with W = `preload` and no memory limit: every other weight may be loaded from the start."""
    return TimingModel(instance).seconds({w.name: 0 if w.name in preload else 1 for w in instance.weights})
