"""Vendors' extensions on the strict device: weights read in place from imported pages, and launches replayed from recordings.

Both are off until a probe has passed on the device itself (`DeviceDescriptor.probed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath
from flashmem.bundle.bundle import Bundle
from flashmem.program.program import fixed_bytes
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for, why_not
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.launching import RECORDABLE_QUEUES, Recording
from flashmem.schedule import loads as schedule
from flashmem.schedule import residency
from flashmem.target.descriptor import IMPORT_HOST_MEMORY
from tests.support.mini_bundle import LAYERS, SLICES, write_mini_bundle
from tests.support.strict_device import PROFILES, Profile
from tests.support.strict_device.door import strict
from tests.support.zoo_data import DATA, examples

MALI, ADRENO = (next(each for each in PROFILES if each.name == name) for name in ("mali-valhall", "adreno7xx"))
PATHS: tuple[MemoryPath, ...] = ("buffer", "texture")


@pytest.fixture(scope="module", autouse=True)
def _segments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slices in segments of one page, so that threads share those of small models too; and a separate kernel cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(schedule, "PASSING_BYTES", 4096)
        patch.setattr(residency, "HOST_PIECE_BYTES", 4096)
        yield


def here() -> Device:
    """The strict device, as flashmem sees it."""
    (device,) = list_devices()
    return device


def probed(bundle: Bundle, extension: str, **changes: Any) -> Bundle:
    """A bundle compiled with the result of a probe that has passed here."""
    return replace(bundle, descriptor=replace(bundle.descriptor, probed={extension: here().driver}, **changes))


@pytest.mark.parametrize("preload", [0, 2, LAYERS * SLICES])
@pytest.mark.parametrize("path", PATHS)
def test_pages_of_the_file_are_imported_while_they_are_loaded(path: MemoryPath, preload: int, tmp_path: Path) -> None:
    for distance in (1, 4):
        model = write_mini_bundle(tmp_path / f"{distance}.flashmem", path, preload=preload, distance=distance)
        inputs = model.inputs()
        with strict(MALI) as device:
            bundle = probed(model.open(), IMPORT_HOST_MEMORY)
            with flashmem.Session(bundle, mode="map") as session:
                for _ in range(3):
                    np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
                assert 0 < device.world.most_pinned <= bundle.plan.layouts["map"].mapped_peak_bytes
            assert device.world.pinned == [] and device.rules.broken == []
            counts = device.rules.counts
            assert (counts["write"], counts["map"]) == (3 * 2, 1)  # two inputs of each run, and the constants: no weight


@pytest.mark.parametrize("path", PATHS)
def test_networks_compiled_with_a_passed_probe_read_the_file_in_place(path: MemoryPath, tmp_path: Path) -> None:
    """The descriptor lists `map`, so the bundle has a layout for it. The bits are those of the other modes."""
    for model in ("gptneo-tiny", "resnet-tiny"):
        with strict(MALI) as device:
            passed = {IMPORT_HOST_MEMORY: here().driver}
            descriptor = descriptor_for(here(), passed)
            assert "map" in descriptor.modes[path][1:] and not descriptor.uses_host_memory
            toml = _written(tmp_path / model, descriptor)
            bundle = flashmem.compile(
                DATA / f"{model}.onnx", tmp_path / f"{model}.flashmem", device=str(toml), memory_path=path, chunk="4KiB",
                m_peak="64KiB", build=False,
            )  # fmt: skip
            answers = []
            for mode in ("map", "alias"):
                with flashmem.Session(bundle, mode=mode) as session:  # type: ignore[arg-type]
                    answers.append([session.run(None, examples(model)) for _ in range(3)])
            assert device.world.most_pinned < bundle.program.weights_bytes and device.world.pinned == []
            for one, other in zip((x for run in answers[0] for x in run), (x for run in answers[1] for x in run), strict=True):
                assert np.array_equal(one, other)
            assert device.rules.broken == []


def _written(folder: Path, descriptor: Any) -> Path:
    from flashmem.profiler.descriptor import write_descriptor

    folder.mkdir()
    return write_descriptor(folder, replace(descriptor, name="mine"), "a test", "phone")


def test_imports_follow_the_variants_of_a_bundle(tmp_path: Path) -> None:
    """Slices that stay resident stay imported; the places of the others are given up."""
    few, many = {"input_ids": (1, 8)}, {"input_ids": (1, 16)}
    inputs = {size: {"input_ids": np.arange(size, dtype=np.int64)[None] % 7} for size in (8, 16)}
    with strict(MALI) as device:
        toml = _written(tmp_path / "d", descriptor_for(here(), {IMPORT_HOST_MEMORY: here().driver}))
        bundle = flashmem.compile(
            DATA / "gptneo-tiny-dynamic.onnx", tmp_path / "m.flashmem", device=str(toml), shapes=[few, many], build=False
        )
        answers: dict[str, list[Any]] = {}
        for mode in ("map", "alias"):
            with flashmem.Session(bundle, mode=mode, verify_weights=True) as session:  # type: ignore[arg-type]
                answers[mode] = [session.run(None, inputs[size])[0] for size in (8, 16, 16, 8, 8)]
        assert device.world.pinned == [] and device.rules.broken == []
    for one, other in zip(answers["map"], answers["alias"], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("share", [1.3, 3.0])
def test_several_models_import_under_one_budget(share: float, tmp_path: Path) -> None:
    models = [write_mini_bundle(tmp_path / f"m{seed}.flashmem", seed=seed) for seed in range(2)]
    with strict(MALI) as device:
        bundles = [probed(model.open(), IMPORT_HOST_MEMORY) for model in models]
        needed = [fixed_bytes(b.program) + b.plan.layouts["map"].total_bytes for b in bundles]
        with flashmem.Runtime(int(share * max(needed)), build_apart=False) as many:
            opened = [many.open(bundle, mode="map") for bundle in bundles]
            order = [0, 1, 1, 0, 1]
            answers = [many.submit(opened[which], models[which].inputs()) for which in order]
            for which, answer in zip(order, answers, strict=True):
                wanted = models[which].reference(models[which].inputs())
                np.testing.assert_allclose(answer.result(60)[0], wanted[0], rtol=0, atol=2e-5)
        assert device.world.pinned == [] and device.rules.broken == []


@pytest.mark.parametrize(
    ("profile", "driver", "reason"),
    [
        (MALI, lambda device: "", "no probe has shown"),
        (MALI, lambda device: f"{device.name}, {device.version}, 4.0", "no probe has shown"),  # an older driver
        (ADRENO, lambda device: device.driver, "only a CPU, or a GPU with cl_arm_import_memory_host, reads"),
    ],
    ids=["no-probe", "other-driver", "no-extension"],
)
def test_nothing_is_imported_without_a_probe_that_passed_here(
    profile: Profile, driver: Callable[[Device], str], reason: str, tmp_path: Path
) -> None:
    with strict(profile) as device:
        passed = {IMPORT_HOST_MEMORY: driver(here())}
        assert "map" not in descriptor_for(here(), passed).modes["buffer"]
        assert reason in why_not(here(), passed)["buffer"]["map"]
        bundle = write_mini_bundle(tmp_path / "m.flashmem").open()
        with pytest.raises(UserError, match="cannot do transfer mode 'map'"):
            flashmem.Session(replace(bundle, descriptor=replace(bundle.descriptor, probed=passed)), mode="map")
        assert device.world.most_pinned == 0


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events of recordings that are played."""
    events, play = list[int](), Recording.play

    def noted(recording: Recording) -> int:
        events.append(play(recording))
        return events[-1]

    monkeypatch.setattr(Recording, "play", noted)
    return events


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["alias", "interleave"])
def test_recorded_launches_break_no_rule(path: MemoryPath, mode: str, tmp_path: Path, played: list[int]) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", path, preload=LAYERS * SLICES)
    inputs = model.inputs()
    for passed in (True, False):
        with strict(ADRENO) as device:
            bundle = model.open()
            bundle = replace(bundle, descriptor=replace(bundle.descriptor, command_buffers=True))
            bundle = probed(bundle, RECORDABLE_QUEUES) if passed else bundle
            played.clear()
            with flashmem.Session(bundle, mode=mode) as session:  # type: ignore[arg-type]
                for _ in range(4):
                    np.testing.assert_allclose(session.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
            assert bool(played) is passed
            assert device.rules.broken == []


def test_a_recording_is_never_longer_than_the_device_takes(tmp_path: Path, played: list[int]) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", preload=LAYERS * SLICES)
    with strict(replace(ADRENO, recordable=5)) as device:
        bundle = probed(model.open(), RECORDABLE_QUEUES, command_buffers=True)
        with flashmem.Session(bundle, mode="alias") as session:
            for _ in range(4):
                session.run(None, model.inputs())
            assert played
        assert device.rules.broken == []
