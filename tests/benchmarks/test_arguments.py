"""Benchmark commands: a wrong argument gives one sentence and exit code 2, before any measurement."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from flashmem.runtime.opencl.discovery import list_devices
from tests.support.paths import DATA, ROOT

FOLDER = ROOT / "benchmarks"


def those_with(call: str) -> list[str]:
    """The modules of benchmarks, as FOLDER.NAME, whose source contains `call`."""
    found = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py") if call in path.read_text()]
    return sorted(".".join(path.parts) for path in found)


OF_ZOO = those_with("parser.add_zoo(")
OF_DEVICE = those_with("parser.add_device(")
MORE = {
    "packages.answers": ["--packages", "absent", "--tools", "absent"],
    "memory.moving_budget": ["absent.flashmem"],
    "planning.planner": ["quality", "--models", "sd15-unet", "--devices", "nvidia", "--objectives", "first"],
    "serving.reopening": ["absent.flashmem"],
    "serving.requests": ["absent.flashmem"],
    "streaming.beyond": ["gpt2"],
    "streaming.changes": ["absent.gguf"],
}
"""Required arguments of a benchmark, besides those under test."""


def refused(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """The last line of stderr of `python -m benchmarks.NAME WORDS`."""
    monkeypatch.setattr(sys, "argv", [name, *MORE.get(name, []), *words])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # runpy warns about a module that is already imported
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    printed = capfd.readouterr()
    assert ended.value.code == 2, printed.err
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err, printed.err
    return printed.err


def test_every_command_has_the_shared_arguments() -> None:
    """No benchmark parses a folder or a device itself, except the workers that other benchmarks start."""
    assert those_with("argparse.ArgumentParser(") == ["exports.__main__", "packages.one", "serving.design_pressure", "worker"]
    assert len(OF_ZOO) > 12 and len(OF_DEVICE) > 12


def test_the_list_names_every_benchmark_with_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    runpy.run_module("benchmarks", run_name="__main__")
    lines = capfd.readouterr().out.splitlines()
    described = dict(line.strip().split(maxsplit=1) for line in lines if line.startswith("  "))
    assert set(described) == set(those_with("run_command(main)")) - {"__main__"}
    assert all(line.endswith(".") for line in described.values()) and max(map(len, lines)) <= 132


def test_one_is_run_by_its_name(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "serving.fifo", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    printed = capfd.readouterr().out
    assert printed.startswith("usage: python -m benchmarks.serving.fifo") and "--iterations" in printed
    assert "'nosuch'" in refused("__main__", ["nosuch"], monkeypatch, capfd)


@pytest.mark.parametrize("name", OF_ZOO)
def test_a_folder_without_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    absent = refused(name, ["--zoo", str(tmp_path / "absent")], monkeypatch, capfd)
    assert "is not a folder; name the one that `python -m benchmarks.exports` wrote models to" in absent
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
        ("serving.design", ["--zoo", ".", "--device", "nosuch"], "no OpenCL device is called 'nosuch'"),
        ("kernels.launches", ["--device", "nosuch"], "no OpenCL device is called 'nosuch'"),
        ("planning.overlap", ["--zoo", str(DATA), "--models", "resnet-tiny", "--devices", "nosuch"], "device descriptor"),
        ("planning.simulation", ["--zoo", ".", "--models", "resnet-tiny"], "no budgets are known for resnet-tiny"),
        ("streaming.comparison", ["--zoo", ".", "--models", "resnet-tiny"], "invalid choice: 'resnet-tiny'"),
        ("paper.tables", ["--zoo", ".", "--models", "nosuch"], "nosuch: no such row"),
        ("kernels.operators", ["--from", "absent.json"], "absent.json"),
        ("serving.fifo", [], "--zoo"),
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
    said = refused("kernels.resident", ["--zoo", str(tmp_path), "--models", "resnet-tiny"], monkeypatch, capfd)
    assert "needs onnxruntime; install flashmem with its `bench` extra" in said
