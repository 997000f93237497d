"""What the oracle's searches share: how problems are drawn, and the rules that every plan keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

Option = TypeVar("Option")
Pick = Callable[[Sequence[Option]], Option]
"""Selects one of several: `random.Random.choice`, or a draw of hypothesis."""

EPSILON = 1e-9
CURVE = ((0.0, 1.0), (4.0, 1.25), (16.0, 2.0), (64.0, 2.5))


def must_be_resident(instance: Instance, preload: Collection[str]) -> frozenset[str]:
    """Weights of every W: those of layer 1, and the requested ones."""
    return frozenset(preload) | {w.name for w in instance.weights if w.first_use == 1}


def keeps_m_peak(instance: Instance, plan: OverlapPlan) -> bool:
    """C2 layer by layer: whole slices, counted twice where lanes copy them."""
    for layer in range(1, len(instance.layers) + 1):
        held = 0
        for w in plan.weights:
            if w.preload:
                continue
            if instance.mode == "interleave":
                held += w.nbytes * (w.read_layer <= layer <= w.moves[-1][0])
                held += w.nbytes * (w.moves[0][0] <= layer <= w.last_use)
            else:
                held += w.nbytes * (w.read_layer <= layer <= w.last_use)
        if held > instance.m_peak:
            return False
    return True
