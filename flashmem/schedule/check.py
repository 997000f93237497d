"""Checker of overlap plans. It shares no code with the planners, so that it finds their mistakes.

`check` verifies a plan against its instance. It needs the standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from flashmem.program.tensors import Slice
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import (
    RELAXING_TIERS,
    OverlapPlan,
    PlannedWeight,
    PlanViolation,
    PoolLayout,
    passing_bytes,
)


def check(plan: OverlapPlan, instance: Instance, slices: Sequence[Slice] = ()) -> None:
    """Verify `plan` against `instance`: C0-C3 (docs/reference/internals/planner.md; FlashMem §3), objective and layouts.

    With `slices` (those of the program), texture slots are also checked to be large enough for their contents.
    Only the strategy "on-demand" may load and move a weight at layer i_w itself, which then waits for it.

    Raises:
        PlanViolation: the first rule found broken.
    """
    check_rules(plan, instance, slices)
    _check_pinned(plan, instance)
    _check_seconds(plan, instance)


def check_rules(plan: OverlapPlan, instance: Instance, slices: Sequence[Slice] = ()) -> None:
    """Verify all rules except an objective in seconds: these checks do not need the rates of the problem."""
    _check_weights(plan, instance)
    for w in plan.weights:
        _check_moves(w, w.first_use if plan.strategy == "on-demand" else w.first_use - 1)
    _check_memory(plan, instance)
    if any(w.pinned and (w.preload or w.keep) for w in plan.weights):
        raise PlanViolation("host", "a weight that stays on the device is in pinned memory too")
    _check_capacities(plan, instance)
    _check_objective(plan)
    dims = {s.name: s for s in slices}
    for mode, layout in plan.layouts.items():
        _check_layout(mode, layout, plan.weights, len(plan.capacities), dims)


def _check_weights(plan: OverlapPlan, instance: Instance) -> None:
    """Check that the plan has every weight of the problem once, with the problem's description of it."""
    if (plan.chunk_bytes, plan.m_peak, plan.mode) != (instance.chunk_bytes, instance.m_peak, instance.mode):
        raise PlanViolation("problem", "the plan was made for another chunk size, another M_peak or another transfer mode")
    planned = {w.name: w for w in plan.weights}
    if len(planned) != len(plan.weights) or planned.keys() != {w.name for w in instance.weights}:
        raise PlanViolation("problem", "the plan does not hold each weight of the problem once")
    for spec in instance.weights:
        w = planned[spec.name]
        chunks = -(-spec.nbytes // instance.chunk_bytes)
        if (w.nbytes, w.chunks, w.first_use, w.last_use) != (spec.nbytes, chunks, spec.first_use, spec.last_use):
            raise PlanViolation("problem", f"weight {w.name} differs from the problem's in size or use")
        if not 1 <= w.first_use <= w.last_use <= len(instance.layers):
            raise PlanViolation("problem", f"weight {w.name} is used outside layers 1 to {len(instance.layers)}")


def _check_memory(plan: OverlapPlan, instance: Instance) -> None:
    """Check C2: the bytes outside W in the plan's mode, at every layer, and the bytes of that mode's layout."""
    layers = len(instance.layers)
    change = [0] * (layers + 2)
    for w in plan.weights:
        if w.preload:
            continue
        home = w.read_layer
        last = layers if w.keep else w.last_use
        if plan.mode == "interleave":  # in staging from its release time to its last move, at home from its first
            change[w.read_layer] += w.nbytes
            change[w.moves[-1][0] + 1] -= w.nbytes
            home = w.moves[0][0]
        change[1 if w.keep else home] += w.nbytes
        change[last + 1] -= w.nbytes
    held = 0
    for layer in range(1, layers + 1):
        held += change[layer]
        if held > plan.m_peak:
            raise PlanViolation("C2", f"{held} bytes in flight at layer {layer}, M_peak is {plan.m_peak}")
    layout = plan.layouts.get(plan.mode)
    in_flight = 0 if layout is None else layout.in_flight_bytes(shares_memory=plan.shares_memory)
    if in_flight > plan.m_peak:
        raise PlanViolation("C2", f"the layout needs {in_flight} bytes outside W, M_peak is {plan.m_peak}")


def _check_pinned(plan: OverlapPlan, instance: Instance) -> None:
    """Check that weights in pinned memory fit what the host has for them."""
    room = 0 if instance.own is None else instance.own.host_bytes or 0
    if (needed := sum(w.nbytes for w in plan.weights if w.pinned)) > room:
        raise PlanViolation("host", f"{needed} bytes of weights are in pinned memory, which has {room} for them")


def _check_capacities(plan: OverlapPlan, instance: Instance) -> None:
    """Check the plan's capacities. For a weighted sum, and where kernels move the bytes, check C3, and that only a relaxing
    tier has raised a C_l.
    """
    if len(plan.capacities) != len(instance.layers):
        raise PlanViolation("C3", f"{len(plan.capacities)} capacities for {len(instance.layers)} layers")
    for layer, (stated, spec) in enumerate(zip(plan.capacities, instance.layers, strict=True), start=1):
        if stated != spec.capacity:
            raise PlanViolation("C3", f"layer {layer} has capacity {stated}, the problem says {spec.capacity}")
    allowed = list(plan.capacities)
    if plan.kind.in_seconds and plan.mode != "interleave":  # `_check_seconds` alone counts the bytes moved during each layer
        if plan.relaxed:
            raise PlanViolation("C3", f"a plan for {plan.objective_kind!r} relaxes C_l, which does not bind it")
        return
    for layer, chunks in plan.relaxed:
        if plan.tier not in RELAXING_TIERS:
            raise PlanViolation("C3", f"tier {plan.tier} has relaxed layer {layer}")
        if not 1 <= layer <= len(allowed) or chunks <= allowed[layer - 1]:
            raise PlanViolation("C3", f"layer {layer} is not relaxed by {chunks} chunks")
        allowed[layer - 1] = chunks
    moved = [0] * len(plan.capacities)
    for w in plan.weights:
        for layer, chunks in w.moves:
            moved[layer - 1] += chunks
    for layer, (chunks, capacity) in enumerate(zip(moved, allowed, strict=True), start=1):
        if chunks > capacity:
            raise PlanViolation("C3", f"layer {layer} moves {chunks} chunks, its capacity is {capacity}")


def _check_objective(plan: OverlapPlan) -> None:
    """Recompute a weighted sum. For others, check that value, bound and gap agree; `_check_seconds` does the rest."""
    tolerance = 1e-6 * abs(plan.objective) + 1e-12
    if not plan.kind.in_seconds:
        preloaded = sum(w.chunks for w in plan.weights if w.preload)
        distance = sum(w.first_use - w.moves[0][0] for w in plan.weights if not w.preload)
        value = plan.lambda_ * preloaded + (1 - plan.lambda_) * distance
        if plan.units == "share":
            everything = sum(w.chunks for w in plan.weights)
            layers = len(plan.weights) * len(plan.capacities)
            value = plan.lambda_ * preloaded / max(1, everything) + (1 - plan.lambda_) * distance / max(1, layers)
        if abs(value - plan.objective) > tolerance:
            raise PlanViolation("objective", f"the objective is not {plan.objective}")
    if plan.bound > plan.objective + tolerance:
        raise PlanViolation("objective", f"bound {plan.bound} above objective {plan.objective}")


def _check_seconds(plan: OverlapPlan, instance: Instance) -> None:
    """Recompute an objective in seconds, from the release times and the bytes moved during each layer."""
    if not plan.kind.in_seconds:
        return
    seconds = _seconds(plan, instance, later=plan.kind.value == "later run")
    if abs(seconds - plan.objective) > 1e-6 * abs(plan.objective) + 1e-12:
        raise PlanViolation("objective", f"the plan takes {seconds} s, its objective is {plan.objective}")


def _seconds(plan: OverlapPlan, instance: Instance, *, later: bool) -> float:
    """Latency of the first run, or of a `later` one: then W and kept weights are resident, the file is in the page cache."""
    opening = 0.0 if later else instance.opening_seconds
    cached = later and instance.host_bandwidth < float("inf")
    weights = [w for w in plan.weights if not (later and (w.preload or w.keep))]
    needs = {w.name: w.first_mover if plan.mode == "interleave" else w.first_use for w in weights}
    beside = [0] * (len(instance.layers) + 1)
    waiting: list[list[str]] = [[] for _ in range(len(instance.layers) + 1)]
    for w in weights:
        waiting[needs[w.name]].append(w.name)
        for layer, chunks in w.moves:
            beside[layer] += chunks * (layer < w.first_use)
    loaded: dict[str, float] = {}
    done = [opening]

    def run(until: int) -> None:
        for layer in range(len(done), until + 1):
            begin = max([done[-1], *(loaded[name] for name in waiting[layer])])
            done.append(begin + instance.layers[layer - 1].loaded_seconds(beside[layer] * plan.chunk_bytes))

    disk = 0.0
    host = opening
    for w in sorted(weights, key=lambda w: (max(1, w.read_layer), needs[w.name], w.first_use)):
        if w.read_layer > 1:
            run(w.read_layer - 1)
            disk = max(disk, done[w.read_layer - 1])
            host = max(host, done[w.read_layer - 1])
        disk += 0.0 if cached else w.nbytes / instance.load_bandwidth
        piece = min(w.nbytes, instance.piece_bytes) / instance.host_bandwidth
        host = loaded[w.name] = max(host + w.nbytes / instance.host_bandwidth, disk + piece)
    run(len(instance.layers))
    return done[-1] if instance.layers else 0.0  # the end of the last layer


def _check_moves(w: PlannedWeight, latest: int) -> None:
    """Check C0 and C1 of one weight, which must be read and moved no later than layer `latest`."""
    if w.preload:
        if w.moves:
            raise PlanViolation("C0", f"preloaded weight {w.name} is streamed as well")
        if not 0 <= w.read_layer <= w.first_use:
            raise PlanViolation("C1", f"preloaded weight {w.name} is read at layer {w.read_layer}, after its use")
        return
    layers = [layer for layer, _ in w.moves]
    if any(chunks < 1 for _, chunks in w.moves) or layers != sorted(set(layers)):
        raise PlanViolation("C0", f"the moves of weight {w.name} are not ascending layers with one or more chunks")
    if sum(chunks for _, chunks in w.moves) != w.chunks:
        raise PlanViolation("C0", f"weight {w.name} moves {sum(n for _, n in w.moves)} chunks of {w.chunks}")
    if layers and (layers[0] < 1 or layers[-1] > latest):
        raise PlanViolation("C0", f"weight {w.name} moves outside layers 1 to {latest}")
    if not layers or not 1 <= w.read_layer <= layers[0]:
        raise PlanViolation("C1", f"weight {w.name} is read at layer {w.read_layer}, after it is moved, or before layer 1")


@dataclass(frozen=True)
class _Placed:
    """Bytes [offset, end), occupied during layers first..last."""

    name: str
    offset: int
    end: int
    first: int
    last: int


def _check_layout(
    mode: str, layout: PoolLayout, weights: tuple[PlannedWeight, ...], layers: int, dims: dict[str, Slice]
) -> None:
    """Check that each slice has the places its mode requires, and that slices alive at the same time do not overlap."""

    def lives(w: PlannedWeight) -> tuple[int, int]:
        if w.preload:
            return 0, layers
        if w.keep:  # it is resident from the start of later runs
            return 0, layers
        return w.moves[0][0] if mode == "interleave" else w.read_layer, w.last_use

    if mode == "map":
        changes = [0] * (layers + 2)
        for w in weights:
            first, last = lives(w)
            changes[first] += w.nbytes
            changes[last + 1] -= w.nbytes
        if max(accumulate(changes)) > layout.mapped_peak_bytes:
            raise PlanViolation("layout", "map: more is resident at once than the layout says")
        return

    for w in weights:
        if (w.name in layout.offsets) == (w.name in layout.slot_of):
            raise PlanViolation("layout", f"{mode}: slice {w.name} must be in the pool or in a texture slot")
    _check_staging(mode, layout, [w for w in weights if mode == "interleave" and not w.preload])
    piece = layout.piece_bytes
    passing = [
        passing_bytes(dims[w.name], piece) if w.name in dims else min(w.nbytes, piece)
        for w in weights
        if mode == "dma" or (mode == "interleave" and (w.preload or layout.staging_slots))
    ]
    if layout.ring_bytes < layout.threads * max(passing, default=0):
        raise PlanViolation("layout", f"{mode}: pieces of the largest slice do not fit the ring")

    pool = [_Placed(w.name, layout.offsets[w.name], layout.offsets[w.name] + w.nbytes, *lives(w))
            for w in weights if w.name in layout.offsets]  # fmt: skip
    _check_disjoint(f"{mode} pool", pool, layout.pool_bytes)

    _check_slots(mode, layout, [(w, *lives(w)) for w in weights if w.name in layout.slot_of], dims)


def _check_staging(mode: str, layout: PoolLayout, streamed: list[PlannedWeight]) -> None:
    """Check that each streamed slice has its own place in the buffer, or a slot, from its release time to its last move."""
    for w in streamed:
        places = layout.staging
        other = layout.staging_slot_of
        if layout.staging_slots:
            places, other = other, places
        if w.name not in places or w.name in other:
            raise PlanViolation("layout", f"{mode}: slice {w.name} has no place in staging")
    if not layout.staging_slots:
        places = layout.staging
        staged = [_Placed(w.name, places[w.name], places[w.name] + w.nbytes, w.read_layer, w.moves[-1][0]) for w in streamed]
        _check_disjoint(f"{mode} staging", staged, layout.staging_bytes)
        return
    turns: dict[int, list[tuple[int, int, str]]] = {}
    for w in streamed:
        number = layout.staging_slot_of[w.name]
        if not 0 <= number < len(layout.staging_slots) or layout.staging_slots[number] < w.nbytes:
            raise PlanViolation("layout", f"{mode}: slice {w.name} does not fit its staging slot")
        turns.setdefault(number, []).append((w.read_layer, w.moves[-1][0], w.name))
    _check_turns(mode, turns, "staging")


def _check_slots(mode: str, layout: PoolLayout, held: list[tuple[PlannedWeight, int, int]], dims: dict[str, Slice]) -> None:
    """Check texture slots: they hold one slice at a time, and each slice fits."""
    turns: dict[int, list[tuple[int, int, str]]] = {}
    for w, first, last in held:
        number = layout.slot_of[w.name]
        if not 0 <= number < len(layout.slots):
            raise PlanViolation("layout", f"{mode}: slice {w.name} names texture slot {number} of {len(layout.slots)}")
        turns.setdefault(number, []).append((first, last, w.name))
        slot = layout.slots[number]
        part = dims.get(w.name)
        if part and (part.width > slot.width or part.height > slot.height or part.channel != slot.channel):
            raise PlanViolation("layout", f"{mode}: slice {w.name} does not fit its texture slot")
    _check_turns(mode, turns, "texture")


def _check_turns(mode: str, turns: dict[int, list[tuple[int, int, str]]], what: str) -> None:
    """Check that no slot holds two slices at once. Each slice has its first and last layer."""
    for taken in turns.values():
        taken.sort()
        for (_, last, name), (first, _, other) in pairwise(taken):
            if first <= last:
                raise PlanViolation("layout", f"{mode}: slices {name} and {other} share a {what} slot at layer {first}")


def _check_disjoint(where: str, places: Iterable[_Placed], size: int) -> None:
    """Check that places alive at the same time are disjoint.

    It sweeps over the layers and keeps the live places sorted by offset, so that a new place is compared with its two
    neighbours only.
    """
    events = sorted(
        [(p.first, 1, p) for p in places] + [(p.last + 1, 0, p) for p in places], key=lambda e: (e[0], e[1], e[2].offset)
    )
    alive: list[tuple[int, int, str]] = []
    for _, opens, p in events:
        if p.offset < 0 or p.end > size:
            raise PlanViolation("layout", f"{where}: slice {p.name} is outside its {size} bytes")
        entry = (p.offset, p.end, p.name)
        at = bisect_left(alive, entry)
        if not opens:
            del alive[at]
            continue
        for neighbour in alive[max(0, at - 1) : at + 1]:
            if neighbour[0] < p.end and p.offset < neighbour[1]:
                raise PlanViolation("layout", f"{where}: slices {neighbour[2]} and {p.name} overlap")
        alive.insert(at, entry)
