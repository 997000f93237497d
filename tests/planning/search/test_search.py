"""The search where a plan has a gap: never a worse plan, never a bound that a plan of the problem beats."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.arithmetic.clock import clock_of
from flashmem.planning.arithmetic.solver import cp_solver
from flashmem.planning.latency.bounds import fastest_seconds
from flashmem.planning.planner import completed, plan_instance, search_gap
from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import ENOUGH
from flashmem.planning.search.later_bound import least_later_seconds
from flashmem.planning.search.moves import MovesModel
from flashmem.planning.search_process import SearchProcess
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import load_descriptor
from tests.support.planning_instances import program_of

STEEP = ((0.0, 1.0), (10.0, 1.5), (20.0, 2.0))
LATE = ((0.0, 1.0), (20.0, 1.0), (30.0, 3.0))
"""Curves: a cost from the first byte on, and none for two chunks."""


def instance_of(curves: tuple[tuple[tuple[float, float], ...], ...], uses: tuple[int, ...], chunk: int = 10) -> Instance:
    layers = tuple(LayerSpec(f"layer{n}", "reusable", 1, 1.0, curve) for n, curve in enumerate(curves, start=1))
    weights = tuple(WeightSpec(f"w{n}", chunk, first, first) for n, first in enumerate(uses))
    return Instance(layers, weights, chunk, 1000, 100.0)


def searched(instance: Instance, **limits: object) -> tuple[OverlapPlan, OverlapPlan]:
    asked = Limits(solver="cp-sat", **limits)  # type: ignore[arg-type]
    program = program_of(instance)
    plan = plan_instance(instance, program, "map", asked, complete=False)
    plan = completed(instance, plan, program, "map", asked)
    return plan, search_gap(Problem(instance, program, "map", asked), plan)


def test_moves_go_to_layers_where_they_cost_nothing() -> None:
    plan, better = searched(instance_of((STEEP, LATE, STEEP, STEEP, LATE, STEEP), (3, 3, 6, 6)))
    assert plan.objective > better.objective == pytest.approx(6.0)
    assert better.status == "optimal" and better.solver == "cp-sat" and "improved the plan" in better.notes[-1]


curves = st.sampled_from([STEEP, LATE, ((0.0, 1.0), (10.0, 2.0), (40.0, 2.1))])


@settings(deadline=None, max_examples=12)
@given(st.tuples(curves, curves, curves, curves), st.tuples(*[st.integers(2, 4)] * 3), st.sampled_from([5.0, 12.0, 100.0]))
def test_its_plans_and_bounds_are_those_of_every_choice_of_moves(
    shapes: tuple[tuple[tuple[float, float], ...], ...], uses: tuple[int, ...], rate: float
) -> None:
    instance = replace(instance_of(shapes, uses), load_bandwidth=rate)
    releases = {w.name: 1 for w in instance.weights}
    choices = [[((w.name, layer)) for layer in range(1, w.first_use)] for w in instance.weights]
    every = [
        clock_of(instance, releases, {name: ((layer, 1),) for name, layer in choice}).seconds for choice in product(*choices)
    ]
    plan, better = searched(instance)
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    bound = MovesModel(instance, {}, moves, plan.objective, 0.0, "exact", exact=False).bound(cp_solver(1, 5))
    assert fastest_seconds(instance, ()) <= min(every) * (1 + 1e-9)
    assert min(every) * (1 - 1e-4) <= bound <= min(every) * (1 + 1e-9)
    assert min(every) * (1 - 1e-9) <= better.objective <= min(every) * (1 + 2 * ENOUGH) or plan.objective == better.objective


def test_a_bound_on_later_runs_is_below_those_of_every_set_of_kept_weights() -> None:
    instance = replace(instance_of((STEEP,) * 5, (1, 2, 3, 4, 5)), load_bandwidth=4.0, host_bandwidth=4.0)
    for room in (0, 10, 25, 40, 50):
        every = []
        for kept in product((False, True), repeat=5):
            if sum(10 * each for each in kept) <= room:
                rest = tuple(w for w, keep in zip(instance.weights, kept, strict=True) if not keep)
                run = replace(instance, weights=rest, load_bandwidth=float("inf"))
                for layers in product(*(range(1, max(2, w.first_use)) for w in rest)):
                    moves = {w.name: ((at, 1),) for w, at in zip(rest, layers, strict=True) if w.first_use > 1}
                    every.append(clock_of(run, {w.name: 1 for w in rest}, moves).seconds)
        bound = least_later_seconds(instance, room, 10.0)
        assert 5.0 * (1 - 1e-5) <= bound <= min(every)
        assert room == 50 or bound > 5.4


def test_later_runs_keep_the_weights_that_they_wait_for() -> None:
    layers = tuple(LayerSpec(f"layer{n}", "reusable", 9, 1.0) for n in range(1, 9))
    sizes = (30, 10, 10, 40, 10, 10, 10, 30)
    weights = tuple(WeightSpec(f"w{n}", size, n, n) for n, size in enumerate(sizes, start=1))
    instance = Instance(layers, weights, 10, 1000, 8.0, host_bandwidth=6.0)
    plan, better = searched(instance, objective="steady", budget=90)
    assert plan.gap > 0.1 and better.solver == "cp-sat"
    assert better.objective <= plan.objective and better.bound >= plan.bound and better.gap < plan.gap


def test_a_search_is_the_same_each_time() -> None:
    instance = instance_of((STEEP, LATE, STEEP, LATE, STEEP, STEEP, LATE, STEEP), (3, 4, 4, 6, 6, 8, 8))
    plans = [replace(searched(instance)[1], solve_seconds=0.0) for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_process_of_its_own_finds_the_same_and_ends_when_it_is_left() -> None:
    program: Program = program_of(instance_of((STEEP,) * 3, (2, 3)))
    plan, _ = searched(instance_of((STEEP,) * 3, (2, 3)))
    given = pickle.loads(pickle.dumps(plan))
    with SearchProcess(program, given, load_descriptor("pocl"), Limits(solver="dp")) as search:
        assert search.result(None) == plan  # nothing may be searched
    with SearchProcess(program, plan, load_descriptor("pocl"), Limits()) as search:
        process = search._process
        assert search.result(0.0) == plan
    assert process.returncode is not None


def test_a_search_that_fails_is_said() -> None:
    program = program_of(instance_of((STEEP,) * 3, (2, 3)))
    plan, _ = searched(instance_of((STEEP,) * 3, (2, 3)))
    with SearchProcess(program, plan, load_descriptor("pocl"), None) as search:  # type: ignore[arg-type]
        found = search.result(None)
    assert found == replace(plan, notes=found.notes)
    assert found.notes[-1].startswith("the search for a better plan failed (AttributeError: 'NoneType'")
