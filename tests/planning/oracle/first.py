"""The first answer: every release time and every move, under a separate clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from tests.support.planning_instances import plan_at

from .rules import CURVE, EPSILON, Pick, keeps_m_peak, must_be_resident

Moves = dict[str, tuple[tuple[int, int], ...]]
MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")


@dataclass(frozen=True)
class FirstCase:
    """A problem for the first answer, with the options of the planner."""

    instance: Instance
    lambda_: float
    preload: frozenset[str]


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


def seconds_of(instance: Instance, resident: Collection[str], releases: dict[str, int], moves: Moves) -> float:
    """Integrated latency as docs/reference/internals/planner.md defines it: the end of each load and layer, by recursion."""
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


Choice = Sequence[tuple[int, tuple[tuple[int, int], ...]]]
"""The release time and the moves of each streamed weight."""


def fastest(
    instance: Instance, resident: frozenset[str], fits: Callable[[Sequence[WeightSpec], Choice], bool] | None = None
) -> float | None:
    """The least latency of any plan with W = `resident` inside M_peak, and for which `fits`; None if no plan exists."""
    streamed = [w for w in instance.weights if w.name not in resident]
    best: float | None = None
    for choice in product(*(ways(instance, w) for w in streamed)):
        if fits is not None and not fits(streamed, choice):
            continue
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


def first_findings(case: FirstCase) -> tuple[str, list[str]]:
    """The same for the first answer."""
    instance = case.instance
    least = must_be_resident(instance, case.preload)
    best = fastest(instance, least)  # at lambda 0; otherwise within the memory that lambda permits
    try:
        plan = plan_at(instance, case.preload, case.lambda_)
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
