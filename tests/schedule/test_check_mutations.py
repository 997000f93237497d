"""The plan checker on plans with one change each: it names the violated constraint, for any problem and planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flashmem.planning.arithmetic.assemble import assemble
from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.latency.first_answer import first_plan, forced_preload, smallest_m_peak
from flashmem.planning.latency.later_runs import later_seconds
from flashmem.planning.opg.lc_opg import solve
from flashmem.planning.opg.srpt import srpt
from flashmem.planning.why import in_flight_bytes, moved_chunks
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.objectives import PAPER
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, PlanViolation
from tests.support.planning_instances import instances, layers_of

Broken = tuple[OverlapPlan, Instance]
Mutation = Callable[[OverlapPlan, Instance, st.DataObject], Broken]


def srpt_plan(instance: Instance) -> OverlapPlan | None:
    """SRPT for the least W, assembled by hand; None if it does not fit."""
    chosen = forced_preload(instance)
    found = srpt(instance, chosen)
    if not found.feasible:
        return None
    objective = 0.9 * sum(instance.chunks(w) for w in instance.weights if w.name in chosen) + 0.1 * found.distance(instance)
    return assemble(
        instance, chosen, {name: parts[0][0] for name, parts in found.moves.items()}, found.moves, kind=PAPER, lambda_=0.9,
        objective=objective, bound=0.0, bound_scope="problem", tier="dynamic-program", started=0.0, notes=(), base=chosen,
    )  # fmt: skip


@given(instances())
@settings(max_examples=60, deadline=None)
def test_srpt_plans_pass(instance: Instance) -> None:
    plan = srpt_plan(instance)
    assume(plan is not None)
    assert plan is not None
    check(plan, instance)


def pick(data: st.DataObject, plan: OverlapPlan, suits: Callable[[PlannedWeight], bool]) -> PlannedWeight:
    found = [w for w in plan.weights if suits(w)]
    assume(found)
    return data.draw(st.sampled_from(found))


def streamed(w: PlannedWeight) -> bool:
    return not w.preload


def changed(plan: OverlapPlan, w: PlannedWeight, **changes: Any) -> OverlapPlan:
    return replace(plan, weights=tuple(replace(w, **changes) if other is w else other for other in plan.weights))


def with_moves(plan: OverlapPlan, w: PlannedWeight, moves: dict[int, int]) -> OverlapPlan:
    return changed(plan, w, moves=tuple(sorted((layer, chunks) for layer, chunks in moves.items() if chunks)))


def drop_a_chunk(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, streamed)
    moves = dict(w.moves)
    moves[data.draw(st.sampled_from(sorted(moves)))] -= 1
    return with_moves(plan, w, moves), instance


def add_a_chunk(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, streamed)
    layer = data.draw(st.integers(w.read_layer, w.first_use - 1))
    moves = dict(w.moves)
    return with_moves(plan, w, {**moves, layer: moves.get(layer, 0) + 1}), instance


def move_to_the_use_or_later(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, streamed)
    moves = dict(w.moves)
    moves[data.draw(st.sampled_from(sorted(moves)))] -= 1
    layer = data.draw(st.integers(w.first_use, len(instance.layers)))
    return with_moves(plan, w, {**moves, layer: 1}), instance


def move_before_loading(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: streamed(w) and w.read_layer > 1)
    moves = dict(w.moves)
    moves[data.draw(st.sampled_from(sorted(moves)))] -= 1
    return with_moves(plan, w, {**moves, data.draw(st.integers(1, w.read_layer - 1)): 1}), instance


def load_after_the_first_move(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: streamed(w) and w.moves[0][0] + 1 < w.first_use)
    return changed(plan, w, read_layer=w.moves[0][0] + 1), instance


def load_at_the_use_or_later(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, streamed)
    return changed(plan, w, read_layer=data.draw(st.integers(w.first_use, len(instance.layers) + 1))), instance


def load_before_layer_1(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return changed(plan, pick(data, plan, streamed), read_layer=data.draw(st.integers(-2, 0))), instance


def pass_the_capacity(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    """Move a chunk to a layer that is already full."""
    moved = moved_chunks(plan)
    full = {layer for layer, (n, c) in enumerate(zip(moved, plan.kept_capacities, strict=True), start=1) if n == c}
    choices = [
        (w, source, layer)
        for w in plan.weights
        for source, _ in w.moves
        for layer in full & set(range(w.read_layer, w.first_use))
        if layer != source and layer > source
    ]
    assume(choices)
    w, source, layer = data.draw(st.sampled_from(choices))
    moves = dict(w.moves)
    moves[source] -= 1
    return with_moves(plan, w, {**moves, layer: moves.get(layer, 0) + 1}), instance


def raise_a_capacity(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    layer = data.draw(st.integers(0, len(plan.capacities) - 1))
    return replace(plan, capacities=tuple(c + (n == layer) for n, c in enumerate(plan.capacities))), instance


def pass_m_peak(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    most = max(in_flight_bytes(plan))
    assume(most > 0)
    return replace(plan, m_peak=most - 1), replace(instance, m_peak=most - 1)


def wrong_bytes(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: True)
    return changed(plan, w, nbytes=w.nbytes + data.draw(st.sampled_from([-1, 1]))), instance


def wrong_chunks(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: True)
    return changed(plan, w, chunks=w.chunks + data.draw(st.sampled_from([-1, 1]))), instance


def wrong_use(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: True)
    field = data.draw(st.sampled_from(["first_use", "last_use"]))
    return changed(plan, w, **{field: getattr(w, field) + data.draw(st.sampled_from([-1, 1]))}), instance


def forget_a_weight(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: True)
    return replace(plan, weights=tuple(other for other in plan.weights if other is not w)), instance


def name_a_weight_twice(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return replace(plan, weights=(*plan.weights, pick(data, plan, lambda w: True))), instance


def preload_what_is_streamed(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return changed(plan, pick(data, plan, streamed), preload=True), instance


def stream_what_is_preloaded(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return changed(plan, pick(data, plan, lambda w: w.preload), preload=False, read_layer=1), instance


def move_what_is_preloaded(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    w = pick(data, plan, lambda w: w.preload)
    return changed(plan, w, moves=((1, w.chunks),)), instance


def move_earlier_unpriced(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    """Make the first move earlier, within the capacities and after the release time, without changing the objective."""
    free = [c - n for n, c in zip(moved_chunks(plan), plan.kept_capacities, strict=True)]
    choices = [
        (w, layer) for w in plan.weights if not w.preload
        for layer in range(w.read_layer, w.first_mover) if free[layer - 1] >= 1
    ]  # fmt: skip
    assume(choices)
    w, layer = data.draw(st.sampled_from(choices))
    moves = dict(w.moves)
    moves[w.last_mover] -= 1
    return with_moves(plan, w, {**moves, layer: 1}), replace(instance, m_peak=plan.m_peak)


def preload_unpriced(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    """Add a weight to W whose cost differs from that of streaming it, without changing the objective."""
    w = pick(data, plan, lambda w: streamed(w) and abs(0.9 * w.chunks - 0.1 * (w.first_use - w.first_mover)) > 1e-3)
    return changed(plan, w, preload=True, read_layer=0, moves=()), instance


def wrong_objective(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return replace(plan, objective=plan.objective + data.draw(st.sampled_from([-0.1, 0.1, 5.0])), bound=-1.0), instance


def bound_above_the_objective(plan: OverlapPlan, instance: Instance, data: st.DataObject) -> Broken:
    return replace(plan, bound=plan.objective + 0.1), instance


MUTATIONS: dict[Mutation, str] = {
    drop_a_chunk: "C0",
    add_a_chunk: "C0",
    move_to_the_use_or_later: "C0",
    move_before_loading: "C1",
    load_after_the_first_move: "C1",
    load_at_the_use_or_later: "C1",
    load_before_layer_1: "C1",
    pass_m_peak: "C2",
    pass_the_capacity: "C3",
    raise_a_capacity: "C3",
    wrong_bytes: "problem",
    wrong_chunks: "problem",
    wrong_use: "problem",
    forget_a_weight: "problem",
    name_a_weight_twice: "problem",
    preload_what_is_streamed: "C0",
    stream_what_is_preloaded: "C0",
    move_what_is_preloaded: "C0",
    move_earlier_unpriced: "objective",
    preload_unpriced: "objective",
    wrong_objective: "objective",
    bound_above_the_objective: "objective",
}


# Plans for the first answer and for later runs: C_l does not bind them, so the seconds must include the copies during a layer.


@st.composite
def slowed(draw: st.DrawFn) -> Instance:
    """Problems whose layers are slowed down by simultaneous copies, with room for a plan."""
    instance = draw(instances())
    layers = tuple(replace(layer, beside=((0.0, 1.0), (4.0, 1.5), (64.0, 9.0))) for layer in instance.layers)
    return replace(instance, layers=layers, m_peak=max(instance.m_peak, smallest_m_peak(instance)[0]), host_bandwidth=8.0)


@given(instance=slowed(), later=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_what_is_moved_beside_a_layer_is_in_the_seconds_of_a_plan(instance: Instance, later: bool, data: st.DataObject) -> None:
    plan = first_plan(instance)
    if later:
        plan = replace(plan, objective_kind="steady", objective=later_seconds(instance, plan), bound=0.0)
    check(plan, instance)
    w = pick(data, plan, lambda w: streamed(w) and w.first_use - w.read_layer > 1)
    moves = dict(w.moves)
    source = data.draw(st.sampled_from(sorted(moves)))
    layer = data.draw(st.integers(w.read_layer, w.first_use - 1))
    moves[source] -= 1
    moved = with_moves(plan, w, {**moves, layer: moves.get(layer, 0) + 1})
    every = {each.name: each.moves for each in moved.weights if not each.preload}
    releases = {each.name: each.read_layer for each in moved.weights}
    seconds = later_seconds(instance, moved) if later else clock_of(instance, releases, every).seconds
    assume(abs(seconds - plan.objective) > 1e-5 * plan.objective)
    with pytest.raises(PlanViolation) as violation:
        check(moved, instance)
    assert violation.value.constraint == "objective"
    check(replace(moved, objective=seconds, bound=0.0), instance)


def test_no_plan_for_the_first_answer_relaxes_a_capacity() -> None:
    instance = Instance(layers_of([0, 0]), (WeightSpec("w", 3, 2, 2),), 1, 9, 1.0)
    plan = first_plan(instance)
    check(plan, instance)
    with pytest.raises(PlanViolation, match="C3"):
        check(replace(plan, relaxed=((1, 3),)), instance)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@given(instance=instances(), by_srpt=st.booleans(), data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_every_mutation_is_caught(mutation: Mutation, instance: Instance, by_srpt: bool, data: st.DataObject) -> None:
    plan = srpt_plan(instance) if by_srpt else solve(instance, time_limit=1.0)
    assume(plan is not None)
    assert plan is not None
    check(plan, instance)
    broken, against = mutation(plan, instance, data)
    with pytest.raises(PlanViolation) as violation:
        check(broken, against)
    assert violation.value.constraint == MUTATIONS[mutation]
