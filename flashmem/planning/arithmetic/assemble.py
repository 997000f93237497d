"""Assemble an overlap plan from decisions (W, g, x): the last step of every planner."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from flashmem.planning.arithmetic.clock import Moves, clock_of, durations, unlimited_seconds
from flashmem.schedule.instance import Instance
from flashmem.schedule.objectives import ObjectiveKind
from flashmem.schedule.plan import PASSING_BYTES, BoundScope, OverlapPlan, PlannedWeight, Tier


def moved_chunks(instance: Instance, moves: Moves) -> list[int]:
    """Chunks moved at each layer, index l - 1."""
    used = [0] * len(instance.layers)
    for parts in moves.values():
        for layer, chunks in parts:
            used[layer - 1] += chunks
    return used


def with_relaxed(plan: OverlapPlan) -> OverlapPlan:
    """A plan for an objective in seconds with the layers that move more than C_l, where kernels move the bytes (C3, C4)."""
    if not (plan.kind.in_seconds and plan.transfer.by_kernels):
        return plan
    used = [0] * len(plan.capacities)
    for w in plan.weights:
        for layer, chunks in w.moves:
            used[layer - 1] += chunks
    above = ((layer, n) for layer, (n, most) in enumerate(zip(used, plan.capacities, strict=True), start=1) if n > most)
    return replace(plan, relaxed=tuple(above))


def cost_note(instance: Instance, moves: Moves) -> str:
    """Says what streaming during launches costs by their curves, and whether kernels move bytes at all."""
    delay = sum(durations(instance, moves)) - sum(spec.seconds for spec in instance.layers)
    who = "bytes that kernels move" if instance.transfer.by_kernels else "kernels move no bytes; loads during launches"
    return f"in mode {instance.mode}, {who} delay them by {delay:.3g} s in all, by the predicted curves"


def slowdown(seconds: float, fastest: float) -> float:
    """The relative increase of `seconds` over `fastest`, the seconds without a memory limit."""
    return max(0.0, seconds / fastest - 1) if fastest else 0.0


def assemble(
    instance: Instance,
    preload: Collection[str],
    releases: Mapping[str, int],
    moves: Moves,
    *,
    kind: ObjectiveKind,
    lambda_: float,
    objective: float,
    bound: float,
    bound_scope: BoundScope,
    tier: Tier,
    started: float,
    notes: tuple[str, ...],
    base: Collection[str],
    asked: Collection[str] = (),
) -> OverlapPlan:
    """The plan of these decisions. Its expected slowdown is relative to W = `base` and no memory limit; `asked` is recorded.

    C_l limits an objective in seconds only where kernels move the bytes. A plan lists the layers where a tier relaxed it.
    """
    weights = tuple(
        PlannedWeight(w.name, w.nbytes, instance.chunks(w), w.first_use, w.last_use, True, releases.get(w.name, 0))
        if w.name in preload
        else PlannedWeight(
            w.name, w.nbytes, instance.chunks(w), w.first_use, w.last_use, False, releases[w.name], moves[w.name]
        )
        for w in instance.weights
    )
    used = moved_chunks(instance, moves)
    above = {
        layer: n - spec.capacity
        for layer, (n, spec) in enumerate(zip(used, instance.layers, strict=True), start=1)
        if n > spec.capacity
    }
    if above:
        worst = max(above, key=above.__getitem__)
        priced = kind.in_seconds and not instance.transfer.by_kernels
        what = "more than C_l is moved, at the price that the objective counts," if priced else "C_l relaxed"
        notes += (
            f"{what} at {len(above)} of {len(used)} layers by {sum(above.values())} chunks in all, most at layer "
            f"{worst} {instance.layers[worst - 1].name!r} ({instance.layers[worst - 1].capacity} to {used[worst - 1]} chunks)",
        )
    if kind.in_seconds:
        notes += (cost_note(instance, moves),)
    seconds = clock_of(instance, {w.name: w.read_layer for w in weights}, moves).seconds
    bound_by_c3 = not kind.in_seconds or instance.transfer.by_kernels
    relaxed = tuple((layer, used[layer - 1]) for layer in sorted(above)) if bound_by_c3 else ()
    return OverlapPlan(
        objective_kind=kind.name,
        chunk_bytes=instance.chunk_bytes,
        m_peak=instance.m_peak,
        capacities=tuple(spec.capacity for spec in instance.layers),
        relaxed=relaxed,
        weights=weights,
        objective=objective,
        bound=bound,
        bound_scope=bound_scope,
        tier=tier,
        asked=tuple(sorted(asked)),
        solve_seconds=time.monotonic() - started,
        lambda_=lambda_,
        mode=instance.mode,
        piece_bytes=instance.piece_bytes or PASSING_BYTES,
        loader_threads=instance.loader_threads,
        shares_memory=instance.shares_memory,
        expected_slowdown=slowdown(seconds, unlimited_seconds(instance, base)),
        notes=(*instance.notes, *notes),
    )
