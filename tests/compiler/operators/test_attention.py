"""Fused attention compared with ONNX Runtime: every form on every device, and scores are never stored in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.compiler.configs.listed import with_configs
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.kernels.attention.configs import AttentionConfig, KeyBlockConfig, QueryRowsConfig
from flashmem.compiler.kernels.attention.operators import Band
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.request.options import find_device
from flashmem.target.descriptor import load_descriptor
from tests.support.attention_cases import FORMS, Model, filled, plain, read_elsewhere
from tests.support.compared import DEVICES, answers_of, require_right
from tests.support.paths import DATA

SOME = (
    "few, masked", "three queries", "one query", "standard, masked", "197 queries", "257 of one channel", "heads of 160",
    "guarded", "causal", "strided", "filled", "filled, one query", "filled, one sees none", "filled, many queries",
    "filled, many, one sees none", "filled, shared keys", "grouped", "grouped, a window", "band to each query",
    "band of a window", "band around each query", "band of few queries",
)  # fmt: skip
"""The forms that differ between devices."""


def graph_of(model: Model, folder: Path) -> Graph:
    onnx.save(model.proto(), folder / "graph.onnx")
    return prepare(import_model(folder / "graph.onnx", {}, why_unsupported))


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_one_operator_that_reads_its_parts_where_they_lie(name: str, tmp_path: Path) -> None:
    model = Model()
    FORMS[name](model)
    found = operators(graph_of(model, tmp_path))
    assert found.count("FusedAttention") == 1
    of_mask = {"Where", "ReduceMax", "Equal"}
    left = {"images": {"Conv", "Transpose"}, "standard, masked": of_mask, "few, masked": of_mask}.get(name, set())
    left |= {"Less", "Sub", "And"} if "filled" in name else set()
    assert set(found) - {"FusedAttention", "Reshape"} <= left


@pytest.mark.parametrize(("name", "model"), list(read_elsewhere()))
def test_scores_that_others_read_stay(name: str, model: Model, tmp_path: Path) -> None:
    assert "FusedAttention" not in operators(graph_of(model, tmp_path))
    device, path = DEVICES[0]
    _compare(model, device, device, path, tmp_path)


def _compare(model: Model, compiled_for: str, device: str, path: str, folder: Path) -> None:
    proto = model.proto()
    require_right(proto, model.feeds, answers_of(proto, model.feeds, (device, path), folder, compiled_for))


def _all_of(names: Iterable[str], kind: str = "normal") -> Model:
    model = Model(kind=kind)
    for name in names:
        FORMS[name](model)
    return model


@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_answers_are_those_of_onnx_runtime(device: str, path: str, tmp_path: Path) -> None:
    _compare(_all_of(FORMS if device == DEVICES[0][0] else SOME), device, device, path, tmp_path)


@pytest.mark.parametrize(("device", "path"), DEVICES)
@pytest.mark.parametrize("compiled_for", ["", "nvidia"])
@pytest.mark.parametrize("rows", [1, 12])
def test_keys_beyond_the_filled_part_are_not_read(rows: int, compiled_for: str, device: str, path: str, tmp_path: Path) -> None:
    """They are not numbers, and neither are their values: one that was read would make the answer so."""
    if compiled_for and device == "pocl" and rows > 1:
        pytest.skip("PoCL takes a minute to build blocks of work-items with barriers between them")
    model, end = Model(), 40
    filled(model, np.full((1, 1, rows, 1), end, np.int32), 200)
    wanted = {name: data for name, data in model.feeds.items()}
    for name in list(wanted)[1:3]:
        wanted[name] = wanted[name].copy()
        wanted[name][:, end:] = np.nan
    right = Model()
    filled(right, np.full((1, 1, rows, 1), end, np.int32), end)
    short = {name: data[:, :end] if at in (1, 2) else data for at, (name, data) in enumerate(model.feeds.items())}
    answers = answers_of(model.proto(), wanted, (device, path), tmp_path, compiled_for or device)
    require_right(right.proto(), short, answers)


@pytest.mark.parametrize("kind", ["positive", "around 1e3", "around -1e4"])
@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_numbers_of_other_kinds(kind: str, device: str, path: str, tmp_path: Path) -> None:
    """Scores that are all large, and answers that are all close to one number."""
    _compare(_all_of(("three queries", "standard", "197 queries", "causal"), kind), device, device, path, tmp_path)


@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_kernels_of_a_gpu_give_the_same_answers(device: str, path: str, tmp_path: Path) -> None:
    # PoCL takes a minute to build blocks of work-items with barriers between them; it builds the other form fast.
    _compare(_all_of(SOME[:2] if device == "pocl" else SOME), "nvidia", device, path, tmp_path)


@pytest.mark.parametrize(("device", "path"), DEVICES)
@pytest.mark.parametrize("phone", ["adreno750", "mali-g710"])
def test_kernels_of_a_phone_give_the_same_answers(phone: str, device: str, path: str, tmp_path: Path) -> None:
    # PoCL takes a minute to build blocks of work-items with barriers between them: one case of few queries, and one of many.
    _compare(_all_of(("three queries", "causal") if device == "pocl" else SOME), phone, device, path, tmp_path)


@pytest.mark.parametrize("device", ["pocl", "nvidia", "mali-g715"])
def test_memory_does_not_grow_with_the_scores(device: str, tmp_path: Path) -> None:
    model = Model()
    plain(model, 1, 4, 1024, 1024, 8)
    graph = graph_of(model, tmp_path)
    program = generate(fuse(graph), load_descriptor(device)).program
    assert [launch.operator_class for launch in program.launches] == ["hierarchical"]
    assert program.launches[0].macs == 4 * 1024 * 1024 * (8 + 8)
    assert program.launches[0].bytes == 4 * 4 * 1024 * 4 * 8  # queries, keys, values, answers: 4 heads of 8 floats
    assert program.arena_bytes < 4 * 1024 * 4 * 8 * 5


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("depthanything-tiny", 4), ("depthanything-tiny-legacy", 4), ("gptneo-tiny", 2), ("gptneo-tiny-legacy", 2),
        ("sam2-narrow", 5), ("sam2-narrow-legacy", 5), ("sam2-narrow-decoder", 7), ("sam2-narrow-decoder-legacy", 7),
        ("sd-tiny-unet", 8), ("sd-tiny-unet-legacy", 8), ("vit-tiny", 2), ("vit-tiny-legacy", 2), ("vit-tiny-opset23", 2),
        ("whisper-tiny-decoder", 4), ("whisper-tiny-encoder", 2),
    ],
)  # fmt: skip
def test_exports_keep_no_scores(name: str, count: int) -> None:
    graph = prepare(import_model(DATA / f"{name}.onnx", {}, why_unsupported))
    fused = [node for node in graph.nodes if node.op == "FusedAttention"]
    assert len(fused) == count and not {"Softmax", "IsNaN"} & set(operators(graph))
    program = generate(fuse(graph), load_descriptor("pocl")).program
    assert sum(launch.shape.family == "attention" for launch in program.launches) == count


@pytest.mark.parametrize(
    "config",
    [
        KeyBlockConfig("deep", 4, 4, (4, 8), channels=32),
        KeyBlockConfig("wide", 8, 4, (2, 4), channels=32),
        KeyBlockConfig("shallow", 8, 2, (2, 4), channels=8),
        QueryRowsConfig("dealt", 8, 2, 8, lanes=16),
        QueryRowsConfig("rows", 12, 4, 4),
    ],
    ids=lambda config: config.name,
)
def test_any_numbers_of_a_config(config: AttentionConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is the only config, it is used where it applies; queries that cannot share keys under it get a plain form."""
    device, path = DEVICES[0]
    listed = replace(with_configs(descriptor_for(find_device(device)), [config]), only=config.name)
    monkeypatch.setattr("flashmem.runtime.request.options.descriptor_for", lambda device: listed)
    model = Model()
    for rows, keys, size, value_size in ((7, 70, 20, 9), (19, 37, 20, 9), (18, 75, 20, 12)):
        plain(model, 1, 2, rows, keys, size, value_size)
    _compare(model, device, device, path, tmp_path)
    launches = flashmem.Bundle.open(tmp_path / "b.flashmem").program.launches
    taken = [launch.shape for launch in launches if launch.shape.family == "attention"]
    numbers = [(shape.tile_columns, shape.k_block, shape.slice_k) for shape in taken]
    channels = config.channels if isinstance(config, KeyBlockConfig) else 0
    lanes = config.lanes if isinstance(config, QueryRowsConfig) else 1
    assert numbers.count((config.keys, channels, lanes)) == (1 if lanes > 1 else 3)


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("filled, many queries", "queries"),
        ("filled, one query", "queries"),
        ("filled", "all"),
        ("filled, windows", "queries"),
        ("filled, shared keys", "queries"),
        ("causal", ""),
    ],
)
def test_queries_have_ends_of_their_own(name: str, filled: str, tmp_path: Path) -> None:
    """Of two sentences, the ends of both are looked at."""
    model = Model()
    FORMS[name](model)
    [attention] = [node for node in graph_of(model, tmp_path).nodes if node.op == "FusedAttention"]
    assert attention.attributes["filled"] == filled


@pytest.mark.parametrize(
    ("name", "band"),
    [
        ("standard", Band(None, 0)), ("in rows", Band(None, 5, 6)), ("grouped", Band(None, 0, 40)),
        ("grouped, a window", Band(-11, 0, 70)), ("masked twice", Band(-19, 0)), ("band of a window", Band(-20, 0)),
        ("causal", None), ("windowed", None), ("masked", None),
    ],
)  # fmt: skip
def test_masks_that_are_bands_are_no_operands(name: str, band: Band | None, tmp_path: Path) -> None:
    model = Model()
    FORMS[name](model)
    [attention] = [node for node in graph_of(model, tmp_path).nodes if node.op == "FusedAttention"]
    assert attention.attributes["scores"].band == band
    masks = {"Where"} & {step.op for step in attention.attributes["scores"].steps}
    assert not (band and masks)
