"""All models of tests/data, small bundles in every mode, and random graphs on the strict device: no rule is broken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.kernels import worker
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule import loads as schedule
from flashmem.schedule import residency
from tests.conformance.random_graphs.graph import draw
from tests.conformance.random_graphs.judge import judge
from tests.conformance.random_graphs.listed import listed
from tests.support.mini_bundle import LAYERS, SLICES, write_mini_bundle
from tests.support.strict_device import PROFILES, Profile
from tests.support.strict_device.door import strict
from tests.support.zoo_data import DATA, EXPORTS, examples

SHAPES = {"gptneo-tiny-dynamic": {"input_ids": (1, 16)}, "gptneo-tiny-dynamic-legacy": {"input_ids": (2, 11)}}
BAND = 16 << 10
PHONE, MALI, GPU = (next(each for each in PROFILES if each.name == name) for name in ("adreno7xx", "mali-valhall", "nvidia"))


OTHERS: dict[str, TransferMode] = {
    "adreno6xx": "dma",
    "adreno8xx": "interleave",
    "mali-valhall": "alias",
    "nvidia": "dma",
}
"""The other profiles, each with one mode: `test_strict_device.py` has all modes of each, for fewer models."""


def _family(export: str) -> str:
    return export.removesuffix("-legacy").partition("-tiny")[0]


_FAMILIES = sorted({_family(export) for export in EXPORTS})
MODELS = [(export, "buffer" if _FAMILIES.index(_family(export)) % 2 else "texture") for export in sorted(EXPORTS)]
"""Each on one path, like the others of its family, whose kernels it shares: building those takes most of the time."""

KINDS: list[tuple[Profile, MemoryPath, TransferMode]] = [
    (profile, path, mode)
    for profile in (PHONE, GPU)
    for path in ("buffer", "texture")
    for mode in ("alias", "dma", "interleave")
    if profile is PHONE or mode != "alias"
]


pytestmark = pytest.mark.filterwarnings("ignore:.*was compiled for")  # one bundle serves all profiles


@pytest.fixture(scope="module", autouse=True)
def _small_segments_and_a_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slices in small segments, so that threads share those of small models too; and a separate kernel cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(schedule, "PASSING_BYTES", BAND)
        patch.setattr(residency, "HOST_PIECE_BYTES", BAND)
        yield


@pytest.mark.parametrize(
    ("model", "path"),
    [pytest.param(*each, marks=[pytest.mark.thorough] * each[0].endswith("-legacy")) for each in MODELS],  # the others' kernels
)
def test_every_model_breaks_no_rule(model: str, path: MemoryPath, tmp_path: Path) -> None:
    """A model's second export, if it has one, runs in `interleave`, the first one in `dma` and `alias`; the same bundle then
    runs under each other profile, with the same bits.

    Copies are launches of the copy kernel: `test_strict_device.py` tests kernels with lanes, which take as long again to build.
    """
    shapes = SHAPES.get(model, {})
    inputs = examples(model)
    if shapes:
        inputs = {name: np.resize(inputs[name], shape) for name, shape in shapes.items()}
    wanted = onnxruntime.InferenceSession(DATA / f"{model}.onnx").run(None, inputs)
    modes: tuple[TransferMode, ...] = ("interleave",) if model.endswith("-legacy") else ("dma", "alias")
    with strict(PHONE) as device:
        bundle = flashmem.compile(
            DATA / f"{model}.onnx",
            tmp_path / "m.flashmem",
            shapes=shapes,
            device=list_devices()[0].descriptor_name,
            memory_path=path,
            chunk="4KiB",
            m_peak="64KiB",
            build=False,
        )
        for mode in modes:
            with flashmem.Session(bundle, mode=mode, lanes=False) as session:
                answers = [session.run(None, inputs) for _ in range(2)]
            for answer in answers:  # the second may be from the steady kernels
                for got, right in zip(answer, wanted, strict=True):
                    assert np.abs(got - right).max() <= 1e-3 * (np.ptp(right) or np.abs(right).max())
            assert device.rules.broken == [] and device.rules.mapped == []
    for profile in PROFILES:
        if profile is PHONE:
            continue
        with strict(profile) as device:
            with flashmem.Session(bundle, mode=OTHERS[profile.name], lanes=False) as session:
                elsewhere = session.run(None, inputs)
            for got, same in zip(elsewhere, answers[0], strict=True):
                assert np.array_equal(got, same)
            assert device.rules.broken == [] and device.rules.mapped == []


@pytest.mark.parametrize("preload", [0, 2, LAYERS * SLICES])
@pytest.mark.parametrize(
    ("profile", "path", "mode"), KINDS, ids=lambda value: value.name if isinstance(value, Profile) else str(value)
)
def test_loads_of_small_bundles_break_no_rule(
    profile: Profile, path: MemoryPath, mode: TransferMode, preload: int, tmp_path: Path
) -> None:
    """Several threads load segments of each slice, for W and in a run, just in time and ahead."""
    for distance in (1, 4):
        model = write_mini_bundle(tmp_path / f"{distance}.flashmem", path, preload=preload, distance=distance)
        inputs = model.inputs()
        with strict(profile) as device:
            with flashmem.Session(model.path, mode=mode) as session:
                for _ in range(2):
                    np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
            assert device.rules.broken == [] and device.rules.mapped == []


@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_a_pool_beyond_the_largest_allocation_leaves_other_modes(path: MemoryPath, tmp_path: Path) -> None:
    """Compiled for a driver that allocates 1 GiB at a time, run on one that allocates less."""
    model = write_mini_bundle(tmp_path / "m.flashmem", path, preload=LAYERS)
    bundle, inputs = model.open(), model.inputs()
    most = bundle.plan.layouts["alias"].pool_bytes - 1
    slots = [slot.nbytes for layout in bundle.plan.layouts.values() for slot in layout.slots]
    assert most > max(*slots, bundle.program.arena_bytes, bundle.program.constants_bytes)
    with strict(replace(PHONE, max_alloc=most)) as device:
        refused = f"mode alias here: resident and streamed weights take {most + 1} bytes in one buffer"
        with pytest.raises(UserError, match=refused):
            flashmem.Session(bundle, mode="alias")
        if path == "texture":  # each weight is a texture in the other modes
            with flashmem.Session(bundle) as session:
                assert session.mode == "interleave"
                np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
        else:
            with pytest.raises(UserError, match=r"cannot be preloaded here: .*; stream it"):
                flashmem.Session(bundle, strategy="preload")
        assert device.rules.broken == []


def test_compiled_kernels_have_what_their_driver_compiles_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mali's binary has the kernels that were created before it was fetched: after runs, and in the building processes."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    model = write_mini_bundle(tmp_path / "m.flashmem")
    with strict(MALI) as device:
        for _ in range(2):  # the second session loads what the first one has saved
            with flashmem.Session(model.path, mode="dma") as session:
                session.run(None, model.inputs())
            assert [each for each in (tmp_path / "cache").rglob("*.bin") if each.stat().st_size]
        context = Context(list_devices()[0])
        bundle = model.open()
        for name, text in kernel_texts(bundle.source.plain).items():
            job = {"build": name, "text": text, "options": bundle.program.build_options, "launches": []}
            binary = Path(worker._build(context, job, tmp_path)["file"])
            context.load(binary.read_bytes(), bundle.program.build_options).check(name)
        assert device.rules.broken == []


@pytest.mark.parametrize(("profile", "device"), [(PHONE, "adreno750"), (GPU, "nvidia")], ids=["phone", "gpu"])
@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_random_graphs_break_no_rule(profile: Profile, device: str, path: MemoryPath) -> None:
    for seed in range(2):
        with strict(profile) as instead:
            verdict = judge(draw(random.Random(seed), 8, listed), device, path)
        assert verdict.kind == "agreed", verdict
        assert instead.rules.broken == []
