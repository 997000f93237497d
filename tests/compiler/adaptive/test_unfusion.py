"""Adaptive unfusion: any split keeps the answer, penalties follow their formula, and a split remains only if it helps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.compiler.adaptive.unfusion import cut_point, splits
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.operators import is_elementwise, why_unsupported
from flashmem.compiler.options import Options
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.fusion import fuse, split
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.stages import pipeline
from flashmem.compiler.stages.pipeline import Cuts, GroupedGraph, Pipeline
from flashmem.compiler.stages.planned import Attempt
from flashmem.planning.penalty import Penalties
from flashmem.program.program import Program
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule.instance import Instance, WeightSpec
from flashmem.schedule.plan import OverlapPlan, PlannedWeight
from flashmem.target.descriptor import load_descriptor
from tests.support.paths import DATA
from tests.support.planning_instances import layers_of

MODELS = ["gptneo-tiny", "resnet-tiny", "vit-tiny", "mobilenet-tiny", "regnet-tiny"]


def _graph(name: str) -> Graph:
    return assign_layouts(decompose(import_model(DATA / f"{name}.onnx", {}, why_unsupported)))


def _inputs(model: Path) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(5)
    return {
        port.name: generator.integers(0, 100, port.shape)
        if "int" in port.type
        else generator.standard_normal(port.shape).astype(np.float32)
        for port in onnxruntime.InferenceSession(model).get_inputs()
    }


def _error(outputs: list[NDArray[Any]], model: Path, inputs: dict[str, NDArray[Any]]) -> float:
    expected = onnxruntime.InferenceSession(model).run(None, inputs)
    return max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in zip(outputs, expected, strict=True))


def _every_elementwise(nodes: list[Node]) -> Cuts:
    return frozenset(nodes)


def _some(nodes: list[Node]) -> Cuts:
    return frozenset(node for node, cut in zip(nodes, np.random.default_rng(1).random(len(nodes)) < 0.4, strict=True) if cut)


@pytest.mark.parametrize("choose", [_every_elementwise, _some])
@pytest.mark.parametrize("name", MODELS)
def test_any_cuts_leave_the_answer(
    name: str, choose: Callable[[list[Node]], Cuts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Cuts] = []

    def split_more(fused: FusedGraph, cuts: Cuts) -> FusedGraph:
        chosen.append(choose([node for node in fused.graph.nodes if is_elementwise(node)]))
        return split(fused, cuts | chosen[-1])

    monkeypatch.setattr(pipeline, "split", split_more)
    model = DATA / f"{name}.onnx"
    inputs = _inputs(model)
    devices = [device.descriptor_name for device in list_devices()]  # alternately: split kernels are built for this test alone
    device = devices[(MODELS.index(name) + (choose is _some)) % len(devices)]
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", device=device, unfusion=False)
    with flashmem.Session(bundle, device=device) as session:
        assert _error(session.run(None, inputs), model, inputs) <= 1e-3
    assert chosen and chosen[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_operator_begins_a_group(name: str) -> None:
    graph = _graph(name)
    consumers, outputs = graph.consumers(), {port.value for port in graph.outputs}
    fused = fuse(graph)
    whole = fused.groups
    cuts = {cut: group for group in whole if (cut := cut_point(group, consumers, outputs)) is not None}
    assert cuts
    apart = split(fused, cuts.keys()).groups
    assert {node for group in apart for node in group.nodes} == {node for group in whole for node in group.nodes}
    assert sum(len(group.nodes) for group in apart) == sum(len(group.nodes) for group in whole)
    assert cuts.keys() <= {group.main for group in apart}
    parts = {group.nodes for group in apart}
    for cut, group in cuts.items():
        at = group.nodes.index(cut)
        assert group.nodes[:at] in parts, "what comes before a cut is a group"
    for group in apart:  # inputs are results of earlier groups
        ready = {node for other in apart[: apart.index(group)] for node in other.nodes} | set(group.nodes)
        for node in group.nodes:
            for value in node.inputs:
                producer = value.producer if value is not None else None
                while producer is not None and producer.op == "Reshape":
                    producer = producer.input(0).producer
                assert producer is None or producer in ready


_GENERATED = """
import hashlib, sys
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.compiler.passes.fusion import fuse
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
options = resolve(BundleRequest(device="generic-cpu"))
graph = read_graph(sys.argv[1], options)
made = generate(fuse(graph), options.descriptor)
print(hashlib.sha256(repr((made.program, made.source)).encode()).hexdigest())
"""


def test_another_process_generates_the_same_program() -> None:
    """Whatever the order of its sets: hashes of strings differ between processes."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _GENERATED, str(DATA / "vit-tiny.onnx")],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1 and len(digests.pop()) == 65


def _plan(weights: tuple[PlannedWeight, ...], layers: int) -> OverlapPlan:
    return OverlapPlan("paper", 1, 100, (0,) * layers, weights, 0.0, 0.0, "problem", "greedy", 0.0)


def test_penalty_is_lambda_times_forced_chunks_plus_mu_times_distance() -> None:
    specs = (WeightSpec("a", 3, 1, 1), WeightSpec("b", 5, 4, 4), WeightSpec("c", 2, 5, 5))
    instance = Instance(layers_of([1, 1, 0, 0, 0]), specs, 1, 100, 1.0)
    plan = _plan(
        (
            PlannedWeight("a", 3, 3, 1, 1, True),  # layer 1 uses it: in W for any capacities
            PlannedWeight("b", 5, 5, 4, 4, True),
            PlannedWeight("c", 2, 2, 5, 5, False, 1, ((1, 1), (2, 1))),
        ),
        5,
    )
    penalties = Penalties(instance, plan, frozenset(), 0.9, 0.1)
    assert penalties.shortage == 5
    # Three more chunks at layer 3 take 3 of b's 5, and reduce the distance of c from 4 (layers 1 and 2) to 2 (layer 3).
    assert penalties.of(3, 3) == pytest.approx(0.9 * 3 + 0.1 * 2)
    assert penalties.of(3, 7) == pytest.approx(0.9 * 5 + 0.1 * 2)
    # At layer 4, which uses b, there is no room for b; the distance of c falls to 1.
    assert penalties.of(4, 3) == pytest.approx(0.1 * 3)
    assert Penalties(instance, plan, frozenset({"b"}), 0.9, 0.0).of(3, 3) == 0


def test_chunks_above_capacity_are_without_room() -> None:
    instance = Instance(layers_of([1, 1, 9]), (WeightSpec("a", 4, 3, 3),), 1, 100, 1.0)
    plan = _plan((PlannedWeight("a", 4, 4, 3, 3, False, 1, ((1, 1), (2, 3))),), 3)
    assert Penalties(instance, plan, frozenset(), 1.0, 0.0).of(1, 9) == 2


@pytest.fixture
def slow_copies(tmp_path: Path) -> str:
    """A device with copies so slow that no matmul of the tiny model hides a chunk of its neighbour."""
    text = "\n".join([
        'name = "slow-copies"', "[rates]", "copy_bandwidth = 4e8", "launch_seconds = 10e-6", "disk_bandwidth = 4e8",
        "contention = {map = 0, alias = 0, dma = 0, interleave = 0}",
    ])  # fmt: skip
    path = tmp_path / "slow-copies.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["map", "interleave"])
def test_splits_lower_the_papers_objective_and_hierarchical_groups_stay_whole(
    mode: str, slow_copies: str, tmp_path: Path
) -> None:
    model = DATA / "gptneo-tiny.onnx"
    inputs = _inputs(model)
    options: dict[str, Any] = {
        "device": slow_copies,
        "m_peak": "64KB",
        "chunk": "4KiB",
        "mode": mode,
        "mu": 0.1,
        "objective": "paper",
    }
    whole = flashmem.compile(model, tmp_path / "whole.flashmem", unfusion=False, **options)
    split = flashmem.compile(model, tmp_path / "split.flashmem", **options)
    assert not any("unfusion" in note for note in whole.plan.notes)
    assert any("adaptive unfusion tried" in note and ", took " in note for note in split.plan.notes)
    assert split.plan.objective < whole.plan.objective
    assert len(split.program.launches) > len(whole.program.launches)
    groups = {launch.operators for launch in split.program.launches}
    hierarchical = [launch for launch in whole.program.launches if launch.operator_class == "hierarchical"]
    assert hierarchical and all(launch.operators in groups for launch in hierarchical)  # no predictor: Table 5's classes
    for bundle in (whole, split):
        with flashmem.Session(bundle, mode=bundle.meta["mode"]) as session:
            assert _error(session.run(None, inputs), model, inputs) <= 1e-3


class _TenChunks(Pipeline):
    """Load capacities of ten chunks for each launch, and no plan."""

    def instance(self, program: Program) -> Instance:
        plain = layers_of([10] * len(program.launches))
        classes = (launch.operator_class for launch in program.launches)  # a split asks the instance for them
        layers = tuple(replace(spec, operator_class=each) for spec, each in zip(plain, classes, strict=True))
        return Instance(layers, (), 1, 1, 1.0)

    def plan(self, instance: Instance, generated: Generated) -> Attempt:
        raise AssertionError("ranking splits makes no plan")


def test_parts_must_gain_alpha_over_the_whole() -> None:
    graph, descriptor = _graph("gptneo-tiny"), load_descriptor("generic-cpu")
    options = Options(descriptor, "map")
    ten_chunks = _TenChunks.of(GroupedGraph.of(graph, options), options)
    generated = ten_chunks.generate()
    whole = Attempt(generated, ten_chunks.instance(generated.program), _plan((), len(generated.program.launches)))
    found = splits(whole, frozenset(), ten_chunks, alpha=1.0)
    assert found and all(split.gain >= 10 for split in found)
    assert {split.name for split in found} < {launch.name for launch in generated.program.launches}
    assert not splits(whole, frozenset(), ten_chunks, alpha=3.0)
    for each in found:
        assert generated.program.launches[each.launch - 1].operator_class != "hierarchical"


def test_where_capacity_has_no_part_in_the_objective_nothing_is_split(slow_copies: str, tmp_path: Path) -> None:
    for name, unfusion in (("m", True), ("n", False)):
        flashmem.compile(
            DATA / "gptneo-tiny.onnx", tmp_path / name, device=slow_copies, budget="1MB", mode="map", unfusion=unfusion
        )
    first, second = flashmem.Bundle.open(tmp_path / "m"), flashmem.Bundle.open(tmp_path / "n")
    assert first.program == second.program
    assert replace(first.plan, solve_seconds=0.0) == replace(second.plan, solve_seconds=0.0)
