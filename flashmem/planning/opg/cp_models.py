"""CP-SAT models of LC-OPG: the choice of W over a window of layers, and the full model over x, z and W."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from flashmem.planning.opg.objective import Decision, PaperInstance
from flashmem.schedule.instance import Instance, WeightSpec


@dataclass(frozen=True)
class Unit:
    """The unit of bytes that keeps the model's numbers small. Sizes are rounded down, so that the model stays a relaxation."""

    nbytes: int
    m_peak: int
    chunk: int
    size: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, instance: Instance, weights: list[WeightSpec]) -> Unit:
        """The unit for a model of `weights`."""
        unit = math.gcd(instance.chunk_bytes, *(w.nbytes for w in weights))
        unit = max(unit, instance.chunk_bytes // 64, 1)
        exact = instance.chunk_bytes % unit == 0 and all(w.nbytes % unit == 0 for w in weights)
        m_peak = instance.m_peak // unit if exact else -(-instance.m_peak // unit)
        return cls(unit, m_peak, -(-instance.chunk_bytes // unit), {w.name: w.nbytes // unit for w in weights})


@dataclass(frozen=True)
class _Row:
    """A layer of the choice model: weights used at the next layer, chunks that it serves, and the variables B_l, R_l, n_l."""

    new: list[str]
    served: int
    largest: int
    waits: list[str]
    chunks: cp_model.IntVar
    nbytes: cp_model.IntVar
    count: cp_model.IntVar


class Window:
    """CP-SAT model of the choice of W: p_w, and by layer the chunks B_l, bytes R_l and weights n_l that must still be pending.

    B_l and R_l follow the recurrence of the backward walk, in whole chunks and in true bytes. Both are lower bounds of the
    amounts in any plan. The sum of n_l is the sum of loading distances. Each n_l is at least B_l over the largest weight, and
    counts w for the distance that it would need alone. The window covers layers `first` to `last` and the weights whose latest
    moves are in it. `carry`: the amounts pending from later layers, in chunks and in units of bytes. `room`: the most bytes
    that W may use in this window.
    """

    def __init__(
        self,
        paper: PaperInstance,
        alone: Mapping[str, int],
        first: int,
        last: int,
        carry: tuple[int, int] = (0, 0),
        room: int | None = None,
    ) -> None:
        instance = paper.instance
        weights = [w for w in instance.weights if w.name in alone and first <= w.first_use - 1 <= last]
        self.model = model = cp_model.CpModel()
        self.chosen = {w.name: model.new_bool_var(f"p {w.name}") for w in weights}
        unit = Unit.of(instance, [w for w in instance.weights if w.name in alone])
        arrivals: defaultdict[int, list[str]] = defaultdict(list)
        held: defaultdict[int, list[str]] = defaultdict(list)
        waits: defaultdict[int, list[str]] = defaultdict(list)
        for w in weights:
            arrivals[w.first_use - 1].append(w.name)
            for layer in range(w.first_use, min(w.last_use, last) + 1):
                held[layer].append(w.name)
            for layer in range(max(first, w.first_use - alone[w.name]), w.first_use):
                waits[layer].append(w.name)

        most_chunks = carry[0] + sum(paper.chunks[w.name] for w in weights)
        chunks_above, bytes_above = (cp_model.LinearExpr.constant(pending) for pending in carry)
        one = dict.fromkeys(self.chosen, 1)
        largest = max((paper.chunks[w.name] for w in instance.weights if w.first_use > last and w.name in alone), default=1)
        counts: list[cp_model.IntVar] = []
        self.carry = carry
        self.unit = unit
        self.paper = paper
        self.rows: list[_Row] = []
        for layer in range(last, first - 1, -1):
            new = arrivals[layer]
            largest = max([largest, *(paper.chunks[name] for name in new)])
            served = instance.layers[layer].capacity if layer < len(instance.layers) else 0
            chunks = model.new_int_var(0, most_chunks, f"B {layer}")
            model.add(chunks >= self._streamed_sum(new, paper.chunks))
            model.add(chunks >= self._streamed_sum(new, paper.chunks) + chunks_above - served)
            nbytes = model.new_int_var(0, unit.m_peak, f"R {layer}")
            model.add(nbytes >= self._streamed_sum(new, unit.size))
            model.add(nbytes >= self._streamed_sum(new, unit.size) + bytes_above - served * unit.chunk)
            if held[layer]:
                model.add(nbytes + self._streamed_sum(held[layer], unit.size) <= unit.m_peak)
            count = model.new_int_var(0, len(instance.weights), f"n {layer}")
            model.add(count * largest >= chunks)
            if waits[layer]:
                model.add(count >= self._streamed_sum(waits[layer], one))
            counts.append(count)
            self.rows.append(_Row(new, served, largest, waits[layer], chunks, nbytes, count))
            chunks_above = chunks
            bytes_above = nbytes
        if first == 1:
            model.add(chunks_above <= instance.layers[0].capacity)
        if room is not None:
            model.add(self._preloaded_sum(list(self.chosen), paper.sizes) <= room)
        cost = paper.preload_cost * self._preloaded_sum(list(self.chosen), paper.chunks)
        model.minimize(cost + paper.distance_cost * cp_model.LinearExpr.sum(counts))

    def hint(self, preload: frozenset[str]) -> None:
        """Set the hint of CP-SAT: W = `preload`, with every variable at its minimum."""
        for name, var in self.chosen.items():
            self.model.add_hint(var, name in preload)
        chunks, nbytes = self.carry
        for row in self.rows:
            new = [name for name in row.new if name not in preload]
            chunks = max(0, chunks - row.served) + sum(self.paper.chunks[name] for name in new)
            nbytes = max(0, nbytes - row.served * self.unit.chunk) + sum(self.unit.size[name] for name in new)
            self.model.add_hint(row.chunks, chunks)
            self.model.add_hint(row.nbytes, nbytes)
            self.model.add_hint(row.count, max(-(-chunks // row.largest), sum(name not in preload for name in row.waits)))

    def _preloaded_sum(self, names: list[str], value: Mapping[str, int]) -> cp_model.LinearExpr:
        return cp_model.LinearExpr.weighted_sum([self.chosen[name] for name in names], [value[name] for name in names])

    def _streamed_sum(self, names: list[str], value: Mapping[str, int]) -> cp_model.LinearExpr:
        return sum(value[name] for name in names) - self._preloaded_sum(names, value)


class FullModel:
    """CP-SAT model of x_{w,l}, z_w and W together, for problems small enough. Its proofs hold for the true objective."""

    def __init__(self, paper: PaperInstance, forced: frozenset[str]) -> None:
        self.paper = paper
        self.forced = forced
        self.weights = [w for w in paper.instance.weights if w.name not in forced]
        self.size = sum(w.first_use - 1 for w in self.weights)

    def solve(self, hint: Decision | None, cp: cp_model.CpSolver) -> tuple[Decision | None, int]:
        """The best plan found, if any, and a proven bound on the cost."""
        paper = self.paper
        instance = self.paper.instance
        model = cp_model.CpModel()
        layers = range(1, len(instance.layers) + 1)
        moved_at: defaultdict[int, list[cp_model.IntVar]] = defaultdict(list)
        in_flight: defaultdict[int, list[cp_model.LinearExpr]] = defaultdict(list)
        fixed_cost = paper.preload_cost * sum(paper.chunks[name] for name in self.forced)
        cost = [cp_model.LinearExpr.constant(fixed_cost)]
        chosen: dict[str, cp_model.IntVar] = {}
        moves: dict[tuple[str, int], cp_model.IntVar] = {}
        preloaded: list[cp_model.LinearExpr] = []
        unit = math.gcd(0, *(w.nbytes for w in self.weights)) or 1
        for w in self.weights:
            total = paper.chunks[w.name]
            size = w.nbytes // unit
            p = chosen[w.name] = model.new_bool_var(f"p {w.name}")
            hinted = hint is not None and w.name in hint.preload
            if hint is not None:
                model.add_hint(p, hinted)
            planned = dict(hint.moves[w.name]) if hint is not None and not hinted else {}
            done = cp_model.LinearExpr.constant(0)
            earlier: cp_model.IntVar | None = None
            for layer in range(1, w.first_use):
                most = min(total, instance.layers[layer - 1].capacity)
                x = moves[w.name, layer] = model.new_int_var(0, most, f"x {w.name} {layer}")
                loading = model.new_bool_var(f"z {w.name} <= {layer}")
                model.add(x <= most * loading)
                if earlier is not None:
                    model.add_implication(earlier, loading)
                if hint is not None:
                    model.add_hint(x, planned.get(layer, 0))
                    model.add_hint(loading, bool(planned) and min(planned) <= layer)
                in_flight[layer].append(loading * size)  # the whole weight in its final place
                if instance.transfer.by_kernels:  # and in staging, until its last move
                    complete = model.new_bool_var(f"all of {w.name} before {layer}")
                    model.add(done >= total * complete)
                    in_flight[layer].append((loading - complete) * size)
                done = done + x
                moved_at[layer].append(x)
                cost.append(paper.distance_cost * loading)
                earlier = loading
            model.add(done + total * p == total)
            for layer in range(w.first_use, w.last_use + 1):
                in_flight[layer].append((1 - p) * size)
            preloaded.append(p * w.nbytes)
            cost.append(paper.preload_cost * total * p)
        for layer in layers:
            if in_flight[layer]:
                model.add(cp_model.LinearExpr.sum(in_flight[layer]) <= instance.m_peak // unit)
            if moved_at[layer]:
                model.add(cp_model.LinearExpr.sum(moved_at[layer]) <= instance.layers[layer - 1].capacity)
        if paper.limit is not None and preloaded:
            fixed = sum(paper.sizes[name] for name in self.forced)
            model.add(cp_model.LinearExpr.sum(preloaded) <= paper.limit - fixed)
        model.minimize(cp_model.LinearExpr.sum(cost))
        if cp.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, 0
        preload = self.forced | {name for name, p in chosen.items() if cp.boolean_value(p)}
        found = {
            w.name: tuple((layer, n) for layer in range(1, w.first_use) if (n := cp.value(moves[w.name, layer])))
            for w in self.weights
            if w.name not in preload
        }
        decision = Decision(preload, found, round(cp.objective_value))
        return decision, math.ceil(cp.best_objective_bound - 1e-6)
