"""Whole small models: every device, memory path and transfer mode agrees with ONNX Runtime, and all give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.compared import require_right
from tests.support.inputs import floats
from tests.support.zoo_data import DATA, EXPORTS, examples

OPEN_SIZE = 12  # tokens, for models with an open sequence length
MODELS = sorted(EXPORTS)
PLACES = [(device, path) for device in list_devices() for path in descriptor_for(device).memory_paths]
IDS = [f"{device.descriptor_name}-{path}" for device, path in PLACES]
ARCHITECTURES = ("gptneo-tiny", "mobilenet-tiny", "regnet-tiny", "resnet-tiny", "vit-tiny")

# Networks of fifty and more kernels, which PoCL builds slowly: run once, on the device with the fastest builds. llvmpipe takes
# minutes for one of their attentions.
MANY_KERNELS = ("deepvit", "depthanything", "sam2", "sd", "whisper")
QUICK_PLACES = [place for place in PLACES if place[0].descriptor_name == "intel-cpu"] or PLACES[:1]


def _places_for(number: int, name: str) -> list[tuple[Any, str]]:
    if name in ARCHITECTURES:
        return [place for at, place in enumerate(PLACES) if place in QUICK_PLACES or (at + number) % 2 == 0]
    if name.startswith(MANY_KERNELS):
        chosen = QUICK_PLACES[number % len(QUICK_PLACES)]
        return [] if name.endswith("-legacy") or chosen[0].reads_unasked else [chosen]
    # Other exports of an architecture test the importer: their kernels are the same, so one place for each is enough.
    return PLACES[number % len(PLACES) :][:1]


# Nor do those kernels have to be optimised again.
STREAMED = [
    pytest.param(
        name,
        *place,
        id=f"{name}-{place[0].descriptor_name}-{place[1]}",
        marks=() if name in ARCHITECTURES or name.startswith(MANY_KERNELS) else pytest.mark.unoptimised,
    )
    for number, name in enumerate(MODELS)
    for place in _places_for(number, name)
]

# fp16, and fp32 on slow devices, in every other place: each device and each memory path has it for each model, or the next one.
EVERY_MODE = [
    pytest.param(name, precision, *place, id=f"{name}-{precision}-{place_id}")
    for number, name in enumerate(["resnet-tiny", "gptneo-tiny", "regnet-tiny"])
    for at, (place, place_id) in enumerate(zip(PLACES, IDS, strict=True))
    for precision in ("fp32", "fp16")
    if (precision == "fp32" and place in QUICK_PLACES) or (at + at // 2 + number) % 2 == 0
]


def _reference(model: Path, inputs: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return onnxruntime.InferenceSession(model).run(None, inputs)  # type: ignore[no-any-return]


def _error(outputs: list[NDArray[Any]], expected: list[NDArray[Any]]) -> float:
    """The error as a fraction of the range of each output, or of its magnitude for a single number."""
    return max(float(np.abs(a - b).max() / (np.ptp(b) or np.abs(b).max())) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize(("name", "device", "path"), STREAMED)
def test_streamed_answer_is_onnxruntimes(name: str, device: Any, path: str, tmp_path: Path) -> None:
    model, is_open = DATA / f"{name}.onnx", "dynamic" in EXPORTS[name][1]
    inputs = examples(name, size=OPEN_SIZE if is_open else None)
    shapes = {"input_ids": (1, OPEN_SIZE)} if is_open else {}
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", device=device.descriptor_name, shapes=shapes, memory_path=path)
    with flashmem.Session(bundle, device=device.descriptor_name) as session:
        first = session.run(None, inputs)
        others = [session.run(None, inputs) for _ in range(4)]
    if name.endswith("-legacy"):  # the reference evaluator cannot run some of these
        assert _error(first, _reference(model, inputs)) <= 1e-3
    else:
        require_right(onnx.load(model), inputs, first)
    for again in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mobilenet-tiny", "positive"), ("regnet-tiny", "large"), ("resnet-tiny", "around 1e3"), ("vit-tiny", "positive"),
     ("whisper-tiny-encoder", "around 1e3")],
)  # fmt: skip
def test_numbers_of_other_kinds(name: str, kind: str, tmp_path: Path) -> None:
    """Pixels from 0 on, spectra far from 0: activations that all have one sign, or little variation."""
    (device, path), model = QUICK_PLACES[0], onnx.load(DATA / f"{name}.onnx")
    inputs = {key: floats(*array.shape, kind=kind) for key, array in examples(name).items()}
    bundle = flashmem.compile(DATA / f"{name}.onnx", tmp_path / "m.flashmem", device=device.descriptor_name, memory_path=path)
    with flashmem.Session(bundle, device=device.descriptor_name) as session:
        require_right(model, inputs, session.run(None, inputs))


@pytest.mark.parametrize(("name", "precision", "device", "path"), EVERY_MODE)
def test_every_mode_gives_the_same_bits(name: str, precision: str, device: Any, path: str, tmp_path: Path) -> None:
    model = DATA / f"{name}.onnx"
    inputs = examples(model.stem)
    bundle = flashmem.compile(
        model, tmp_path / "m.flashmem", device=device.descriptor_name, memory_path=path, precision=precision, chunk="4KiB"
    )
    answers = {}
    for mode in descriptor_for(device).modes[path]:
        with flashmem.Session(bundle, device=device.descriptor_name, mode=mode) as session:
            answers[mode] = session.run(None, inputs)
    with flashmem.Session(bundle, device=device.descriptor_name, strategy="preload") as session:
        answers["preload"] = session.run(None, inputs)
    assert len(answers) >= 3
    expected = answers.pop("preload")
    assert _error(expected, _reference(model, inputs)) <= (1e-3 if precision == "fp32" else 1e-2)
    for mode, outputs in answers.items():
        assert all(np.array_equal(a, b) for a, b in zip(outputs, expected, strict=True)), mode


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
def test_the_smallest_budget_works_and_one_byte_less_does_not(mode: str, tmp_path: Path) -> None:
    model = DATA / "gptneo-tiny.onnx"
    inputs = examples(model.stem)
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(model, tmp_path / "m.flashmem", budget=1, mode=mode, chunk="4KiB")
    smallest = refused.value.smallest_bytes
    assert str(smallest) in str(refused.value)
    assert refused.value.binding
    with pytest.raises(BudgetError):
        flashmem.compile(model, tmp_path / "m.flashmem", budget=smallest - 1, mode=mode, chunk="4KiB")
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=smallest, mode=mode, chunk="4KiB")
    with flashmem.Session(bundle, mode=mode) as session:
        outputs = session.run(None, inputs)
        assert session.last_run.memory.peak_bytes <= smallest
    assert _error(outputs, _reference(model, inputs)) <= 1e-3


def test_a_tied_table_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of the tied export is used by the head and the row gather: the gather reads the head's panels."""
    monkeypatch.setattr("flashmem.compiler.memory.constants.RESIDENT_CONSTANT_BYTES", 1 << 10)  # as for a table of full size
    model = DATA / "gptneo-tiny-tied.onnx"
    inputs = examples(model.stem)
    bundle = flashmem.compile(model, tmp_path / "tied.flashmem", memory_path="buffer")
    gathers = [gather for gather in bundle.program.host_embeddings if gather.panel > 1]
    assert gathers
    for gather in gathers:
        assert any(part.offset <= gather.offset < part.offset + part.nbytes for part in bundle.program.slices)
    with flashmem.Session(bundle) as session:
        outputs = session.run(None, inputs)
    assert _error(outputs, _reference(model, inputs)) <= 1e-3


def test_a_tied_table_of_large_panels_is_stored_by_rows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row would be read with its panel, which takes longer than the launches that need it."""
    monkeypatch.setattr("flashmem.compiler.memory.constants.RESIDENT_CONSTANT_BYTES", 1 << 10)
    model = DATA / "gptneo-tiny-tied.onnx"
    shared = flashmem.compile(model, tmp_path / "shared.flashmem", memory_path="buffer")
    (before,) = shared.program.host_embeddings
    monkeypatch.setattr("flashmem.compiler.lowering.host_embedding.MOST_PANEL_BYTES", before.panel_bytes - 1)
    bundle = flashmem.compile(model, tmp_path / "rows.flashmem", memory_path="buffer")
    (lookup,) = bundle.program.host_embeddings
    assert before.panel > 1 == lookup.panel and lookup.panel_bytes < before.panel_bytes
    assert not any(part.offset <= lookup.offset < part.offset + part.nbytes for part in bundle.program.slices)
    inputs = examples(model.stem)
    with flashmem.Session(bundle) as session, flashmem.Session(shared) as other:
        for got, wanted in zip(session.run(None, inputs), other.run(None, inputs), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_nan_passes_through(tmp_path: Path) -> None:
    model = DATA / "vit-tiny.onnx"
    inputs = {name: np.full_like(array, np.nan) for name, array in examples(model.stem).items()}
    bundle = flashmem.compile(model, tmp_path / "m.flashmem")
    with flashmem.Session(bundle) as session:
        (output, *_) = session.run(None, inputs)
    assert np.isnan(output).all()
