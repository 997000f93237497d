"""The cost of a fused layer to the plan: Penalty(v) = lambda |W_new| + mu * dz (FlashMem section 4.3).

Fusion lowers load capacity, because a group streams only as much as its most sensitive operator tolerates. W_new are the chunks
without capacity for that reason. They are moved above some C_l, or are preloaded although a layer before their use could have
moved them. The decrease of the loading distances is dz. Both are estimates from a plan with the capacity that a split would
give. The planner then decides on the program that was really split.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.planning.latency.first_answer import forced_preload
from flashmem.planning.opg.srpt import SrptPlan, srpt
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan


class Penalties:
    """Penalties of the fused layers of one program under one plan. `asked`: weights that are in W for any capacities."""

    def __init__(self, instance: Instance, plan: OverlapPlan, asked: frozenset[str], lambda_: float, mu: float) -> None:
        self._instance = replace(instance, m_peak=plan.m_peak)
        self._lambda = lambda_
        self._mu = mu
        self._preload = {w.name for w in plan.weights if w.preload}
        forced = forced_preload(instance, asked)
        # (first layer, last layer) of the window in which a weight without capacity could have been moved, and its chunks
        self._without_room = [(1, w.first_use - 1, w.chunks) for w in plan.weights if w.preload and w.name not in forced]
        self._without_room += _above_capacity(instance, plan)
        now = srpt(self._instance, self._preload) if mu else None
        self._distance = now.distance(instance) if now is not None and now.feasible else None

    @property
    def shortage(self) -> int:
        """Number of chunks without any capacity."""
        return sum(chunks for _, _, chunks in self._without_room)

    def of(self, layer: int, gain: int) -> float:
        """The penalty of a fused layer at `layer` (1-based) that could move `gain` more chunks if it were split."""
        affected = sum(chunks for first, last, chunks in self._without_room if first <= layer <= last)
        return self._lambda * min(gain, affected) + self._mu * self._distance_saved(layer, gain)

    def _distance_saved(self, layer: int, gain: int) -> int:
        if self._distance is None:
            return 0
        layers = list(self._instance.layers)
        layers[layer - 1] = replace(layers[layer - 1], capacity=layers[layer - 1].capacity + gain)
        roomier: SrptPlan = srpt(replace(self._instance, layers=tuple(layers)), self._preload)
        return self._distance - roomier.distance(self._instance)


def _above_capacity(instance: Instance, plan: OverlapPlan) -> list[tuple[int, int, int]]:
    """Windows of the chunks moved above C_l. In each layer, the chunks with the latest use count as the excess."""
    left = [spec.capacity for spec in instance.layers]
    windows = []
    for w in sorted((w for w in plan.weights if not w.preload), key=lambda w: w.first_use):
        for layer, chunks in w.moves:
            within = min(chunks, left[layer - 1])
            left[layer - 1] -= within
            if chunks > within:
                windows.append((w.read_layer, w.first_use - 1, chunks - within))
    return windows
