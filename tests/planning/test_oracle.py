"""Planners compared with exhaustive search; `python -m tests.planning.oracle` tries more problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import first_plan, judge_first_answer
from flashmem.planning.opg.lc_opg import solve
from flashmem.program.tensors import Slice
from flashmem.schedule.buffer_slots import staging_slots
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlannedWeight, TextureSlot
from tests.planning.oracle.first import FirstCase, fastest, first_case, first_findings
from tests.planning.oracle.paper import PaperCase, best_cost, paper_case, paper_findings
from tests.planning.oracle.slots import SlotCase, slot_case, slot_findings
from tests.support.planning_instances import layers_of, plan_at


@st.composite
def paper_cases(draw: st.DrawFn) -> PaperCase:
    return paper_case(lambda options: draw(st.sampled_from(options)))


@st.composite
def first_cases(draw: st.DrawFn) -> FirstCase:
    return first_case(lambda options: draw(st.sampled_from(options)))


@st.composite
def slot_cases(draw: st.DrawFn) -> SlotCase:
    return slot_case(lambda options: draw(st.sampled_from(options)))


@given(paper_cases())
@settings(max_examples=60, deadline=None)
def test_nothing_false_is_said_of_the_papers_objective(case: PaperCase) -> None:
    assert not paper_findings(case)[1]


@given(first_cases())
@settings(max_examples=60, deadline=None)
def test_nothing_false_is_said_of_the_first_answer(case: FirstCase) -> None:
    assert not first_findings(case)[1]


@given(slot_cases())
@settings(max_examples=60, deadline=None)
def test_nothing_false_is_said_of_budgets_and_slots(case: SlotCase) -> None:
    assert not slot_findings(case)[1]


def short_of_room() -> PaperCase:
    """W has room for five chunks of 13, so weights wait longer than a place in W would cost."""
    sizes = ((3, 6), (1, 4), (1, 3), (3, 3), (1, 3), (2, 5))
    weights = tuple(WeightSpec(f"w{n}", chunks, first, first) for n, (chunks, first) in enumerate(sizes))
    instance = Instance(layers_of([2, 0, 2, 2, 1, 0]), weights, 1, 100, 1.0)
    return PaperCase(instance, 0.3, "printed", frozenset(), 5, 16, 1, 5.0)


def test_a_limit_on_w_opens_the_window_in_which_weights_wait() -> None:
    case = short_of_room()
    best = best_cost(case)
    assert best is not None and abs(best - 5.7) < 1e-9
    plan = solve(case.instance, lambda_=0.3, preload_limit=5)
    assert abs(plan.objective - best) < 1e-9 and plan.status == "optimal"


def test_a_bound_for_the_first_answer_holds_for_plans_that_hold_more_than_this_one() -> None:
    """At lambda 1 the plan uses the least memory; its bound is proven for all memory that lambda permits."""
    weights = (WeightSpec("a", 5, 4, 4), WeightSpec("b", 5, 4, 4), WeightSpec("c", 7, 2, 2))
    layers = tuple(replace(layer, seconds=each) for layer, each in zip(layers_of([0, 0, 2, 1]), (1, 8, 1, 3), strict=True))
    instance = Instance(layers, weights, 4, 34, 1.0, mode="dma", host_bandwidth=2.0, piece_bytes=3)
    for step in range(5):
        plan = plan_at(instance, (), step / 4)
        best = fastest(instance if plan.bound_within is None else replace(instance, m_peak=plan.bound_within), frozenset())
        assert best is not None and plan.bound <= best + 1e-9
        assert plan.status == "bounded" or plan.objective <= best + 1e-9
        assert step or plan.bound_within in (None, 34)


def test_a_plan_made_in_less_memory_is_judged_in_what_was_given() -> None:
    """In 9 bytes all is read while layer 1 runs; in 6 the last read waits. The best plan for 6 is not the best for 9."""
    weights = tuple(WeightSpec(f"w{n}", 3, n, n) for n in (2, 3, 4))
    layers = tuple(replace(layer, seconds=each) for layer, each in zip(layers_of([9] * 4), (4.0, 1.0, 1.0, 1.0), strict=True))
    instance = Instance(layers, weights, 3, 9, 1.5)
    small = first_plan(replace(instance, m_peak=6))
    assert small.status.startswith("optimal")
    again = judge_first_answer(instance, small)
    best = fastest(instance, frozenset())
    assert best is not None and again.bound <= best + 1e-9 < small.objective and again.status == "bounded"


def test_a_plan_that_relaxes_a_capacity_is_not_called_optimal() -> None:
    """It reaches the bound of the problem without C_l, but is not a plan of the problem with it."""
    instance = Instance(layers_of([0, 0]), (WeightSpec("w", 1, 2, 2),), 1, 9, 1.0)
    plan = solve(instance, preload_limit=0)
    assert plan.relaxed == ((1, 1),) and plan.objective == plan.bound
    assert plan.status == "heuristic"


def one_slot_for_all(images: Sequence[tuple[Slice, int, int]]) -> tuple[tuple[TextureSlot, ...], dict[str, int]]:
    largest = max((part for part, _, _ in images), key=lambda part: part.file_bytes, default=None)
    if largest is None:
        return (), {}
    slot = TextureSlot(largest.width, largest.height, largest.channel, largest.file_bytes)
    return (slot,), {part.name: 0 for part, _, _ in images}


def halves(planned: Sequence[tuple[Slice, PlannedWeight]]) -> tuple[tuple[int, ...], dict[str, int]]:
    sizes, slot_of = staging_slots(planned)
    return tuple(size // 2 for size in sizes), slot_of


def too_sure(instance: Instance, plan: OverlapPlan) -> OverlapPlan:
    return replace(judge_first_answer(instance, plan), bound=1.01 * plan.objective)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("flashmem.planning.memory.layout.colour_slots", one_slot_for_all, "share a slot at once"),
        ("flashmem.planning.memory.layout.staging_slots", halves, "does not fit its staging slot"),
        ("tests.planning.oracle.slots.judge_first_answer", too_sure, "above the optimum"),
    ],
)
def test_the_oracle_finds_wrong_slots_and_bounds(
    name: str, wrong: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, wrong)
    found = [finding for n in range(80) for finding in slot_findings(slot_case(Random(f"wrong {n}").choice))[1]]
    assert any(said in each for each in found)
