"""Slicing of weights: launches that fill a device, with and without limits, and distribution of large work over threads."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Session
from flashmem.base.errors import BudgetError, RunError
from flashmem.base.pages import page_size
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.cli.commands.plan_data import several_launches
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.weights.packing import Packing
from flashmem.compiler.weights.slicing import DEFAULT, LEAST_BYTES, ROUNDS, Slicing
from flashmem.planning.arithmetic.clock import TimingModel
from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.planner import planning_instance
from flashmem.program.launches import Launch
from flashmem.program.program import Program, fixed_bytes
from flashmem.program.tensors import Slice
from flashmem.request.limits import Limits
from flashmem.request.request import BundleRequest
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.loads import segments
from flashmem.schedule.plan import PASSING_BYTES, OverlapPlan, passing_bytes
from flashmem.schedule.residency import session_bytes
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate
from flashmem.tools.zoo.graphs import zoo_graph
from flashmem.tools.zoo.net import Net
from tests.runtime.streaming.test_transfer_modes import CASES

KIB = 1 << 10


@given(
    st.integers(1, 5000), st.integers(1, 3000), st.sampled_from([1, 3]), st.sampled_from(["buffer", "texture"]),
    st.sampled_from(["float32", "int4"]), st.integers(1, 300_000), st.integers(1, 500),
    st.integers(1, 1 << 22), st.one_of(st.none(), st.integers(1, 1 << 26)), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_launch_is_full_or_as_large_as_it_may_be(
    depth: int, columns: int, groups: int, path: MemoryPath, storage: Any, parallelism: int, row_items: int, least: int,
    most: int | None, gpu: bool, later: bool,
) -> None:  # fmt: skip
    kind: Literal["cpu", "gpu"] = "gpu" if gpu else "cpu"
    device = DeviceDescriptor("made-up", kind, parallelism=parallelism, image_max_width=8192, image_max_height=8192)
    packing = Packing(depth, columns, groups, 32, storage, path, 64, device)
    parts = Slicing(least, most, later).slices(packing, row_items)
    assert [part.first_panel for part in parts] == [sum(p.panels for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.panels for part in parts) == packing.panels
    largest = max(part.panels for part in parts)
    if largest > 1:
        assert largest * packing.panel_bytes <= max(least, most or 1 << 60)
    if len(parts) == 1:
        return
    # With one slice less, the largest slice exceeds `least`, and `most` or what fills the device or the width of an image.
    texels = packing.panel_texels  # nothing is folded: no depth exceeds the images' height
    fewest = -(-packing.panels // (len(parts) - 1))  # panels of the largest slice with one slice less
    assert fewest * packing.panel_bytes > least
    full = fewest * row_items > ROUNDS * parallelism and not ((gpu or later) and most is None)
    assert full or (most and fewest * packing.panel_bytes > most) or (path == "texture" and fewest * texels > 8192)


def graph_of(rows: int, *products: tuple[int, int]) -> Graph:
    """A chain of products, without weights."""
    net = Net("products")
    x = net.input("x", (rows, products[0][0]), "float32")
    for number, (_, columns) in enumerate(products):
        x = net.op("Relu", [net.linear(x, f"w{number}", columns)], (rows, columns))
    return net.finish(x)


def planned(graph: Graph, device: str, mode: TransferMode | None = None, **limits: Any) -> tuple[Program, OverlapPlan]:
    descriptor = load_descriptor(device)
    mode = mode or descriptor.modes[descriptor.memory_paths[0]][0]
    made, plan = plan_graph(assign_layouts(decompose(graph)), Options(descriptor, mode, BundleRequest(**limits)))
    return made.program, plan


def products(program: Program) -> list[Launch]:
    """The launches without those that add the parts of a product whose depth work-groups share."""
    return [launch for launch in program.launches if not launch.kernel.startswith("join_sums")]


def test_without_a_limit_a_thin_product_is_one_launch_on_a_gpu() -> None:
    program, _ = planned(graph_of(128, (2048, 8192)), "nvidia")
    assert len(products(program)) == 1 and program.slices[0].nbytes == 4 * 2048 * 8192
    for device, launches in (("nvidia", 1), ("adreno750", 1), ("pocl", 16), ("intel-cpu", 16)):
        program, _ = planned(graph_of(128, (2048, 8192)), device)
        assert several_launches(program) == ({} if launches == 1 else {"w0.weight": launches}), device


def test_every_operator_of_a_model_is_one_launch_where_nothing_is_limited() -> None:
    program, _ = planned(zoo_graph("gptneo-125m"), "nvidia")
    assert several_launches(program) == {}
    assert len(products(program)) < 200  # 267 with slices of 4 MiB


PRODUCTS = ((768, 3072), (3072, 768)) * 4


@pytest.mark.parametrize(("mode", "objective"), [("dma", "first"), ("dma", "paper"), ("interleave", "first")])
def test_the_smallest_budget_is_that_of_the_smallest_slices(
    mode: TransferMode, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(128, *PRODUCTS)
    with pytest.raises(BudgetError) as refused:
        planned(graph, "nvidia", mode, budget=1 << 20)
    smallest = refused.value.smallest_bytes
    program, plan = planned(graph, "nvidia", mode, budget=smallest, objective=objective)
    layout = lay_out_pools(program.slices, plan, [mode])[mode]
    assert session_bytes(program, layout, shares_memory=plan.shares_memory) <= smallest
    assert max(part.nbytes for part in program.slices) <= LEAST_BYTES
    monkeypatch.setattr(
        importlib.import_module("flashmem.compiler.adaptive.granularity"), "_sizes", lambda limits: iter([DEFAULT])
    )
    with pytest.raises(BudgetError) as finest:
        planned(graph, "nvidia", mode, budget=1 << 20)
    assert finest.value.smallest_bytes == smallest


@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_reads_of_the_papers_plan_run_ahead_as_far_as_its_layout_has_room(mode: TransferMode) -> None:
    m_peak = 24 << 20
    program, plan = planned(graph_of(128, *PRODUCTS), "nvidia", mode, m_peak=m_peak, objective="paper")
    layout = lay_out_pools(program.slices, plan, [mode])[mode]
    assert layout.in_flight_bytes(shares_memory=plan.shares_memory) <= m_peak
    assert any(w.read_layer < w.first_mover for w in plan.weights if not w.preload)
    instance = planning_instance(program, load_descriptor("nvidia"), mode, Limits(m_peak=m_peak, objective="paper"))
    timing = TimingModel(instance, {w.name: w.moves for w in plan.weights if not w.preload})
    ahead = timing.clock({w.name: w.read_layer for w in plan.weights}).seconds
    assert ahead <= timing.clock({w.name: 0 if w.preload else w.first_mover for w in plan.weights}).seconds


def test_slices_are_smaller_under_a_budget_as_far_as_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(128, *PRODUCTS)
    with pytest.raises(BudgetError) as refused:
        planned(graph, "adreno750", budget=1 << 20)
    found = {}
    for budget in (refused.value.smallest_bytes, 40 << 20, 100 << 20):
        program, plan = planned(graph, "adreno750", budget=budget)
        found[budget] = len(program.launches), plan.objective
    launches = [count for count, _ in found.values()]
    assert launches == sorted(launches, reverse=True) and launches[0] > launches[-1] == len(PRODUCTS)
    monkeypatch.setattr(
        importlib.import_module("flashmem.compiler.adaptive.granularity"), "_sizes", lambda limits: iter([DEFAULT])
    )
    opening = load_descriptor("adreno750").rates.layer_seconds
    for budget, (count, seconds) in found.items():
        program, plan = planned(graph, "adreno750", budget=budget)
        assert seconds + count * opening <= 1.02 * (plan.objective + len(program.launches) * opening)


def test_a_cpu_keeps_its_slices_small() -> None:
    for name in ("pocl", "intel-cpu", "generic-cpu"):
        program, _ = planned(graph_of(128, *PRODUCTS), name)
        assert max(part.nbytes for part in program.slices) <= LEAST_BYTES


@given(st.integers(1, 40 << 20), st.integers(0, 4000), st.sampled_from(["map", "alias", "dma", "interleave"]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_bands_are_the_slice_in_order(nbytes: int, width: int, mode: TransferMode, image: bool) -> None:
    pitch = 16 * width
    part = Slice("s", "w", 0, pitch * (-(-nbytes // pitch)), width, -(-nbytes // pitch), pitch) if image and width else (
        Slice("s", "w", 0, nbytes))  # fmt: skip
    found = segments(part, mode)
    assert [segment.first for segment in found] == [sum(b.nbytes for b in found[:i]) for i in range(len(found))]
    assert sum(segment.nbytes for segment in found) == part.file_bytes
    unit = part.row_pitch if part.is_image and mode != "map" else page_size()
    assert all(segment.nbytes > 0 and segment.first % unit == 0 for segment in found)
    assert max(segment.nbytes for segment in found) <= passing_bytes(part)  # one copy each


def test_what_is_large_passes_through_staging_in_pieces() -> None:
    instance = Instance((), (), 1 << 20, 1 << 30, 1e9)
    weights = tuple(WeightSpec(name, 40 << 20, layer, layer) for name, layer in (("w", 1), ("x", 3)))
    layers = planned(graph_of(8, (64, 64), (64, 64), (64, 64)), "nvidia")[1].capacities
    instance = replace(instance, weights=weights, layers=tuple(_layer(c) for c in layers))
    slices = [Slice(w.name, w.name, 0, w.nbytes) for w in weights]
    plan = first_plan(instance)
    layouts = lay_out_pools(slices, plan, ["dma", "interleave"])
    check(replace(plan, layouts=dict(layouts)), instance, slices)
    assert layouts["dma"].ring_bytes == layouts["interleave"].ring_bytes == 2 * PASSING_BYTES
    assert (
        layouts["dma"].all_staging_bytes == 0 and layouts["interleave"].staging_bytes == 40 << 20
    )  # W is copied, the other waits
    wide = Slice("wide", "w", 0, 40 << 20, 1 << 19, 5, 8 << 20)
    assert passing_bytes(wide) == 8 << 20  # at least a row


def _layer(capacity: int) -> Any:
    from flashmem.schedule.instance import LayerSpec

    return LayerSpec("layer", "reusable", capacity, 1e-3)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products of 3 and of 40 rows with a common weight, and another product."""
    path = tmp_path_factory.mktemp("shared") / "shared.onnx"
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.standard_normal(shape, np.float32) / 16, name)
        for name, shape in (("twice", (256, 512)), ("once", (512, 640)))
    ]
    nodes = [
        helper.make_node("MatMul", ["a", "twice"], ["u"]),
        helper.make_node("MatMul", ["b", "twice"], ["v"]),
        helper.make_node("Tanh", ["v"], ["t"]),
        helper.make_node("MatMul", ["t", "once"], ["w"]),
    ]
    ports = {"a": (3, 256), "b": (40, 256), "u": (3, 512), "w": (40, 640)}
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.items()}
    graph = helper.make_graph(nodes, "shared", [infos["a"], infos["b"]], [infos["u"], infos["w"]], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def compiled(
    model: Path, output: Path, slicing: Slicing, device: Device, path: str, monkeypatch: pytest.MonkeyPatch, **limits: Any
) -> flashmem.Bundle:
    """A bundle with slices cut by `slicing`, whatever the limits."""
    granularity = importlib.import_module("flashmem.compiler.adaptive.granularity")
    monkeypatch.setattr(granularity, "_sizes", lambda limits: iter([slicing]))
    name = str(list_devices().index(device))
    return flashmem.compile(model, output, device=name, memory_path=path, chunk=16 * KIB, **limits)  # type: ignore[arg-type]


def small_bands(monkeypatch: pytest.MonkeyPatch, nbytes: int = 48 * KIB) -> None:
    """Set segments, and pieces in staging, to `nbytes`."""
    monkeypatch.setattr("flashmem.schedule.plan.PASSING_BYTES", nbytes)


def feeds_of(model: Path) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(1)
    ports = onnxruntime.InferenceSession(model).get_inputs()
    return {port.name: generator.standard_normal(port.shape).astype(np.float32) for port in ports}


@pytest.mark.parametrize(("device", "path"), CASES)
def test_large_and_small_slices_give_the_same_bits_in_every_mode(
    device: Device, path: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bands(monkeypatch)
    feeds = feeds_of(shared)
    expected = onnxruntime.InferenceSession(shared).run(None, feeds)
    first: Sequence[NDArray[Any]] | None = None
    for label, slicing in (("fine", Slicing(64 * KIB, 64 * KIB)), ("whole", Slicing(most=None))):
        bundle = compiled(shared, tmp_path / f"{label}.flashmem", slicing, device, path, monkeypatch)
        count = Counter(part.weight for part in bundle.program.slices)
        assert (min(count.values()) > 5) if label == "fine" else set(count.values()) == {1}
        for mode in descriptor_for(device).modes[path]:
            for strategy, checked in (("stream", False), ("stream", True), ("preload", False))[: 1 if label == "fine" else 3]:
                name = str(list_devices().index(device))
                with Session(bundle, device=name, mode=mode, strategy=strategy, verify_weights=checked) as session:  # type: ignore[arg-type]
                    answers = [session.run(None, feeds) for _ in range(2)]
                    loads = Counter(span.name for span in session.last_run.loads) if session.last_run else Counter()
                first = first or answers[0]
                for got in answers:
                    for a, b in zip(got, first, strict=True):
                        np.testing.assert_array_equal(a, b, err_msg=f"{label} {mode} {strategy}")
                if label == "whole" and strategy == "stream" and loads:
                    assert (max(loads.values()) == 1) == checked, (mode, loads)
    assert first is not None
    for a, b in zip(first, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("device", "path"), CASES)
def test_the_simulation_has_the_same_bands(
    device: Device, path: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bands(monkeypatch)
    bundle = compiled(shared, tmp_path / "m.flashmem", Slicing(most=None), device, path, monkeypatch)
    for mode in descriptor_for(device).modes[path]:
        with Session(bundle, device=str(list_devices().index(device)), mode=mode) as session:
            session.run(None, feeds_of(shared))
            real = session.last_run
        assert real is not None
        predicted = simulate(describe(bundle.program, bundle.plan, descriptor_for(device), mode)).report
        if mode != "interleave":  # where W is loaded separately
            assert Counter(span.name for span in predicted.loads) == Counter(span.name for span in real.loads)
        if mode != "map":
            assert predicted.memory.peak_bytes == real.memory.peak_bytes
        assert predicted.memory.over_time[-1][1] == real.memory.over_time[-1][1]


@pytest.mark.parametrize(("device", "path"), CASES)
def test_a_band_that_cannot_be_read_ends_the_run_with_a_sentence(
    device: Device, path: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_bands(monkeypatch)
    bundle = compiled(shared, tmp_path / "m.flashmem", Slicing(most=None), device, path, monkeypatch)
    last = max(bundle.program.slices, key=lambda part: part.nbytes)
    bad = last.offset + last.file_bytes - 1
    read_into, populate = WeightFile.read_into, WeightFile.populate

    def failing_read(file: WeightFile, data: Any, offset: int) -> None:
        if offset <= bad < offset + data.nbytes:
            raise RunError("the disk failed")
        read_into(file, data, offset)

    def failing_populate(file: WeightFile, offset: int, nbytes: int) -> None:
        if offset <= bad < offset + nbytes:
            raise RunError("the disk failed")
        populate(file, offset, nbytes)

    monkeypatch.setattr(WeightFile, "read_into", failing_read)
    monkeypatch.setattr(WeightFile, "populate", failing_populate)
    for mode in descriptor_for(device).modes[path]:
        session = Session(bundle, device=str(list_devices().index(device)), mode=mode)
        with pytest.raises(RunError, match="the disk failed"):
            session.run(None, feeds_of(shared))
        with pytest.raises(RunError, match="closed"):
            session.run(None, feeds_of(shared))


def test_a_budget_holds_with_large_slices(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W and the streamed slices are larger than the staging that they pass through."""
    small_bands(monkeypatch)
    device, path = CASES[0].values
    assert isinstance(device, Device) and isinstance(path, str)
    whole = compiled(shared, tmp_path / "w.flashmem", Slicing(most=None), device, path, monkeypatch)
    for mode in descriptor_for(device).modes[path]:
        budget = fixed_bytes(whole.program) + whole.plan.layouts[mode].total_bytes
        bundle = compiled(
            shared, tmp_path / f"{mode}.flashmem", Slicing(most=None), device, path, monkeypatch, budget=budget, mode=mode
        )
        with Session(bundle, device=str(list_devices().index(device))) as session:
            session.run(None, feeds_of(shared))
            assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
