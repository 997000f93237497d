"""The zoo: what it lists, what it refuses, and that its exports depend on what they are asked.

PyTorch is not needed for the tests of the committed exports; where it is installed, exporting is tested too.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from flashmem.errors import UserError
from flashmem.zoo.export import OUTPUT, Exporter, export
from flashmem.zoo.models import ZooModel, find, names, tiny_names

DATA = Path(__file__).parent / "data"
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = runpy.run_path(str(DATA / "regenerate.py"))["EXPORTS"]

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the zoo extra is not installed")


def answers(path: Path, model: ZooModel) -> list[np.ndarray]:
    """What the model at `path` answers to two inputs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (wanted,) = session.get_inputs()
    sizes = [1, model.default_size] if model.vocabulary else [1, 3, model.default_size, model.default_size]
    assert wanted.name == model.input_name
    assert all(not isinstance(dim, int) or dim == size for dim, size in zip(wanted.shape, sizes, strict=True))
    found = []
    for seed in range(2):
        random = np.random.default_rng(seed)
        feed = random.integers(0, model.vocabulary, sizes) if model.vocabulary else random.standard_normal(sizes, np.float32)
        found.append(session.run([OUTPUT], {wanted.name: feed})[0])
    return found


def test_names() -> None:
    assert {"resnet50", "vit-b16", "gptneo-125m"} <= set(names())
    assert not set(names()) & set(tiny_names())
    assert {name for name, _ in EXPORTS.values()} == set(tiny_names())
    assert {path.stem for path in DATA.glob("*.onnx")} == set(EXPORTS)


@pytest.mark.parametrize("target", EXPORTS)
def test_committed_exports_are_small_and_answer_what_they_are_asked(target: str) -> None:
    path, model = DATA / f"{target}.onnx", find(EXPORTS[target][0])
    assert path.stat().st_size < 300_000
    one, other = answers(path, model)
    assert np.isfinite(one).all()
    assert np.abs(one - other).max() > 0.1 * one.std() > 0


def test_committed_exports_are_what_they_are_named_after() -> None:
    def load(name: str) -> onnx.ModelProto:
        return onnx.load(DATA / f"{name}.onnx", load_external_data=False)

    constants = [any(n.op_type == "Constant" for n in load(name).graph.node) for name in ("vit-tiny-legacy", "vit-tiny")]
    assert constants == [True, False]  # the ways the two exporters write shapes
    assert any(node.op_type == "Attention" for node in load("vit-tiny-opset23").graph.node)
    assert [dim.dim_param != "" for dim in load("gptneo-tiny-dynamic").graph.input[0].type.tensor_type.shape.dim] == [True] * 2
    assert all(t.data_location for t in load("gptneo-tiny-external").graph.initializer if t.ByteSize() > 2048)
    groups = {
        a.i
        for name in ("regnet-tiny", "mobilenet-tiny")
        for n in load(name).graph.node
        for a in n.attribute
        if a.name == "group"
    }
    assert len(groups) > 3  # none, grouped, depthwise of several widths


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet", {}, "no model 'resnet' in the zoo: choose one of resnet50, "),
        ("resnet50", {"exporter": "onnx"}, "no exporter 'onnx': choose dynamo or legacy"),
        ("resnet50", {"size": 0}, "the size of resnet50 is a positive number of pixels, not 0"),
        ("gptneo-125m", {"size": -3}, "positive number of tokens"),
        ("vit-b16", {"exporter": "legacy", "external_data": True}, "the legacy exporter decides by itself"),
    ],
)
def test_wrong_requests(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        export(name, tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {"torch", "transformers"} - {missing}:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is missing as well")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=f"the zoo needs {missing}: install flashmem with its `zoo` extra"):
        export("resnet-tiny", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="the zoo extra is installed")
def test_without_torch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the zoo needs torch: install flashmem with its `zoo` extra"):
        export("resnet-tiny", tmp_path)


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("name", ["regnet-tiny", "gptneo-tiny"])
def test_export(name: str, exporter: Exporter, tmp_path: Path) -> None:
    path = export(name, tmp_path / "new", exporter=exporter, filename="m.onnx")
    assert path == tmp_path / "new" / "m.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["m.onnx"]
    one, other = answers(path, find(name))
    assert np.abs(one - other).max() > 0.1 * one.std() > 0


@needs_torch
def test_export_is_reproducible_and_seeds_differ(tmp_path: Path) -> None:
    model = find("vit-tiny")
    first, again, other = (answers(export("vit-tiny", tmp_path / str(i), seed=s), model)[0] for i, s in enumerate((0, 0, 1)))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


@needs_torch
def test_export_with_external_data_and_another_size(tmp_path: Path) -> None:
    path = export("gptneo-tiny", tmp_path, size=24, external_data=True)
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    (wanted,) = onnx.load(path).graph.input
    assert [dim.dim_value for dim in wanted.type.tensor_type.shape.dim] == [1, 24]


@needs_torch
def test_a_size_the_architecture_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gptneo-tiny cannot take size 65"):
        export("gptneo-tiny", tmp_path, size=65)
