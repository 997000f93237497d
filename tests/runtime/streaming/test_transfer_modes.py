"""Every device, both memory paths, every transfer mode and strategy: correct answers, and the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from flashmem import Session
from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.program.lanes import lane_kind
from flashmem.program.program import fixed_bytes, host_bytes
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming import copied_ahead
from flashmem.runtime.streaming.background_reads import BackgroundReads, Reading
from flashmem.runtime.streaming.interleaved import layer_moves, needed_slices
from flashmem.schedule.residency import session_bytes, streamed_layout
from tests.support.mini_bundle import LAYERS, SLICES, WIDTH, MiniModel, write_mini_bundle
from tests.support.own_memory import give_own_memory

MemoryPath = Literal["buffer", "texture"]
Channel = Literal["float", "half"]


def device_id(device: Device) -> str:
    return device.descriptor_name


CASES = [
    pytest.param(device, path, id=f"{device.descriptor_name}-{path}")
    for device in list_devices()
    for path in descriptor_for(device).memory_paths
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], MiniModel]:
    folder = tmp_path_factory.mktemp("mini")
    paths: tuple[MemoryPath, ...] = ("buffer", "texture")
    channels: tuple[Channel, ...] = ("float", "half")
    return {
        (path, channel): write_mini_bundle(folder / f"{path}-{channel}.flashmem", path, channel=channel)
        for path in paths
        for channel in channels
    }


def test_a_device_is_here() -> None:
    assert CASES, "the tests need an OpenCL device: pip install intel-opencl-rt, or PoCL"


@pytest.mark.parametrize("channel", ["float", "half"])
@pytest.mark.parametrize(("device", "path"), CASES)
def test_all_modes_and_strategies_give_the_same_bits_and_the_right_answer(
    device: Device, path: MemoryPath, channel: Channel, models: dict[tuple[str, str], MiniModel]
) -> None:
    model = models[path, channel]
    inputs = model.inputs(seed=1)
    expected = model.reference(inputs)
    name = str(list_devices().index(device))
    first: list[np.ndarray] | None = None
    for mode in descriptor_for(device).modes[path]:
        for strategy in ("stream", "preload"):
            with Session(model.path, device=name, mode=mode, strategy=strategy) as session:
                for repeat in range(3):
                    outputs = session.run(None, inputs)
                    first = first or outputs
                    for got, reference in zip(outputs, first, strict=True):
                        np.testing.assert_array_equal(got, reference, err_msg=f"{mode}, {strategy}, run {repeat}")
    assert first is not None
    assert [out.dtype for out in first] == [np.float32, np.float16, np.int64]
    np.testing.assert_allclose(first[0], expected[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(first[1], expected[1], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(first[2], expected[2])


@pytest.mark.parametrize("channel", ["float", "half"])
@pytest.mark.parametrize(("device", "path"), CASES)
def test_moves_by_launches_of_their_own_give_the_same_bits(
    device: Device, path: MemoryPath, channel: Channel, models: dict[tuple[str, str], MiniModel]
) -> None:
    model = models[path, channel]
    inputs = model.inputs(seed=4)
    answers: list[list[np.ndarray]] = []
    for lanes in (True, False):
        with Session(model.path, device=str(list_devices().index(device)), mode="interleave", lanes=lanes) as session:
            answers += [session.run(None, inputs) for _ in range(2)]
    for outputs in answers[1:]:
        for got, expected in zip(outputs, answers[0], strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("device", "path"), CASES)
def test_where_memory_is_not_shared_staging_is_slots_that_are_never_mapped_and_loads_pass_through_a_ring(
    device: Device, path: MemoryPath, models: dict[tuple[str, str], MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's driver keeps host memory for mapped memory: 463 MB for a budget of 86, with a mapped place for each slice."""
    mapped: dict[int, int] = {}
    map_buffer = Queue.map

    def spy(queue: Queue, buffer: Any, nbytes: int, **rest: Any) -> Any:
        mapped[buffer.int_ptr] = max(nbytes, mapped.get(buffer.int_ptr, 0))
        return map_buffer(queue, buffer, nbytes, **rest)

    model = models[path, "float"]
    inputs = model.inputs(seed=5)
    monkeypatch.setattr(Queue, "map", spy)
    monkeypatch.setattr("flashmem.runtime.request.options.find_device", lambda *_, **__: replace(device, unified_memory=False))
    program, plan = model.open().program, model.open().plan
    piece = min(1 << 20, sum(part.file_bytes for part in program.slices))  # no slice is divided, and several pass together
    piece = -(-piece // 4096) * 4096
    layout = streamed_layout(program, plan, "interleave", shares_memory=False)
    ring = (layout.threads + 2) * piece
    slots = sum(layout.staging_slots)
    held = fixed_bytes(program, shares_memory=False) + plan.layouts["interleave"].home_bytes + slots
    assert session_bytes(program, layout, shares_memory=False) == held and len(layout.staging_slots) > 1
    with Session(model.path, mode="interleave", strategy="preload") as session:
        expected = session.run(None, inputs)
    mapped.clear()
    with Session(model.path, mode="interleave") as session:
        for _ in range(2):
            for got, wanted in zip(session.run(None, inputs), expected, strict=True):
                np.testing.assert_array_equal(got, wanted)
            assert session.last_run is not None and session.last_run.memory.peak_bytes == held
            host = session.last_run.memory.host
            assert host is not None and host.peak_bytes == ring + host_bytes(program)
    assert list(mapped.values()) == [program.constants_bytes]  # the ring is pages of the process
    with pytest.raises(BudgetError, match="budget"):
        Session(model.path, mode="interleave", budget=held - 1)


@pytest.mark.parametrize(("device", "path"), CASES)
@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_where_memory_is_not_shared_adjacent_slices_are_read_together(
    device: Device, path: MemoryPath, mode: TransferMode, models: dict[tuple[str, str], MiniModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, reads, joined = models[path, "float"], list[int](), copied_ahead.JOINED_BYTES
    inputs, begin = model.inputs(seed=6), BackgroundReads.begin
    whole = sum(part.file_bytes for part in model.open().program.slices)

    def spy(background: BackgroundReads, data: Any, address: int, offset: int) -> Reading:
        reads.append(data.nbytes)
        return begin(background, data, address, offset)

    give_own_memory(monkeypatch, device)
    monkeypatch.setattr(BackgroundReads, "begin", spy)
    made = []
    for most in (0, joined):
        monkeypatch.setattr(copied_ahead, "JOINED_BYTES", most)
        reads.clear()
        with Session(model.path, mode=mode, prepare=False) as session:
            made.append(session.run(None, inputs))
        assert sum(reads) >= whole
        made.append(len(reads))
    (alone, calls, together, fewer) = made
    assert fewer < calls
    for got, wanted in zip(together, alone, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_without_lanes_the_same_units_move_at_the_same_layers(path: str, models: dict[tuple[str, str], MiniModel]) -> None:
    bundle = models[path, "float"].open()
    slices = {part.name: part for part in bundle.program.slices}
    interleaved, separate = (
        layer_moves(bundle.plan, slices, lane_kind(bundle.program), lanes=lanes) for lanes in (True, False)
    )
    assert any(moves.interleaved for moves in interleaved.values()) and not any(
        moves.interleaved for moves in separate.values()
    )
    assert {layer: set(moves.all) for layer, moves in separate.items()} == {
        layer: set(moves.all) for layer, moves in interleaved.items()
    }
    assert needed_slices(bundle.plan, separate).keys() == needed_slices(bundle.plan, interleaved).keys()


@pytest.mark.parametrize("distance", [1, 30])
@pytest.mark.parametrize("preload", [0, LAYERS * SLICES])
def test_no_preloading_all_preloading_short_and_long_distances(preload: int, distance: int, tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", preload=preload, distance=distance)
    inputs = model.inputs(seed=2)
    expected = model.reference(inputs)[0]
    for mode in descriptor_for(list_devices()[0]).modes["buffer"]:
        with Session(model.path, device="0", mode=mode) as session:
            for _ in range(2):
                np.testing.assert_allclose(session.run(["y"], inputs)[0], expected, rtol=0, atol=2e-5)


def test_other_inputs_give_other_outputs_in_one_session(models: dict[tuple[str, str], MiniModel]) -> None:
    model = models["buffer", "float"]
    with Session(model.path) as session:
        for seed in (3, 4, 3):
            inputs = model.inputs(seed)
            np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)


def test_streaming_stays_below_the_weights_and_reports_what_it_held(models: dict[tuple[str, str], MiniModel]) -> None:
    model = models["buffer", "float"]
    weights = LAYERS * WIDTH * WIDTH * 4
    with Session(model.path, mode="map", trace=True) as session:
        session.run(None, model.inputs())
        report = session.last_run
        assert report is not None
        assert 0 < report.memory.average_bytes <= report.memory.peak_bytes < weights / 2
        assert sum(report.memory.by_category.values()) == report.memory.peak_bytes
        assert report.latency.integrated == pytest.approx(report.latency.init + report.latency.exec)
        assert {span.name for span in report.loads} == {part.name for part in session.bundle.program.slices}
        assert [span.name for span in report.layers] == [launch.name for launch in session.bundle.program.launches]
        assert all(span.start <= span.end for span in (*report.loads, *report.layers))
        starts = [span.start for span in report.layers]
        assert starts == sorted(starts)
        assert report.memory.process_peak_rss_bytes is not None
        assert report.memory.process_peak_rss_bytes > report.memory.peak_bytes
        # On the device's clock, every load ended before the launch that needs it began.
        began = {span.name: span.start for span in report.layers}
        assert all(span.end <= began[span.name] + 1e-3 for span in report.loads)
        session.run(None, model.inputs())
        assert session.last_run is not None and session.last_run.latency.init == 0


def test_preloading_holds_everything(models: dict[tuple[str, str], MiniModel]) -> None:
    model = models["buffer", "float"]
    with Session(model.path, strategy="preload") as session:
        assert session.mode == "dma"
        assert session.budget is None
        session.run(None, model.inputs())
        assert session.last_run is not None
        assert session.last_run.memory.peak_bytes > LAYERS * WIDTH * WIDTH * 4
