"""`run --learn`: measured seconds change the plan, the plan stays valid, and the bundle is replaced atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.errors import UserError
from flashmem.bundle.replacing import replace_plan
from flashmem.cli.calls.models import RunCommand
from flashmem.cli.commands.run import run_model
from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.schedule.instance import Instance
from flashmem.schedule.loads import TimedInterval
from flashmem.tools.learn import KEY, Learned, learn, observe
from tests.support.paths import DATA
from tests.support.planning_instances import layers_of

MODEL = DATA / "resnet-tiny.onnx"


def _inputs(bundle: flashmem.Bundle) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(0)
    return {port.name: generator.standard_normal(port.shape).astype(port.dtype) for port in bundle.program.inputs}


def _report(bundle: flashmem.Bundle, seconds: float, rate: float) -> RunReport:
    """A run in which every layer took `seconds`, and loads ran in sequence at `rate` bytes per second."""
    layers = [TimedInterval(x.name, n * seconds, (n + 1) * seconds) for n, x in enumerate(bundle.program.launches)]
    loads, at = [], 0.0
    for part in bundle.program.slices:
        loads.append(TimedInterval(part.name, at, at + part.nbytes / rate))
        at = loads[-1].end
    return RunReport(Latency(1, 0, 1), MemoryUse(0, 0.0, None, {}, None, ()), tuple(loads), tuple(layers))


@pytest.fixture
def bundle(tmp_path: Path) -> flashmem.Bundle:
    return flashmem.compile(MODEL, tmp_path / "m.flashmem", budget="400KB", chunk="4KiB", mode="map")


def test_the_plan_expects_what_was_measured(bundle: flashmem.Bundle) -> None:
    weights = sum(part.nbytes for part in bundle.program.slices)
    layers = len(bundle.program.launches)
    slow = learn(bundle, "map", [_report(bundle, 1.0, 1e9)] * 3)  # loads cost nothing: the sum of the layers' seconds
    assert slow.plan.objective == pytest.approx(layers, rel=1e-2)
    fast = learn(flashmem.compile(MODEL, bundle.path, budget="400KB", chunk="4KiB", mode="map"), "map",
                 [_report(bundle, 1e-9, weights / 7.0)])  # fmt: skip
    assert fast.plan.objective >= 7.0 * 0.99  # layers cost nothing: the disk's time
    assert any("learned from 1 runs" in note for note in fast.plan.notes)


def test_what_was_learned_is_kept_and_added_to(bundle: flashmem.Bundle) -> None:
    once = learn(bundle, "map", [_report(bundle, 1.0, 1e6)])
    twice = learn(once, "map", [_report(bundle, 3.0, 3e6)])
    assert twice.meta[KEY]["runs"] == 2
    assert twice.meta[KEY]["seconds"] == pytest.approx([2.0] * len(bundle.program.launches))
    assert twice.meta[KEY]["load_bandwidth"] == pytest.approx(2e6)
    other = learn(twice, "dma", [_report(bundle, 5.0, 1e6)])  # another mode: the learned values do not apply
    assert other.meta[KEY]["runs"] == 1 and other.meta["mode"] == "dma"


def test_capacities_follow_measured_latency() -> None:
    instance = Instance(layers_of([4, 4, 4], seconds=2.0), (), 1, 10, 1.0)
    learned = Learned("map", 1, (1.0, 2.0, 100.0), 5.0).applied_to(instance)
    assert [spec.capacity for spec in learned.layers] == [2, 4, 16]
    assert [spec.seconds for spec in learned.layers] == [1.0, 2.0, 100.0]
    assert learned.load_bandwidth == 5.0


def test_loads_of_several_threads_count_once(bundle: flashmem.Bundle) -> None:
    report = _report(bundle, 1.0, 1e6)
    names = [part.name for part in bundle.program.slices][:2]
    sizes = {part.name: part.nbytes for part in bundle.program.slices}
    both = RunReport(
        report.latency, report.memory, (TimedInterval(names[0], 0.0, 2.0), TimedInterval(names[1], 1.0, 4.0)), report.layers
    )
    assert observe(bundle, "map", [both]).load_bandwidth == pytest.approx((sizes[names[0]] + sizes[names[1]]) / 4.0)


@pytest.mark.parametrize("mode", ["map", "interleave"])
def test_real_runs_teach_a_plan_that_gives_the_same_answer(mode: Any, tmp_path: Path, capsys: Any) -> None:
    bundle = flashmem.compile(MODEL, tmp_path / "m.flashmem", budget="600KB", chunk="4KiB", mode=mode)
    inputs = _inputs(bundle)
    with flashmem.Session(bundle) as session:
        before = session.run(None, inputs)
    digest = bundle.weights_sha256
    for runs in (3, 6):
        run_model(RunCommand(bundle.path, repeat=3, learn=True, json=True))
        again = flashmem.Bundle.open(bundle.path)  # checks C0-C3 and the layouts
        assert again.meta[KEY]["runs"] == runs and again.plan.layouts.keys() == bundle.plan.layouts.keys()
    assert again.weights_sha256 == digest
    again.verify_weights()
    with flashmem.Session(again) as session:
        assert session.mode == mode
        for got, expected in zip(session.run(None, inputs), before, strict=True):
            np.testing.assert_array_equal(got, expected)
        assert session.last_run is not None and session.last_run.memory.peak_bytes <= 600_000
    assert "planned again" in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_leaves_the_bundle(bundle: flashmem.Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in bundle.path.rglob("*.*")}

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashmem.bundle.version_directories._write", full)
    with pytest.raises(UserError, match="disk is full"):
        replace_plan(bundle, bundle.plan, bundle.meta)
    assert {path.name: path.read_bytes() for path in bundle.path.rglob("*.*")} == files
    assert [path.name for path in bundle.path.parent.iterdir()] == [bundle.path.name]


def test_a_bundle_without_limits_and_preloading_runs_teach_nothing(bundle: flashmem.Bundle) -> None:
    bare = replace_plan(bundle, bundle.plan, {"budget_bytes": 400_000})
    with pytest.raises(UserError, match="does not say what it was planned for"):
        learn(bare, "map", [_report(bundle, 1.0, 1e6)])
    with pytest.raises(UserError, match="runs that stream"):
        run_model(RunCommand(bundle.path, strategy="preload", learn=True))
