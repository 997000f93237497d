"""The command line from arguments to exit codes, with real models on the devices of this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import onnxruntime
import pytest

from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule.plan import Status
from tests.support.caches import empty_bundle_cache
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA

RESNET, GPTNEO, DYNAMIC = DATA / "resnet-tiny.onnx", DATA / "gptneo-tiny.onnx", DATA / "gptneo-tiny-dynamic.onnx"
DEVICES = [device.descriptor_name for device in list_devices()]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_bundle_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "model.flashmem"
    command = [sys.executable, "-m", "flashmem", "compile", str(RESNET), "-o", str(path), "--budget", "64MB", "--no-build"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_devices_names_what_is_here(flashmem: Command) -> None:
    listed = flashmem("devices", "--no-measure", "--json").json["devices"]
    assert [entry["descriptor"] for entry in listed] == DEVICES
    assert [entry["auto"] for entry in listed].count(True) == 1
    report = flashmem("devices", "--no-measure")
    for entry in listed:
        assert entry["transfer_mode"] in entry["modes"][entry["memory_path"]]
        assert set(entry["modes"]["buffer"]) | set(entry["not_possible"]["buffer"]) == {"map", "alias", "dma", "interleave"}
        assert entry["integer_products"] == list_devices()[entry["number"]].dots and entry["unused_extensions"] == {}
        assert entry["name"] in report.out and entry["driver_version"] in report.out


def test_verify_asks_for_onnx_runtime_before_it_compiles(flashmem: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    outcome = flashmem("run", RESNET, "--verify")
    assert outcome.code == 2 and "pip install onnxruntime" in outcome.err and "compiling" not in outcome.err


@pytest.mark.parametrize("device", DEVICES)
def test_run_reports_one_json_object(flashmem: Command, bundle: Path, device: str) -> None:
    outcome = flashmem("run", bundle, "--json", "--verify", "--repeat", "3", "--device", device)
    assert outcome.code == 0
    report = outcome.json
    assert set(report) >= {"device", "memory_path", "transfer_mode", "latency_ms", "memory", "plan", "verify"}
    latency, memory, plan = report["latency_ms"], report["memory"], report["plan"]
    assert 0 < latency["init"] < latency["integrated"]
    assert 0 < latency["exec"] < latency["integrated"]
    assert latency["integrated"] >= latency["init"] + latency["exec"] - 1
    assert 0 < memory["average_bytes"] <= memory["peak_bytes"] <= memory["budget_bytes"] == 64_000_000
    assert memory["process_bare_rss_bytes"] < memory["process_peak_rss_bytes"] - memory["peak_bytes"] / 2
    assert plan["status"] in get_args(Status) and plan["checked"] is True
    assert 0 <= plan["gap"] <= 1 and 0 <= plan["preload_ratio"] <= 1 and plan["solve_seconds"] < 60
    assert plan["bound"] <= plan["objective"]
    assert plan["tier"] in ("cp-sat", "soft-threshold", "incremental-preload", "greedy")
    assert report["verify"]["ok"] is True
    assert 0 <= report["verify"]["relative_error"] <= 1e-3


def test_a_person_gets_a_short_report(flashmem: Command, bundle: Path) -> None:
    outcome = flashmem("run", bundle)
    assert outcome.code == 0
    assert re.search(r"\d+(\.\d+)? ms", outcome.out) and "64MB" in outcome.out
    assert len(outcome.out.splitlines()) < 20
    assert "verify" not in outcome.out


def test_run_writes_what_onnx_runtime_computes_from_the_same_inputs(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    pixels = np.random.default_rng(3).standard_normal((1, 3, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "x.npz", pixel_values=pixels)
    assert flashmem("run", bundle, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz").code == 0
    (expected,) = onnxruntime.InferenceSession(str(RESNET)).run(None, {"pixel_values": pixels})
    with np.load(tmp_path / "y.npz") as stored:
        assert stored.files == ["logits"]
        np.testing.assert_allclose(stored["logits"], expected, atol=1e-4 * np.ptp(expected))


def test_the_seed_draws_the_inputs(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    drawn = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert flashmem("run", bundle, "--seed", str(seed), "--output", tmp_path / f"{name}.npz").code == 0
        drawn.append(np.load(tmp_path / f"{name}.npz")["logits"])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


def test_streamed_and_preloaded_answers_are_the_same_bits(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    answers = []
    for strategy in ("stream", "preload"):
        assert flashmem("run", bundle, "--strategy", strategy, "--output", tmp_path / "y.npz").code == 0
        answers.append(np.load(tmp_path / "y.npz")["logits"])
    assert np.array_equal(*answers)


def test_an_onnx_file_is_compiled_into_the_cache_once(flashmem: Command, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = flashmem("run", GPTNEO, "--verify", "--json", "--budget", "32MB")
    assert first.json["verify"]["ok"] is True
    assert "compiling gptneo-tiny.onnx" in first.err
    (made,) = (cache / "bundles").iterdir()
    before = made.stat().st_mtime_ns
    monkeypatch.setattr(subprocess, "Popen", None)  # it is found without a child process that imports the compiler
    second = flashmem("run", GPTNEO, "--json", "--budget", "32MB")
    assert second.code == 0
    assert [made] == list((cache / "bundles").iterdir()) and made.stat().st_mtime_ns == before


def test_symbolic_dimensions_are_bound(flashmem: Command) -> None:
    outcome = flashmem("run", DYNAMIC, "--shape", "input_ids=1x16", "--verify", "--json")
    assert outcome.code == 0 and outcome.json["verify"]["ok"] is True
    unbound = flashmem("run", DYNAMIC)
    assert unbound.code == 2 and "--shape" in unbound.err


def test_fp16_storage_is_verified_by_its_own_tolerance(flashmem: Command) -> None:
    report = flashmem("run", RESNET, "--precision", "fp16", "--verify", "--json").json
    assert report["verify"]["ok"] is True
    assert 0 < report["verify"]["relative_error"] <= 1e-2


def test_a_difference_is_exit_code_1(flashmem: Command, bundle: Path) -> None:
    outcome = flashmem("run", bundle, "--verify", "--json", "--model", DATA / "resnet-tiny-other.onnx")
    assert outcome.code == 2, "a missing original is the user's to change"
    outcome = flashmem("run", bundle, "--verify", "--json", "--model", DATA / "mobilenet-tiny.onnx")
    assert outcome.code == 1
    assert outcome.json["verify"]["ok"] is False
    assert len(outcome.err.strip().splitlines()) == 1


def test_a_trace_holds_layers_and_loads(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    assert flashmem("run", bundle, "--trace", tmp_path / "trace.json").code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"layer", "load"}
    played = [event for event in spans if event["cat"] == "layer"]
    assert all(before["ts"] + before["dur"] <= after["ts"] + 1 for before, after in pairwise(played)), (
        "one after the other, in us"
    )
    layers = flashmem("plan", bundle, "--json").json["layers"]
    assert [event["name"] for event in played] == [layer["name"] for layer in layers]


@pytest.mark.parametrize("options", [("--mode", "map"), ("--mode", "interleave"), ("--strategy", "preload")], ids=" ".join)
def test_a_timeline_shows_runs_beside_their_predictions(
    options: tuple[str, ...], flashmem: Command, bundle: Path, tmp_path: Path
) -> None:
    assert flashmem("run", bundle, *options, "--repeat", "3", "--timeline", tmp_path / "t.html").code == 0
    page = (tmp_path / "t.html").read_text()
    for title in ("first run, measured", "first run, predicted", "run 3, measured", "later run, predicted", options[1]):
        assert title in page
    layers = flashmem("plan", bundle, "--json").json["layers"]
    assert layers and all(page.count(f'"{layer["name"]}"') >= 4 for layer in layers)
    assert flashmem("run", bundle, *options, "--timeline", tmp_path / "t.html").code == 0
    assert "run 3" not in (tmp_path / "t.html").read_text()


def test_plan_is_readable_and_complete(flashmem: Command, bundle: Path) -> None:
    data = flashmem("plan", bundle, "--json").json
    report = flashmem("plan", bundle)
    assert report.code == 0 and data["plan"]["status"] in report.out
    assert data["plan"]["checked"] is True
    for layer in data["layers"]:
        assert layer["name"] in report.out
        assert layer["in_flight_bytes"] <= data["plan"]["m_peak_bytes"]
    moved = sum(layer["moved_chunks"] for layer in data["layers"])
    assert moved == sum(weight["chunks"] for weight in data["weights"] if not weight["preload"])
    assert data["layers"][-1]["layer"] == len(data["layers"])


@pytest.mark.build_apart
def test_compile_prints_the_path_and_nothing_else(flashmem: Command, tmp_path: Path) -> None:
    outcome = flashmem("compile", RESNET, "-o", tmp_path / "m.flashmem")
    assert (outcome.code, outcome.out) == (0, f"{tmp_path / 'm.flashmem'}\n")
    cached = flashmem("compile", RESNET)
    assert Path(cached.out.strip()).is_dir()


def test_a_bundle_settles_what_it_was_compiled_for(flashmem: Command, bundle: Path) -> None:
    outcome = flashmem("run", bundle, "--precision", "fp16")
    assert outcome.code == 2 and "--precision was fixed" in outcome.err


def test_a_budget_too_small_names_one_that_works(flashmem: Command) -> None:
    outcome = flashmem("compile", GPTNEO, "--budget", "1KB")
    assert outcome.code == 2
    (needed,) = re.findall(r"(\d+) bytes or more", outcome.err)
    assert flashmem("run", GPTNEO, "--budget", needed, "--verify").code == 0


TEXT, NO_FILE, CUT, BUNDLE = "text.onnx", "gone.onnx", "cut.onnx", "a bundle"


@pytest.mark.parametrize(
    "words",
    [
        ("run", NO_FILE),
        ("compile", NO_FILE),
        ("plan", NO_FILE),
        ("run", TEXT),
        ("compile", TEXT),
        ("run", CUT),
        ("run", "."),
        ("plan", "."),
        ("compile", RESNET, "--budget", "0"),
        ("compile", RESNET, "--budget", "-1"),
        ("compile", RESNET, "--budget", "lots"),
        ("compile", RESNET, "--m-peak", "1MB", "--budget", "1MB"),
        ("compile", RESNET, "--chunk", "0"),
        ("compile", RESNET, "--lambda", "2"),
        ("compile", RESNET, "--shape", "pixel_values"),
        ("compile", RESNET, "--shape", "nothing=1x3"),
        ("compile", RESNET, "--preload", "no-such-weight"),
        ("compile", RESNET, "--device", "adreno9000"),
        ("compile", RESNET, "--precision", "int4"),
        ("compile", RESNET, "-o", f"{RESNET}/inside-a-file.flashmem"),
        ("run", RESNET, "--device", "adreno9000"),
        ("run", RESNET, "--input", "gone.npz"),
        ("run", RESNET, "--input", TEXT),
        ("run", BUNDLE, "--input", "wrong-name.npz"),
        ("run", BUNDLE, "--input", "wrong-shape.npz"),
        ("run", BUNDLE, "--input", "wrong-type.npz"),
        ("run", RESNET, "--output", "no/such/folder/y.npz"),
        ("run", RESNET, "--trace", "no/such/folder/trace.json"),
        ("run", RESNET, "--timeline", "no/such/folder/t.html"),
        ("run", RESNET, "--timeline", "t.png"),
        ("run", BUNDLE, "--repeat", "0"),
        ("run", BUNDLE, "--mode", "teleport"),
        ("run",),
        ("fly",),
        ("zoo", "export", "no-such-model", "-o", "."),
        ("demo", NO_FILE),
        ("demo", TEXT),
        ("demo", "--budget", "lots"),
    ],
    ids=lambda words: " ".join(Path(word).name for word in map(str, words)),
)
def test_what_the_user_has_to_change(
    words: tuple[str, ...], flashmem: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(TEXT).write_text("these are words, not a model")
    Path(CUT).write_bytes(RESNET.read_bytes()[:9000])
    np.savez("wrong-name.npz", pixels=np.zeros((1, 3, 32, 32), np.float32))
    np.savez("wrong-shape.npz", pixel_values=np.zeros((1, 3, 32, 31), np.float32))
    np.savez("wrong-type.npz", pixel_values=np.zeros((1, 3, 32, 32), np.int64))
    before = {path for path in tmp_path.iterdir() if path.name != "cache"}
    outcome = flashmem(*(bundle if word == BUNDLE else word for word in words))
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    sentence = outcome.err.strip().splitlines()[-1]
    assert len(sentence) > 20
    left = {path for path in tmp_path.iterdir() if path.name != "cache"}
    assert left == before, "nothing half-written remains"


def test_a_bundle_run_never_imports_the_offline_half(bundle: Path) -> None:
    program = (
        "import sys; sys.argv = ['flashmem', 'run', sys.argv[1], '--json']\n"
        "from flashmem.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "heavy = {'onnx', 'onnx_ir', 'onnxscript', 'ortools', 'jinja2', 'xgboost', 'onnxruntime', 'torch', 'scipy', 'pandas'}\n"
        "heavy |= {'flashmem.compile', 'flashmem.compiler', 'flashmem.planning.capacity'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, bundle], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    json.loads(done.stdout)


def test_help_and_version(flashmem: Command) -> None:
    assert flashmem("--version").out.startswith("flashmem ")
    for words in ((), ("devices",), ("compile",), ("run",), ("plan",), ("zoo",), ("zoo", "export"), ("demo",)):
        outcome = flashmem(*words, "--help")
        assert outcome.code == 0 and "usage:" in outcome.out
    assert "gptneo-125m" in flashmem("zoo", "list").out
