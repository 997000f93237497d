"""`flashmem simulate` and `flashmem sweep`, from arguments to files, figures and exit codes."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from flashmem.base.paths import VARIABLE
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule.plan import Status
from tests.support.caches import empty_bundle_cache
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA

RESNET, GPTNEO = DATA / "resnet-tiny.onnx", DATA / "gptneo-tiny.onnx"
DEVICE = list_devices()[0].descriptor_name
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    empty_bundle_cache(tmp_path / "cache", monkeypatch)
    return command_line(monkeypatch, capfd)


@pytest.fixture
def absent_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, which nothing has made yet."""
    folder = tmp_path / "absent"
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("bundle") / "model.flashmem"
    command = [sys.executable, "-m", "flashmem", "compile", str(RESNET), "-o", str(path), "--device", DEVICE, "--no-build"]
    subprocess.run(command, check=True, capture_output=True)
    yield path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("strategy", ["stream", "preload"])
def test_the_memory_predicted_is_the_memory_of_a_run(flashmem: Command, bundle: Path, strategy: str) -> None:
    for mode in ("dma", "alias"):
        predicted = flashmem("simulate", bundle, "--mode", mode, "--strategy", strategy, "--json").json
        run = flashmem("run", bundle, "--mode", mode, "--strategy", strategy, "--device", DEVICE, "--json").json
        assert predicted["simulated"] is True
        for key in ("transfer_mode", "memory_path", "strategy", "precision"):
            assert predicted[key] == run[key]
        assert predicted["memory"]["peak_bytes"] == run["memory"]["peak_bytes"]
        assert predicted["plan"] == run["plan"]


def test_simulate_reports_and_draws(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    report = flashmem("simulate", bundle, "--disk", "cold", "--timeline", tmp_path / "t.html")
    assert report.code == 0
    for words in ("first answer", "predicted", "memory", "busy", "disk"):
        assert words in report.out
    page = (tmp_path / "t.html").read_text()
    for words in ("resnet-tiny", "first run, predicted", "later run, predicted", "read from the disk", "released when layer"):
        assert words in page
    cold = flashmem("simulate", bundle, "--disk", "cold", "--json").json
    cached = flashmem("simulate", bundle, "--json").json
    assert cold["latency_ms"]["integrated"] >= cached["latency_ms"]["integrated"]
    assert "disk" in cold["busy_ms"] and "disk" not in cached["busy_ms"]
    latency = cached["latency_ms"]
    assert latency["integrated"] == pytest.approx(latency["init"] + latency["exec"])
    assert cached["memory"]["average_bytes"] <= cached["memory"]["peak_bytes"]


def test_a_bundle_is_played_on_another_device_and_a_file(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    described = tmp_path / "slow.toml"
    described.write_text(
        'name = "slow"\nkind = "gpu"\nshares_memory = false\nuses_host_memory = false\n'
        '[modes]\nbuffer = ["dma"]\ntexture = ["dma"]\n[rates]\ngemm_flops = 1e6\n'
        "contention = {dma = 0}\n"
    )
    slow = flashmem("simulate", bundle, "--device", described, "--json").json
    assert (slow["device"], slow["device_measured"], slow["transfer_mode"]) == ("slow", False, "dma")
    assert slow["latency_ms"]["exec"] > 10 * flashmem("simulate", bundle, "--json").json["latency_ms"]["exec"]


def test_an_onnx_file_is_planned_first(flashmem: Command) -> None:
    report = flashmem("simulate", GPTNEO, "--device", "nvidia", "--budget", "32MB", "--json").json
    assert report["device"] == "nvidia" and report["memory"]["budget_bytes"] == 32_000_000
    assert report["memory"]["peak_bytes"] <= 32_000_000


ZOO = ("zoo:gptneo-125m", "--device", "adreno750")


@pytest.mark.parametrize(
    "options",
    [
        ("--m-peak", "500MB"),
        ("--budget", "128MB"),
        ("--m-peak", "100MB", "--objective", "first", "--mode", "interleave", "--precision", "fp16"),
        ("--m-peak", "500MB", "--lambda", "0.5", "--chunk", "4MiB", "--memory-path", "buffer", "--preload", "h.3.c_fc.weight"),
        ("--m-peak", "64MB", "--unfusion", "--mu", "0.5", "--alpha", "0.2"),
    ],
    ids=" ".join,
)
def test_a_known_architecture_is_played_as_it_is_planned(options: tuple[str, ...], flashmem: Command) -> None:
    played = flashmem("simulate", *ZOO, *options, "--json").json
    planned = flashmem("plan", *ZOO, *options, "--json").json
    assert (played["device"], played["device_measured"], played["simulated"]) == ("adreno750", False, True)
    assert played["memory_path"] == planned["memory_path"]
    kept = set(played["plan"]) - {"solve_seconds"}
    statuses = (planned["plan"]["status"], played["plan"]["status"])
    if not all(status.startswith("optimal") for status in statuses):  # a time limit stops the solver anywhere
        kept = {"objective_kind", "checked"}
        assert played["plan"]["objective"] == pytest.approx(planned["plan"]["objective"], rel=0.01)
    assert {k: played["plan"][k] for k in kept} == {k: planned["plan"][k] for k in kept}
    memory, latency = played["memory"], played["latency_ms"]
    assert memory["budget_bytes"] == (128_000_000 if "--budget" in options else None)
    assert 0 < memory["average_bytes"] <= memory["peak_bytes"] <= (memory["budget_bytes"] or 1_000_000_000)
    assert latency["integrated"] == pytest.approx(latency["init"] + latency["exec"])


@pytest.mark.thorough
def test_strategies_and_disks_of_a_known_architecture(flashmem: Command, tmp_path: Path) -> None:
    budget = ("--budget", "128MB", "--disk", "cold")
    played = {
        strategy: flashmem("simulate", *ZOO, *budget, "--strategy", strategy, "--json").json
        for strategy in ("stream", "on-demand", "preload")
    }
    assert [each["strategy"] for each in played.values()] == list(played)
    assert played["stream"]["latency_ms"]["integrated"] <= played["on-demand"]["latency_ms"]["integrated"]
    weights = 490_000_000  # all of them are resident at once
    assert played["stream"]["memory"]["peak_bytes"] <= 128_000_000 < weights < played["preload"]["memory"]["peak_bytes"]
    cached = flashmem("simulate", *ZOO, "--budget", "128MB", "--timeline", tmp_path / "t.html")
    assert cached.code == 0 and "first answer" in cached.out
    assert "gptneo-125m" in (tmp_path / "t.html").read_text()


GRID = ("--m-peak", "1KB,64KB,1MB", "--lambda", "0.1,0.9", "--device", DEVICE, "-o", "s.csv")


def test_a_sweep_fills_its_grid_and_starts_where_it_stopped(
    flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = flashmem("sweep", RESNET, *GRID, "--mu", "0,0.5", "--plot", "s.png")
    assert outcome.code == 0 and outcome.out == ""
    rows = rows_of(Path("s.csv"))
    assert len(rows) == 3 * 2 * 2
    assert {(row["m_peak_bytes"], row["lambda"], row["mu"]) for row in rows} == {
        (m_peak, lambda_, mu) for m_peak in ("1000", "64000", "1000000") for lambda_ in ("0.1", "0.9") for mu in ("0.0", "0.5")
    }
    for row in rows:
        assert row["source"] == "simulated" and row["model"] == str(RESNET)
        assert float(row["integrated_ms"]) == pytest.approx(float(row["init_ms"]) + float(row["exec_ms"]))
        assert 0 <= float(row["preload_ratio"]) <= 1 and 0 < int(row["average_bytes"]) <= int(row["peak_bytes"])
        assert row["tier"] and float(row["bound"]) <= float(row["objective"]) + 1e-9
    for name in ("s.png", "s-figure8.png"):
        assert Path(name).read_bytes().startswith(PNG)
    # As after a crash, which truncated the last line. Only that point is computed again; the other rows stay unchanged.
    whole = Path("s.csv").read_bytes()
    lines = whole.splitlines(keepends=True)
    Path("s.csv").write_bytes(whole[:-7])
    again = flashmem("sweep", RESNET, *GRID, "--mu", "0,0.5")
    assert again.code == 0 and "11 of 12 points are in s.csv already" in again.err
    assert Path("s.csv").read_bytes().splitlines(keepends=True)[:-1] == lines[:-1]
    assert len(rows_of(Path("s.csv"))) == 12
    assert "12 of 12 points" in flashmem("sweep", RESNET, *GRID, "--mu", "0,0.5").err


@pytest.mark.parametrize(("limit", "column"), [(("--budget",), "budget_bytes")])
def test_a_limit_too_small_is_a_row_that_names_one_that_works(
    limit: tuple[str, ...], column: str, flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flag, *more = limit
    words = ("sweep", GPTNEO, "-o", "s.csv", "--device", DEVICE, *more, flag)
    assert flashmem(*words, "1B").code == 0
    (row,) = rows_of(Path("s.csv"))
    assert (row["status"], row[column]) == ("infeasible", "1")
    nothing = flashmem(*words, "1B", "--plot", "n.png")
    assert nothing.code == 2 and "nothing to draw" in nothing.err
    assert flashmem(*words, f"{row['smallest_bytes']}B").code == 0
    assert rows_of(Path("s.csv"))[1]["status"] in get_args(Status)


def test_with_the_papers_objective_m_peak_never_refuses(
    flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flashmem("sweep", GPTNEO, "--m-peak", "1B", "-o", "s.csv", "--device", DEVICE).code == 0
    (row,) = rows_of(Path("s.csv"))
    assert row["status"] == "optimal" and float(row["preload_ratio"]) == 1


@pytest.mark.thorough
def test_models_devices_and_precisions_are_axes_too(flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("sweep", RESNET, GPTNEO, "--budget", "32MB", "--precision", "fp32,fp16", "--device", "nvidia,generic-cpu")
    assert flashmem(*words, "-o", "s.csv", "--plot", "s.png", "--disk", "cold", "--jobs", "2").code == 0
    rows = rows_of(Path("s.csv"))
    assert len({(row["model"], row["precision"], row["device"]) for row in rows}) == len(rows) == 8
    smaller = {(r["model"], r["device"]): int(r["peak_bytes"]) for r in rows if r["precision"] == "fp16"}
    assert all(smaller[r["model"], r["device"]] <= int(r["peak_bytes"]) for r in rows if r["precision"] == "fp32")


@pytest.mark.thorough
def test_known_architectures_are_swept_without_a_file(
    flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flashmem("sweep", "zoo:gptneo-125m", "--budget", "256MB", "--device", "nvidia", "-o", "s.csv").code == 0
    (row,) = rows_of(Path("s.csv"))
    assert row["model"] == "zoo:gptneo-125m" and int(row["peak_bytes"]) <= 256_000_000


@pytest.mark.thorough
def test_a_measured_sweep_holds_the_memory_that_a_simulated_one_predicts(
    flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("sweep", RESNET, "--budget", "8MB", "--device", DEVICE, "--mode", "dma", "-o", "s.csv")
    assert flashmem(*words).code == 0
    assert flashmem(*words, "--measured", "--runs", "1").code == 0
    predicted, measured = rows_of(Path("s.csv"))
    assert (predicted["source"], measured["source"]) == ("simulated", "measured")
    for column in ("objective", "preload_ratio", "peak_bytes"):
        assert predicted[column] == measured[column]
    assert 0 < float(measured["exec_ms"]) < float(measured["integrated_ms"])


def test_points_are_measured_on_the_device_that_a_file_describes(
    flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        f'name = "{DEVICE}"\nshares_memory = false\n[modes]\nbuffer = ["dma"]\n'
        "[rates]\ncontention.dma = 1\ndisk_bandwidth = 5e8\n"
    )
    words = ("--budget", "8MB", "--device", "mine.toml", "--mode", "dma", "--measured", "--runs", "1", "-o", "s.csv")
    outcome = flashmem("sweep", RESNET, *words)
    assert outcome.code == 0, outcome.err
    (row,) = rows_of(Path("s.csv"))
    assert (row["device"], row["source"]) == ("mine.toml", "measured") and float(row["exec_ms"]) > 0


SWEEP = ("sweep", RESNET, "--m-peak", "1MB")


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "gone.onnx"),
        ("simulate", "text.onnx"),
        ("simulate", RESNET, "--device", "adreno9000"),
        ("simulate", RESNET, "--disk", "lukewarm"),
        ("simulate", RESNET, "--budget", "1KB"),
        ("simulate", RESNET, "--timeline", "no/such/folder/t.html"),
        ("simulate", RESNET, "--timeline", "t.svg"),
        ("simulate", "zoo:"),
        ("simulate", "zoo:no-such-model"),
        ("simulate", "zoo:gptneo-125m.onnx", "--device", "nvidia"),
        ("simulate", *ZOO[:1], "--device", "adreno9000"),
        ("simulate", *ZOO, "--mode", "map"),
        ("simulate", *ZOO, "--shape", "input_ids=1x8"),
        ("simulate", *ZOO, "--budget", "1MB"),
        ("simulate", *ZOO, "--budget", "1GB", "--m-peak", "1GB"),
        ("simulate", *ZOO, "--m-peak", "lots"),
        ("simulate", *ZOO, "--m-peak", "1GB", "--preload", "nobody"),
        ("simulate", *ZOO, "--m-peak", "1GB", "--mu", "1"),
        ("simulate", *ZOO, "--strategy", "resident-first"),
        ("simulate", *ZOO, "--timeline", "t.png"),
        ("simulate", "BUNDLE", "--device", "adreno9000"),
        ("simulate", "BUNDLE", "--budget", "1KB"),
        ("simulate", "BUNDLE", "--precision", "fp16"),
        ("simulate", "BUNDLE", "--device", "nvidia", "--mode", "map"),
        ("simulate", "BUNDLE", "--device", "text.toml"),
        ("sweep",),
        ("sweep", RESNET),
        ("sweep", "gone.onnx", "--m-peak", "1MB"),
        ("sweep", "text.onnx", "--m-peak", "1MB"),
        ("sweep", RESNET, "--m-peak", "1MB,,2MB"),
        ("sweep", RESNET, "--m-peak", "1MB,lots"),
        ("sweep", RESNET, "--budget", "0"),
        (*SWEEP, "--lambda", "0.5,2"),
        (*SWEEP, "--lambda", "half"),
        (*SWEEP, "--mu", "-1"),
        (*SWEEP, "--mu", "nan"),
        (*SWEEP, "--precision", "fp32,int4"),
        (*SWEEP, "--device", "adreno9000"),
        (*SWEEP, "--mode", "teleport"),
        (*SWEEP, "--device", "nvidia", "--mode", "map"),
        (*SWEEP, "--shape", "pixel_values"),
        (*SWEEP, "--objective", "beauty"),
        ("sweep", "zoo:no-such-model", "--m-peak", "1MB"),
        ("sweep", "zoo:gptneo-125m", "--m-peak", "1MB", "--measured"),
        ("sweep", "zoo:gptneo-125m", "--m-peak", "1MB", "--shape", "input_ids=1x8"),
        (*SWEEP, "--jobs", "0"),
        (*SWEEP, "--plot", "no/such/folder/s.png"),
        (*SWEEP, "-o", "no/such/folder/s.csv"),
        (*SWEEP, "-o", "other.csv"),
        (*SWEEP, "-o", "text.onnx"),
        ("sweep", "BUNDLE", "--m-peak", "1MB", "--precision", "fp16"),
        ("sweep", "BUNDLE", "--m-peak", "1MB", "--mu", "0,0.1"),
    ],
    ids=lambda words: " ".join(Path(word).name for word in map(str, words)),
)
def test_what_the_user_has_to_change(
    words: tuple[str, ...], flashmem: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.onnx").write_text("these are words, not a model")
    Path("text.toml").write_text("these are words, not a descriptor")
    Path("other.csv").write_text("name,age\nAda,36\n")
    if "sweep" in words and "-o" not in words:
        words = (*words, "-o", "out/s.csv")
        Path("out").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    outcome = flashmem(*(bundle if word == "BUNDLE" else word for word in words))
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert len(outcome.err.strip().splitlines()[-1]) > 20
    if "simulate" in words and any(str(word).startswith("zoo:") for word in words):
        assert len(outcome.err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zoo:no-such-model",), "no architecture 'no-such-model'"),
        (("--device", f"{DEVICE},adreno9000"), "adreno9000"),
        (("--device", f"{DEVICE},gone.toml"), "gone.toml"),
        (("BUNDLE", "--precision", "fp32,fp16"), "leave fp16 out"),
        (("zoo:gptneo-125m", "--measured"), "has no weights"),
        (("--device", f"{DEVICE},adreno750", "--measured"), "no adreno750 is here"),
    ],
)
def test_a_sweep_refuses_before_its_first_point(
    words: tuple[str, ...], message: str, flashmem: Command, absent_cache: Path, bundle: Path, tmp_path: Path
) -> None:
    device = () if "--device" in words else ("--device", DEVICE)
    words = tuple(str(bundle) if word == "BUNDLE" else word for word in words)
    outcome = flashmem("sweep", RESNET, *words, *device, "--m-peak", "1MB", "-o", tmp_path / "s.csv")
    assert outcome.code == 2 and message in outcome.err and len(outcome.err.strip().splitlines()) == 1
    assert rows_of(tmp_path / "s.csv") == [] and not absent_cache.exists()


def test_a_page_that_cannot_be_drawn_is_refused_before_the_model_is_compiled(
    flashmem: Command, absent_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    for command in ("simulate", "run"):
        outcome = flashmem(command, RESNET, "--timeline", tmp_path / "t.html")
        assert outcome.code == 2 and "bokeh" in outcome.err and not absent_cache.exists()


def test_what_is_not_installed_is_named(flashmem: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = flashmem(*SWEEP, "-o", "s.csv", "--plot", "s.png")
    assert outcome.code == 2 and "install" in outcome.err and "matplotlib" in outcome.err


def test_two_sweeps_do_not_write_to_one_file(flashmem: Command, tmp_path: Path) -> None:
    from flashmem.tools.sweep.results import ResultFile

    with ResultFile(tmp_path / "s.csv"):
        outcome = flashmem(*SWEEP, "-o", tmp_path / "s.csv")
    assert outcome.code == 2 and "another sweep" in outcome.err


def test_help_names_what_is_needed(flashmem: Command) -> None:
    assert "--timeline" in flashmem("simulate", "--help").out
    assert "--jobs" in flashmem("sweep", "--help").out
