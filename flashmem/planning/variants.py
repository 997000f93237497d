"""Shape variants of one bundle, planned together, so that a session changes between them without loading weights again.

Each variant keeps some weights for later runs. Planned alone, variants keep different ones, for which memory seldom suffices at
once. Here they keep the same. The variant with the least computing chooses them: it hides
loads least. The bytes in flight of all variants then use the same memory in turn, so the largest of them limits what stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.budget import plan_within
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.latency.later_runs import OWN_WORTH, by_cache_and_disk, keep_weights, ladder, read_early, with_kept
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.planner import planning_instance, seal
from flashmem.planning.problem import Problem
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

TOGETHER_WORTH = 0.1
"""The share of a later run that the same weights in all variants may cost any of them. A change between variants that keep
different weights costs more."""

_TRIES = 4
"""How often what stays is chosen again for less memory, if another variant does not fit with it."""


@dataclass(frozen=True)
class VariantProblem:
    """A shape variant to plan: its instance, its plan when planned alone, and a measure of the bytes that the budget limits."""

    instance: Instance
    plan: OverlapPlan
    measure: Measure


def plan_together(variants: Sequence[VariantProblem], budget: int, *, answers_first: bool) -> list[OverlapPlan] | None:
    """Plans of all `variants` within `budget` bytes that keep the same weights; None if their own ones do, or none is good
    enough.

    Each later run takes at most the share `TOGETHER_WORTH` longer than that of the variant's own plan. With `answers_first`,
    each first answer is at most the share `OWN_WORTH` after the earliest, or not after that of its own plan. Of several, those
    with the least sum of later runs over the own plans' are returned.
    """
    if len({staying(each.plan) for each in variants}) == 1:
        return None
    alone = [_later(each.instance, each.plan) for each in variants]
    try:
        rooms = [_rooms(each, budget) for each in variants]
    except BudgetError:  # not with this staging
        return None
    leader = min(range(len(variants)), key=lambda at: sum(layer.seconds for layer in variants[at].instance.layers))
    best: tuple[float, list[OverlapPlan]] | None = None
    for plans in zip(*rooms, strict=True):
        made = _with_common(variants, plans, budget, leader)
        if made is None:
            continue
        if answers_first:
            made = [read_early(each.instance, plan) for each, plan in zip(variants, made, strict=True)]
            soonest = [min(plan.objective for plan in several) for several in rooms]
            pairs = zip(variants, made, soonest, strict=True)
            if any(plan.objective > max(each.plan.objective, (1 + OWN_WORTH) * early) for each, plan, early in pairs):
                continue
        later = [_later(each.instance, plan) for each, plan in zip(variants, made, strict=True)]
        ratios = [seconds / own if own else 1.0 for seconds, own in zip(later, alone, strict=True)]
        if max(ratios) <= 1 + TOGETHER_WORTH and (best is None or sum(ratios) < best[0]):
            best = sum(ratios), made
    return None if best is None else best[1]


def _later(instance: Instance, plan: OverlapPlan) -> float:
    """Seconds of a later run: where memory is shared, between those with the file in the page cache and on the disk."""
    seconds = by_cache_and_disk(instance, plan)[0]
    return seconds if instance.own is not None else sqrt(seconds)


def _rooms(variant: VariantProblem, budget: int) -> list[OverlapPlan]:
    """Plans of a variant for the first answer with nothing kept, in several M_peak. Raises BudgetError: no plan fits."""
    instance = variant.instance
    asked = variant.plan.asked
    chosen = forced_preload(instance, asked)
    roomiest, _ = plan_within(instance, budget, variant.measure, preload=chosen, quick=True)

    def make(m_peak: int) -> OverlapPlan:
        return first_plan(replace(instance, m_peak=m_peak), chosen, quick=True)

    plans = [*ladder(instance, roomiest, min(smallest_m_peak(instance, chosen)[0], roomiest.m_peak), make), roomiest]
    return [replace(plan, asked=asked) for plan in plans]


def _with_common(
    variants: Sequence[VariantProblem], plans: Sequence[OverlapPlan], budget: int, leader: int
) -> list[OverlapPlan] | None:
    """`plans` with the same weights kept, those that serve the `leader` best; None if they do not fit with any."""
    used = [each.measure(plan) for each, plan in zip(variants, plans, strict=True)]
    preloaded = frozenset(w.name for plan in plans for w in plan.weights if w.preload)
    spare = budget - max(used)
    for _ in range(_TRIES):
        if spare < 0:
            return None
        leads = variants[leader]
        chosen = with_kept(leads.instance, plans[leader], used[leader] + spare, leads.measure)
        common = preloaded | staying(chosen)
        made = [_keeping_all(plan, common) for plan in plans]
        over = max(each.measure(plan) for each, plan in zip(variants, made, strict=True)) - budget
        if over <= 0:
            return made
        spare -= over
    return None


def _keeping_all(plan: OverlapPlan, names: Collection[str]) -> OverlapPlan:
    return keep_weights(plan, {w.name for w in plan.weights if w.name in names and not w.preload})


def planned_together(
    variants: Sequence[tuple[Program, OverlapPlan]], descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits
) -> list[OverlapPlan]:
    """The checked plans of shape variants of one bundle that keep the same weights, if they can.

    Their own plans otherwise, and for first answers where memory is shared.
    `variants`: each program, and the plan that it has alone.
    """
    objective = objective_of(limits.resolved_objective)
    plans = [plan for _, plan in variants]
    answers_first = objective.kind.value == "first run"
    if limits.budget is None or limits.strategy != "stream" or not objective.serves_later_runs:
        return plans
    if descriptor.shares_memory and answers_first:
        return plans
    threads = min(plan.loader_threads for plan in plans)
    piece = min(plan.piece_bytes for plan in plans)
    problems = []
    for program, plan in variants:
        instance = planning_instance(program, descriptor, mode, limits.replace(chunk=plan.chunk_bytes))
        problems.append(Problem(replace(instance, piece_bytes=piece, loader_threads=threads), program, mode, limits))
    alone = [VariantProblem(each.instance, plan, each.in_all) for each, plan in zip(problems, plans, strict=True)]
    made = plan_together(alone, limits.budget, answers_first=answers_first)
    if made is None:
        return plans
    checked = []
    for problem, own, plan in zip(problems, plans, made, strict=True):
        judged = objective.judged(problem, plan)
        noted = replace(judged, notes=(*judged.notes, *(note for note in own.notes if note not in judged.notes)))
        checked.append(seal(problem, noted))
    return checked
