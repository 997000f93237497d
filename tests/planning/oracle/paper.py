"""The paper's objective: every W, every x."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from unittest import mock

from flashmem.base.errors import BudgetError
from flashmem.planning.opg import preload_dp
from flashmem.planning.opg.lc_opg import solve
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import Units

from .rules import EPSILON, Pick, keeps_m_peak, must_be_resident


@dataclass(frozen=True)
class PaperCase:
    """A problem for the paper's objective, with the options of the planner."""

    instance: Instance
    lambda_: float
    units: Units
    preload: frozenset[str]
    preload_limit: int | None
    width: int
    workers: int
    seconds: float


def paper_case(pick: Pick) -> PaperCase:
    """Up to seven layers and six weights of up to three chunks; in every third much is used late, and W has little room."""
    short_of_room = pick((False, False, True))
    layers = pick((5, 6, 7)) if short_of_room else pick(range(2, 8))
    chunk = 1 if short_of_room else pick((1, 4, 7))
    weights = []
    for n in range(pick((4, 5, 6)) if short_of_room else pick(range(1, 7))):
        first = pick(range(layers // 2 if short_of_room else 1, layers + 1))
        last = pick(range(first, layers + 1)) if pick((False, False, True)) else first
        nbytes = pick((1, 1, 2, 3)) * chunk - pick((0, 0, *range(chunk)))
        weights.append(WeightSpec(f"w{n}", nbytes, first, last))
    total = sum(w.nbytes for w in weights)
    capacities = (0, 1, 2, 2) if short_of_room else (0, 1, 1, 2, 2, 3)
    instance = Instance(
        tuple(LayerSpec(f"layer{n}", pick(("reusable", "hierarchical")), pick(capacities), 1.0) for n in range(layers)),
        tuple(weights),
        chunk,
        pick((2 * total, total, *(() if short_of_room else (pick(range(1, total + 1)),)))),
        1.0,
        mode=pick(("map", "interleave")),
    )
    return PaperCase(
        instance,
        pick((0.05, 0.1, 0.3)) if short_of_room else pick((0.0, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0)),
        pick(("printed", "share")),
        frozenset(pick(weights).name for _ in range(pick((0, 0, 0, 1, 2)))),
        pick(range(total // 2 + 1)) if short_of_room else pick((None, None, 0, pick(range(total + 1)))),
        pick((1, 2, 16)),
        1 if short_of_room else pick((0, 1, 1)),
        pick((0.02, 5.0, 5.0, 5.0)),
    )


def resident_sets(case: PaperCase) -> Iterator[frozenset[str]]:
    """Every W that the instance permits."""
    least = must_be_resident(case.instance, case.preload)
    free = [w for w in case.instance.weights if w.name not in least]
    for size in range(len(free) + 1):
        for chosen in combinations(free, size):
            if case.preload_limit is None or sum(w.nbytes for w in chosen) <= case.preload_limit:
                yield least | {w.name for w in chosen}


def best_cost(case: PaperCase, *, capacities: bool = True) -> float | None:
    """The least objective of any plan; None if no plan exists. Without `capacities`, C_l does not limit moves."""
    instance, lambda_ = case.instance, case.lambda_
    a_chunk, a_layer = lambda_, 1 - lambda_
    if case.units == "share":
        a_chunk /= max(1, sum(-(-w.nbytes // instance.chunk_bytes) for w in instance.weights))
        a_layer /= max(1, len(instance.layers) * len(instance.weights))
    best: float | None = None
    for chosen in resident_sets(case):
        inside = a_chunk * sum(-(-w.nbytes // instance.chunk_bytes) for w in instance.weights if w.name in chosen)
        if best is None or inside < best:
            distance = least_distance(instance, chosen, capacities=capacities)
            if distance is not None and (best is None or inside + a_layer * distance < best):
                best = inside + a_layer * distance
    return best


def least_distance(instance: Instance, preload: Collection[str], *, capacities: bool = True) -> int | None:
    """The least sum of i_w - z_w for W = `preload`, by trying every move at every layer; None if no moves are possible."""
    streamed = [w for w in instance.weights if w.name not in preload]
    total = tuple(-(-w.nbytes // instance.chunk_bytes) for w in streamed)
    staged = instance.mode == "interleave"

    @cache
    def walk(layer: int, left: tuple[int, ...]) -> int | None:
        """The least distance from `layer` on, where `left` chunks of each weight are still to be moved."""
        if any(n and w.first_use <= layer for n, w in zip(left, streamed, strict=True)):
            return None
        if layer > len(instance.layers):
            return 0
        room = instance.layers[layer - 1].capacity if capacities else sum(total)
        best: int | None = None
        for moved in product(*(range(min(n, room) + 1) for n in left)):
            if sum(moved) > room:
                continue
            held = waiting = 0
            for w, before, now, all_of_it in zip(streamed, left, moved, total, strict=True):
                begun = before - now < all_of_it
                held += w.nbytes * (begun and layer <= w.last_use)
                held += w.nbytes * (staged and begun and before > 0)
                waiting += begun and layer < w.first_use
            if held > instance.m_peak:
                continue
            rest = walk(layer + 1, tuple(n - m for n, m in zip(left, moved, strict=True)))
            if rest is not None and (best is None or rest + waiting < best):
                best = rest + waiting
        return best

    return walk(1, total)


def paper_findings(case: PaperCase) -> tuple[str, list[str]]:
    """The planner's result for an instance, in a word, and the findings."""
    instance = case.instance
    best = best_cost(case)
    with mock.patch.object(preload_dp, "_FIRST_WIDTH", case.width):
        try:
            plan = solve(
                instance, lambda_=case.lambda_, preload=case.preload, preload_limit=case.preload_limit,
                units=case.units, workers=case.workers, time_limit=case.seconds,
            )  # fmt: skip
        except BudgetError as refusal:
            return "refused", _false_refusal(case, best, refusal)
    found = []
    if not keeps_m_peak(instance, plan):
        found.append("it passes M_peak")
    taken = sum(w.nbytes for w in plan.weights if w.preload and w.name not in must_be_resident(instance, case.preload))
    if case.preload_limit is not None and taken > case.preload_limit:
        found.append(f"W takes {taken} bytes of {case.preload_limit}")
    if not must_be_resident(instance, case.preload) <= {w.name for w in plan.weights if w.preload}:
        found.append("a weight that must be in W is not")
    least = best_cost(case, capacities=False) if plan.relaxed else best
    if least is None:
        found.append("no plan exists")
        return plan.status, found
    if plan.bound > least + EPSILON:
        found.append(f"bound {plan.bound:.9g} above the optimum {least:.9g}")
    if plan.status.startswith("optimal") and (plan.relaxed or plan.objective > least + EPSILON):
        found.append(f"{plan.status} at {plan.objective:.9g}, the optimum is {least:.9g}")
    if plan.relaxed and best is not None and case.seconds > 1 and case.workers:
        found.append(f"C_l relaxed although a plan of {best:.9g} keeps it")
    return plan.status, found


def _false_refusal(case: PaperCase, best: float | None, refusal: BudgetError) -> list[str]:
    found = []
    heuristic = case.instance.mode == "interleave" or case.preload_limit is not None
    if best is not None and (not heuristic or (case.workers and case.seconds > 1)):
        found.append(f"refused although a plan of {best:.9g} exists: {refusal}")
    enough = replace(case, instance=replace(case.instance, m_peak=refusal.smallest_bytes))
    if best_cost(enough, capacities=False) is None:
        found.append(f"no plan exists at the M_peak that it names: {refusal}")
    return found
