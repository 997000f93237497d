"""Small models on the strict device: under each profile, memory path and transfer mode, no OpenCL rule is broken."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.errors import RunError
from flashmem.base.types import MemoryPath
from flashmem.bundle.bundle import Bundle
from flashmem.program.launches import Arg
from flashmem.program.program import fixed_bytes
from flashmem.program.tensors import Tensor
from flashmem.runtime.engine.steps import Resources, _Binder
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.schedule import loads as schedule
from flashmem.schedule import residency
from flashmem.tools.doctor import selftest
from tests.support.caches import kernels_built_by_runs
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import ROOT
from tests.support.strict_device import PROFILES, Profile, StrictOpenCL
from tests.support.strict_device.door import strict
from tests.support.zoo_data import DATA, examples

MODELS = ("gptneo-tiny", "mobilenet-tiny", "regnet-tiny", "resnet-tiny", "vit-tiny")
PATHS = ("buffer", "texture")
MODES = ("alias", "dma", "interleave")
CASES = [
    pytest.param(profile, mode, id=f"{profile.name}-{mode}")
    for profile in PROFILES
    for mode in MODES
    if profile.unified_memory or mode != "alias"
]

pytestmark = pytest.mark.filterwarnings("ignore:.*was compiled for")  # one bundle serves all profiles


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate kernel cache: only the strict device can use its binaries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _nothing_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every strict device is PoCL: see `kernels_built_by_runs`."""
    kernels_built_by_runs(monkeypatch, saved=False)


@pytest.fixture(scope="module", autouse=True)
def _segments() -> Iterator[None]:
    """Slices in segments of one page, so that threads share those of small models too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "PASSING_BYTES", 4096)
        patch.setattr(residency, "HOST_PIECE_BYTES", 4096)
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bundle]:
    """Each model for each memory path, compiled once for all profiles, with a budget so small that slices share places."""
    folder = tmp_path_factory.mktemp("bundles")
    with strict(PROFILES[1]):
        name = list_devices()[0].descriptor_name
        assert name == "adreno750"
        return {
            (model, path): flashmem.compile(
                DATA / f"{model}.onnx",
                folder / f"{model}-{path}.flashmem",
                device=name,
                memory_path=path,  # type: ignore[arg-type]
                chunk="4KiB",
                m_peak="64KiB",
                build=False,
            )
            for model in MODELS
            for path in PATHS
        }


@pytest.fixture(scope="module")
def expected() -> dict[str, list[NDArray[Any]]]:
    """ONNX Runtime's answers."""
    return {name: onnxruntime.InferenceSession(DATA / f"{name}.onnx").run(None, examples(name)) for name in MODELS}


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[StrictOpenCL]:
    with strict(request.param) as instead:
        yield instead


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("device", "mode"), CASES, indirect=["device"])
def test_models_break_no_rule(
    path: str, mode: str, device: StrictOpenCL, bundles: dict[tuple[str, str], Bundle], expected: dict[str, list[NDArray[Any]]]
) -> None:
    profile: Profile = device.world.profile
    (here,) = list_devices()
    assert here.name == profile.device and mode in descriptor_for(here).modes[path]  # type: ignore[index]
    for model in MODELS:
        with flashmem.Session(bundles[model, path], mode=mode, trace=mode == "dma") as session:  # type: ignore[arg-type]
            first = session.run(None, examples(model))
            again = session.run(None, examples(model))
        for got, same, wanted in zip(first, again, expected[model], strict=True):
            assert np.array_equal(got, same)
            assert np.abs(got - wanted).max() <= 1e-3 * (np.ptp(wanted) or np.abs(wanted).max())
        assert device.rules.mapped == []
    assert device.rules.broken == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["alias", "interleave"])
def test_each_load_maps_its_own_bytes_and_nothing_else(path: str, mode: str, bundles: dict[tuple[str, str], Bundle]) -> None:
    """Two commands a load, from a thread that reads megabytes meanwhile; constants are mapped once, when the session opens."""
    with strict(PROFILES[1]) as device, flashmem.Session(bundles["gptneo-tiny", path], mode=mode) as session:  # type: ignore[arg-type]
        for _ in range(3):
            before = dict(device.rules.counts)
            session.run(None, examples("gptneo-tiny"))
            assert session.last_run is not None
            made = {kind: count - before.get(kind, 0) for kind, count in device.rules.counts.items()}
            assert made.get("map", 0) == made.get("unmap", 0) == len(session.last_run.loads)
        assert device.rules.counts["map"] > 1
    assert device.rules.broken == []


def test_a_kernel_that_writes_over_an_operand_takes_one_memory_object_twice() -> None:
    """Two memory objects that share bytes, one of them written, are undefined, in one kernel as in two."""
    tensors = tuple(Tensor(name, (256,), "float32", 512, 1024) for name in ("operand", "output"))
    with strict(PROFILES[1]):
        ledger = Ledger(Context(list_devices()[0]), None)
        binder = _Binder(
            SimpleNamespace(tensors=tensors),  # type: ignore[arg-type]
            Resources(ledger, ledger.buffer("arena", 4096, "the arena"), None, {}, {}),
        )
        operand, output = (binder.bind(Arg("tensor", tensor.name)) for tensor in tensors)
    assert operand is output


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_a_host_tier_breaks_no_rule(
    path: str, mode: str, bundles: dict[tuple[str, str], Bundle], expected: dict[str, list[NDArray[Any]]]
) -> None:
    """Copies from it are in defined order, its bytes do not change meanwhile, and it is unmapped before it is freed."""
    profile = next(profile for profile in PROFILES if not profile.unified_memory)
    with strict(profile) as device:
        for model in MODELS:
            for host_budget in ("auto", None):
                with flashmem.Session(bundles[model, path], mode=mode, host_budget=host_budget) as session:  # type: ignore[arg-type]
                    first = session.run(None, examples(model))
                    for _ in range(2):
                        again = session.run(None, examples(model))
                        assert all(np.array_equal(got, same) for got, same in zip(first, again, strict=True))
                    report = session.last_run
                assert report is not None and bool(report.host_tier_bytes) == (host_budget is not None and bool(report.loads))
                for got, wanted in zip(first, expected[model], strict=True):
                    assert np.abs(got - wanted).max() <= 1e-3 * (np.ptp(wanted) or np.abs(wanted).max())
                assert device.rules.mapped == []
        assert device.rules.broken == []


@pytest.mark.parametrize("host_budget", [None, "auto"])
@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_pinned_memory_that_nobody_frees_is_never_mapped_and_released(
    mode: str, host_budget: str | None, bundles: dict[tuple[str, str], Bundle]
) -> None:
    profile = next(profile for profile in PROFILES if not profile.unified_memory)
    with strict(profile) as device:
        session = flashmem.Session(bundles["gptneo-tiny", "buffer"], mode=mode, host_budget=host_budget)  # type: ignore[arg-type]
        session.run(None, examples("gptneo-tiny"))
        tier, bound = session._engine.opened.tier, session._engine.bound
        assert bound is not None and tier is not None and not device.rules.mapped
        ledger = weakref.ref(tier.ledger)
        del session, tier, bound
        until = monotonic() + 60
        while ledger() is not None and monotonic() < until:
            gc.collect()
            sleep(0.01)
        assert ledger() is None and device.rules.broken == [] == device.rules.mapped


def test_a_session_that_nobody_closes_releases_its_memory_in_order(bundles: dict[tuple[str, str], Bundle]) -> None:
    with strict(PROFILES[1]) as device:
        session = flashmem.Session(bundles["gptneo-tiny", "buffer"])
        session.run(None, examples("gptneo-tiny"))
        bound = session._engine.bound
        assert bound is not None
        ledger = weakref.ref(bound.ledger)
        del session, bound
        until = monotonic() + 60
        while ledger() is not None and monotonic() < until:  # a thread ends the next run's loads
            gc.collect()
            sleep(0.01)
        assert ledger() is None and device.rules.broken == []


AT_EXIT = """
import atexit, sys
atexit.register(lambda: print(session._engine.failure, device.rules.broken))  # the last to be called
import flashmem
from tests.support.strict_device import PROFILES
from tests.support.strict_device.door import strict
from tests.support.zoo_data import examples
instead = strict(PROFILES[1])
device = instead.__enter__()
session = flashmem.Session(sys.argv[1], build_apart=False)
session.run(None, examples("gptneo-tiny"))
"""


def test_sessions_that_are_open_when_python_exits_are_closed(bundles: dict[tuple[str, str], Bundle]) -> None:
    command = [sys.executable, "-c", AT_EXIT, str(bundles["gptneo-tiny", "buffer"].path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "close was called []\n"), done.stderr


@pytest.mark.parametrize("share", [1.3, 3.0])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", MODES)
def test_several_models_under_one_budget_break_no_rule(path: MemoryPath, mode: str, share: float, tmp_path: Path) -> None:
    """While one model computes, the next one loads, and weights of both are loaded and freed; or it opens, if both fit."""
    models = [write_mini_bundle(tmp_path / f"m{seed}.flashmem", path, seed=seed) for seed in range(2)]
    with strict(PROFILES[1]) as device:
        needed = [fixed_bytes(m.open().program) + m.open().plan.layouts[mode].total_bytes for m in models]
        with flashmem.Runtime(int(share * max(needed)), build_apart=False) as many:
            opened = [many.open(model.open(), mode=mode) for model in models]  # type: ignore[arg-type]
            order = [0, 1, 1, 0, 1]
            answers = [many.submit(opened[which], models[which].inputs()) for which in order]
            for which, answer in zip(order, answers, strict=True):
                wanted = models[which].reference(models[which].inputs())
                np.testing.assert_allclose(answer.result(60)[0], wanted[0], rtol=0, atol=2e-5)
        assert device.rules.broken == []


@pytest.mark.parametrize("path", PATHS)
def test_constants_of_a_model_that_is_opened_beside_another_are_waited_for(
    path: MemoryPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written on another queue than the one on which kernels read them."""
    bind = LoadedModel.try_bind
    monkeypatch.setattr(LoadedModel, "try_bind", lambda loaded, plan, queue: bind(loaded, plan, loaded.device.beside))
    model = write_mini_bundle(tmp_path / "m.flashmem", path)
    with strict(PROFILES[1]) as device:
        with flashmem.Runtime("64MiB") as many:
            answer = many.open(model.open()).run(None, model.inputs())
        np.testing.assert_allclose(answer[0], model.reference(model.inputs())[0], rtol=0, atol=2e-5)
        assert device.rules.broken == []


def test_constants_that_are_damaged_are_not_released_while_they_are_mapped(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    bundle = model.open()
    with bundle.weights_path.open("r+b") as file:
        file.seek(bundle.program.constants_offset)
        file.write(b"\xff" * 16)
    with strict(PROFILES[1]) as device:
        with pytest.raises(RunError, match="the part with the constants"):
            flashmem.Session(model.path, mode="dma")
        assert device.rules.broken == []


def test_the_doctor_breaks_no_rule(tmp_path: Path) -> None:
    with strict(PROFILES[3]) as device:
        for result in islice(selftest.tests(0, tmp_path), 4):  # the fifth measures times
            assert result.ok, result
    assert device.rules.broken == []
