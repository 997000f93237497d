"""SRPT compared with exhaustive search on small problems."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import forced_preload
from flashmem.planning.opg.srpt import offenders, srpt
from flashmem.schedule.instance import Instance, WeightSpec
from tests.support.planning_instances import in_flight, instances, layers_of, least_distance

small = instances(most_layers=6, most_weights=4, most_chunks=3, whole_chunks=True)
small_any_size = instances(most_layers=6, most_weights=4, most_chunks=3)


@given(small, st.data())
@settings(max_examples=150, deadline=None)
def test_srpt_is_the_optimum_for_a_given_w(instance: Instance, data: st.DataObject) -> None:
    others = [w.name for w in instance.weights]
    preload = forced_preload(instance) | set(data.draw(st.lists(st.sampled_from(others), max_size=2)) if others else [])
    plan, best = srpt(instance, preload), least_distance(instance, preload)
    assert plan.feasible == (best is not None)
    if plan.feasible:
        assert plan.distance(instance) == best


@given(small_any_size)
@settings(max_examples=100, deadline=None)
def test_partly_filled_chunks_never_make_srpt_too_optimistic(instance: Instance) -> None:
    preload = forced_preload(instance)
    plan, best = srpt(instance, preload), least_distance(instance, preload)
    if plan.feasible:
        assert plan.distance(instance) == best
        assert max(in_flight(instance, plan.moves), default=0) <= instance.m_peak


def test_a_known_plan() -> None:
    # Backwards: big (3 chunks) and small (1) are used at layer 4. Layer 3 serves small and one of big, layer 2 the rest.
    weights = (WeightSpec("big", 30, 4, 4), WeightSpec("small", 10, 4, 4))
    instance = Instance(layers_of([5, 2, 2, 0]), weights, 10, 40, 1.0)
    plan = srpt(instance, ())
    assert plan.moves == {"big": ((2, 2), (3, 1)), "small": ((3, 1),)}
    assert in_flight(instance, plan.moves) == [0, 30, 40, 40]
    assert plan.feasible


@given(instances())
@settings(max_examples=100, deadline=None)
def test_relaxing_moves_above_capacity_only_up_to_the_ceiling(instance: Instance) -> None:
    preload = forced_preload(instance)
    ceiling = [2 * spec.capacity + 1 for spec in instance.layers]
    strict, relaxed = srpt(instance, preload), srpt(instance, preload, ceiling)
    for layer, top in enumerate(ceiling, start=1):
        assert sum(n for moves in relaxed.moves.values() for at, n in moves if at == layer) <= top
    if strict.feasible:
        assert relaxed == strict
    if relaxed.feasible:
        assert max(in_flight(instance, relaxed.moves), default=0) <= instance.m_peak
        assert all(
            sum(n for _, n in relaxed.moves[w.name]) == instance.chunks(w) for w in instance.weights if w.name not in preload
        )


@given(instances(whole_chunks=True))
@settings(max_examples=100, deadline=None)
def test_offenders_let_the_walk_through(instance: Instance) -> None:
    preload = forced_preload(instance)
    evicted = offenders(instance, preload)
    assert bool(evicted) != srpt(instance, preload).feasible
    assert srpt(instance, preload | evicted).feasible
    assert not offenders(instance, preload, room=0)
