"""Labels and probabilities of classifiers, and files on the command line, against arithmetic and ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from examples import text_direction
from flashmem.base.errors import UserError
from flashmem.tools.inputs.classes import Classes, Labels, find_labels, likeliest_classes
from flashmem.tools.inputs.description import describe
from flashmem.tools.inputs.prepare import Given, prepare
from tests.support.caches import empty_bundle_cache
from tests.support.command_line import Command, command_line
from tests.support.trained_inputs import line, path_of
from tests.tools.inputs.models import classifier, identity, photo, saved_photo

THREE = {"0": "red", "1": "green", "2": "blue"}


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    empty_bundle_cache(tmp_path / "cache", monkeypatch)
    return command_line(monkeypatch, capfd)


@pytest.mark.parametrize(
    ("metadata", "files", "expected"),
    [
        ({"names": "{0: 'red', 1: 'green', 2: 'blue'}", "task": "classify"}, {}, Labels(("red", "green", "blue"))),
        ({"names": "{0: 'red', 1: 'green', 2: 'blue'}", "task": "detect"}, {}, Labels()),
        ({"names": "not a list"}, {}, Labels()),
        ({}, {"config": {"id2label": THREE}}, Labels(("red", "green", "blue"))),
        ({}, {"config": {"id2label": {"0": "a", "2": "b"}}}, Labels()),
        ({}, {"config": {"label_names": ["a", "b"]}}, Labels(("a", "b"))),
        (
            {},
            {"config": {"id2label": THREE, "problem_type": "multi_label_classification"}},
            Labels(tuple(THREE.values()), True),
        ),
    ],
)
def test_labels_are_found_where_exporters_leave_them(
    metadata: Mapping[str, str], files: dict[str, Any], expected: Labels, tmp_path: Path
) -> None:
    model = classifier(tmp_path / "m.onnx", [1, 3, 8, 8], metadata=metadata, **files)
    assert find_labels(describe(model, {}), None) == expected
    (tmp_path / "l.txt").write_text("one\ntwo words\n\n")
    assert find_labels(describe(model, {}), tmp_path / "l.txt").names == ("one", "two words")


def test_probabilities_are_made_only_of_what_is_none() -> None:
    logits = np.array([[1.0, 3.0, -2.0]], np.float32)
    labels = Labels(("a", "b", "c"))
    soft = np.exp(logits[0] - 3) / np.exp(logits[0] - 3).sum()
    found = likeliest_classes({"y": logits}, labels)
    assert found is not None and found.how == "softmax of the output"
    assert [(index, label) for _, index, label in found.rows] == [(1, "b"), (0, "a"), (2, "c")]
    np.testing.assert_allclose([chance for chance, _, _ in found.rows], np.sort(soft)[::-1], rtol=1e-6)
    given = likeliest_classes({"y": soft[None], "hidden": np.zeros((1, 4, 5), np.float32)}, labels)
    assert given is not None and given.how == "probabilities as the model gives them"
    np.testing.assert_allclose([row[0] for row in given.rows], np.sort(soft)[::-1])
    several = likeliest_classes({"y": logits}, Labels(labels.names, True))
    assert several is not None and several.how == "sigmoid of the output"
    np.testing.assert_allclose(several.rows[0][0], 1 / (1 + np.exp(-3)))


def test_an_output_of_no_classes_has_none() -> None:
    vector = np.array([[1.0, 3.0, -2.0]], np.float32)
    assert likeliest_classes({"y": vector}, Labels()) is None  # an embedding as well may be three numbers
    assert likeliest_classes({"y": vector}, Labels(("a", "b"))) is None
    assert likeliest_classes({"y": vector, "z": vector}, Labels(("a", "b", "c"))) is None
    assert likeliest_classes({"y": np.full((1, 3), np.nan, np.float32)}, Labels(("a", "b", "c"))) is None
    many = np.full((1, 8), 1 / 8, np.float32)
    assert likeliest_classes({"y": many}, Labels()) == Classes(
        "y", "probabilities as the model gives them", tuple((0.125, index, f"class {index}") for index in range(5))
    )


def test_a_run_says_classes_and_how_the_photo_was_read(flashmem: Command, tmp_path: Path) -> None:
    model = classifier(tmp_path / "m.onnx", ["n", 3, "h", "w"], config={"id2label": THREE})
    path = saved_photo(tmp_path / "p.png", 48, 48)
    words = ("run", model, "--image", path, "--size", "48", "--rescale", "1")
    report = flashmem(*words, "--verify")
    assert report.code == 0, report.err
    assert "p.png as x: NCHW RGB, shorter side to 48, centre 48x48, v; from flags; guessed: RGB, centre crop" in report.out
    means = photo(48, 48).astype(np.float64).mean((0, 1))
    order = np.argsort(-means)
    assert re.search(rf"class 1 +\d+\.\d% {list(THREE.values())[order[0]]}", report.out)
    data = flashmem(*words, "--json").json
    chances = np.exp(means - means.max()) / np.exp(means - means.max()).sum()
    assert [row["index"] for row in data["classes"]["top"]] == order.tolist()
    np.testing.assert_allclose([row["probability"] for row in data["classes"]["top"]], chances[order], rtol=1e-3, atol=1e-9)
    assert data["classes"]["how"] == "softmax of the output" and set(data["inputs"]) == {"image"}


def test_a_bundle_reads_photos_as_its_model_does(flashmem: Command, tmp_path: Path) -> None:
    model = classifier(tmp_path / "m.onnx", ["n", 3, "h", "w"], config={"id2label": THREE})
    bundle = tmp_path / "b.flashmem"
    shapes = ("--shape", "x=1x3x48x48", "--shape", "x=1x3x32x32")
    assert flashmem("compile", model, "-o", bundle, *shapes).code == 0
    path = saved_photo(tmp_path / "p.png", 48, 48)
    for size in (32, 48):
        data = flashmem("run", bundle, "--image", path, "--size", size, "--json").json
        assert data["shapes"]["x"] == [1, 3, size, size] and data["classes"]["top"][0]["label"] in THREE.values()
    wrong = flashmem("run", bundle, "--image", path, "--size", "40")
    assert wrong.code == 2 and "x=1x3x48x48" in wrong.err


def test_inputs_that_no_file_is_for_are_said_to_be_random(flashmem: Command, tmp_path: Path) -> None:
    model = identity(tmp_path / "m.onnx", {"x": [1, 3, 8, 8], "state": [2, 64]})
    path = saved_photo(tmp_path / "p.png")
    assert "state: drawn from --seed; give it with --input" in flashmem("run", model, "--image", path).out
    np.savez(tmp_path / "s.npz", state=np.ones((2, 64), np.float32))
    both = flashmem("run", model, "--image", path, "--input", tmp_path / "s.npz", "--output", tmp_path / "y.npz")
    assert both.code == 0 and "drawn from" not in both.out
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_array_equal(found["state_out"], -np.ones((2, 64)))
        np.testing.assert_array_equal(found["x_out"], -prepare(model, Given(image=path)).arrays["x"])


def test_labels_that_no_output_has_are_refused_before_the_run(flashmem: Command, tmp_path: Path) -> None:
    model = classifier(tmp_path / "m.onnx", [1, 3, 8, 8])
    (tmp_path / "l.txt").write_text("a\nb\n")
    for words, message in (
        (
            ("--image", saved_photo(tmp_path / "p.png"), "--labels", tmp_path / "l.txt"),
            "names 2 classes, and no output has as many",
        ),
        (("--labels", tmp_path / "none.txt"), "no such file"),
        (("--size", "8"), "--size says how an image is read; give one with --image"),
        (("--image", tmp_path / "l.txt"), "is not an image that can be read"),
    ):
        refused = flashmem("run", model, *words)
        assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err


@pytest.mark.thorough
def test_a_trained_network_knows_a_line_that_stands_on_its_head(flashmem: Command, tmp_path: Path) -> None:
    """RapidOCR's classifier of directions, with flags as its own package normalises."""
    network = path_of(text_direction.NETWORK)
    (tmp_path / "l.txt").write_text("upright\nturned\n")
    flags = (
        "--size",
        "192x48",
        "--mean",
        "0.5",
        "--std",
        "0.5",
        "--color",
        "BGR",
        "--fit",
        "stretch",
        "--labels",
        tmp_path / "l.txt",
    )
    image = Image.fromarray(line("Weights streamed from disk"))
    for label, turned in (("upright", image), ("turned", image.rotate(180))):
        turned.save(tmp_path / f"{label}.png")
        data = flashmem("run", network, "--image", tmp_path / f"{label}.png", *flags, "--json").json
        best = data["classes"]["top"][0]
        assert best["label"] == label and best["probability"] > 0.9
        assert data["classes"]["how"] == "probabilities as the model gives them"
        pixels = np.asarray(turned.resize((192, 48), Image.Resampling.BILINEAR)).astype(np.float32)[..., ::-1]
        array = ((pixels / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None]
        (expected,) = onnxruntime.InferenceSession(network, providers=["CPUExecutionProvider"]).run(None, {"x": array})
        assert abs(expected.max() - best["probability"]) < 1e-4


def test_a_language_model_is_pointed_to_generate(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="is a language model, which reads a prompt: flashmem generate"):
        prepare(tmp_path / "m.gguf", Given(text="hello"))
