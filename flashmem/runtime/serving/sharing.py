"""Rules of the memory arbiter for sharing one budget among models: pure functions, without OpenCL.

A model's *fixed* bytes are its activations, constants and host scratch, held while it is bound. Its *room* is the bytes in
flight under its plan, held while it runs. If all fixed bytes and the largest room fit the budget together, every model stays
bound, and the rest holds resident weights. If not, models take turns, and nothing stays. The queue determines which model needs
the rest first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar


@dataclass(frozen=True)
class Need:
    """Bytes of a model while it is bound, and additional bytes of a run."""

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

    These are the bytes that the turns before that one do not need; 0 if models must take turns.

    Args:
        limit: the budget; None for no limit.
        needs: bytes of each model.
        resident: resident bytes of the other models. Models with a turn before the next one of `model` keep theirs; all others
            free them for it.
        ahead: bytes that other models have loaded ahead, which they keep.
        model: without another turn in the queue, all other models may run before its next turn.
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
    """Bytes granted to a model: now (`committed`), at most during its turn, after it, and without residents (`fixed`)."""

    model: Model
    committed: int
    peak: int
    rest: int
    fixed: int


def spare(limit: float, beside: int, turns: Sequence[Turn[Model]]) -> float:
    """Additional bytes that can be granted now to the model of the last turn, so that each earlier turn has its peak.

    The first turn has begun, and is granted its peak. A model may have several turns; its residents are freed after the last.
    `beside`: bytes granted to models without a turn.
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
    """`models` in the order in which they free memory.

    First those without a turn in the `queue`, in the order of `models` (the least recently run first); then those whose next
    turn is the latest.
    """
    turns = {model: turn for turn, model in reversed(list(enumerate(queue)))}
    return sorted(models, key=lambda model: -turns.get(model, len(queue)))
