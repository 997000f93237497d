"""One schedule, timed by the planner's clock and by the simulator with the runtime's own loads: the same times.

The machine is the one of the clock's model: one thread that never divides a load, a disk that learns of every release, and a
host without cost. Additional effects of the simulator (docs/explanation/simulation.md) are excluded here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.options import Options
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.planning.arithmetic.clock import clock_of, needed_at
from flashmem.planning.instance import build_instance
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.latency.later_runs import later_seconds
from flashmem.planning.planner import make_plan, planning_instance
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.request.request import BundleRequest
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor, Rates
from flashmem.tools.simulation.scenario import Scenario, describe
from flashmem.tools.simulation.simulator import simulate
from tests.support.paths import DATA

MODELS = ("gptneo-tiny.onnx", "vit-tiny.onnx", "resnet-tiny.onnx")
MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")
DISK = 1e6
CHUNK = 256


@cache
def program_of(model: str) -> Program:
    options = Options(
        DeviceDescriptor("made-up", modes={"buffer": MODES}, memory_paths=("buffer",)), "dma", BundleRequest(unfusion=False)
    )
    return plan_graph(read_graph(DATA / model, options), options)[0].program


@st.composite
def devices(draw: st.DrawFn) -> DeviceDescriptor:
    """Layers that take about as long as their loads, more or less."""
    rates = Rates(
        disk_bandwidth=DISK,
        cached_bandwidth=draw(st.sampled_from((20 * DISK, 100 * DISK))),
        copy_bandwidth=draw(st.sampled_from((40 * DISK, 1000 * DISK))),
        gemm_flops=draw(st.sampled_from((1e6, 1e7, 1e8))),
        memory_bandwidth=draw(st.sampled_from((1e6, 1e7))),
        session_seconds=draw(st.sampled_from((0.0, 0.05))),
        kernel_seconds=0.0,
        layer_seconds=0.0,
        launch_seconds=0.0,
        load_seconds=0.0,
        contention=dict.fromkeys(MODES, draw(st.sampled_from((0.0, 0.3, 1.0, 2.0)))),
    )
    return DeviceDescriptor("made-up", modes={"buffer": MODES}, memory_paths=("buffer",), rates=rates)


def as_the_clock_knows_it(scenario: Scenario, plan: OverlapPlan, instance: Instance) -> Scenario:
    """The scenario on the clock's machine."""
    host = instance.host_bandwidth
    copies = 1e30 if instance.mode in ("dma", "interleave") else host
    machine = replace(
        scenario.machine, read_bandwidth=host, copy_bandwidth=copies, load_seconds=0.0, threads=1, copy_engine=False,
        disk_queue_bytes=1 << 60,
    )  # fmt: skip
    releases = {w.name: max(1, w.read_layer) for w in plan.weights}
    needs = needed_at(instance, {w.name: w.moves for w in plan.weights})
    uses = {w.name: w.first_use for w in plan.weights}
    loads = sorted(scenario.loads, key=lambda load: (releases[load.name], needs[load.name], uses[load.name]))
    return replace(
        scenario,
        machine=machine,
        loads=tuple(replace(load, after=releases[load.name] - 1, reads_ahead=False) for load in loads),
        announced=sum(releases[load.name] == 1 for load in loads),
        context_seconds=instance.opening_seconds,
        kernel_seconds=0.0,
        constants_bytes=0,
        gathered_bytes=0,
        input_bytes=0,
        output_bytes=0,
    )


@given(st.sampled_from(MODELS), st.sampled_from(MODES), devices(), st.sampled_from((0.3, 0.5, 1.0, 2.5)))
@settings(max_examples=25, deadline=None)
def test_the_same_plan_takes_the_same_time_in_the_clock_and_in_the_simulator(
    model: str, mode: TransferMode, device: DeviceDescriptor, part: float
) -> None:
    """Within 1 %: in `interleave` the clock counts whole chunks, and lanes copy bytes."""
    program = program_of(model)
    limits = Limits(m_peak=int(part * sum(each.nbytes for each in program.slices)), chunk=CHUNK)
    try:
        plan = with_layouts(program, make_plan(program, device, mode, limits), [mode])
    except BudgetError:
        return
    instance = replace(planning_instance(program, device, mode, limits), piece_bytes=plan.piece_bytes)
    scenario = as_the_clock_knows_it(describe(program, plan, device, mode, disk="cold"), plan, instance)
    played = simulate(scenario)
    clock = clock_of(instance, {w.name: w.read_layer for w in plan.weights}, {w.name: w.moves for w in plan.weights})
    starts = zip(played.report.layers, clock.started, strict=True)
    assert max(abs(span.start - started) for span, started in starts) <= 0.01 * clock.seconds
    assert played.report.latency.integrated == pytest.approx(plan.objective, rel=0.01)
    assert played.later == pytest.approx(later_seconds(instance, plan), rel=0.01)


@dataclass(frozen=True)
class Waiting:
    """A capacity model of launches of 1 ms that were profiled with simultaneous loads: they end when their loads do."""

    bandwidth: float
    note: str = "made up"
    tells_classes: bool = False

    def prepare(self, launches: object, mode: TransferMode) -> None:
        """Nothing is predicted ahead."""

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        return 1e-3

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        return max(1e-3, streamed_bytes / self.bandwidth)

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        return (1 + slowdown) * 1e-3 * self.bandwidth


@pytest.mark.parametrize("mode", ["map", "alias", "dma"])
def test_what_a_launch_waits_for_its_loads_is_counted_once(mode: TransferMode) -> None:
    """Loads take twice as long as layers: a run takes the time of the loads, not that of the layers as profiled."""
    program = program_of("gptneo-tiny.onnx")
    total = sum(part.nbytes for part in program.slices)
    bandwidth = total / (2e-3 * len(program.launches))
    rates = Rates(
        disk_bandwidth=1e15, cached_bandwidth=bandwidth, copy_bandwidth=bandwidth, session_seconds=0.0, kernel_seconds=0.0,
        layer_seconds=0.0, contention=dict.fromkeys(MODES, 0.1),
    )  # fmt: skip
    device = DeviceDescriptor("made-up", modes={"buffer": MODES}, memory_paths=("buffer",), rates=rates)
    instance = build_instance(program, device, chunk_bytes=CHUNK, m_peak=total // 2, mode=mode, model=Waiting(bandwidth))
    plan = first_plan(instance)
    assert plan.objective <= total / bandwidth + 1.2e-3 * len(program.launches) / 2
    profiled = [layer.seconds for layer in instance.layers]
    assert max(layer.loaded_seconds(total) for layer in instance.layers) <= max(profiled) / (1 - 0.1) + 1e-12
