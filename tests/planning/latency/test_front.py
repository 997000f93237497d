"""Lambda and M_peak through `make_plan`: no earlier answer with less memory, and no plan lost under a smaller limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import BudgetError
from flashmem.base.types import POOL_ALIGNMENT, TransferMode
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.options import resolve
from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.measure import in_flight_measure
from flashmem.planning.planner import make_plan, plan_instance, planning_instance
from flashmem.planning.why import in_flight_bytes
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.request.request import BundleRequest
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.tools.zoo.graphs import zoo_graph
from tests.support.planning_instances import instances, program_of

MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")
LAMBDAS = (0.0, 0.3, 0.7, 1.0)


def average(instance: Instance, plan: OverlapPlan) -> float:
    """Bytes of weights in memory on average: places are held all the time, pages from their read to their last use."""
    resident = sum(w.nbytes for w in plan.weights if w.preload)
    streamed = [w for w in plan.weights if not w.preload]
    if plan.mode != "map":
        return resident + max(in_flight_bytes(plan), default=0)
    clock = clock_of(instance, {w.name: w.read_layer for w in plan.weights}, {w.name: w.moves for w in streamed})
    begun = {w.name: max(instance.opening_seconds, clock.read[w.name]) for w in streamed}
    return resident + sum(w.nbytes * (clock.done[w.last_use - 1] - begun[w.name]) for w in streamed) / clock.seconds


def keeps_the_order(instance: Instance, plans: Mapping[tuple[int, float], OverlapPlan], program: Program) -> None:
    """Check the plans of several M_peak and lambda against each other."""
    averages = {key: average(instance, plan) for key, plan in plans.items()}
    measure = in_flight_measure(program, instance.mode)
    for m_peak, lambda_ in plans:
        assert measure(plans[m_peak, lambda_]) <= m_peak
        assert plans[m_peak, lambda_].bound <= plans[m_peak, lambda_].objective * (1 + 1e-9)
    for m_peak in {key[0] for key in plans}:
        for fast, lean in pairwise(LAMBDAS):
            assert plans[m_peak, lean].objective >= plans[m_peak, fast].objective * (1 - 1e-9)
            assert averages[m_peak, lean] <= averages[m_peak, fast] + 1
    most = max(m_peak for m_peak, _ in plans)
    for m_peak, lambda_ in plans:
        roomy, tight = plans[most, lambda_], plans[m_peak, lambda_]
        if measure(roomy) <= m_peak and roomy.member != "large-resident":
            later = tight.objective > roomy.objective * (1 + 1e-9)
            assert not (later and averages[m_peak, lambda_] >= averages[most, lambda_])


@given(instances(most_layers=8, most_weights=8), st.sampled_from(MODES), st.sampled_from((0.15, 0.25, 0.4)))
@settings(max_examples=5, deadline=None)
def test_random_problems(instance: Instance, mode: TransferMode, share: float) -> None:
    unit = POOL_ALIGNMENT
    instance = replace(
        instance, mode=mode, w_may_grow=True, piece_bytes=unit, chunk_bytes=unit * instance.chunk_bytes,
        load_bandwidth=unit * instance.load_bandwidth,
        weights=tuple(replace(w, nbytes=unit * w.nbytes) for w in instance.weights),
    )  # fmt: skip
    program, total = program_of(instance), 2 * sum(w.nbytes for w in instance.weights)
    plans = {}
    for m_peak in (max(1, int(share * total)), 2 * total + 4 * unit):
        try:
            for lambda_ in LAMBDAS:
                limits = Limits(m_peak=m_peak, lambda_=lambda_)
                plans[m_peak, lambda_] = plan_instance(replace(instance, m_peak=m_peak), program, mode, limits)
        except BudgetError:
            assert lambda_ == 0.0
    keeps_the_order(instance, plans, program)


@cache
def program(name: str, device: str) -> Program:
    return plan_graph(prepare(zoo_graph(name)), resolve(BundleRequest(device=device)))[0].program


@pytest.mark.parametrize(("name", "device"), [("vit-b16", "pocl"), ("mobilenetv2", "adreno750")])
def test_models(name: str, device: str) -> None:
    """At 40 MB a ViT-B/16 kept nothing at lambda 0, and two thirds of its weights at lambda 0.9."""
    made, options = program(name, device), resolve(BundleRequest(device=device))
    plans = {
        (m_peak, lambda_): make_plan(made, options.descriptor, options.mode, Limits(m_peak=m_peak, lambda_=lambda_))
        for m_peak in (40_000_000, 320_000_000)
        for lambda_ in LAMBDAS
    }
    keeps_the_order(planning_instance(made, options.descriptor, options.mode, Limits(m_peak=40_000_000)), plans, made)
