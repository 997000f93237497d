"""The plan checker: plans that it must accept, and plans that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.bundle.bundle import Bundle
from flashmem.cli.commands.plan_summary import summary
from flashmem.planning.latency.first_answer import first_plan, smallest_m_peak
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.opg.lc_opg import solve
from flashmem.program.tensors import Slice
from flashmem.schedule.check import check, check_rules
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlanViolation, PoolLayout, TextureSlot
from tests.support.mini_bundle import write_mini_bundle
from tests.support.planning_instances import instances, keeps_the_rules, layers_of

WEIGHTS = (WeightSpec("head", 100, 1, 1), WeightSpec("a", 25, 3, 3), WeightSpec("b", 40, 4, 5), WeightSpec("c", 10, 5, 5))
INSTANCE = Instance(layers_of([2, 3, 4, 3, 0]), WEIGHTS, 10, 80, 1.0)
SLICES = (
    Slice("head", "head", 0, 100),
    Slice("a", "a", 0, 25),
    Slice("b", "b", 0, 64, 2, 2, 32),
    Slice("c", "c", 0, 16, 1, 1, 16),
)
MODES = ("map", "alias", "dma", "interleave")


def good_plan() -> OverlapPlan:
    plan = solve(INSTANCE)
    check(plan, INSTANCE)
    # 9 = 0.9 * 10 chunks of head; a, b and c are moved in the layer before their use
    assert plan.status == "optimal" and plan.objective == pytest.approx(9 + 0.1 * 3)
    return plan


def with_weight(plan: OverlapPlan, name: str, /, **changes: Any) -> OverlapPlan:
    return replace(plan, weights=tuple(replace(w, **changes) if w.name == name else w for w in plan.weights))


def test_the_plan_that_is_spoilt_below() -> None:
    assert {w.name: w.moves for w in good_plan().weights} == {"head": (), "a": ((2, 3),), "b": ((3, 4),), "c": ((4, 1),)}


@pytest.mark.parametrize(
    ("constraint", "spoil"),
    [
        ("problem", lambda p: replace(p, weights=p.weights[:-1])),
        ("problem", lambda p: replace(p, weights=(*p.weights, p.weights[-1]))),
        ("problem", lambda p: with_weight(p, "a", name="z")),
        ("problem", lambda p: with_weight(p, "a", nbytes=24)),
        ("problem", lambda p: with_weight(p, "a", chunks=2)),
        ("problem", lambda p: with_weight(p, "b", first_use=5)),
        ("problem", lambda p: with_weight(p, "b", last_use=4)),
        ("problem", lambda p: replace(p, m_peak=p.m_peak + 1)),
        ("problem", lambda p: replace(p, chunk_bytes=20)),
        ("C0", lambda p: with_weight(p, "a", moves=((2, 2),))),
        ("C0", lambda p: with_weight(p, "a", moves=((1, 1), (2, 1), (2, 1)))),
        ("C0", lambda p: with_weight(p, "a", moves=((2, 2), (1, 1)))),
        ("C0", lambda p: with_weight(p, "a", moves=((1, 0), (2, 3)))),
        ("C0", lambda p: with_weight(p, "a", moves=((2, 2), (3, 1)))),
        ("C0", lambda p: with_weight(p, "a", moves=((0, 1), (2, 2)))),
        ("C0", lambda p: with_weight(p, "a", preload=True)),
        ("problem", lambda p: replace(p, mode="dma")),
        ("C3", lambda p: replace(p, relaxed=((2, 9),))),
        ("C3", lambda p: replace(p, tier="greedy", relaxed=((2, 1),))),
        ("C0", lambda p: with_weight(p, "head", preload=False, read_layer=1)),
        ("C1", lambda p: with_weight(p, "a", moves=((1, 1), (2, 2)), read_layer=2)),
        ("C1", lambda p: with_weight(p, "a", read_layer=0)),
        ("C3", lambda p: with_weight(p, "c", moves=((2, 1),), read_layer=2)),
        ("C3", lambda p: replace(p, capacities=p.capacities[:-1])),
        ("C3", lambda p: replace(p, capacities=(9, *p.capacities[1:]))),
        ("C3", lambda p: replace(p, tier="greedy", capacities=(1, *p.capacities[1:]))),
        ("objective", lambda p: replace(p, objective=p.objective - 1, bound=0.0)),
        ("objective", lambda p: replace(p, bound=p.objective + 1)),
    ],
)
def test_spoilt_plans_are_caught(constraint: str, spoil: Callable[[OverlapPlan], OverlapPlan]) -> None:
    with pytest.raises(PlanViolation) as violation:
        check(spoil(good_plan()), INSTANCE)
    assert violation.value.constraint == constraint


def test_memory_is_counted_from_the_read_gate_to_the_last_use() -> None:
    assert smallest_m_peak(INSTANCE) == (65, "layer3")  # a (25) and, for the next layer, b (40)
    tight = replace(INSTANCE, m_peak=64)
    with pytest.raises(PlanViolation, match="65 bytes in flight at layer 3") as violation:
        check(replace(good_plan(), m_peak=64), tight)
    assert violation.value.constraint == "C2"


def test_a_partly_filled_chunk_counts_what_it_holds() -> None:
    instance = Instance(layers_of([9, 9]), (WeightSpec("w", 11, 2, 2),), 10, 11, 1.0)
    check(solve(instance), instance)


@given(instances(most_layers=6, most_weights=5, most_chunks=3), st.data())
@settings(max_examples=300, deadline=None)
def test_the_checker_agrees_with_the_rules_on_random_changes(instance: Instance, data: st.DataObject) -> None:
    limit = max(smallest_m_peak(instance)[0], instance.m_peak)
    inside = replace(instance, m_peak=limit)
    plan = solve(inside, time_limit=0.0) if data.draw(st.booleans()) else first_plan(inside)
    streamed = [w for w in plan.weights if not w.preload]
    for _ in range(data.draw(st.integers(1, 2)) if streamed else 0):
        w = data.draw(st.sampled_from(streamed))
        layers = st.integers(0, len(instance.layers))
        moves = data.draw(st.dictionaries(layers, st.integers(1, 3), max_size=3))
        plan = with_weight(plan, w.name, moves=tuple(sorted(moves.items())), read_layer=data.draw(layers))
    try:
        check(plan, inside)
    except PlanViolation as violation:  # the objective is checked after the rules
        assert (violation.constraint == "objective") == keeps_the_rules(plan, inside)
    else:
        assert keeps_the_rules(plan, inside)


def laid_out(*, shares_memory: bool = True) -> OverlapPlan:
    weights = tuple(replace(w, nbytes=s.nbytes) for w, s in zip(WEIGHTS, SLICES, strict=True))
    instance = replace(INSTANCE, weights=weights, m_peak=100_000)
    plan = first_plan(replace(instance, shares_memory=shares_memory))
    early = tuple(replace(w, read_layer=1) if w.name == "b" else w for w in plan.weights)  # so that it waits beside a
    plan = replace(plan, weights=early)
    plan = replace(plan, layouts=lay_out_pools(SLICES, plan, MODES))  # type: ignore[arg-type]
    check_rules(plan, instance, SLICES)  # without the objective, which changes with the order of reads
    return plan


def change(layout: PoolLayout, **changes: Any) -> PoolLayout:
    return replace(layout, **changes)


@pytest.mark.parametrize(
    ("mode", "spoil"),
    [
        ("map", lambda x: change(x, mapped_peak_bytes=100)),
        ("alias", lambda x: change(x, offsets={**x.offsets, "a": x.offsets["head"]})),
        ("alias", lambda x: change(x, offsets={**x.offsets, "a": x.offsets["head"] + 99})),
        ("alias", lambda x: change(x, offsets={**x.offsets, "a": -1})),
        ("alias", lambda x: change(x, offsets={**x.offsets, "a": x.pool_bytes - 24})),
        ("alias", lambda x: change(x, offsets={k: v for k, v in x.offsets.items() if k != "a"})),
        ("dma", lambda x: change(x, ring_bytes=99)),
        ("dma", lambda x: change(x, slot_of={**x.slot_of, "c": x.slot_of["b"]})),
        ("dma", lambda x: change(x, slot_of={**x.slot_of, "c": 7})),
        ("dma", lambda x: change(x, slots=tuple(replace(slot, width=1) for slot in x.slots))),
        ("dma", lambda x: change(x, slots=tuple(replace(slot, channel="half") for slot in x.slots))),
        ("dma", lambda x: change(x, slot_of={})),
        ("interleave", lambda x: change(x, staging={k: v for k, v in x.staging.items() if k != "a"})),
        ("interleave", lambda x: change(x, staging=dict.fromkeys(x.staging, 0))),
        ("interleave", lambda x: change(x, ring_bytes=199)),
        ("interleave", lambda x: change(x, staging_bytes=100)),
    ],
)
def test_spoilt_layouts_are_caught(mode: str, spoil: Callable[[PoolLayout], PoolLayout]) -> None:
    _catches(laid_out(), mode, spoil)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: change(x, staging_slot_of={k: v for k, v in x.staging_slot_of.items() if k != "a"}),
        lambda x: change(x, staging_slot_of={**x.staging_slot_of, "a": 7}),
        lambda x: change(x, staging_slot_of={**x.staging_slot_of, "a": -1}),
        lambda x: change(x, staging_slot_of={**x.staging_slot_of, "a": x.staging_slot_of["b"]}),
        lambda x: change(x, staging={"a": 0}),
        lambda x: change(x, staging_slots=(24,) * len(x.staging_slots)),
        lambda x: change(x, staging_slots=()),
        lambda x: change(x, ring_bytes=199),
    ],
)
def test_spoilt_staging_slots_are_caught(spoil: Callable[[PoolLayout], PoolLayout]) -> None:
    _catches(laid_out(shares_memory=False), "interleave", spoil)


def _catches(plan: OverlapPlan, mode: str, spoil: Callable[[PoolLayout], PoolLayout]) -> None:
    instance = replace(
        INSTANCE, weights=tuple(WeightSpec(w.name, w.nbytes, w.first_use, w.last_use) for w in plan.weights), m_peak=100_000
    )
    spoilt = replace(plan, layouts={**plan.layouts, mode: spoil(plan.layouts[mode])})
    with pytest.raises(PlanViolation) as violation:
        check(spoilt, instance, SLICES)
    assert violation.value.constraint == "layout"


def test_a_slot_may_be_taken_again_once_it_is_free() -> None:
    instance = Instance(layers_of([0] * 5), (WeightSpec("x", 16, 2, 2), WeightSpec("y", 16, 4, 4)), 16, 16, 1.0)
    slices = (Slice("x", "x", 0, 16, 1, 1, 16), Slice("y", "y", 0, 16, 1, 1, 16))
    plan = first_plan(instance)
    layout = PoolLayout(slots=(TextureSlot(1, 1, "float", 16),), slot_of={"x": 0, "y": 0}, ring_bytes=32)
    check(replace(plan, layouts={"dma": layout}), instance, slices)
    assert lay_out_pools(slices, plan, ["dma"])["dma"].slots == layout.slots


def test_checked_is_what_the_checker_says_of_the_plan_that_is_shown(tmp_path: Path) -> None:
    """The checker knows each launch's C_l and which of them were relaxed: the same moves pass with one and not without."""
    bundle = Bundle.open(write_mini_bundle(tmp_path / "mini").path)
    plan, program = bundle.plan, bundle.program
    assert summary(plan, program)["checked"] is True
    layer, most = next((at, n) for at, n in enumerate(plan.capacities, start=1) if n)
    lower = replace(plan, capacities=(*plan.capacities[: layer - 1], most - 1, *plan.capacities[layer:]))
    assert summary(lower, program)["checked"] is False
    assert summary(replace(lower, relaxed=((layer, most),)), program)["checked"] is True
    assert summary(replace(lower, relaxed=((layer, most),), tier="cp-sat"), program)["checked"] is False
    assert summary(replace(plan, m_peak=1), program)["checked"] is False
