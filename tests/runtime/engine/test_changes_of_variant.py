"""Changes of shape variant: a session loads nothing that both variants keep, on devices with memory of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.language_session import RowPart
from flashmem.runtime.memory.accounts import Category
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import find_device, list_devices
from flashmem.runtime.opencl.handles import DeviceMemory
from flashmem.schedule.loads import staying
from flashmem.target.descriptor import load_descriptor
from tests.support.chain_model import WIDTH, chained, smallest_budget, write_chain
from tests.support.gguf_models import SmallLlama
from tests.support.own_memory import descriptor_with_own_memory, give_own_memory

THOROUGH = pytest.mark.thorough
"""For cases in mode interleave and of long texts: planning them within a budget takes half a minute."""
TURNS = (1, 0, 1, 2, 0, 0, 2, 1, 0)


def stays_in(bundle: flashmem.Bundle) -> list[frozenset[str]]:
    return [staying(each.plan) for each in bundle.variants]


def loaded(session: flashmem.Session) -> set[str]:
    report = session.last_run
    assert report is not None
    return {load.name for load in report.loads}


@pytest.mark.parametrize("more", [1.02, 1.3, 1.8])
@pytest.mark.parametrize("mode", ["dma", pytest.param("interleave", marks=THOROUGH)])
def test_a_change_loads_nothing_that_both_variants_keep(
    mode: TransferMode, more: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants without states, whose activations have other sizes. Each answer is compared with float64."""
    model, random = tmp_path / "chain.onnx", np.random.default_rng(6)
    weights = write_chain(model)
    cases = [random.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (3, 40, 17)]
    options: dict[str, Any] = {
        "device": descriptor_with_own_memory(tmp_path), "mode": mode, "memory_path": "buffer", "build": False,
        "shapes": [{"x": case.shape} for case in cases],
    }  # fmt: skip
    budget = int(more * smallest_budget(model, tmp_path, **options))
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=budget, **options)
    give_own_memory(monkeypatch, find_device("pocl"))
    stays = stays_in(bundle)
    assert mode == "interleave" or more < 1.3 or all(stays)
    answers: dict[int, NDArray[np.float32]] = {}
    with flashmem.Session(bundle, mode=mode, prepare=False) as session:
        before: int | None = None
        for which in TURNS:
            (got,) = session.run(None, {"x": cases[which]})
            np.testing.assert_allclose(got, chained(cases[which], weights), rtol=0, atol=1e-4)
            np.testing.assert_array_equal(got, answers.setdefault(which, got))
            assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
            if before is not None:
                kept = stays[before] & stays[which]
                if mode == "interleave" and kept != stays[which]:  # its kernels would copy what is in its place already
                    kept = frozenset()
                assert loaded(session).isdisjoint(kept)
            before = which


@pytest.mark.parametrize(
    ("mode", "more"), [("dma", 1.3), *(pytest.param(*case, marks=THOROUGH) for case in (("dma", 1.5), ("alias", 1.3)))]
)
def test_variants_of_a_language_model_stay_bound_and_resident(
    mode: TransferMode, more: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned together they keep the same weights, which are loaded once. States and outputs are those of programs bound
    anew. In mode dma on a device with memory of its own.
    """
    model = SmallLlama(layers=4, formats=("Q8_0",))
    file = model.write(tmp_path / "m.gguf")
    options: dict[str, Any] = {
        "device": descriptor_with_own_memory(tmp_path) if mode == "dma" else "pocl", "memory_path": "buffer", "mode": mode,
        "max_length": 64, "build": False,
    }  # fmt: skip
    budget = int(more * smallest_budget(file, tmp_path, **options))
    bundle = flashmem.compile(file, tmp_path / "m.flashmem", budget=budget, **options)
    if mode == "dma":
        give_own_memory(monkeypatch, find_device("pocl"))
    stays = stays_in(bundle)
    assert len(set(stays)) == 1 and stays[0]
    found: list[list[NDArray[Any]]] = []
    tokens = np.random.default_rng(3).integers(5, 300, 64)
    for bound in (True, False):
        if not bound:
            monkeypatch.setattr(BoundProgram, "has_room_for", lambda *given: False)
        with Generator(bundle, device="pocl", mode=mode) as generator:
            session, programs = generator._model.session, set[int]()
            for number, length in enumerate((32, 1, 8, 1, 8, 8, 1, 32, 8, 1)):
                after = generator._model.run({0: RowPart(number, [int(t) for t in tokens[:length]])})
                found.append([each.read() for each in after[0]])
                programs.add(id(session._engine.bound))
                assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
                assert number == 0 or loaded(session).isdisjoint(stays[0])
            assert len(programs) == (3 if bound else 1)
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_no_buffer_of_weights_is_divided_on_a_device_with_memory_of_its_own(
    mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's driver would give each part memory of its own. A bundle compiled for shared memory is laid out anew."""
    model = tmp_path / "chain.onnx"
    weights = write_chain(model)
    x = np.random.default_rng(2).standard_normal((9, WIDTH)).astype(np.float32)
    whole = flashmem.compile(model, tmp_path / "whole.flashmem", device="pocl", shapes={"x": x.shape}, memory_path="buffer")
    sizes = sum(part.file_bytes for part in whole.program.slices)
    for device in (descriptor_with_own_memory(tmp_path), "pocl"):
        options: dict[str, Any] = {"device": device, "mode": mode, "memory_path": "buffer", "shapes": {"x": x.shape}}
        bundle = flashmem.compile(model, tmp_path / "m.flashmem", m_peak=sizes // 2, build=False, **options)
        with monkeypatch.context() as patch:
            give_own_memory(patch, find_device("pocl"))
            parted, part = set[str](), Ledger.part

            def spy(ledger: Ledger, category: Category, *place: Any, of: Any = part, seen: set[str] = parted) -> DeviceMemory:
                seen.add(category)
                return of(ledger, category, *place)

            patch.setattr(Ledger, "part", spy)
            with flashmem.Session(bundle, mode=mode) as session:
                for _ in range(2):
                    np.testing.assert_allclose(session.run(None, {"x": x})[0], chained(x, weights), rtol=0, atol=1e-4)
            assert "arena" in parted and "weights" not in parted


@pytest.mark.parametrize("path", ["buffer", "texture"])
@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_variants_planned_for_later_runs_keep_the_same_where_memory_is_shared(
    device: Device, mode: TransferMode, path: MemoryPath, tmp_path: Path
) -> None:
    """In every mode: a change of variant reads no byte of the weights that stay. The first run of each reads the others."""
    target = load_descriptor(device.descriptor_name)
    if mode not in target.modes.get(path, ()):
        pytest.skip(f"{device.descriptor_name} has no mode {mode} on that path")
    model, random = tmp_path / "chain.onnx", np.random.default_rng(7)
    weights = write_chain(model)
    cases = [random.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (1, 40, 17)]
    options: dict[str, Any] = {
        "device": device.descriptor_name, "mode": mode, "memory_path": path, "build": False, "objective": "steady",
        "shapes": [{"x": case.shape} for case in cases],
    }  # fmt: skip
    budget = int(1.5 * smallest_budget(model, tmp_path, **options))
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=budget, **options)
    stays, *others = stays_in(bundle)
    assert stays and all(each == stays for each in others)
    with flashmem.Session(bundle, device=device.descriptor_name, mode=mode, prepare=False) as session:
        for number, which in enumerate(TURNS):
            (got,) = session.run(None, {"x": cases[which]})
            np.testing.assert_allclose(got, chained(cases[which], weights), rtol=1e-4, atol=1e-4)
            assert (stays <= loaded(session)) if number == 0 else stays.isdisjoint(loaded(session))
            report = session.last_run
            assert report is not None and report.memory.peak_bytes <= budget
            streamed = {w.name: w.nbytes for w in bundle.variants[which].plan.weights if w.name not in stays}
            assert number == 0 or sum(load.nbytes for load in report.loads) == sum(streamed.values())
