"""Optimal designs by exhaustive search in plain arithmetic, and designs that simpler methods choose.

It uses nothing from `flashmem.tools.design.metrics` or `rass.py`: it implements the formulas of docs/how-to/applications.md a
second time.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flashmem.base.errors import UserError
from flashmem.tools.design.application import Application, Measure, Task
from flashmem.tools.design.metrics import Candidate, Decision
from flashmem.tools.design.writer import Solved, solved

BETTER_HIGH = ("accuracy", "throughput", "system-throughput", "fairness")


@dataclass(frozen=True)
class Exhaustive:
    """Every decision with its optimality, None if a constraint is violated; and the decisions for each role."""

    decisions: tuple[Decision, ...]
    optimality: tuple[float | None, ...]
    roles: dict[str, int]

    def of(self, decision: Decision) -> float | None:
        """The optimality of one decision."""
        return self.optimality[self.decisions.index(decision)]


def _percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by linear interpolation between neighbouring values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _statistic(values: Sequence[float], name: str) -> float:
    known: dict[str, Callable[[Sequence[float]], float]] = {
        "average": statistics.fmean, "deviation": statistics.pstdev, "minimum": min, "maximum": max,
    }  # fmt: skip
    return known[name](values) if name in known else _percentile(values, float(name[1:]))


def _among(decision: Decision, candidate: Candidate) -> list[float]:
    """Seconds of `candidate` when it waits for one run of each other on its processor."""
    waits = sum(
        statistics.fmean(other.profile.later)
        for other in decision
        if other is not candidate and other.processor.name == candidate.processor.name
    )
    return [seconds + waits for seconds in candidate.profile.later]


def measured(decision: Decision, measure: Measure) -> float:
    """The value of one metric of a decision."""
    if measure.task is None:
        progress = [statistics.fmean(one.profile.later) / statistics.fmean(_among(decision, one)) for one in decision]
        together = {
            "turnaround": statistics.fmean(1 / each for each in progress),
            "system-throughput": math.fsum(progress),
            "fairness": min(a / b for a in progress for b in progress),
        }
        return together[measure.metric]
    (one,) = (each for each in decision if each.task == measure.task)
    if measure.metric == "latency":
        return _statistic(_among(decision, one), measure.statistic)
    if measure.metric == "throughput":
        return _statistic([1 / seconds for seconds in _among(decision, one)], measure.statistic)
    profile = one.profile
    single = {"first": profile.first, "memory": profile.memory, "size": profile.size, "workload": profile.workload}
    return float(single.get(measure.metric, one.variant.accuracy or 0.0))


def _kept(decision: Decision, application: Application) -> bool:
    for constraint in application.constraints:
        found = measured(decision, constraint.measure)
        if found > constraint.bound if constraint.at_most else found < constraint.bound:
            return False
    return True


def exhaustive(application: Application, candidates: Sequence[Candidate]) -> Exhaustive:
    """Evaluate all decisions."""
    decisions = tuple(itertools.product(*([c for c in candidates if c.task == task.name] for task in application.tasks)))
    kept = [number for number, decision in enumerate(decisions) if _kept(decision, application)]
    distance, largest = dict.fromkeys(kept, 0.0), 0.0
    for objective in application.objectives:
        values = {number: measured(decisions[number], objective.measure) for number in kept}
        best = (max if objective.maximise else min)(values.values())
        furthest = max(abs(value - best) for value in values.values())
        if furthest <= 1e-9 * max(map(abs, values.values())):
            continue  # the same for all, except for rounding
        scale = objective.weight / statistics.pvariance(values.values())
        largest += scale * furthest**2
        for number, value in values.items():
            distance[number] += scale * (value - best) ** 2
    scores = {number: math.sqrt(largest / distance[number]) if distance[number] else math.inf for number in kept}
    found = tuple(scores.get(number) for number in range(len(decisions)))
    return Exhaustive(decisions, found, _roles(decisions, scores))


def _roles(decisions: Sequence[Decision], scores: dict[int, float]) -> dict[str, int]:
    """Roles of section 4.3.4: best on each set of processors, smallest, lightest, and the better balanced of the last two."""
    roles: dict[str, int] = {}
    used = {number: frozenset(one.processor.name for one in decisions[number]) for number in scores}
    best = {which: max((n for n in scores if used[n] == which), key=scores.__getitem__) for which in set(used.values())}
    sets: list[frozenset[str]] = []
    for which in sorted(best, key=lambda which: -scores[best[which]]):
        if len(sets) < 3 and not any(known <= which for known in sets):
            sets.append(which)
            roles[f"best {len(sets)}"] = best[which]
    memory, work, balance = (_sizes(decisions, scores, what) for what in ("memory", "work", "balance"))
    roles["least memory"] = min(scores, key=lambda n: (memory[n], -scores[n]))
    roles["lightest"] = min(scores, key=lambda n: (work[n], -scores[n]))
    both = (roles["least memory"], roles["lightest"])
    roles["light and small"] = min(both, key=lambda n: (round(balance[n], 9), -scores[n]))
    return roles


def _sizes(decisions: Sequence[Decision], kept: Iterable[int], what: str) -> dict[int, float]:
    """Bytes or multiply-adds of the kept decisions, all tasks together; or the sum of both, each scaled to 0..1."""
    kept = tuple(kept)
    memory = {n: float(sum(one.profile.memory for one in decisions[n])) for n in kept}
    work = {n: float(sum(one.profile.workload for one in decisions[n])) for n in kept}
    if what != "balance":
        return memory if what == "memory" else work
    total = dict.fromkeys(kept, 0.0)
    for values in (memory, work):
        low, high = min(values.values()), max(values.values())
        for number in kept if high > low else ():
            total[number] += (values[number] - low) / (high - low)
    return total


def disagreements(answer: Solved, found: Exhaustive) -> list[str]:
    """Differences between RASS and the exhaustive search; equally good decisions count as equal."""
    differing = []
    for number, (ours, theirs) in enumerate(zip(answer.solution.optimality, found.optimality, strict=True)):
        same = math.isnan(ours) if theirs is None else math.isclose(ours, theirs, rel_tol=1e-6)
        if not same:
            differing.append(f"decision {number}: optimality {ours} and {theirs}")
    chosen = {role: row for row, roles in zip(answer.solution.designs, answer.solution.roles, strict=True) for role in roles}
    bests = [row for role, row in chosen.items() if role.startswith("best on ")]
    ordered = sorted(bests, key=lambda row: -answer.solution.optimality[row])
    ours_by_role = {f"best {place}": row for place, row in enumerate(ordered, 1)}
    ours_by_role |= {role: row for role, row in chosen.items() if not role.startswith("best on ")}
    if ours_by_role.keys() != found.roles.keys():
        return [*differing, f"roles {sorted(ours_by_role)} and {sorted(found.roles)}"]
    for role, row in ours_by_role.items():
        if _worth(found, row, role) != _worth(found, found.roles[role], role):
            differing.append(f"{role}: decision {row}, and {found.roles[role]} is better")
    return differing


def _worth(found: Exhaustive, row: int, role: str) -> tuple[float, ...]:
    """The values by which a role chooses a decision, then its optimality."""
    kept = [number for number, score in enumerate(found.optimality) if score is not None]
    whats = {"least memory": "memory", "lightest": "work", "light and small": "balance"}
    first = (round(_sizes(found.decisions, kept, whats[role])[row], 9),) if role in whats else ()
    return (*first, round(found.optimality[row] or 0.0, 6))


# Simpler methods (section 7.1.1).


def best_accuracy(application: Application, candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each task, the model with the highest accuracy, in all its precisions."""
    return _one_model(application, candidates, lambda one: -(one.variant.accuracy or 0.0))


def smallest_model(application: Application, candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each task, the model with the fewest bytes of weights, in all its precisions."""
    return _one_model(application, candidates, lambda one: one.profile.size)


def _one_model(
    application: Application, candidates: Sequence[Candidate], cost: Callable[[Candidate], float]
) -> list[Candidate]:
    kept = []
    for task in application.tasks:
        of_task = [one for one in candidates if one.task == task.name]
        path = min(of_task, key=cost).variant.path
        kept += [one for one in of_task if one.variant.path == path]
    return kept


def best_of(found: Exhaustive, kept: Iterable[Candidate]) -> float | None:
    """The best optimality of decisions of these candidates; None if none of them satisfies the constraints."""
    allowed = set(map(id, kept))
    scores = [
        score
        for decision, score in zip(found.decisions, found.optimality, strict=True)
        if score is not None and all(id(one) in allowed for one in decision)
    ]
    return max(scores, default=None)


def unaware(
    application: Application, candidates: Sequence[Candidate], found: Exhaustive, *, weighted_sum: bool = False
) -> float | None:
    """Each task solved separately, by optimality or by the weighted sum of normalised objectives (OODIn), then combined."""
    chosen = []
    for task in application.tasks:
        mine = [one for one in candidates if one.task == task.name]
        alone = _alone(application, task)
        try:
            one = _summed(alone, mine) if weighted_sum else _single(solved(alone, mine))
        except UserError:
            return None
        chosen.append(one)
    return found.of(tuple(chosen))


def _alone(application: Application, task: Task) -> Application:
    return replace(
        application,
        tasks=(task,),
        objectives=tuple(each for each in application.objectives if each.measure.task == task.name),
        constraints=tuple(each for each in application.constraints if each.measure.task == task.name),
    )


def _single(answer: Solved) -> Candidate:
    (one,) = answer.decisions[answer.solution.designs[0]]
    return one


def _summed(application: Application, candidates: Sequence[Candidate]) -> Candidate:
    kept = [(one,) for one in candidates if _kept((one,), application)]
    if not kept:
        raise UserError("no candidate keeps the constraints")
    totals = [0.0] * len(kept)
    for objective in application.objectives:
        values = [measured(decision, objective.measure) for decision in kept]
        low, high = min(values), max(values)
        for number, value in enumerate(values if high > low else ()):
            share = (value - low) / (high - low)
            totals[number] += objective.weight * (share if objective.maximise else 1 - share)
    return kept[max(range(len(kept)), key=totals.__getitem__)][0]
