"""Commands of benchmarks: an argument that has to be changed is one sentence and exit code 2, before anything is measured."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from flashmem.runtime.opencl.context import list_devices
from tests.support.paths import ROOT

OF_ZOO = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "parser.add_zoo(" in path.read_text())
OF_DEVICE = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "parser.add_device(" in path.read_text())
MORE = {
    "moving_budget": ["absent.flashmem"],
    "planner": ["quality", "--models", "sd15-unet", "--devices", "nvidia", "--objectives", "first"],
    "reopening": ["absent.flashmem"],
    "requests": ["absent.flashmem"],
}
"""Arguments that a benchmark needs beside those under test."""


def refused(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """The sentence that `python -m benchmarks.NAME WORDS` ends with."""
    monkeypatch.setattr(sys, "argv", [name, *MORE.get(name, []), *words])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # runpy warns of a module that is there
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    printed = capfd.readouterr()
    assert ended.value.code == 2, printed.err
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err, printed.err
    return printed.err


def test_every_command_has_the_shared_arguments() -> None:
    """No benchmark parses a folder or a device on its own, but for the workers that others start."""
    own = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "argparse.ArgumentParser(" in path.read_text()]
    assert sorted(own) == ["design_pressure", "worker"]
    assert len(OF_ZOO) > 12 and len(OF_DEVICE) > 12


@pytest.mark.parametrize("name", OF_ZOO)
def test_a_folder_without_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = refused(name, ["--zoo", str(tmp_path / "absent")], monkeypatch, capfd)
    assert "is not a folder; name the one that `flashmem zoo export` wrote models to" in absent
    device = ["--device", list_devices()[0].descriptor_name] if name in OF_DEVICE else []
    empty = refused(name, ["--zoo", str(tmp_path), *device], monkeypatch, capfd)
    assert str(tmp_path) in empty, empty


@pytest.mark.parametrize("name", OF_DEVICE)
def test_a_device_that_is_not_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--zoo", str(tmp_path)] if name in OF_ZOO else []
    assert "no OpenCL device is called 'nosuch'" in refused(name, [*words, "--device", "nosuch"], monkeypatch, capfd)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("design", ["--zoo", ".", "--device", "nosuch"], "no OpenCL device is called 'nosuch'"),
        ("launches", ["--device", "nosuch"], "no OpenCL device is called 'nosuch'"),
        ("overlap", ["--zoo", str(ROOT / "tests/data"), "--models", "resnet-tiny", "--devices", "nosuch"], "device descriptor"),
        ("simulation", ["--zoo", ".", "--models", "resnet-tiny"], "no budgets are known for resnet-tiny"),
        ("streaming", ["--zoo", ".", "--models", "resnet-tiny"], "invalid choice: 'resnet-tiny'"),
        ("tables", ["--zoo", ".", "--models", "nosuch"], "nosuch: no such row"),
        ("kernels", ["--from", "absent.json"], "absent.json"),
        ("fifo", [], "--zoo"),
    ],
)
def test_other_words_that_are_wrong(
    name: str, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(name, words, monkeypatch, capfd)


def test_a_module_that_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    (tmp_path / "resnet-tiny").mkdir()
    (tmp_path / "resnet-tiny/model.onnx").touch()
    said = refused("resident", ["--zoo", str(tmp_path), "--models", "resnet-tiny"], monkeypatch, capfd)
    assert "needs onnxruntime; install flashmem with its `bench` extra" in said
