"""Rules by which several models share one budget: pure functions, without OpenCL.

A model's *fixed* bytes are its activations, constants and host scratch, held while it is bound; its *room* is what its plan
has in flight beside them, held while it runs. Where all fixed bytes and the largest room fit the budget at once, every model
stays bound, and what is left holds weights that stay resident. Where they do not, models take turns, and nothing stays.
The queue says who needs what is left soonest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar


@dataclass(frozen=True)
class Need:
    """Bytes that a model holds while it is bound, and bytes that a run holds beside them."""

    fixed: int
    room: int


Model = TypeVar("Model", bound=Hashable)


def may_keep(
    limit: int | None,
    needs: Mapping[Model, Need],
    resident: Mapping[Model, int],
    ahead: Mapping[Model, int],
    model: Model,
    queue: Sequence[Model],
) -> float:
    """Bytes of weights that `model`, whose turn it is, may leave resident until its next turn in the `queue`.

    These are the bytes that the turns before that one do not need; 0 where models have to take turns.

    Args:
        limit: the budget; None for no limit.
        needs: bytes of each model.
        resident: bytes that others have resident. Models with a turn before the next one of `model` keep theirs; all others
            give them up for it.
        ahead: bytes that others have loaded ahead, which they keep.
        model: without another turn in the queue, all others may run before its next one.
        queue: the turns after this one.
    """
    if limit is None:
        return inf
    first = {*queue[: queue.index(model)]} if model in queue else {*needs}
    room = max(need.room for other, need in needs.items() if other in first or other == model)
    kept = {other: nbytes for other, nbytes in resident.items() if other in first and other != model}
    taken = sum(max(kept.get(other, 0), ahead.get(other, 0)) for other in {*kept, *ahead})
    return max(0, limit - sum(need.fixed for need in needs.values()) - room - taken)


@dataclass(frozen=True)
class Turn(Generic[Model]):
    """Bytes that a model counts on: now (`committed`), at most during its turn, after it, and without residents (`fixed`)."""

    model: Model
    committed: int
    peak: int
    rest: int
    fixed: int


def spare(limit: float, beside: int, turns: Sequence[Turn[Model]]) -> float:
    """Bytes more that the model of the last one of `turns` may count on now, so that each turn before it has its peak.

    The first turn is under way, and counts on its peak. A model may have several turns; after the last one its residents are
    freed. `beside`: bytes that models without a turn count on.
    """
    counted = {turn.model: turn.committed for turn in turns}
    left = limit - beside - sum(counted.values())
    last = {turn.model: number for number, turn in enumerate(turns)}
    for number, (before, turn) in enumerate(pairwise(turns[:-1])):
        counted[before.model] = before.rest if last[before.model] > number else before.fixed
        others = sum(nbytes for model, nbytes in counted.items() if model != turn.model)
        left = min(left, limit - beside - others - turn.peak)
    return left


def latest_needed(models: Iterable[Model], queue: Sequence[Model]) -> list[Model]:
    """`models` in the order in which they give memory up.

    First those without a turn in the `queue`, in the order of `models` (the one that ran longest ago first); then those whose
    next turn is the latest.
    """
    turns = {model: turn for turn, model in reversed(list(enumerate(queue)))}
    return sorted(models, key=lambda model: -turns.get(model, len(queue)))
