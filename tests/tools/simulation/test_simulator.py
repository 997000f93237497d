"""The simulator compared with hand-computed runs and lower bounds; `test_one_schedule` compares it with the planner's clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.tools.simulation.events import Events, Process, Work
from flashmem.tools.simulation.scenario import Allocation, Machine, Scenario, SimulatedLayer, SimulatedLoad
from flashmem.tools.simulation.simulator import Prediction, simulate

PLAIN = Machine(read_bandwidth=10.0, copy_bandwidth=20.0, threads=1)


def load(name: str, nbytes: int, after: int = 0, *, preload: bool = False, held: int = 0) -> SimulatedLoad:
    return SimulatedLoad(name, nbytes, (("read", nbytes),), after, preload, held)


def layer(seconds: float, *needs: str) -> SimulatedLayer:
    return SimulatedLayer("layer", seconds, needs)


def started(prediction: Prediction) -> list[float]:
    return [span.start for span in prediction.report.layers]


def test_one_layer_waits_for_its_weight() -> None:
    prediction = simulate(Scenario(PLAIN, (layer(3.0, "w"),), (load("w", 50),)))
    assert prediction.report.latency.integrated == pytest.approx(5 + 3)
    assert started(prediction) == [pytest.approx(5)]
    assert prediction.busy == {"read": pytest.approx(5), "compute": pytest.approx(3)}


def test_the_second_weight_comes_in_while_the_first_layer_computes() -> None:
    layers, loads = (layer(3.0, "a"), layer(1.0, "b")), (load("a", 50), load("b", 20))
    prediction = simulate(Scenario(PLAIN, layers, loads))
    assert started(prediction) == [pytest.approx(5), pytest.approx(8)]  # b is loaded at 7, layer 1 ends at 8: compute bound
    slow = simulate(Scenario(PLAIN, layers, (load("a", 50), load("b", 90))))
    assert started(slow) == [pytest.approx(5), pytest.approx(14)]  # bound by the loader


def test_a_gate_keeps_a_load_back_until_its_layer_is_done() -> None:
    scenario = Scenario(PLAIN, (layer(3.0, "a"), layer(1.0, "b")), (load("a", 50), load("b", 20, after=1)))
    prediction = simulate(scenario)
    assert [span.start for span in prediction.report.loads] == [0.0, pytest.approx(8)]
    assert prediction.report.latency.integrated == pytest.approx(5 + 3 + 2 + 1)


def test_two_threads_share_the_rate_and_overlap_reading_with_copying() -> None:
    two = replace(PLAIN, threads=2)
    both = simulate(Scenario(two, (layer(1.0, "a", "b"),), (load("a", 50), load("b", 50))))
    assert both.report.latency.integrated == pytest.approx(10 + 1)
    assert [span.end for span in both.report.loads] == [pytest.approx(10), pytest.approx(10)]
    assert sorted(span.thread for span in both.report.loads) == [0, 1]
    pieces = (("read", 50), ("copy", 100))
    copied = [SimulatedLoad(name, 50, pieces) for name in "ab"]
    one = simulate(Scenario(PLAIN, (layer(1.0, "a", "b"),), tuple(copied)))
    assert one.report.latency.integrated == pytest.approx(4 * 5 + 1)
    parallel = simulate(Scenario(two, (layer(1.0, "a", "b"),), tuple(copied)))
    assert parallel.report.latency.integrated == pytest.approx(10 + 10 + 1)  # in step: both read, then both copy


def test_a_copy_engine_does_one_copy_after_the_other_and_a_piece_is_free_after_its_copy() -> None:
    """Eight loads of 50 bytes, which take 5 s to read at the full rate, and 5 s to copy."""
    loads = tuple(SimulatedLoad(name, 50, (("read", 50), ("copy", 100))) for name in "abcdefgh")
    shared = Scenario(replace(PLAIN, threads=2), (layer(1.0, *"abcdefgh"),), loads)
    assert simulate(shared).report.latency.integrated == pytest.approx(8 * 10 + 1)
    engine = replace(shared, machine=replace(shared.machine, copy_engine=True))
    assert engine.machine.readers == 4
    # Four are read by 20 s, and their copies end at 25, 30, 35 and 40 s. Each piece then reads for 20 s, and is copied.
    assert simulate(engine).report.latency.integrated == pytest.approx(40 + 20 + 5 + 1)


def test_a_cold_disk_begins_when_the_session_does() -> None:
    cold = replace(PLAIN, disk_bandwidth=5.0)
    opened = Scenario(cold, (layer(1.0, "w"),), (load("w", 50),), announced=1, context_seconds=4.0, kernel_seconds=2.0)
    prediction = simulate(opened)
    assert prediction.report.latency.init == pytest.approx(6)
    # The disk has read 50 bytes at 10; the thread, which reads from 6 on, would have had them at 11.
    assert prediction.report.latency.integrated == pytest.approx(11 + 1)
    assert simulate(replace(opened, machine=replace(cold, disk_bandwidth=2.0))).report.latency.integrated == pytest.approx(26)
    assert prediction.disk[0].end == pytest.approx(10)


def test_announcing_more_than_the_disk_takes_does_not_hold_the_opening_up() -> None:
    """Two loads of 50 bytes at 5 a second: whether the second is announced at once, or after the first is read at 10."""
    for queue in (100, 99):
        machine = replace(PLAIN, disk_bandwidth=5.0, disk_queue_bytes=queue)
        loads = (load("a", 50), load("b", 50))
        prediction = simulate(Scenario(machine, (layer(1.0, "a", "b"),), loads, announced=2, context_seconds=4.0))
        assert prediction.report.latency.init == pytest.approx(4)
        assert prediction.disk[-1].end == pytest.approx(20)


def test_every_slice_costs_its_load_seconds() -> None:
    prediction = simulate(Scenario(replace(PLAIN, load_seconds=0.5), (layer(1.0, "a", "b"),), (load("a", 10), load("b", 10))))
    assert prediction.report.latency.integrated == pytest.approx(2 * 1.5 + 1)
    two = Scenario(replace(PLAIN, load_seconds=0.5, threads=2), (layer(1.0, "a", "b"),), (load("a", 10), load("b", 10)))
    ends = simulate(two).report.latency.integrated
    assert ends == pytest.approx(0.5 + 2 + 1), "threads take turns: the second's time passes while the first one reads"


def test_preloading_belongs_to_the_opening() -> None:
    scenario = Scenario(
        PLAIN, (layer(1.0, "a"), layer(1.0, "b")), (load("a", 50, preload=True), load("b", 50, preload=True)),
        context_seconds=2.0, input_bytes=20, output_bytes=40, resident_first=True,
    )  # fmt: skip
    prediction = simulate(scenario)
    assert prediction.report.latency.init == pytest.approx(2 + 10)
    assert prediction.report.latency.exec == pytest.approx(1 + 2 + 2)
    assert prediction.later == pytest.approx(1 + 2 + 2)


def test_w_comes_in_while_layers_run() -> None:
    layers, loads = (layer(1.0), layer(1.0, "a")), (load("a", 50, preload=True), load("b", 10))
    assert started(simulate(Scenario(PLAIN, layers, loads))) == [0.0, pytest.approx(5)]


def test_what_is_kept_is_there_in_a_later_run() -> None:
    layers, loads = (layer(1.0), layer(1.0, "a"), layer(1.0, "b")), (replace(load("a", 50), keep=True), load("b", 10))
    prediction = simulate(Scenario(PLAIN, layers, loads))
    assert prediction.report.latency.integrated == pytest.approx(5 + 1 + 1)
    assert prediction.later == pytest.approx(3)


def test_a_later_run_opens_nothing_and_finds_w_and_the_file_in_memory() -> None:
    scenario = Scenario(
        replace(PLAIN, disk_bandwidth=1.0), (layer(1.0, "a"), layer(1.0, "b")), (load("a", 50, preload=True), load("b", 30)),
        announced=2, context_seconds=7.0,
    )  # fmt: skip
    prediction = simulate(scenario)
    assert simulate(replace(scenario, announced=0)).report.latency.integrated == pytest.approx(7 + 80 + 1)
    assert prediction.report.latency.integrated == pytest.approx(80 + 1)  # reading keeps pace with the disk
    assert prediction.later == pytest.approx(3 + 1)


def test_memory_is_what_the_ledger_would_count() -> None:
    """Opened at 2; a (100 bytes) is held from 2, b (60) from the free of a, which is after layer 1."""
    scenario = Scenario(
        PLAIN, (layer(3.0, "a"), layer(1.0, "b")),
        (load("a", 50, held=100), load("b", 20, after=1, held=60)), frees={1: ("a",), 2: ("b",)},
        allocations=(Allocation("arena", 10), Allocation("weights", 5)), context_seconds=2.0,
    )  # fmt: skip
    memory = simulate(scenario).report.memory
    assert memory.peak_bytes == 115
    assert memory.by_category == {"arena": 10, "weights": 105}
    # From 2: loading 5 s and computing 3 s with a; then loading 2 s and computing 1 s with b.
    assert memory.average_bytes == pytest.approx((115 * 8 + 75 * 3) / 11)


def test_processes_that_wait_for_one_another_are_an_error_and_not_a_hang() -> None:
    def waits() -> Process:
        yield Work("time", 1.0)
        yield lambda: False

    with pytest.raises(RuntimeError, match="stuck"):
        Events(lambda busy: {"time": 1.0}).run(waits())


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any machine and any plan that the runtime could run: loads in order of their release times, each needed after its own."""
    count = draw(st.integers(1, 8))
    wanted: list[tuple[int, int, int, bool]] = []
    for _ in range(draw(st.integers(0, 10))):
        first = draw(st.integers(1, count))
        wanted.append((draw(st.integers(0, first - 1)), first, draw(st.integers(1, 60)), draw(st.booleans())))
    wanted.sort()
    names = [f"w{number}" for number in range(len(wanted))]
    loads, needs, frees = [], {}, {}
    for name, (after, first, nbytes, preload) in zip(names, wanted, strict=True):
        after = 0 if preload else after
        pieces = draw(st.sampled_from(((("read", nbytes),), (("copy", nbytes),), (("read", nbytes), ("copy", nbytes)))))
        loads.append(SimulatedLoad(name, nbytes, pieces, after, preload, draw(st.sampled_from((0, nbytes)))))
        needs[first] = (*needs.get(first, ()), name)
        if not preload:
            last = draw(st.integers(first, count))
            frees[last] = (*frees.get(last, ()), name)
    loads.sort(key=lambda one: one.after)
    machine = Machine(
        read_bandwidth=draw(st.sampled_from((5.0, 10.0, 40.0))),
        copy_bandwidth=draw(st.sampled_from((5.0, 20.0))),
        disk_bandwidth=draw(st.sampled_from((None, 2.0, 12.0))),
        load_seconds=draw(st.sampled_from((0.0, 0.125))),
        disk_queue_bytes=draw(st.sampled_from((1, 50, 10**6))),
        threads=draw(st.integers(1, 3)),
    )
    layers = tuple(layer(draw(st.integers(1, 16)) / 4, *needs.get(number, ())) for number in range(1, count + 1))
    return Scenario(
        machine, layers, tuple(loads), frees, (Allocation("arena", draw(st.integers(0, 50))),),
        announced=draw(st.integers(0, len(loads))), context_seconds=draw(st.sampled_from((0.0, 1.5))),
    )  # fmt: skip


@given(scenarios())
@settings(max_examples=150, deadline=None)
def test_no_run_beats_its_resources(scenario: Scenario) -> None:
    prediction = simulate(scenario)
    machine, latency = scenario.machine, prediction.report.latency.integrated
    moved = {"read": 0, "copy": 0}
    for one in scenario.loads:
        for resource, nbytes in one.pieces:
            moved[resource] += nbytes
    compute = sum(one.seconds for one in scenario.layers)
    total = sum(one.nbytes for one in scenario.loads if any(one.name in at.needs for at in scenario.layers))
    assert latency >= compute * (1 - 1e-9)
    assert latency >= total / (machine.disk_bandwidth or inf) * (1 - 1e-9)
    assert latency >= moved["read"] / machine.read_bandwidth * (1 - 1e-9)
    assert latency >= moved["copy"] / machine.copy_bandwidth * (1 - 1e-9)
    assert sum(span.end - span.start for span in prediction.report.layers) >= compute * (1 - 1e-9)
    # With threads that take loads in turns, less work can take longer (Graham, 1966).
    assert prediction.later > 0
    assert prediction.later <= latency * (1 + 1e-9) or machine.threads > 1


@given(scenarios())
@settings(max_examples=150, deadline=None)
def test_layers_run_in_order_with_their_weights_and_behind_their_gates(scenario: Scenario) -> None:
    prediction = simulate(scenario)
    layers = prediction.report.layers
    assert len(layers) == len(scenario.layers) and len(prediction.report.loads) == len(scenario.loads)
    for before, after in pairwise(layers):
        assert before.end <= after.start + 1e-9
    spans = {span.name: span for span in prediction.report.loads}
    for at, played in zip(scenario.layers, layers, strict=True):
        assert all(spans[name].end <= played.start + 1e-9 for name in at.needs)
    for one in scenario.loads:
        assert one.after == 0 or spans[one.name].start >= layers[one.after - 1].end - 1e-9


@given(scenarios())
@settings(max_examples=150, deadline=None)
def test_memory_stays_between_what_is_fixed_and_what_all_slices_take(scenario: Scenario) -> None:
    memory = simulate(scenario).report.memory
    fixed = sum(allocation.nbytes for allocation in scenario.allocations)
    everything = fixed + sum(one.held for one in scenario.loads)
    assert fixed <= memory.peak_bytes <= everything
    assert memory.average_bytes <= memory.peak_bytes * (1 + 1e-9)
    assert all(fixed <= held <= everything for _, held in memory.over_time[2:])
    kept = sum(one.held for one in scenario.loads if one.preload)
    assert memory.over_time[-1][1] == fixed + kept, "what is streamed has been freed in the end"
    assert sum(memory.by_category.values()) == memory.peak_bytes


@st.composite
def paced(draw: st.DrawFn) -> Scenario:
    """One thread, and no other that announces reads: nothing can overtake anything, so more speed is never worse.

    With a session's announcer this is not true: a faster thread may reach the disk's full queue at a worse time.
    """
    scenario = draw(scenarios())
    return replace(scenario, announced=0, machine=replace(scenario.machine, threads=1))


@given(paced(), st.sampled_from(("read_bandwidth", "copy_bandwidth", "disk_bandwidth")))
@settings(max_examples=150, deadline=None)
def test_more_bandwidth_is_never_slower(scenario: Scenario, rate: str) -> None:
    slow = simulate(scenario).report.latency.integrated
    before = getattr(scenario.machine, rate)
    faster = replace(scenario, machine=replace(scenario.machine, **{rate: 2 * before if before else None}))
    assert simulate(faster).report.latency.integrated <= slow * (1 + 1e-9)
