"""Sounds and texts as inputs: against numpy, arithmetic, and the library tokenizers."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from scipy.io import wavfile
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from flashmem.base.errors import UserError
from flashmem.tools.inputs.audio import AudioFormat, read_audio, time_axis
from flashmem.tools.inputs.prepare import Given, prepare
from tests.tools.inputs.models import identity

RATE = 8000


def tone(seconds: float, rate: int, hertz: float = 440.0) -> NDArray[np.float64]:
    return np.asarray(0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate))


def saved(path: Path, samples: NDArray[np.float64], kind: str, rate: int = RATE) -> Path:
    """A WAV file; of 24 bits by the standard library, of others by SciPy."""
    if kind == "int24":
        with wave.open(str(path), "wb") as file:
            file.setnchannels(samples.shape[1] if samples.ndim > 1 else 1)
            file.setsampwidth(3)
            file.setframerate(rate)
            whole = np.round(samples * (2**23 - 1)).astype("<i4")
            file.writeframes(whole.reshape(-1, 1).view(np.uint8)[:, :3].tobytes())
        return path
    if kind == "uint8":
        stored = np.round(samples * 127 + 128).astype(np.uint8)
    else:
        stored = (samples if kind.startswith("f") else np.round(samples * np.iinfo(kind).max)).astype(kind)
    wavfile.write(path, rate, stored)
    return path


@pytest.mark.parametrize(
    ("kind", "step"),
    [("uint8", 1 / 64), ("int16", 2e-4), ("int24", 1e-6), ("int32", 1e-6), ("float32", 1e-7), ("float64", 1e-7)],
)
def test_every_kind_of_wav_has_the_samples_that_were_written(kind: str, step: float, tmp_path: Path) -> None:
    samples = np.stack([tone(0.1, RATE), tone(0.1, RATE, 600)], 1)
    path = saved(tmp_path / "s.wav", samples, kind)
    found = read_audio(path, AudioFormat(RATE))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples.mean(1), atol=step)


def test_another_rate_is_the_same_tone(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.wav", tone(1.0, 44_100), "float32", 44_100)
    found = read_audio(path, AudioFormat(16_000))
    assert len(found) == 16_000
    np.testing.assert_allclose(found[200:-200], tone(1.0, 16_000)[200:-200], atol=2e-3)  # ends are cut off


def test_length_rate_and_scale_are_the_model_s(tmp_path: Path) -> None:
    config = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": RATE, "do_normalize": True}
    samples = tone(0.25, RATE)
    path = saved(tmp_path / "s.wav", samples, "float32")
    model = identity(tmp_path / "m.onnx", {"input_values": ["n", 3000], "h": [2, 1, 64]}, preprocessor_config=config)
    made = prepare(model, Given(audio=path))
    array = made.arrays["input_values"]
    standard = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    np.testing.assert_allclose(array, np.pad(standard, (0, 1000))[None], atol=1e-5)
    assert made.others == ("h",) and "zero mean and unit variance; from preprocessor_config.json" in made.sentences["audio"]
    cut = identity(tmp_path / "c.onnx", {"x": [1, 1, 500]})
    np.testing.assert_allclose(prepare(cut, Given(audio=path, rate=RATE)).arrays["x"][0, 0], standard[:500], atol=1e-5)


def test_a_guessed_rate_and_an_open_length_are_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.wav", tone(0.5, RATE), "int16")
    model = identity(tmp_path / "m.onnx", {"x": [1, "samples"]})
    made = prepare(model, Given(audio=path))
    assert made.shapes == {"x": (1, 8000)} and "guessed: the rate (--rate)" in made.sentences["audio"]
    stored = identity(tmp_path / "r.onnx", {"x": [1, "samples"]}, metadata={"sample_rate": "4000"})
    assert prepare(stored, Given(audio=path)).shapes == {"x": (1, 2000)}


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((None, 43844, 1), 1), ((1, 1, None), 2), ((None, None), 1), ((16000,), 0), ((None,), 0), ((1, 576), 1),
        ((None, 128, None), None), ((1, 80, 3000), None), ((2, 1, 128), None), ((1, 40), None), ((), None),
        ((1, 1, 1, 900), None),
    ],
)  # fmt: skip
def test_time_is_the_long_or_open_dimension_among_ones(shape: tuple[int | None, ...], axis: int | None) -> None:
    assert time_axis(shape) == axis


def test_what_is_no_waveform_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "s.wav", tone(0.1, RATE), "int16")
    with pytest.raises(
        UserError, match=r"no input of the model is a waveform .spectrograms and other features are not computed"
    ):
        prepare(identity(tmp_path / "m.onnx", {"features": [1, 80, 3000]}), Given(audio=path))
    (tmp_path / "t.wav").write_text("not a sound")
    (tmp_path / "h.wav").write_bytes(path.read_bytes()[:30])
    for name in ("t", "h"):
        with pytest.raises(UserError, match="is not a WAV file that can be read"):
            read_audio(tmp_path / f"{name}.wav", AudioFormat(RATE))
    with pytest.raises(UserError, match="no such audio file"):
        read_audio(tmp_path / "none.wav", AudioFormat(RATE))
    wavfile.write(tmp_path / "e.wav", RATE, np.zeros(0, np.int16))
    with pytest.raises(UserError, match="has no samples"):
        read_audio(tmp_path / "e.wav", AudioFormat(RATE))
    with pytest.raises(UserError, match="--rate says how audio is read; give a file with --audio"):
        prepare(identity(tmp_path / "m.onnx", {"x": [1, 500]}), Given(rate=8000))


# Texts


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "photo", "of", "two", "cat", "##s"]


def tokenizer(folder: Path) -> Tokenizer:
    made = Tokenizer(WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    made.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair=None, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    return made


INPUTS: dict[str, list[Any]] = {name: [1, "tokens"] for name in ("input_ids", "attention_mask", "token_type_ids")}


@pytest.mark.parametrize(
    ("length", "ids", "mask"),
    [(None, [2, 5, 6, 7, 8, 9, 3], 7), (10, [2, 5, 6, 7, 8, 9, 3, 0, 0, 0], 7), (5, [2, 5, 6, 7, 3], 5)],
)
def test_a_text_has_the_library_s_tokens(length: int | None, ids: list[int], mask: int, tmp_path: Path) -> None:
    tokenizer(tmp_path)
    inputs = {name: [1, length or "tokens"] for name in INPUTS}
    model = identity(tmp_path / "m.onnx", inputs, dtype=TensorProto.INT64)
    made = prepare(model, Given(text="photo of two cats"))
    assert {name: array.dtype for name, array in made.arrays.items()} == {name: np.dtype(np.int64) for name in INPUTS}
    assert made.arrays["input_ids"].tolist() == [ids]
    assert made.arrays["attention_mask"].tolist() == [[1] * mask + [0] * (len(ids) - mask)]
    assert made.arrays["token_type_ids"].tolist() == [[0] * len(ids)]
    words = {None: "7 tokens; tokenizer.json", 10: "10 tokens, 3 of them padding", 5: "5 tokens, of 7"}[length]
    assert words in made.sentences["text"]


def test_a_text_without_a_tokenizer_or_a_place_is_refused(tmp_path: Path) -> None:
    model = identity(tmp_path / "m.onnx", INPUTS, dtype=TensorProto.INT64)
    with pytest.raises(UserError, match=r"there is no tokenizer.json beside .*m.onnx; copy the model's there"):
        prepare(model, Given(text="a cat"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "none"}}))
    with pytest.raises(UserError, match="is not a tokenizer that can be read"):
        prepare(model, Given(text="a cat"))
    with pytest.raises(UserError, match="no input of the model is named input_ids, so --text has no place"):
        prepare(identity(tmp_path / "i.onnx", {"x": [1, 3, 4, 4]}), Given(text="a cat"))
