"""Points of a sweep are planned like in `compile`: from a graph without its weights, with fusion groups split."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.ir.graph import Graph, Placeholder
from flashmem.compiler.ir.portable import PortableGraph, portable
from flashmem.compiler.memory.constants import RESIDENT_CONSTANT_BYTES
from flashmem.compiler.options import Options
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.sweep.grid import Point
from flashmem.tools.sweep.points import Subject, measured, simulated
from flashmem.tools.sweep.settings import combinations
from flashmem.tools.sweep.subjects import subject_of
from flashmem.tools.zoo.graphs import zoo_graph
from tests.support.paths import DATA

MODELS = sorted(DATA.glob("*-tiny.onnx"))


def graph_of(model: Path) -> Graph:
    return read_graph(model, Options(load_descriptor("generic-cpu"), "map"))


def sent(graph: Graph) -> Graph:
    """The graph after transport to a worker."""
    read: PortableGraph = pickle.loads(pickle.dumps(portable(graph, RESIDENT_CONSTANT_BYTES)))
    return read.graph()


@pytest.mark.parametrize("device", ["generic-cpu", "generic-gpu"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stem)
def test_a_worker_generates_the_same_program(model: Path, device: str) -> None:
    graph, descriptor = graph_of(model), load_descriptor(device)
    arrived = sent(graph)
    assert generate(fuse(arrived), descriptor).program == generate(fuse(graph), descriptor).program


def test_a_deep_graph_travels_without_its_weights() -> None:
    graph = assign_layouts(decompose(zoo_graph("gptneo-1.3b")))
    flat = pickle.dumps(portable(graph, RESIDENT_CONSTANT_BYTES))
    assert len(flat) < 8 << 20 and len(graph.nodes) > 500
    descriptor = load_descriptor("generic-cpu")
    arrived: Graph = pickle.loads(flat).graph()
    assert generate(fuse(arrived), descriptor).program == generate(fuse(graph), descriptor).program
    weights = [value.constant for value in arrived.constants() if 4 * value.size > RESIDENT_CONSTANT_BYTES]
    assert weights and all(isinstance(weight, Placeholder) for weight in weights)


@pytest.fixture
def slow_copies(tmp_path: Path) -> str:
    """A device with copies so slow that no matmul of the tiny model hides a chunk of its neighbour."""
    path = tmp_path / "slow-copies.toml"
    path.write_text(
        'name = "slow-copies"\n[rates]\ncopy_bandwidth = 4e8\nlaunch_seconds = 10e-6\ndisk_bandwidth = 4e8\n'
        "contention = {map = 0, alias = 0, dma = 0, interleave = 0}\n"
    )
    return str(path)


def point(device: str, mu: float, settings: str = "") -> Point:
    return Point(
        model=str(DATA / "gptneo-tiny.onnx"), shape="", device=device, precision="fp32", m_peak_bytes=256 << 10,
        budget_bytes=None, lambda_=0.9, mu=mu, chunk_bytes=4 << 10, objective_asked="paper", mode="map", settings=settings,
        disk="cached", source="simulated",
    )  # fmt: skip


def test_mu_splits_layers_of_a_simulated_point_as_compile_does(slow_copies: str, tmp_path: Path) -> None:
    subject = subject_of(point(slow_copies, 0.1))
    rows = {mu: simulated(subject, point(slow_copies, mu)) for mu in (0.0, 0.1)}
    # At mu 0 groups are split until every weight has room; the only further gain is loading distance.
    assert rows[0.0]["preload_ratio"] == rows[0.1]["preload_ratio"] == 0
    further, enough = rows[0.1]["objective"], rows[0.0]["objective"]
    assert isinstance(further, float) and isinstance(enough, float) and further < 0.8 * enough
    launches = {}
    for mu, row in rows.items():
        bundle = flashmem.compile(
            point(slow_copies, mu).model, tmp_path / f"{mu}.flashmem", device=slow_copies, m_peak=256 << 10, chunk=4 << 10,
            mu=mu, mode="map", objective="paper",
        )  # fmt: skip
        assert row["objective"] == bundle.plan.objective
        launches[mu] = len(bundle.program.launches)
    assert launches[0.0] < launches[0.1]


def test_a_measured_point_runs_the_layers_it_was_planned_with(slow_copies: str, tmp_path: Path) -> None:
    """Its bundle has unsplit groups, so a bundle with split ones is made for the point, and removed afterwards."""
    model, device = Path(point(slow_copies, 0.1).model), list_devices()[0].descriptor_name
    whole = flashmem.compile(model, tmp_path / "bundles" / "whole.flashmem", device=slow_copies, unfusion=False)
    subject = Subject(whole.descriptor, "dma", graph_of(model), whole.program, whole.path)
    asked = replace(point(device, 0.1), mode="dma", source="measured")
    ran, predicted = measured(subject, asked, 1), simulated(subject, asked)
    assert ran["objective"] == predicted["objective"] != simulated(subject, replace(asked, mu=0.0))["objective"]
    assert ran["peak_bytes"] == predicted["peak_bytes"]
    assert [path.name for path in whole.path.parent.iterdir()] == ["whole.flashmem"]


def test_varied_options_make_every_combination_and_other_plans(slow_copies: str) -> None:
    settings = combinations(["strategy=stream,same-op", "unfusion=yes,no", "alpha=0.5"])
    assert settings == [
        f"alpha=0.5 strategy={strategy} unfusion={unfusion}" for strategy in ("stream", "same-op") for unfusion in ("yes", "no")
    ]
    subject = subject_of(point(slow_copies, 0.1))
    rows = [simulated(subject, point(slow_copies, 0.1, each)) for each in settings]
    assert [row["settings"] for row in rows] == settings
    whole = flashmem.compile(
        DATA / "gptneo-tiny.onnx", device=slow_copies, m_peak=256 << 10, lambda_=0.9, mu=0.1, chunk=4 << 10, objective="paper",
        mode="map", strategy="same-op", unfusion=False, alpha=0.5, build=False,
    )  # fmt: skip
    assert rows[3]["objective"] == whole.plan.objective
    assert rows[0]["objective"] != rows[3]["objective"]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["strategy"], "--vary 'strategy' has no values"),
        (["strategy=stream,"], "has no values"),
        (["strategy=stream", "strategy=same-op"], "--vary strategy is given twice"),
        (["strategy=later"], "strategy 'later' is unknown"),
        (["alpha=-1"], "alpha -1"),
        (["unfusion=maybe"], "neither yes nor no"),
        (["lambda=0.1"], "an axis of its own: --lambda"),
        (["speed=1"], "name one of: alpha, elemental-slowdown"),
    ],
)
def test_varied_options_that_are_refused(texts: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        combinations(texts)


def test_a_preload_ratio_is_reached_from_none_to_all() -> None:
    """The reading of the paper's Figure 8: other plans for each share of the weights in W."""
    base = replace(point("adreno750", 0.1), objective_asked="auto", lambda_=0.0, m_peak_bytes=1 << 30, mode="interleave")
    subject = subject_of(base)
    ratios = (0.0, 0.2, 0.5, 0.8, 1.0)
    rows = [simulated(subject, replace(base, settings=f"preload-ratio={ratio}")) for ratio in ratios]
    found = [float(str(row["preload_ratio"])) for row in rows]
    assert found == sorted(set(found)) and found[-1] == 1.0
    assert all(abs(is_ - asked) < 0.2 for is_, asked in zip(found, ratios, strict=True))


def test_thresholds_of_classes_change_a_plan_where_capacity_is_short() -> None:
    """Where C_l has room for all chunks they need not: then waiting layers hide what is moved during them anyway."""
    base = replace(point("adreno750", 0.1), objective_asked="auto", lambda_=0.0, m_peak_bytes=1 << 20, mode="interleave")
    subject = subject_of(base)
    rows = [simulated(subject, replace(base, settings=f"reusable-slowdown={share}")) for share in (0.0, 0.4)]
    strict, loose = (float(str(row["objective"])) for row in rows)
    assert strict > loose
