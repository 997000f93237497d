"""Exports by PyTorch: their list, their refusals, and files that depend on their arguments.

The tests of the committed exports do not need PyTorch; if it is installed, exporting is tested too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.exports.export import INPUTS, NOTES, Exporter, export
from benchmarks.exports.models import find, names, tiny_names
from benchmarks.exports.recipe import Recipe
from flashmem.base.errors import UserError
from tests.support.zoo_data import DATA, EXPORTS

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def answers(path: Path, model: Recipe) -> list[list[np.ndarray]]:
    """The answers of the model at `path` to an example, and to examples with one changed input each."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [port.name for port in session.get_inputs()] == [each.name for each in model.inputs]
    assert [port.name for port in session.get_outputs()] == list(model.outputs)
    first = model.examples(np.random.default_rng(0))
    for port in session.get_inputs():
        sizes = zip(port.shape, first[port.name].shape, strict=True)
        assert all(not isinstance(dim, int) or dim == size for dim, size in sizes)
    feeds = [first]
    for name, given in first.items():
        others = (model.examples(np.random.default_rng(seed))[name] for seed in range(1, 20))
        feeds.append(first | {name: next(other for other in others if not np.array_equal(given, other))})
    return [session.run(None, feed) for feed in feeds]


def check_that_inputs_matter(path: Path, model: Recipe) -> None:
    """Check that another value of any input changes an output, and that every output changes."""
    usual, *others = answers(path, model)
    assert all(np.isfinite(output).all() for output in usual)
    spreads = [output.std() if output.size > 1 else np.abs(output).max() for output in usual]
    moves = np.array([[np.abs(a - b).max() for a, b in zip(usual, other, strict=True)] for other in others])
    large = moves > 0.1 * np.array(spreads)
    assert all(spread > 0 for spread in spreads) and large.any(0).all() and large.any(1).all()


def test_names() -> None:
    assert {"resnet50", "vit-b16", "gptneo-125m", "sam2-large", "sd15-unet", "whisper-medium-decoder"} <= set(names())
    assert not set(names()) & set(tiny_names())
    assert {name for name, _ in EXPORTS.values()} == set(tiny_names())
    assert {path.stem for path in DATA.glob("*.onnx")} == set(EXPORTS)


@pytest.mark.parametrize("target", EXPORTS)
def test_committed_exports_are_small_and_answer_what_they_are_asked(target: str) -> None:
    path = DATA / f"{target}.onnx"
    assert path.stat().st_size < 300_000
    check_that_inputs_matter(path, find(EXPORTS[target][0]))


def test_committed_exports_are_what_they_are_named_after() -> None:
    def load(name: str) -> onnx.ModelProto:
        return onnx.load(DATA / f"{name}.onnx", load_external_data=False)

    constants = [any(n.op_type == "Constant" for n in load(name).graph.node) for name in ("vit-tiny-legacy", "vit-tiny")]
    assert constants == [True, False]  # how the two exporters write shapes
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
        ("resnet", {}, "no model 'resnet' to export: choose one of resnet50, "),
        ("resnet50", {"exporter": "onnx"}, "no exporter 'onnx': choose dynamo or legacy"),
        ("resnet50", {"size": 0}, "the size of resnet50 is a positive number of pixels, not 0"),
        ("gptneo-125m", {"size": -3}, "positive number of tokens"),
        ("vit-b16", {"exporter": "legacy", "external_data": True}, "the legacy exporter decides by itself"),
        ("gptneo-2.7b", {"exporter": "legacy"}, "the legacy exporter cannot write gptneo-2.7b: .*; use dynamo"),
    ],
)
def test_wrong_requests(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        export(name, tmp_path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_a_package(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {"torch", "transformers"} - {missing}:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is missing as well")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=f"exports need {missing}: pip install -r benchmarks/exports/requirements.txt"):
        export("resnet-tiny", tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_without_torch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"exports need torch: pip install -r benchmarks/exports/requirements\.txt"):
        export("resnet-tiny", tmp_path)


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("name", ["regnet-tiny", "vit-tiny"])
def test_export(name: str, exporter: Exporter, tmp_path: Path) -> None:
    path = export(name, tmp_path / "new", exporter=exporter, filename="m.onnx")
    assert path == tmp_path / "new" / "m.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["m.onnx"]
    check_that_inputs_matter(path, find(name))


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
@pytest.mark.parametrize("name", tiny_names())
def test_every_architecture_can_be_exported(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """By both exporters, or with a reason why not. Run this for other releases (CONTRIBUTING.md)."""
    model = find(name)
    if exporter == "legacy" and model.dynamo_only:
        with pytest.raises(UserError, match=f"the legacy exporter cannot write {name}: .*; use dynamo"):
            export(name, tmp_path, exporter=exporter)
        return
    try:
        path = export(name, tmp_path, exporter=exporter)
    except UserError as error:
        # The masks of transformers 5 use an operator (aten::diff) that the legacy exporter lacks.
        assert exporter == "legacy" and name.startswith("gptneo") and f"cannot write {name} (" in str(error)
        pytest.skip(str(error))
    check_that_inputs_matter(path, model)


@needs_torch
def test_export_is_reproducible_and_seeds_differ(tmp_path: Path) -> None:
    model = find("vit-tiny")
    first, again, other = (answers(export("vit-tiny", tmp_path / str(i), seed=s), model)[0][0] for i, s in enumerate((0, 0, 1)))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


@needs_torch
def test_export_with_external_data_and_another_size(tmp_path: Path) -> None:
    path = export("gptneo-tiny", tmp_path, size=24, external_data=True)
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    (wanted,) = onnx.load(path).graph.input
    assert [dim.dim_value for dim in wanted.type.tensor_type.shape.dim] == [1, 24]


@needs_torch
@pytest.mark.parametrize(
    ("name", "size"),
    [("gptneo-tiny", 65), ("deepvit-tiny", 12), ("sam2-narrow", 48), ("sam2-narrow-decoder", 8), ("whisper-tiny-encoder", 7)],
)
def test_a_size_the_architecture_cannot_take(name: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} cannot take size {size}: "):
        export(name, tmp_path, size=size)


@needs_torch
def test_notes_say_what_was_exported_and_how_to_ask_it(tmp_path: Path) -> None:
    path = export("whisper-tiny-decoder", tmp_path, seed=3, notes=True)
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", INPUTS, NOTES}
    said = json.loads((tmp_path / NOTES).read_text())
    assert said["name"] == "whisper-tiny-decoder" and said["size"] == 12 and said["seed"] == 3 and "torch" in said["versions"]
    with np.load(tmp_path / INPUTS) as file:
        (logits,) = onnxruntime.InferenceSession(str(path)).run(None, dict(file))
    assert logits.shape == (1, 12, 307)


@needs_torch
@pytest.mark.parametrize("exporter", ["dynamo", "legacy"])
def test_what_pytorch_cannot_export_is_one_sentence(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **how: Any) -> None:
        raise NotImplementedError("operators of\nanother world")

    monkeypatch.setattr("torch.onnx.export", fail)
    with pytest.raises(
        UserError, match=rf"the {exporter} exporter of PyTorch .* cannot write resnet-tiny \(operators of another"
    ):
        export("resnet-tiny", tmp_path, exporter=exporter)
    assert not list(tmp_path.iterdir())
