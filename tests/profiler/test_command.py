"""`flashmem profile` from arguments to a descriptor, trained models, a report and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.predictor import Predictor
from flashmem.profiler import bench, measure, openings, sessions, train
from flashmem.profiler.dataset import Growing, read_dataset
from flashmem.profiler.report import judged_by_shipped
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.processor import processor_of
from flashmem.target.descriptor import load_descriptor
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA

MODEL = DATA / "resnet-tiny.onnx"
DEVICE = next(str(number) for number, device in enumerate(list_devices()) if device.kind == "cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(monkeypatch, capfd)


@pytest.mark.thorough
def test_a_profile_killed_and_resumed_to_its_figures(
    flashmem: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Precise medians and models take long; few and small ones show whether it works.
    few = ((sessions, "_ROUNDS", 1), (openings, "_KERNELS", 4), (openings, "_LAYERS", 16), (bench, "_DELAYS", 3))
    ratios = ((measure, "_MODEL_RATIOS", (0.5, 2.0)), (measure, "_SAMPLE_RATIOS", (0.4, 2.0)))
    for module, name, value in (*few, *ratios, (train, "_SECONDS_ROUNDS", 20), (train, "_SLOWDOWN_ROUNDS", 20)):
        monkeypatch.setattr(module, name, value)
    folder = tmp_path / "mine"
    partial = folder / ".mine.profile.partial.csv"
    words = ("profile", "--device", DEVICE, "-o", folder, "--name", "mine", "--model", MODEL)

    assert killed_at(0, flashmem, *words).code == 130
    rates = partial.with_suffix(".rates.json")
    rates.write_text(json.dumps({**json.loads(rates.read_text()), "spent": 60.0}))  # any value, independent of this machine
    early = flashmem(*words, "--minutes", "0.1")
    assert early.code == 2 and "0 launches are too few to learn from" in early.err

    assert killed_at(2, flashmem, *words).code == 130
    before = partial.read_text()
    minutes, code = 1.0, 2
    with monkeypatch.context() as patch:
        patch.setattr(train, "LEAST_LAUNCHES", 30)  # so that those of the sample alone are enough for a report
        while code == 2 and minutes < 10:
            minutes += 0.3
            done = flashmem(*words, "--minutes", minutes)
            code = done.code
    assert code == 0, done.err
    tuned = descriptor_for(list_devices()[int(DEVICE)]).tuned
    tables = {f"{tuned}.tuned.csv"} if tuned else set()  # the tuning database in use
    written = {"mine.profile.csv.gz", "mine.seconds.ubj", "mine.slowdown.ubj", "mine.toml"}
    assert {path.name for path in folder.iterdir()} == written | tables
    assert done.out.strip() == str(folder / "mine.toml")
    descriptor = load_descriptor(done.out.strip())
    assert descriptor.measured and descriptor.measured_on == processor_of(list_devices()[int(DEVICE)])
    assert descriptor.sources["measured_on"] == descriptor.sources["gemm_flops"]
    assert 1e9 < descriptor.rates.gemm_flops < 1e13 and 1e-4 < descriptor.rates.session_seconds < 10
    assert "trained" in default_model(descriptor, descriptor.memory_paths[0]).note
    dataset = folder / "mine.profile.csv.gz"
    _, rows = read_dataset(dataset)
    assert {row.origin for row in rows} == {"sample", "resnet-tiny"}
    partial.write_text(before)
    kept = Growing(partial, json.loads(before.partition("\n")[0][2:]), resume=True).rows
    assert len({row.case for row in kept}) == 2 and rows[: len(kept)] == kept

    models = [folder / "mine.seconds.ubj", folder / "mine.slowdown.ubj"]
    trained = [model.read_bytes() for model in models]
    for model in models:
        model.unlink()
    assert flashmem("profile", "--dataset", dataset).out.strip() == str(folder / "mine")
    assert [model.read_bytes() for model in models] == trained

    figures = tmp_path / "figures"
    report = flashmem("profile", "--dataset", dataset, "--report", "--again", dataset, "--figures", figures)
    assert report.code == 0, report.err
    for heading in ("raw seconds: MAPE", "C_l within 25 %", "operator classes from the response to", "measured again"):
        assert heading in report.out
    assert "trained on all of it: resnet-tiny, sample" in report.out
    assert flashmem("profile", "--dataset", dataset, "--without", "vit").code == 2
    assert flashmem("profile", "--dataset", dataset, "--without", "resnet-tiny").code == 0
    assert Predictor.load(str(folder / "mine"), "buffer").trained_on == ("sample",)
    [judged] = judged_by_shipped(dataset)[1]
    assert judged.what == "resnet-tiny" and {p.row.origin for p in judged.predictions} == {"resnet-tiny"}
    assert {path.name: path.read_bytes()[: len(PNG)] for path in figures.iterdir()} == {
        "mine-response.png": PNG, "mine-prediction.png": PNG,
    }  # fmt: skip


def killed_at(number: int, flashmem: Command, *words: str | Path) -> Any:
    """The command, interrupted as by Ctrl-C when `number` launches are measured."""
    real, calls = measure._measure_launch, iter(range(number))

    def interrupted(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_measure_launch", interrupted)
        return flashmem(*words)
