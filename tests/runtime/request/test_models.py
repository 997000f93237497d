"""Sessions opened with a model: the cache of bundles, models in memory, options for the compiler, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Session
from flashmem.base.errors import MissingFileError, UserError
from flashmem.bundle import cache as bundle_cache
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.request import models
from tests.support.caches import empty_bundle_cache
from tests.support.command_line import Command, command_line
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import DATA

MODEL = DATA / "resnet-tiny.onnx"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_bundle_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def names() -> list[str]:
    return [entry.path.name for entry in bundle_cache.entries()]


def feeds(reference: onnxruntime.InferenceSession) -> dict[str, NDArray[Any]]:
    [port] = reference.get_inputs()
    return {port.name: np.random.default_rng(0).standard_normal(port.shape).astype(np.float32)}


def close(answers: list[NDArray[Any]], model: Path | bytes) -> None:
    reference = onnxruntime.InferenceSession(model)
    for answer, wanted in zip(answers, reference.run(None, feeds(reference)), strict=True):
        np.testing.assert_allclose(answer, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", range(len(list_devices())))
@pytest.mark.parametrize("form", ["path", "text", "bytes", "proto"])
def test_a_model_runs_in_whatever_form_it_is_given(form: str, device: int) -> None:
    given: dict[str, Any] = {"path": MODEL, "text": str(MODEL), "bytes": MODEL.read_bytes(), "proto": onnx.load(MODEL)}
    reference = onnxruntime.InferenceSession(MODEL)
    with Session(given[form], budget="64MB", device=str(device)) as session:
        assert session.budget == 64_000_000 == session.bundle.budget_bytes
        close(session.run(None, feeds(reference)), MODEL)
    before = names()
    with Session(given[form], budget="64MB", device=str(device)):
        assert names() == before and len(before) == 1
    with Session(given[form], budget="65MB", device=str(device)):
        assert len(names()) == 2


def test_the_command_line_and_a_session_find_each_others_bundles(command: Command) -> None:
    with Session(MODEL, budget="64MB", precision="fp16") as session:
        made = session.bundle.path
    assert command("run", str(MODEL), "--budget", "64MB", "--precision", "fp16").code == 0
    assert names() == [made.name]
    assert command("run", str(MODEL), "--strategy", "preload").code == 0
    assert len(names()) == 2
    with Session(MODEL, strategy="preload") as session:
        assert len(names()) == 2 and session.strategy == "preload"


_FOUND = """
import sys
import flashmem
with flashmem.Session(sys.argv[1], budget="64MB", build_apart=False) as session:
    pass
print(sorted({"onnx", "onnx_ir", "jinja2", "flashmem.compile"} & sys.modules.keys()))
"""


def test_a_cached_bundle_is_found_without_the_compiler() -> None:
    command = [sys.executable, "-c", _FOUND, str(MODEL)]
    said = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() for _ in range(2)]
    assert said == ["['flashmem.compile', 'jinja2', 'onnx', 'onnx_ir']", "[]"]


def test_a_changed_model_is_compiled_again(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    content = model.SerializeToString()
    with Session(content) as session:
        first = session.bundle.path
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    changed = model.SerializeToString()
    reference = onnxruntime.InferenceSession(changed)
    with Session(changed) as session:
        assert session.bundle.path != first
        close(session.run(None, feeds(reference)), changed)


def test_options_of_compile_reach_it() -> None:
    ids = DATA / "gptneo-tiny-dynamic.onnx"
    with Session(ids, shapes=[{"input_ids": (1, 8)}, {"input_ids": (1, 12)}], precision="fp16") as session:
        assert [variant.program.inputs[0].shape for variant in session.bundle.variants] == [(1, 8), (1, 12)]
        assert session.bundle.program.precision == "fp16"


def test_compile_accepts_models_in_memory(tmp_path: Path) -> None:
    content = MODEL.read_bytes()
    kept = flashmem.compile(content, build=False)
    named = flashmem.compile(onnx.load(MODEL), tmp_path / "m.flashmem", build=False)
    assert kept.meta["model_path"] == named.meta["model_path"] == "" and kept.model == "model"
    assert kept.weights_sha256 == named.weights_sha256 == flashmem.compile(MODEL, build=False).weights_sha256
    folder = tmp_path / "stages"
    flashmem.compile(content, dump_stages=folder, build=False)
    assert list(folder.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"GGUF\3", "the given bytes are a GGUF file; give the path of the file"),
        (b"nothing", "^the given model cannot be read as an ONNX model"),
        (b"", "^the given model is empty"),
        (None, "a session is opened with a bundle, a model or the path of one, not with None"),
        ("nowhere.onnx", "model nowhere.onnx does not exist; name an .onnx or .gguf file, or a folder of a language model"),
        ("nowhere", "bundle nowhere does not exist"),
    ],
)
def test_what_is_no_model_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Session(given)


def test_a_model_in_memory_whose_weights_are_in_another_file_is_refused() -> None:
    path = DATA / "gptneo-tiny-external.onnx"
    with pytest.raises(MissingFileError, match=r"^the given model: the external data file .* give the path of its file"):
        Session(onnx.load(path, load_external_data=False))
    with pytest.raises(UserError, match=r"a model is the path of a file, bytes or an onnx\.ModelProto, not int"):
        flashmem.compile(3)  # type: ignore[arg-type]


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = write_mini_bundle(tmp_path / "m.flashmem").path
    with pytest.raises(UserError, match="a session has no option 'precison'; did you mean 'precision'"):
        Session(MODEL, precison="fp16")  # type: ignore[call-arg]
    with pytest.raises(UserError, match="a session has no option 'colour'; it has: budget, "):
        Session(path, colour="red")  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"precision was fixed when .*m\.flashmem was compiled; compile the model anew"):
        Session(path, precision="fp16")
    assert not names()


def test_without_the_compiler_a_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="is no bundle, and the compiler is not installed here"):
        Session(MODEL)
