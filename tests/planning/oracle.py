"""Exhaustive search over the plans of small problems: no planner may claim more than this search finds.

    python -m tests.planning.oracle --instances 20000 --seed 0

Every instance is planned for the paper's objective or for the first answer, with every option that changes the set of plans:
weights that must be in W, a limit on W, M_peak, transfer modes with and without lanes (which hold a copied weight twice), the
widths of the search, CP-SAT or none, and little time. A finding is a plan wrongly called optimal, a bound above the optimum, a
plan that breaks a rule, or a refusal although a plan exists. One refusal is accepted: in `interleave`, planners copy a weight
in the layer before its use when memory is short. With a limit on W and without CP-SAT, they may then find no W. Findings are
printed; with a finding the exit code is 1.

The oracle shares no code with the planner. It walks the layers forwards with the remaining chunks of every weight
(`best_cost`). It tries every release time with every move under a separate clock (`fastest`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from typing import TypeVar
from unittest import mock

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.opg import preload_dp
from flashmem.planning.opg.lc_opg import solve
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan, Units

Option = TypeVar("Option")
Pick = Callable[[Sequence[Option]], Option]
"""Selects one of several: `random.Random.choice`, or a draw of hypothesis."""

Moves = dict[str, tuple[tuple[int, int], ...]]

EPSILON = 1e-9
MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")
CURVE = ((0.0, 1.0), (4.0, 1.25), (16.0, 2.0), (64.0, 2.5))


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


@dataclass(frozen=True)
class FirstCase:
    """A problem for the first answer, with the options of the planner."""

    instance: Instance
    lambda_: float
    preload: frozenset[str]


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


def first_case(pick: Pick) -> FirstCase:
    """Up to four layers and three weights of up to two chunks, on every kind of machine."""
    layers = pick(range(1, 5))
    chunk = pick((1, 4))
    beside = pick(((), CURVE))
    weights = []
    for n in range(pick((1, 2, 3))):
        first = pick(range(1, layers + 1))
        last = pick(range(first, layers + 1)) if pick((False, True)) else first
        weights.append(WeightSpec(f"w{n}", pick((1, 2)) * chunk - pick((0, *range(chunk))), first, last))
    total = sum(w.nbytes for w in weights)
    instance = Instance(
        tuple(LayerSpec(f"layer{n}", "reusable", pick(range(4)), pick((1, 3, 8)) / 8, beside) for n in range(layers)),
        tuple(weights),
        chunk,
        pick((max(1, 2 * total), pick(range(1, 2 * total + 2)))),
        pick((1.0, 4.0, 64.0)),
        mode=pick(MODES),
        host_bandwidth=pick((2.0, 8.0, float("inf"))),
        opening_seconds=pick((0.0, 1.5)),
        piece_bytes=pick((0, 3)),
    )
    asked = frozenset(pick(weights).name for _ in range(pick((0, 0, 1)))) if weights else frozenset()
    return FirstCase(instance, pick((0.0, 0.0, 0.5, 1.0)), asked)


# The paper's objective: every W, every x.


def must_be_resident(instance: Instance, preload: Collection[str]) -> frozenset[str]:
    """Weights of every W: those of layer 1, and the requested ones."""
    return frozenset(preload) | {w.name for w in instance.weights if w.first_use == 1}


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


# The first answer: every release time and every move, under a separate clock.


def seconds_of(instance: Instance, resident: Collection[str], releases: dict[str, int], moves: Moves) -> float:
    """Integrated latency by the definition in docs/planner.md: the end of each load and each layer, by recursion."""
    beside = [0] * (len(instance.layers) + 1)
    needs = {w.name: w.first_use for w in instance.weights}
    for w in instance.weights:
        for layer, chunks in moves.get(w.name, ()):
            beside[layer] += chunks
        if instance.mode == "interleave" and w.name in moves:
            needs[w.name] = moves[w.name][0][0]
    order = sorted(instance.weights, key=lambda w: (max(1, releases[w.name]), needs[w.name], w.first_use))

    @cache
    def read(number: int) -> float:
        before = read(number - 1) if number else 0.0
        return max(before, opened(number)) + order[number].nbytes / instance.load_bandwidth

    @cache
    def loaded(number: int) -> float:
        before = loaded(number - 1) if number else instance.opening_seconds
        w = order[number]
        piece = min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth
        return max(max(before, opened(number)) + w.nbytes / instance.host_bandwidth, read(number) + piece)

    def opened(number: int) -> float:
        release = releases[order[number].name]
        return done(release - 1) if release > 1 else 0.0

    @cache
    def done(layer: int) -> float:
        if layer == 0:
            return instance.opening_seconds
        begin = max([done(layer - 1), *(loaded(n) for n, w in enumerate(order) if needs[w.name] == layer)])
        return begin + slowed(instance.layers[layer - 1], beside[layer] * instance.chunk_bytes)

    return done(len(instance.layers))


def slowed(layer: LayerSpec, nbytes: int) -> float:
    """Seconds of a layer with `nbytes` moved during it, along the polyline and beyond it at its last slope."""
    points = list(layer.beside)
    if len(points) < 2:
        return layer.seconds
    for (low, slow), (high, slower) in pairwise(points):
        if nbytes <= high or (high, slower) == points[-1]:
            return layer.seconds * (slow + (slower - slow) * (nbytes - low) / (high - low))
    raise AssertionError


def ways(instance: Instance, w: WeightSpec) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Every release time of a weight with every way to move its chunks."""
    chunks = -(-w.nbytes // instance.chunk_bytes)
    found = []
    for parts in product(range(chunks + 1), repeat=w.first_use - 1):
        if sum(parts) == chunks:
            moves = tuple((layer, n) for layer, n in enumerate(parts, start=1) if n)
            found += [(release, moves) for release in range(1, moves[0][0] + 1)]
    return found


def fastest(instance: Instance, resident: frozenset[str]) -> float | None:
    """The least latency of any plan with W = `resident` inside M_peak; None if no plan exists."""
    streamed = [w for w in instance.weights if w.name not in resident]
    best: float | None = None
    for choice in product(*(ways(instance, w) for w in streamed)):
        held = [0] * (len(instance.layers) + 1)
        for w, (release, moves) in zip(streamed, choice, strict=True):
            home = moves[0][0] if instance.mode == "interleave" else release
            for layer in range(home, w.last_use + 1):
                held[layer] += w.nbytes
            if instance.mode == "interleave":
                for layer in range(release, moves[-1][0] + 1):
                    held[layer] += w.nbytes
        if max(held) > instance.m_peak:
            continue
        releases = dict.fromkeys(resident, 0) | {w.name: release for w, (release, _) in zip(streamed, choice, strict=True)}
        # Weights of W may be read at any time: all first, or all after the streamed ones used before them.
        moves = {w.name: moves for w, (_, moves) in zip(streamed, choice, strict=True)}
        late = [w for w in instance.weights if w.name in resident and w.first_use > 1]
        for turns in product(*((0, *range(1, w.first_use + 1)) for w in late)):
            seconds = seconds_of(instance, resident, releases | {w.name: g for w, g in zip(late, turns, strict=True)}, moves)
            if best is None or seconds < best:
                best = seconds
    return best


# Comparison with the planner.


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


def first_findings(case: FirstCase) -> tuple[str, list[str]]:
    """The same for the first answer."""
    instance = case.instance
    least = must_be_resident(instance, case.preload)
    best = fastest(instance, least)  # at lambda 0; otherwise within the memory that lambda permits
    try:
        plan = first_plan(instance, case.preload, lambda_=case.lambda_)
    except BudgetError as refusal:
        exists = best is not None and instance.mode != "interleave"
        found = [f"refused although a plan of {best:.9g} s exists: {refusal}"] if exists else []
        if fastest(replace(instance, m_peak=refusal.smallest_bytes), least) is None:
            found.append(f"no plan exists at the M_peak that it names: {refusal}")
        return "refused", found
    found = [] if keeps_m_peak(instance, plan) else ["it passes M_peak"]
    resident = frozenset(w.name for w in plan.weights if w.preload)
    moves: Moves = {w.name: w.moves for w in plan.weights if not w.preload}
    releases = {w.name: w.read_layer for w in plan.weights}
    played = seconds_of(instance, resident, releases, moves)
    if abs(played - plan.objective) > EPSILON:
        found.append(f"{plan.objective:.9g} s is {played:.9g} s by the definition")
    if plan.bound_within is not None:
        instance = replace(instance, m_peak=plan.bound_within)
        best = fastest(instance, least)
    if case.lambda_ == 0 and plan.bound_within not in (None, case.instance.m_peak):
        found.append(f"the bound is for {plan.bound_within} bytes in flight")
    if best is None:
        return plan.status, [*found, "no plan exists"]
    if plan.bound > best + EPSILON:
        found.append(f"bound {plan.bound:.9g} s above the optimum {best:.9g} s of this W")
    if plan.status.startswith("optimal") and plan.objective > best + EPSILON:
        found.append(f"{plan.status} at {plan.objective:.9g} s, the optimum of this W is {best:.9g} s")
    if plan.status == "optimal" and plan.bound_within is None:
        free = sorted({w.name for w in instance.weights} - least)
        for size in range(1, len(free) + 1):
            for more in combinations(free, size):
                other = fastest(instance, least | set(more))
                if other is not None and plan.objective > other + EPSILON:
                    found.append(f"optimal at {plan.objective:.9g} s, with {more} in W it is {other:.9g} s")
    return plan.status, found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planning.oracle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    said: Counter[str] = Counter()
    wrong, begun = 0, time.monotonic()
    for number in range(options.instances):
        draw = random.Random(f"{options.seed} {number}")
        made = first_case(draw.choice) if number % 4 == 3 else paper_case(draw.choice)
        status, found = first_findings(made) if isinstance(made, FirstCase) else paper_findings(made)
        said[f"{'first' if isinstance(made, FirstCase) else 'paper'} {status}"] += 1
        wrong += bool(found)
        for finding in found:
            print(f"instance {number} of seed {options.seed}: {finding}\n    {made}", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(said.items())))
    print(f"{options.instances} instances in {time.monotonic() - begun:.0f} s, seed {options.seed}: {wrong} with a finding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
