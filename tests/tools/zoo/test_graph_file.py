"""`flashmem zoo`: the list of architectures, and their files with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from flashmem.base.errors import UserError
from flashmem.tools.zoo import graph_file
from flashmem.tools.zoo.graph_file import export_architecture, write_with_random_weights
from flashmem.tools.zoo.graphs import GptNeo, architectures, zoo_graph


def _answer(path: Path) -> np.ndarray:
    with np.load(path.parent / "inputs.npz") as file:
        (answer,) = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, dict(file))
    return np.asarray(answer)


def test_a_file_answers_its_example(tmp_path: Path) -> None:
    path = export_architecture("mobilenetv3-large", tmp_path / "new", size=64, seed=3)
    assert {file.name for file in path.parent.iterdir()} == {"model.onnx", "inputs.npz"}
    answer = _answer(path)
    assert answer.shape == (1, 1000) and np.isfinite(answer).all() and answer.std() > 0
    again = export_architecture("mobilenetv3-large", tmp_path / "again", size=64, seed=3)
    assert path.read_bytes() == again.read_bytes()


def test_weights_beside_the_model_are_those_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        graph_file, "zoo_graph", lambda name, size: GptNeo(2, 16, 2, vocabulary=1000, window=4).graph(name, size)
    )
    inside = export_architecture("gptneo", tmp_path / "inside", size=8)
    monkeypatch.setattr(graph_file, "_INSIDE", 0)
    outside = export_architecture("gptneo", tmp_path / "outside", size=8)
    assert {file.name for file in outside.parent.iterdir()} == {"model.onnx", "model.onnx.data", "inputs.npz"}
    onnx.checker.check_model(str(outside))
    assert outside.stat().st_size < inside.stat().st_size
    np.testing.assert_array_equal(_answer(outside), _answer(inside))


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("resnet", None, "no architecture 'resnet' in the zoo: choose one of resnet50, "),
        ("resnet50", 100, "the size of resnet50 is a positive multiple of 32 pixels, not 100"),
        ("vit-b16", 0, "the size of vit-b16 is a positive multiple of 16 pixels, not 0"),
        ("gptneo-125m", -3, "positive multiple of 1 tokens"),
        ("whisper-tiny-encoder", 7, "multiple of 2 frames"),
    ],
)
def test_what_no_architecture_takes_is_refused(name: str, size: int | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        export_architecture(name, tmp_path, size=size)
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_architecture() -> None:
    rows = list(architectures())
    assert ("vit-b16", "224 pixels", "google/vit-base-patch16-224") in rows
    assert all(zoo_graph(name).nodes for name in ("gpt2", "whisper-tiny-encoder") if name in {row[0] for row in rows})


def test_weights_depend_on_the_seed(tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        files.append(tmp_path / f"{seed}.onnx")
        write_with_random_weights(GptNeo(1, 8, 2, vocabulary=50).graph("tiny", 4), files[-1], seed)
    assert files[0].read_bytes() != files[1].read_bytes()
