"""CP-SAT for x: during which layers bytes are moved, with W, release times and the order of reads as they are.

Aggregated chunks y_l replace x_{w,l}: a chunk may be moved from the release of its weight to the layer before its use. These
windows open and close in order of use, so any y that has moved enough by each layer, and no more than is released, can be split
into moves of weights, the earliest use first. The cost of a layer is the hull of its curve. So a plan is accepted only when the
clock confirms it. Without limits on memory and order, the same model proves a bound for every plan of the same W.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from ortools.sat.python import cp_model

from flashmem.planning.arithmetic.assemble import moved_chunks
from flashmem.planning.arithmetic.clock import Compute, Moves, TimingModel
from flashmem.planning.latency.bounds import hull_lines, ready_without_limit
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec

Curves = Literal["hull", "exact"]
"""How the slowdown of a layer is stated: by the hull of its curve, which is soon solved, or exactly."""

HULL: Curves = "hull"
EXACT: Curves = "exact"

_TICKS = 2_000_000
"""The number of time steps (ticks) into which the latency of a plan is divided."""

_FINE = 64
"""Parts of a tick in which the price of a chunk is stated."""

MOST_LAYERS = 2000
"""The most layers of one model."""

_FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)


class MovesModel:
    """The model of x for plans that read the weights of `moves` as `releases` say. `seconds`: the latency of a known plan.

    `exact`: times are rounded up, and a plan's are its own; if not, they are rounded down, for a bound. `least`: a proven bound
    on `seconds`.
    """

    def __init__(
        self,
        instance: Instance,
        releases: Mapping[str, int],
        moves: Moves,
        seconds: float,
        least: float,
        curves: Curves,
        *,
        exact: bool = True,
    ) -> None:
        self._instance = instance
        self._releases = releases
        self._moves = moves
        self._tick = seconds / _TICKS
        self._whole = math.ceil if exact else math.floor
        self._slack = 0 if exact else _FINE - 1  # an end is a whole tick, which would round up
        self._curves = curves
        self._streamed = [w for w in instance.weights if w.name in moves]
        self._most = sum(map(instance.chunks, self._streamed))
        self._model = cp_model.CpModel()
        opened = self._ticks(instance.opening_seconds)
        self._starts = [self._model.new_int_var(opened, opened, "opening")]
        self._ends = list(self._starts)
        self._chunks = [self._model.new_int_var(0, 0, "before layer 1")]
        self._took = [0]  # ticks of each layer with the known moves
        for spec, moved in zip(instance.layers, moved_chunks(instance, moves), strict=True):
            self._took.append(self._add_layer(spec, moved))
        self._model.add(self._ends[-1] >= math.floor(least / self._tick))  # where it ends
        self._model.minimize(self._ends[-1])

    def solve(self, cp: cp_model.CpSolver) -> Moves | None:
        """Moves that may be faster; None if none were found."""
        self._count_chunks(released=True)
        self._add_reads()
        if cp.solve(self._model) not in _FOUND:
            return None
        return self._split([cp.value(y) for y in self._chunks[1:]])

    def bound(self, cp: cp_model.CpSolver) -> float:
        """A bound in seconds on every plan with this W, whatever its memory, its order of reads and its moves; 0 if none."""
        self._count_chunks(released=False)
        preload = {w.name for w in self._instance.weights if w.name not in self._moves}
        for layer, ready in enumerate(ready_without_limit(self._instance, preload), start=1):
            if ready:
                self._model.add(self._starts[layer] >= self._ticks(ready))
        status = cp.solve(self._model)
        return cp.best_objective_bound * self._tick if status in (*_FOUND, cp_model.UNKNOWN) else 0.0

    def _ticks(self, seconds: float) -> int:
        return self._whole(seconds / self._tick)

    def _add_layer(self, spec: LayerSpec, known: int) -> int:
        """Add the next layer. Returns its ticks with the `known` number of chunks."""
        instance = self._instance
        model = self._model
        start = model.new_int_var(0, _HORIZON, f"start {spec.name}")
        end = model.new_int_var(0, _HORIZON, f"end {spec.name}")
        moved = model.new_int_var(0, self._most, f"y {spec.name}")
        model.add_hint(moved, known)
        model.add(start >= self._ends[-1])
        took = self._ticks(spec.seconds)
        model.add(end >= start + took)
        for fixed, each in hull_lines(spec, instance.chunk_bytes, _FINE / self._tick):
            model.add(_FINE * end >= _FINE * start + self._whole(fixed) + self._whole(each) * moved - self._slack)
            took = max(took, -(-(self._whole(fixed) + self._whole(each) * known) // _FINE))
        if self._curves == "exact" and not _is_convex(spec):  # the hull is below the curve
            took = max(took, self._add_segments(spec, start, end, moved, known))
        self._starts.append(start)
        self._ends.append(end)
        self._chunks.append(moved)
        return took

    def _add_segments(
        self, spec: LayerSpec, start: cp_model.IntVar, end: cp_model.IntVar, moved: cp_model.IntVar, known: int
    ) -> int:
        """Add the curve itself: one of its segments holds. Returns the ticks with the `known` number of chunks."""
        instance = self._instance
        model = self._model
        first = 0
        took = 0
        chosen = []
        for (low, slow), (high, slower) in pairwise(spec.beside):
            last = self._most if high == spec.beside[-1][0] else min(self._most, int(high // instance.chunk_bytes))
            if first > last:
                continue
            price = spec.seconds * (slower - slow) / (high - low)
            fixed = self._ticks(_FINE * (spec.seconds * slow - price * low))
            each = self._ticks(_FINE * price * instance.chunk_bytes)
            here = model.new_bool_var(f"{spec.name} to {last}")
            model.add_linear_constraint(moved, first, last).only_enforce_if(here)
            model.add(_FINE * end >= _FINE * start + fixed + each * moved - self._slack).only_enforce_if(here)
            model.add_hint(here, first <= known <= last)
            if first <= known <= last:
                took = -(-(fixed + each * known) // _FINE)
            chosen.append(here)
            first = last + 1
        model.add_exactly_one(chosen)
        return took

    def _add_reads(self) -> None:
        """Weights are read in turn, once their release times permit; layers wait for them. The hint is the known plan."""
        instance = self._instance
        model = self._model
        timing = TimingModel(instance, self._moves)
        compute = Compute(self._took[1:], self._ticks(instance.opening_seconds))
        disk: cp_model.LinearExprT = 0
        host: cp_model.LinearExprT = self._ends[0]
        disk_at = 0.0
        host_at: float = self._ticks(instance.opening_seconds)
        for w in timing.order(self._releases):
            release = max(1, self._releases[w.name])
            opens = compute.until(release - 1) if release > 1 else 0
            handing = self._ticks(w.nbytes / instance.host_bandwidth)
            reading = self._ticks(w.nbytes / instance.load_bandwidth)
            piece = self._ticks(min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth)
            begin = model.new_int_var(0, _HORIZON, f"read {w.name}")
            loaded = model.new_int_var(0, _HORIZON, f"loaded {w.name}")
            model.add(begin >= disk)
            model.add(loaded >= host + handing)
            if release > 1:
                model.add(begin >= self._ends[release - 1])
                model.add(loaded >= self._ends[release - 1] + handing)
            model.add(loaded >= begin + reading + piece)
            model.add(self._starts[timing.needs[w.name]] >= loaded)
            begin_at = max(disk_at, opens)
            host_at = max(max(host_at, opens) + handing, begin_at + reading + piece)
            disk_at = begin_at + reading
            model.add_hint(begin, round(begin_at))
            model.add_hint(loaded, round(host_at))
            need = timing.needs[w.name]
            compute.ready[need] = max(compute.ready[need], host_at)
            disk = begin + reading
            host = loaded
        compute.until(len(instance.layers))
        for start, end, begun, ended in zip(self._starts[1:], self._ends[1:], compute.started, compute.done[1:], strict=True):
            model.add_hint(start, round(begun))
            model.add_hint(end, round(ended))

    def _count_chunks(self, *, released: bool) -> None:
        """Chunks are moved before their use and, if `released`, after the release of their weight (by kernels, its read)."""
        instance = self._instance
        known = 0
        due: defaultdict[int, int] = defaultdict(int)
        opened: defaultdict[int, int] = defaultdict(int)
        for w in self._streamed:
            due[w.first_use - 1] += instance.chunks(w)
            if released:
                opened[self._first_mover(w)] += instance.chunks(w)
        before = self._chunks[0]
        needed = 0
        allowed = 0
        for layer, moved in enumerate(moved_chunks(instance, self._moves), start=1):
            after = self._model.new_int_var(0, self._most, f"moved by {layer}")
            known += moved
            self._model.add_hint(after, known)
            self._model.add(after == before + self._chunks[layer])
            needed += due[layer]
            allowed += opened[layer]
            self._model.add(after >= needed)
            if released:
                self._model.add(after <= allowed)
            before = after

    def _first_mover(self, w: WeightSpec) -> int:
        """Where kernels move bytes, the layer that moves the first waits for its read: that layer does not change."""
        return self._moves[w.name][0][0] if self._instance.transfer.by_kernels else max(1, self._releases[w.name])

    def _split(self, moved: Sequence[int]) -> Moves | None:
        """Moves of weights with `moved` chunks at each layer, index l - 1."""
        waiting = sorted(self._streamed, key=self._first_mover)
        left = {w.name: self._instance.chunks(w) for w in waiting}
        found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        heap: list[tuple[int, int, str]] = []
        at = 0
        for layer, room in enumerate(moved, start=1):
            while at < len(waiting) and self._first_mover(waiting[at]) <= layer:
                heapq.heappush(heap, (waiting[at].first_use, at, waiting[at].name))
                at += 1
            while room and heap:
                first_use, _, name = heap[0]
                if first_use <= layer:
                    return None
                taken = min(room, left[name])
                found[name].append((layer, taken))
                left[name] -= taken
                room -= taken
                if not left[name]:
                    heapq.heappop(heap)
        return None if any(left.values()) else {name: tuple(parts) for name, parts in found.items()}


def _is_convex(spec: LayerSpec) -> bool:
    slopes = [(slower - slow) / (high - low) for (low, slow), (high, slower) in pairwise(spec.beside)]
    return all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(slopes))


_HORIZON = 2 * _TICKS
