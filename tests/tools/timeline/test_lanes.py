"""The data of the timeline: every layer and load of a report is on a lane, with its times, its bytes and why it waited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from flashmem import RunReport, Session
from flashmem.runtime.engine.report import Latency, MemoryUse
from flashmem.schedule.loads import TimedInterval
from flashmem.tools.simulation.scenario import Allocation, Machine, Scenario, SimulatedLayer, SimulatedLoad
from flashmem.tools.simulation.simulator import simulate
from flashmem.tools.timeline.lanes import Bar, Timeline, bar_text, memory_text, timeline_of
from tests.support.mini_bundle import MiniModel, write_mini_bundle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniModel]:
    yield write_mini_bundle(tmp_path_factory.mktemp("mini") / "m.flashmem")


def traced(model: MiniModel, mode: str) -> tuple[RunReport, RunReport]:
    """The reports of a first and a later run."""
    with Session(model.path, mode=mode, trace=True) as session:  # type: ignore[arg-type]
        reports = []
        for _ in range(2):
            session.run(None, model.inputs())
            assert session.last_run is not None
            reports.append(session.last_run)
    return reports[0], reports[1]


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
def test_a_measured_run_has_every_layer_and_load_with_its_times_and_bytes(model: MiniModel, mode: str) -> None:
    sizes = {part.name: part.file_bytes for part in model.open().program.slices}
    for report in traced(model, mode):
        timeline, opened = timeline_of(report, "a run"), report.ended - report.latency.exec
        assert report.loads and report.layers
        layers = [bar for bar in timeline.bars if bar.kind == "layer"]
        assert [(bar.index, bar.name) for bar in layers] == [(n, each.name) for n, each in enumerate(report.layers)]
        for bar, layer in zip(layers, report.layers, strict=True):
            assert (bar.start, bar.end) == (layer.start - opened, layer.end - opened)
        loaded = dict[str, int]()
        for index, load in enumerate(report.loads):
            own = [bar for bar in timeline.bars if bar.index == index and bar.kind in ("read", "wait", "copy")]
            assert [bar.kind for bar in own] == [step for step, _ in load.steps]
            assert {(bar.name, bar.nbytes) for bar in own} == {(load.name, load.nbytes)}
            assert own[0].start == load.start - opened and own[-1].end <= load.end - opened
            assert all(one.end == other.start for one, other in pairwise(own))
            loaded[load.name] = loaded.get(load.name, 0) + load.nbytes
        assert loaded == {name: sizes[name] for name in loaded}
        idle = [bar for bar in timeline.bars if bar.kind == "idle"]
        steps = sum(len(load.steps) for load in report.loads)
        assert len(timeline.bars) == len(report.layers) + len(idle) + steps
        assert {bar.lane for bar in timeline.bars} == set(timeline.lanes)
        assert -1e-3 < timeline.busy[0] < timeline.busy[1] <= timeline.end + 1e-3


def test_memory_is_the_ledgers_over_time(model: MiniModel) -> None:
    report, _ = traced(model, "map")
    timeline = timeline_of(report, "a run")
    assert max(each.nbytes for each in timeline.memory) == timeline.peak == report.memory.peak_bytes
    assert all(sum(nbytes for _, nbytes in each.by_category) == each.nbytes for each in timeline.memory)
    assert all(one.end == other.start for one, other in pairwise(timeline.memory))
    assert timeline.memory[-1].end == timeline.end
    held = sum(each.nbytes * (each.end - each.start) for each in timeline.memory)
    began = report.memory.over_time[0][0]
    assert held == pytest.approx(report.memory.average_bytes * (report.ended - began), rel=1e-3)


MACHINE = Machine(read_bandwidth=10.0, copy_bandwidth=20.0, threads=1)


def bars_of(timeline: Timeline, kind: str) -> list[Bar]:
    return [bar for bar in timeline.bars if bar.kind == kind]


def test_a_predicted_run_says_why_each_layer_and_load_waited() -> None:
    """Layer 1 waits 5 s for a; b is read ahead from 5 s to 7 s, and copied when layer 1 ends, at 8 s."""
    loads = (
        SimulatedLoad("a", 50, (("read", 50),)),
        SimulatedLoad("b", 20, (("read", 20), ("copy", 20)), after=1, reads_ahead=True),
    )
    layers = (SimulatedLayer("first", 3.0, ("a",)), SimulatedLayer("second", 1.0, ("b",)), SimulatedLayer("third", 1.0))
    allocations = (Allocation("arena", 30), Allocation("weights", 70))
    predicted = simulate(Scenario(MACHINE, layers, loads, allocations=allocations), budget=128)
    timeline = timeline_of(predicted.report, "predicted")
    assert timeline.lanes == ("read 1", "copy 1", "compute") and timeline.budget == 128
    assert [(bar.name, bar.start, bar.end) for bar in bars_of(timeline, "layer")] == [
        ("first", 5, 8), ("second", pytest.approx(9), pytest.approx(10)), ("third", pytest.approx(10), pytest.approx(11)),
    ]  # fmt: skip
    assert [(bar.lane, bar.name, bar.start, bar.end) for bar in bars_of(timeline, "wait")] == [("read 1", "b", 7, 8)]
    (copied,) = bars_of(timeline, "copy")
    assert (copied.lane, copied.start, copied.end) == ("copy 1", 8, 9)
    assert bar_text(copied) == "copied to the device: 1000.00 ms, from 8000.00 ms, 20B, 20B/s"
    assert copied.why == "released when layer 1, first, was done: read ahead, then waited 1000.00 ms"
    assert [(bar.start, bar.end) for bar in bars_of(timeline, "idle")] == [(0, 5), (8, 9)]
    assert [bar.why for bar in bars_of(timeline, "layer")] == [
        "the device waited 5000.00 ms for a", "the device waited 1000.00 ms for b", "waited for no weight",
    ]  # fmt: skip
    assert [(each.start, each.end, memory_text(each)) for each in timeline.memory] == [(0, 11, "weights 70B, arena 30B")]


def test_a_cold_disk_has_a_lane() -> None:
    machine = replace(MACHINE, disk_bandwidth=5.0)
    loads = tuple(SimulatedLoad(name, 50, (("read", 50),)) for name in "ab")
    predicted = simulate(Scenario(machine, (SimulatedLayer("only", 1.0, ("a", "b")),), loads, announced=2))
    timeline = timeline_of(predicted.report, "cold", predicted.disk)
    assert timeline.lanes == ("disk", "read 1", "compute")
    assert [(bar.name, bar.start, bar.end, bar.nbytes, bar.rate) for bar in bars_of(timeline, "disk")] == [
        ("a", 0, 10, 50, 5), ("b", 10, 20, 50, 5),
    ]  # fmt: skip


def test_a_busy_loader_and_a_load_in_pieces_are_said() -> None:
    layers = (TimedInterval("one", 10.0, 11.0), TimedInterval("two", 14.0, 15.0, waited_for="late"))
    loads = (
        TimedInterval("big", 10.0, 13.0, 0, (("read", 11.0), ("copy", 11.5), ("read", 12.0), ("copy", 13.0)), 400),
        TimedInterval("late", 13.0, 14.0, 0, (("read", 14.0),), 100, after=1),
    )
    memory = MemoryUse(0, 0.0, None, {}, None, ())
    timeline = timeline_of(RunReport(Latency(6.0, 1.0, 5.0), memory, loads, layers, ended=15.0), "made")
    assert (timeline.start, timeline.end, timeline.memory, timeline.budget) == (-1, 5, (), None)
    pieces = [bar for bar in timeline.bars if bar.name == "big"]
    assert [(bar.kind, bar.start, bar.end, bar.nbytes, bar.rate) for bar in pieces] == [
        ("read", 0, 1, 400, 0), ("copy", 1, 1.5, 400, 0), ("read", 1.5, 2, 400, 0), ("copy", 2, 3, 400, 0),
    ]  # fmt: skip
    (late,) = (bar for bar in timeline.bars if bar.name == "late")
    assert late.why == "released when layer 1, one, was done, 2000.00 ms before it began: loader 1 was busy"
    assert [(bar.start, bar.end) for bar in bars_of(timeline, "idle")] == [(1, 4)]


def test_a_run_without_loads_and_layers_has_no_lane() -> None:
    memory = MemoryUse(8, 8.0, 10, {}, None, ((1.0, 8),))
    timeline = timeline_of(RunReport(Latency(3.0, 1.0, 2.0), memory, (), (), ended=4.0), "not traced")
    assert timeline.lanes == () and timeline.busy == (-1, 2)
    assert [(each.start, each.end, each.nbytes) for each in timeline.memory] == [(-1, 2, 8)]
