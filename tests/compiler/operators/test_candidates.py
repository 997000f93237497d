"""Candidates beside a stable sort and sums in float64: ties, logits that are not numbers, many temperatures, several rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.bundle.language import CANDIDATES, KEPT, LOGITS, SUM_ERROR, TEMPERATURE
from flashmem.compiler.frontend.language.candidates import with_candidates
from tests.support.compared import DEVICES, OF_A_GPU
from tests.support.strict_device import PROFILES
from tests.support.strict_device.door import strict

PLACES = [(*place, "") for place in DEVICES] + OF_A_GPU

SHAPES = ((1, 1, 50257), (1, 8, 2100), (1, 2, 700), (1, 1, 65), (1, 3, 40), (1, 1, 1))
"""Many chunks, several, two of which the last is short, and one; fewer tokens than candidates."""


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are compiled get candidates, as language models do."""
    compiling = import_module("flashmem.compile")  # the package has a function of this name
    read = compiling.read_graph
    monkeypatch.setattr(compiling, "read_graph", lambda model, options, *more: read(model, options, more[0], with_candidates))


def compiled(shape: tuple[int, ...], folder: Path, **options: Any) -> flashmem.Bundle:
    """A model whose logits are its input with the other sign."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", LOGITS)]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], [LOGITS])], "g", values[:1], values[1:])
    path = folder / f"{'x'.join(map(str, shape))}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return flashmem.compile(path, path.with_suffix(".flashmem"), **options)


def inputs(shape: tuple[int, ...]) -> dict[str, Any]:
    """Logits of several kinds, by name."""
    random = np.random.default_rng(shape[-1])
    found = {
        "wide": random.normal(2, 6, shape),
        "ascending": np.sort(random.uniform(-3, 7, shape)),
        "tied": random.integers(-9, 9, shape) / 4 + 100,
        "equal": np.full(shape, -7.0),
        "masked": np.where(random.uniform(size=shape) < 0.97, -np.inf, random.normal(0, 1, shape)),
    }
    found["masked"][..., 0] = 0.5
    return {name: logits.astype(np.float32) for name, logits in found.items()}


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_beside_a_sort(shape: tuple[int, ...], device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    bundle = compiled(shape, tmp_path, device=compiled_for or device, memory_path=path)
    kept = min(KEPT, shape[-1])
    with flashmem.Session(bundle, device=device) as session:
        for name, logits in inputs(shape).items():
            for temperature in (1.0, 0.3, 4.0, 1e-30, 1e30):
                given = {"x": -logits, TEMPERATURE: np.array(temperature, np.float32)}
                [found] = session.run([CANDIDATES], given)
                order = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[..., :kept]
                values = np.take_along_axis(logits, order, -1)
                assert np.array_equal(found[..., :kept], order), name
                assert np.array_equal(found[..., kept:-1].view(np.float32), values), name
                weights = np.exp((logits.astype(np.float64) - values[..., :1]) / np.float64(np.float32(temperature)))
                np.testing.assert_allclose(
                    np.ascontiguousarray(found[..., -1:]).view(np.float32), weights.sum(-1, keepdims=True), rtol=SUM_ERROR / 4
                )
                assert np.array_equal(session.outputs(LOGITS)[LOGITS], logits)


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
def test_logits_that_are_no_numbers(device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    shape = (1, 3, 2100)
    bundle = compiled(shape, tmp_path, device=compiled_for or device, memory_path=path)
    with flashmem.Session(bundle, device=device) as session:
        for wrong in (np.nan, np.inf, -np.inf):
            for at in (slice(None), slice(900, 901), slice(2099, None)):
                logits = np.random.default_rng(5).normal(0, 4, shape).astype(np.float32)
                logits[0, 1, at] = wrong
                [found] = session.run([CANDIDATES], {"x": -logits, TEMPERATURE: np.array(1, np.float32)})
                sums = np.ascontiguousarray(found[0, :, -1]).view(np.float32)
                is_right = np.isfinite(sums) & (sums > 0)
                assert is_right.tolist() == [True, bool(np.isfinite(logits[0, 1].max())), True]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("device", ["pocl", "nvidia", "adreno750", "mali-g710"])
def test_two_launches(device: str, tmp_path: Path) -> None:
    names = [launch.name for launch in compiled((1, 8, 50257), tmp_path, device=device, build=False).program.launches]
    assert [name for name in names if name.startswith(CANDIDATES)] == ["candidates[chunks]", "candidates[row]"]


@pytest.mark.usefixtures("extended")
@pytest.mark.filterwarnings("ignore:.*was compiled for")
@pytest.mark.parametrize("compiled_for", [DEVICES[0][0], "adreno750"])
def test_no_rule_of_a_strict_device_is_broken(compiled_for: str, tmp_path: Path) -> None:
    shape = (1, 2, 1100)
    bundle = compiled(shape, tmp_path, device=compiled_for, memory_path="buffer", build=False)
    logits = inputs(shape)["wide"]
    for profile in PROFILES if compiled_for != "adreno750" else PROFILES[:1]:
        with strict(profile) as device:
            with flashmem.Session(bundle) as session:
                [found] = session.run([CANDIDATES], {"x": -logits, TEMPERATURE: np.array(1, np.float32)})
                assert np.array_equal(found[..., 0], logits.argmax(-1))
                assert np.array_equal(session.outputs(LOGITS)[LOGITS], logits)
            assert device.rules.broken == []
