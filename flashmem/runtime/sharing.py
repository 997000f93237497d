"""How several models share one budget: pure rules, without OpenCL.

A model's *fixed* bytes are its activations, constants and host scratch, held while it is placed; its *room* is what its plan
has in flight beside them, held while it runs. Where all fixed bytes and the largest room fit the budget at once, every model
stays placed, and what is left holds weights that stay resident. Where they do not, models take turns, and nothing stays.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar


@dataclass(frozen=True)
class Need:
    """Bytes that a model holds while it is placed, and those that a run holds beside them."""

    fixed: int
    room: int


def left_over(limit: int | None, needs: Sequence[Need]) -> float:
    """Bytes of the budget for weights that stay resident between runs: 0 where models have to take turns."""
    if limit is None:
        return inf
    return max(0, limit - sum(need.fixed for need in needs) - max((need.room for need in needs), default=0))


Model = TypeVar("Model", bound=Hashable)


def latest_needed(models: Iterable[Model], queue: Sequence[Model]) -> list[Model]:
    """`models` in the order in which they are to give memory up: those that nobody waits for (`models` has the one that ran
    longest ago first), then those whose next turn in the `queue` is farthest.
    """
    turns = {model: turn for turn, model in reversed(list(enumerate(queue)))}
    return sorted(models, key=lambda model: -turns.get(model, len(queue)))
