"""The memory benchmarks on tiny models: saved rows, plots, and the message where no limit can be set."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashmem
from benchmarks import command
from benchmarks.memory import activations, hard_limit
from benchmarks.memory.activations import alive
from benchmarks.memory.activations_page import draw, page
from benchmarks.memory.budgets import compiled_at_smallest, keep, read_rows
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.paths import DATA, ROOT


@pytest.mark.parametrize("model", ["resnet-tiny", "gptneo-tiny"])
def test_what_is_alive_fits_the_arena_and_is_what_the_compiler_counted(model: str, tmp_path: Path) -> None:
    budget, bundle = compiled_at_smallest(DATA / f"{model}.onnx", tmp_path / "m.flashmem", "generic-cpu")
    program = bundle.program
    held = alive(program)
    assert len(held) == len(program.launches) + 1
    assert max(held) <= program.arena_bytes < budget
    assert max(held) <= program.live_bytes + 512 * len(program.tensors)
    with pytest.raises(flashmem.base.errors.BudgetError):
        flashmem.compile(DATA / f"{model}.onnx", tmp_path / "less.flashmem", device="generic-cpu", budget=budget - 1)


def test_rows_are_kept_by_their_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for model, value in (("a", 1), ("b", 2), ("a", 3)):
        rows = keep({"model": model, "device": "d", "value": value}, path, ("model", "device"))
    assert [row["value"] for row in rows] == [3, 2] and read_rows(path) == rows


def test_the_picture_and_the_page_are_made(tmp_path: Path) -> None:
    trace = {
        "integrated": 1.0,
        "layers": [(0.2, 0.3), (0.3, 0.9)],
        "changes": [(0.1, "arena", 1000), (0.15, "weights", 500), (0.9, "weights", 0)],
    }
    draw(trace, [10, 600, 1000], 1000, "a model", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    row = {
        "model": "m", "precision": "fp32", "device": "d", "runtime": "r", "weights": 10**9, "smallest": 10**6, "arena": 5,
        "alive": 4, "average_twice": 3.0, "paper": None, "error": None,
        "first": dict.fromkeys(("smallest", "twice", "unlimited"), 1.0),
    }  # fmt: skip
    assert "| [m](p/m-fp32.png) | fp32 | 1000 | **1.0** |" in page([row], "p")


def test_where_no_limit_can_be_set_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hard_limit, "why_no_limit", lambda: "Permission denied")
    monkeypatch.setattr(sys, "argv", ["hard_limit", "--zoo", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^no hard limit can be set here \(Permission denied\); it needs root"):
        hard_limit.main()


def test_a_model_that_fails_is_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo/resnet-tiny").mkdir(parents=True)
    (tmp_path / "zoo/resnet-tiny/model.onnx").write_bytes(b"no model")
    rows, text = tmp_path / "rows.json", tmp_path / "page.md"
    words = ["--zoo", str(tmp_path / "zoo"), "--device", "generic-cpu", "--rows", str(rows), "--page", str(text)]
    monkeypatch.setattr(activations, "device_here", lambda device: list_devices()[0])
    monkeypatch.setattr(hard_limit, "device_here", lambda device: list_devices()[0])
    monkeypatch.setattr(command, "device_here", lambda device: list_devices()[0])
    monkeypatch.setattr(hard_limit, "why_no_limit", lambda: None)
    monkeypatch.setattr(hard_limit, "run_worker", lambda *words: {"bare": 1})
    for benchmark, more in ((activations, ["--precisions", "fp32", "--pictures", str(tmp_path / "p")]), (hard_limit, [])):
        monkeypatch.setattr(sys, "argv", ["command", *words, *more, "--models", "resnet-tiny", "gptneo-tiny"])
        with pytest.raises(SystemExit, match=r"resnet-tiny.*, gptneo-tiny"):
            benchmark.main()
        broken, missing = json.loads(rows.read_text())
        assert "no model" not in broken["failed"] and "not there; export it" in missing["failed"]
        assert broken["failed"] in text.read_text() and missing["failed"] in text.read_text()
        rows.unlink()


@pytest.mark.thorough
def test_a_row_of_activations_is_measured_once(tmp_path: Path) -> None:
    (tmp_path / "zoo/resnet-tiny").mkdir(parents=True)
    shutil.copyfile(DATA / "resnet-tiny.onnx", tmp_path / "zoo/resnet-tiny/model.onnx")
    device = list_devices()[0].descriptor_name
    command = [
        sys.executable, "-m", "benchmarks.memory.activations", "--zoo", str(tmp_path / "zoo"), "--device", device,
        "--models", "resnet-tiny", "--precisions", "fp32", "--runs", "1",
        "--rows", str(tmp_path / "rows.json"), "--page", str(tmp_path / "page.md"),
        "--pictures", str(tmp_path / "pictures"),
    ]  # fmt: skip
    root = ROOT
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "resnet-tiny fp32: " in done.stderr
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["error"] < 1e-4 and row["peak"] <= row["smallest"] and row["alive"] <= row["arena"]
    assert (tmp_path / "pictures/resnet-tiny-fp32.png").is_file() and "resnet-tiny" in (tmp_path / "page.md").read_text()
    assert subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stderr == ""
