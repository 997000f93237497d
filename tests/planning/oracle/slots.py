"""Budgets with texture slots and staging slots: every release time and move, and every way to share slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from flashmem.base.errors import BudgetError
from flashmem.base.types import POOL_ALIGNMENT, TEXEL_BYTES, Channel
from flashmem.planning.baselines import WeightedOperator
from flashmem.planning.budget import with_staging_that_fits
from flashmem.planning.latency.first_answer import judge_first_answer
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.portfolio import fastest_within
from flashmem.planning.problem import roomiest
from flashmem.program.tensors import Slice
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PoolLayout

from .first import Choice, fastest
from .rules import CURVE, EPSILON, Pick, must_be_resident


@dataclass(frozen=True)
class SlotCase:
    """A problem for the first answer within a budget, with a slice for each weight. M_peak of `instance` holds everything."""

    instance: Instance
    slices: tuple[Slice, ...]
    budget: int


def slot_case(pick: Pick) -> SlotCase:
    """Up to four layers and three slices of up to two chunks: images, rarely buffers, on devices that copy into slots."""
    layers, unit = pick(range(1, 5)), POOL_ALIGNMENT
    slices, weights = [], []
    for n in range(pick((1, 2, 3, 3))):
        first = pick(range(1, layers + 1))
        last = pick(range(first, layers + 1)) if pick((False, True)) else first
        name, channel = f"w{n}", pick(_CHANNELS)
        width, height = pick((16, 32, 48)), pick((1, 2, 3))
        pitch = width * TEXEL_BYTES[channel]
        if pick((False, False, False, True)):
            slices.append(Slice(name, name, 0, pick((1, 2, 3, 4)) * unit - pick((0, 7))))
        else:
            slices.append(Slice(name, name, 0, pitch * height, width, height, pitch, channel))
        weights.append(WeightSpec(name, slices[-1].file_bytes, first, last))
    total = sum(w.nbytes for w in weights)
    beside = pick(((), tuple((unit * moved, slow) for moved, slow in CURVE)))
    mode = pick(("dma", "interleave", "interleave"))
    instance = Instance(
        tuple(LayerSpec(f"layer{n}", "reusable", pick(range(4)), pick((1, 3, 8)) / 8, beside) for n in range(layers)),
        tuple(weights),
        max(unit, -(-max(w.nbytes for w in weights) // 2)),
        2 * total,
        unit * pick((1.0, 4.0, 64.0)),
        mode=mode,
        host_bandwidth=unit * pick((2.0, 8.0, float("inf"))),
        opening_seconds=pick((0.0, 1.5)),
        piece_bytes=pick((0, unit)),
        loader_threads=pick((1, 2)),
        shares_memory=pick((True, False)) if mode == "interleave" else False,
    )
    return SlotCase(instance, tuple(slices), unit * pick(range(1, 4 + 4 * total // unit)))


_CHANNELS: tuple[Channel, ...] = ("float", "float", "half")


Life = tuple[Slice, int, int]
"""A slice with the first and the last layer in which it has a place, both included."""


def least_slot_bytes(lives: Sequence[Life], size: Callable[[Sequence[Slice]], int]) -> int:
    """The fewest bytes of slots for `lives`, by trying every way to share them. `size`: bytes of a slot for these slices."""

    def best(left: Sequence[Life], slots: list[list[Life]]) -> int:
        if not left:
            return sum(size([part for part, _, _ in slot]) for slot in slots)
        (part, first, last), *rest = left
        found = [best(rest, [*slots, [(part, first, last)]])]
        for n, slot in enumerate(slots):
            alone = all(end < first or last < begin for _, begin, end in slot)
            if alone and all(other.is_image == part.is_image and other.channel == part.channel for other, _, _ in slot):
                found.append(best(rest, [*slots[:n], [*slot, (part, first, last)], *slots[n + 1 :]]))
        return min(found)

    return best(lives, [])


def texture_bytes(slices: Sequence[Slice]) -> int:
    """Bytes of the smallest image that holds each of `slices`."""
    return max(part.width for part in slices) * max(part.height for part in slices) * TEXEL_BYTES[slices[0].channel]


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a place."""
    return -(-nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT


def most_at_once(lives: Sequence[Life]) -> int:
    """The most bytes of places at one layer: no layout in one buffer has fewer."""
    return max((sum(aligned(p.file_bytes) for p, a, b in lives if a <= layer <= b) for _, layer, _ in lives), default=0)


def least_bytes(case: SlotCase, instance: Instance, streamed: Sequence[WeightSpec], choice: Choice) -> int:
    """A lower bound of the bytes of any layout, exact for textures and staging slots: homes, staging and the ring."""
    of = {part.name: part for part in case.slices}
    staged = instance.mode == "interleave"
    homes = [(of[w.name], 0, len(instance.layers)) for w in instance.weights if w not in streamed]
    staging = []
    for w, (release, moves) in zip(streamed, choice, strict=True):
        homes.append((of[w.name], moves[0][0] if staged else release, w.last_use))
        if staged:
            staging.append((of[w.name], release, moves[-1][0]))
    images, buffers = ([life for life in homes if life[0].is_image is kind] for kind in (True, False))
    nbytes = least_slot_bytes(images, texture_bytes) + most_at_once(buffers)
    if instance.shares_memory:
        nbytes += most_at_once(staging)
    else:
        plain = [(replace(part, width=0, channel="float"), first, last) for part, first, last in staging]
        whole = {part.name: part.file_bytes for part, _, _ in staging}
        nbytes += least_slot_bytes(plain, lambda parts: max(aligned(whole[part.name]) for part in parts))
    passing = [
        part for part in case.slices if not (staged and instance.shares_memory) or part.name not in {w.name for w in streamed}
    ]
    piece = aligned(max(instance.piece_bytes, 1, *(part.row_pitch for part in case.slices)))
    return nbytes + instance.loader_threads * max((aligned(min(part.file_bytes, piece)) for part in passing), default=0)


def broken_slots(case: SlotCase, plan: OverlapPlan, layout: PoolLayout) -> list[str]:
    """Slices that do not fit their slot, or share it with another at the same time."""
    found, of = [], {part.name: part for part in case.slices}

    def lives(w: PlannedWeight) -> tuple[range, range]:
        """Layers at home and in staging."""
        if w.preload:
            return range(len(case.instance.layers) + 1), range(0)
        if case.instance.mode == "interleave":
            return range(w.moves[0][0], w.last_use + 1), range(w.read_layer, w.moves[-1][0] + 1)
        return range(w.read_layer, w.last_use + 1), range(0)

    for w in plan.weights:
        part = of[w.name]
        if part.is_image:
            slot = layout.slots[layout.slot_of[w.name]]
            if slot.width < part.width or slot.height < part.height or slot.channel != part.channel:
                found.append(f"{w.name} does not fit its texture slot")
        if layout.staging_slots and not w.preload and layout.staging_slots[layout.staging_slot_of[w.name]] < part.file_bytes:
            found.append(f"{w.name} does not fit its staging slot")
    for one, other in combinations(plan.weights, 2):
        for place, (a, b) in enumerate(zip(lives(one), lives(other), strict=True)):
            slot_of = (layout.slot_of, layout.staging_slot_of)[place]
            shared = one.name in slot_of and slot_of[one.name] == slot_of.get(other.name)
            if shared and set(a) & set(b):
                found.append(f"{one.name} and {other.name} share a slot at once")
    return found


def slot_findings(case: SlotCase) -> tuple[str, list[str]]:
    """The same for a budget, in texture slots and staging slots."""
    instance = case.instance
    operators = [WeightedOperator(w.first_use, "a", (w.name,)) for w in sorted(instance.weights, key=lambda w: w.first_use)]
    least = must_be_resident(instance, ())
    rest = sorted({w.name for w in instance.weights} - least)
    every_w = [least | set(more) for size in range(len(rest) + 1) for more in combinations(rest, size)]

    def layout_of(plan: OverlapPlan) -> PoolLayout:
        return lay_out_pools(case.slices, plan, [instance.mode])[instance.mode]

    def planned(budget: int) -> tuple[Instance, OverlapPlan]:
        return with_staging_that_fits(
            instance,
            budget,
            lambda staged: fastest_within(staged, operators, budget, lambda plan: layout_of(plan).total_bytes, frozenset()),
        )

    def exists(budget: int, within: Instance) -> bool:
        def fits(streamed: Sequence[WeightSpec], choice: Choice) -> bool:
            return least_bytes(case, within, streamed, choice) <= budget

        return any(fastest(within, chosen, fits) is not None for chosen in every_w)

    try:
        within, plan = planned(case.budget)
    except BudgetError as refusal:
        found = []
        smallest = refusal.smallest_bytes
        try:
            works, plan = planned(smallest)
        except BudgetError:
            return "refused", [f"the budget that it names is refused: {refusal}"]
        if layout_of(plan).total_bytes > smallest or not exists(smallest, works):
            found.append(f"no plan exists in the budget that it names: {refusal}")
        return "refused, slots exist" if exists(case.budget, instance) else "refused", found
    plan = judge_first_answer(roomiest(within, plan, case.budget), plan)
    layout = layout_of(plan)
    found = broken_slots(case, plan, layout)
    if layout.total_bytes > case.budget:
        found.append(f"the layout needs {layout.total_bytes} bytes of {case.budget}")
    streamed = [w for w in within.weights if any(w.name == p.name and not p.preload for p in plan.weights)]
    taken: Choice = [next((p.read_layer, p.moves) for p in plan.weights if p.name == w.name) for w in streamed]
    if layout.total_bytes < (fewest := least_bytes(case, within, streamed, taken)):
        found.append(f"the layout needs {layout.total_bytes} bytes, fewer than the {fewest} of any layout")
    resident = frozenset(p.name for p in plan.weights if p.preload)
    best = fastest(within, resident, lambda streamed, choice: least_bytes(case, within, streamed, choice) <= case.budget)
    if best is None:
        return plan.status, [*found, "no plan exists"]
    if plan.bound > best + EPSILON:
        found.append(f"bound {plan.bound:.9g} s above the optimum {best:.9g} s of this W")
    if plan.status.startswith("optimal") and plan.objective > best + EPSILON:
        found.append(f"{plan.status} at {plan.objective:.9g} s, the optimum of this W is {best:.9g} s")
    return plan.status, found
