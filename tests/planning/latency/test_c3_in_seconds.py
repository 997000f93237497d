"""C3 where kernels move the bytes: a constraint of plans in seconds too, which a tier relaxes at the price of the curve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashmem.planning.arithmetic.clock import TimingModel, durations
from flashmem.planning.latency.first_answer import first_plan
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlanViolation

CHUNK = 10


def problem(capacity: int) -> Instance:
    """Layers of 1 s, of which each moved chunk adds 1 % up to five and 10 % beyond; the disk is never the limit."""
    beside = ((0.0, 1.0), (5.0 * CHUNK, 1.05), (25.0 * CHUNK, 3.05))
    layers = tuple(LayerSpec(f"l{n}", "reusable", capacity, 1.0, beside) for n in range(8))
    weights = tuple(WeightSpec(f"w{n}", 8 * CHUNK, 2 * n, 2 * n) for n in range(1, 5))
    return Instance(layers, weights, CHUNK, 10**9, 1e9, mode="interleave", host_bandwidth=1e9)


def moved(plan: OverlapPlan) -> list[int]:
    found = [0] * len(plan.capacities)
    for w in plan.weights:
        for layer, chunks in w.moves:
            found[layer - 1] += chunks
    return found


def test_halving_capacities_changes_the_plan_and_the_time_by_what_the_curve_says() -> None:
    whole, half = first_plan(problem(8)), first_plan(problem(4))
    assert moved(whole) != moved(half)
    assert max(moved(half)[:7]) <= 8 and not whole.relaxed
    curve = problem(8).layers[0]
    for plan in (whole, half):
        assert plan.objective == pytest.approx(sum(curve.loaded_seconds(n * CHUNK) for n in moved(plan)), abs=1e-3)
    assert half.objective < whole.objective  # eight chunks at once cost more than four and four


def test_what_passes_c_l_is_listed_and_checked() -> None:
    instance = problem(1)
    plan = first_plan(instance)
    over = tuple((layer, n) for layer, n in enumerate(moved(plan), start=1) if n > 1)
    assert plan.relaxed == over != () and any("C_l relaxed" in note for note in plan.notes)
    assert plan.status != "heuristic"  # the bound is that of all plans, with and without C3
    checked = replace(instance, m_peak=plan.m_peak)
    check(plan, checked)
    with pytest.raises(PlanViolation, match="C3"):
        check(replace(plan, relaxed=()), checked)
    with pytest.raises(PlanViolation, match="C3"):
        check(replace(plan, tier="cp-sat"), checked)


def test_a_plan_says_what_streaming_costs_in_every_mode() -> None:
    by_kernels = first_plan(problem(4))
    delay = sum(durations(problem(4), {w.name: w.moves for w in by_kernels.weights if w.moves})) - 8.0
    assert (
        f"in mode interleave, bytes that kernels move delay them by {delay:.3g} s in all, by the predicted curves"
        in by_kernels.notes
    )
    free = replace(problem(4), mode="alias", layers=tuple(replace(each, beside=()) for each in problem(4).layers))
    plan = first_plan(free)
    assert (
        "in mode alias, kernels move no bytes; loads during launches delay them by 0 s in all, by the predicted curves"
        in plan.notes
    )
    assert not plan.relaxed and TimingModel(free).seconds({w.name: w.read_layer for w in plan.weights}) == plan.objective
