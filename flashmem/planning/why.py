"""Explain why each weight of W is preloaded, by arithmetic on a finished plan.

Each weight of W is tried with the resources that the plan leaves over: load capacity that no streamed weight uses, and bytes
below M_peak. The reason is the resource that is missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from flashmem.schedule.plan import OverlapPlan, PlannedWeight

Kind = Literal["first-layer", "asked", "resident-first", "too-large", "no-capacity", "distance", "memory", "unproven"]


@dataclass(frozen=True)
class Reason:
    """Why weight `name` is in W. `waits`: how many layers ahead it would be loaded if streamed (0: it cannot be streamed)."""

    name: str
    kind: Kind
    waits: int
    text: str


def in_flight_bytes(plan: OverlapPlan, *, ahead: bool = True) -> list[int]:
    """Bytes that C2 counts at each layer, index l - 1. Without `ahead`: with every release time at the first move."""
    layers = len(plan.capacities)
    change = [0] * (layers + 2)
    for w in plan.weights:
        if w.preload:
            continue
        release = w.read_layer if ahead else w.first_mover
        home = release
        last = w.last_use
        if plan.transfer.by_kernels:
            home = w.first_mover
            change[release] += w.nbytes
            change[w.last_mover + 1] -= w.nbytes
        if w.keep:
            home = 1
            last = layers
        change[home] += w.nbytes
        change[last + 1] -= w.nbytes
    return list(accumulate(change))[1:-1]


def moved_chunks(plan: OverlapPlan) -> list[int]:
    """Chunks moved at each layer, index l - 1."""
    moved = [0] * len(plan.capacities)
    for w in plan.weights:
        for layer, chunks in w.moves:
            moved[layer - 1] += chunks
    return moved


def reasons(plan: OverlapPlan) -> list[Reason]:
    """One reason for each weight of W, in the plan's order."""
    left = [capacity - moved for capacity, moved in zip(plan.kept_capacities, moved_chunks(plan), strict=True)]
    judge = _Judge(
        plan,
        [0, *accumulate(plan.kept_capacities)],
        [0, *accumulate(left)],
        in_flight_bytes(plan, ahead=False),
        frozenset(plan.asked),
    )
    return [judge.reason(w) for w in plan.weights if w.preload]


@dataclass(frozen=True)
class _Judge:
    plan: OverlapPlan
    capacity: Sequence[int]  # cumulative over layers 1 to l
    left: Sequence[int]  # capacity that no weight uses, cumulative over layers 1 to l
    in_flight: Sequence[int]
    asked: frozenset[str]

    def reason(self, w: PlannedWeight) -> Reason:
        if w.first_use == 1:
            return Reason(w.name, "first-layer", 0, "used by layer 1, which has no layer before it to load it")
        if w.name in self.asked:
            return Reason(w.name, "asked", 0, "requested with --preload")
        if self.plan.kind.in_seconds:  # other objectives preload no further weights: it gains them nothing
            return Reason(w.name, "resident-first", 0, "strategy resident-first fills the budget with weights")
        if w.nbytes > self.plan.m_peak:
            return Reason(w.name, "too-large", 0, f"its {w.nbytes} bytes are more than M_peak")
        free = self.left[w.first_use - 1]
        if free < w.chunks:
            return Reason(w.name, "no-capacity", 0, self._no_capacity(w, free))
        start = bisect_right(self.left, free - w.chunks, 0, w.first_use)  # the latest start with T(w) free chunks
        waits = w.first_use - start
        a_chunk, a_layer = self.plan.prices
        stream = a_layer * waits
        preload = a_chunk * w.chunks
        if stream >= preload * (1 - 1e-9):
            relation = ">" if stream > preload * (1 + 1e-9) else "="
            price = f"(1-λ)·{waits} = {stream:.4g} {relation} λ·{w.chunks} = {preload:.4g}"
            if self.plan.units == "share":
                price = (
                    f"as shares of all, {waits} layers cost {stream:.4g} {relation} {preload:.4g} for {w.chunks} chunks in W"
                )
            return Reason(w.name, "distance", waits, f"{self._full_before(w)}streamed, it would wait {waits} layers: {price}")
        for layer in range(start, w.last_use + 1):
            if self.in_flight[layer - 1] + self._held(w, layer) > self.plan.m_peak:
                return Reason(w.name, "memory", waits, f"streaming it would pass M_peak at layer {layer}")
        gain = preload - stream
        return Reason(w.name, "unproven", waits, f"streaming it would gain {gain:.4g}: the plan is not proven to be the best")

    def _held(self, w: PlannedWeight, layer: int) -> int:
        """Bytes of w at `layer` if it used the capacity left before its use."""
        return w.nbytes * (2 if self.plan.transfer.by_kernels and layer < w.first_use else 1)

    def _no_capacity(self, w: PlannedWeight, free: int) -> str:
        total = self.capacity[w.first_use - 1]
        if total < w.chunks:
            return f"the layers before it can move {total} of its {w.chunks} chunks in all"
        before = self._full_before(w)
        if not free:
            return before.removesuffix("; ")
        return f"{before}earlier ones have {free} of the {w.chunks} chunks it needs"

    def _full_before(self, w: PlannedWeight) -> str:
        """A phrase for the contiguous layers right before the use of w that have no capacity left."""
        last = w.first_use - 1
        first = bisect_left(self.left, self.left[last], 0, last) + 1
        if first > last:
            return ""
        if first == last:
            return f"no capacity left in layer {last}; "
        return f"no capacity left in layers {first}-{last}; "
