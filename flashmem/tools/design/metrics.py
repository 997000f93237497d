"""Metrics of decisions (CARIn, section 4.1).

A decision selects one candidate for each task. Tasks run at the same time, and each handles its requests in sequence. Tasks on
one processor run in turn, so that each waits for one run of every other: T_i,multi = T_i + Σ_j T_j over the others on its
processor. Tasks on different processors do not slow each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.tools.design.application import Application, Measure, Processor, Statistic, Variant
from flashmem.tools.turnaround import fairness, normalised_progress, normalised_turnaround, system_throughput

MOST_DECISIONS = 1_000_000
"""The most decisions that are enumerated; a larger application must be reduced."""


@dataclass(frozen=True)
class Profile:
    """The cost of a candidate that runs alone: seconds of the first answer and of later ones, bytes, multiply-adds."""

    first: float
    later: tuple[float, ...]
    memory: int
    size: int
    workload: int


@dataclass(frozen=True)
class Candidate:
    """An execution configuration of a task: a model, its processor and its memory budget."""

    task: str
    variant: Variant
    processor: Processor
    budget: int | None
    profile: Profile


Decision = tuple[Candidate, ...]
"""One candidate for each task, in the order of the tasks."""


def decisions(application: Application, candidates: Sequence[Candidate]) -> list[Decision]:
    """All decisions.

    Raises:
        UserError: a task has no candidate, or there are too many decisions.
    """
    each = [[one for one in candidates if one.task == task.name] for task in application.tasks]
    for task, found in zip(application.tasks, each, strict=True):
        if not found:
            raise UserError(f"task {task.name!r} runs on none of the devices within any of the budgets; give it more memory")
    count = math.prod(map(len, each))
    if count > MOST_DECISIONS:
        raise UserError(f"there are {count:,} decisions, more than {MOST_DECISIONS:,}; name fewer models, devices or budgets")
    return list(itertools.product(*each))


def value(decision: Decision, measure: Measure) -> float:
    """The value of a metric for `decision`: seconds, bytes, multiply-adds, runs per second, or a ratio."""
    if measure.task is None:
        return _together(decision, measure)
    number = next(number for number, one in enumerate(decision) if one.task == measure.task)
    candidate = decision[number]
    profile = candidate.profile
    match measure.metric:
        case "accuracy":
            return candidate.variant.accuracy or 0.0
        case "first":
            return profile.first
        case "memory":
            return float(profile.memory)
        case "size":
            return float(profile.size)
        case "workload":
            return float(profile.workload)
        case "throughput":
            return _statistic(1 / _latencies(decision, number), measure.statistic)
        case _:
            return _statistic(_latencies(decision, number), measure.statistic)


def memory(decision: Decision) -> int:
    """Bytes of all tasks together."""
    return sum(one.profile.memory for one in decision)


def workload(decision: Decision) -> int:
    """Multiply-adds of one run of every task."""
    return sum(one.profile.workload for one in decision)


def processors_of(decision: Decision) -> tuple[str, ...]:
    """The processor of each task."""
    return tuple(one.processor.name for one in decision)


def is_allowed(decision: Decision, application: Application) -> bool:
    """Whether the decision satisfies all constraints."""
    for constraint in application.constraints:
        found = value(decision, constraint.measure)
        if (found > constraint.bound) if constraint.at_most else (found < constraint.bound):
            return False
    return True


def _latencies(decision: Decision, number: int) -> NDArray[np.float64]:
    here = decision[number].processor.name
    others = [one for place, one in enumerate(decision) if place != number and one.processor.name == here]
    waits = sum(float(np.mean(one.profile.later)) for one in others)
    return np.asarray(decision[number].profile.later, np.float64) + waits


def _together(decision: Decision, measure: Measure) -> float:
    alone = [float(np.mean(one.profile.later)) for one in decision]
    multi = [float(_latencies(decision, number).mean()) for number in range(len(decision))]
    pairs = list(zip(alone, multi, strict=True))
    if measure.metric == "turnaround":
        return float(np.mean([normalised_turnaround(single, among) for single, among in pairs]))
    progress = [normalised_progress(single, among) for single, among in pairs]
    return system_throughput(progress) if measure.metric == "system-throughput" else fairness(progress)


def _statistic(values: NDArray[np.float64], statistic: Statistic) -> float:
    match statistic:
        case "average":
            return float(values.mean())
        case "deviation":
            return float(values.std())
        case "minimum":
            return float(values.min())
        case "maximum":
            return float(values.max())
        case _:
            return float(np.percentile(values, int(statistic[1:])))
