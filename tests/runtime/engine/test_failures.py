"""Failures of a run: reported once and clearly, with all resources released."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem import Runtime, Session
from flashmem.base.errors import BudgetError, BundleError, FlashmemWarning, NoDeviceError, RunError, UserError
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine import engine
from flashmem.runtime.engine.activations import Activations
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.run import Run
from flashmem.runtime.engine.warm_up import WarmUp
from flashmem.runtime.engine.weight_store import WeightStore
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.devices import choose, descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.ring import PinnedRing
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.own_memory import give_own_memory

pytestmark = pytest.mark.build_apart

MODES = ("map", "alias", "dma", "interleave")


@pytest.fixture
def model(tmp_path: Path) -> MiniModel:
    return write_mini_bundle(tmp_path / "m.flashmem")


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem")]


@pytest.mark.parametrize("device", range(len(list_devices())))
@pytest.mark.parametrize("mode", MODES)
def test_a_file_truncated_while_open_is_one_clear_error(mode: str, device: int, model: MiniModel) -> None:
    session = Session(model.path, device=str(device), mode=mode)
    cut = model.open().program.slices[-3].offset + 100
    os.truncate(model.open().weights_path, cut)
    with pytest.raises(RunError, match=r"short read: .*weights\.bin ends before byte \d+"):
        session.run(None, model.inputs())
    assert loader_threads() == []
    with pytest.raises(RunError, match=r"the session is closed \(its last run failed: short read"):
        session.run(None, model.inputs())
    session.close()


@pytest.mark.parametrize("what", ["the bundle", "the mode", "the context"])
def test_a_session_that_cannot_be_opened_leaves_no_thread(what: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    make, mode = undocumented.make_context, "map"

    def make_late(device: Any) -> Any:
        time.sleep(0.2)
        if what == "the context":
            raise RunError("the driver is gone")
        return make(device)

    monkeypatch.setattr(undocumented, "make_context", make_late)
    if what == "the bundle":
        os.truncate(model.open().files / "program.json", 100)
    elif what == "the mode":
        mode = "teleport"
    said = {"the bundle": "program.json", "the mode": "teleport", "the context": "the driver is gone"}[what]
    with pytest.raises(RunError if what == "the context" else UserError, match=said):
        Session(model.path, mode=mode)  # type: ignore[arg-type]
    assert loader_threads() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_file_truncated_while_open_fails_preloading_too(mode: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    preload = WeightStore.preload

    def truncate_first(weights: WeightStore) -> None:
        os.truncate(model.open().weights_path, model.open().program.slices[5].offset + 8)
        preload(weights)

    monkeypatch.setattr(WeightStore, "preload", truncate_first)
    with pytest.raises(RunError, match="short read"):
        Session(model.path, mode=mode, strategy="preload")
    assert loader_threads() == []


def test_a_file_truncated_before_is_a_damaged_bundle(model: MiniModel) -> None:
    bundle = model.open()
    os.truncate(model.open().weights_path, 1000)
    with pytest.raises(BundleError, match=r"is not .* bytes long"):
        Session(bundle)


def test_no_thread_is_left_behind(model: MiniModel) -> None:
    with Session(model.path, prepare=False) as session:
        session.run(None, model.inputs())
        assert loader_threads() == []
    with Session(model.path) as session:
        session.run(None, model.inputs())
    assert loader_threads() == []


def test_running_after_close_is_an_error_and_closing_twice_is_not(model: MiniModel) -> None:
    session = Session(model.path)
    session.run(None, model.inputs())
    session.close()
    session.close()
    with pytest.raises(RunError, match="the session is closed"):
        session.run(None, model.inputs())


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_below_the_need_is_refused_and_the_need_is_named(mode: str, model: MiniModel) -> None:
    bundle = model.open()
    needed = fixed_bytes(bundle.program) + bundle.plan.layouts[mode].total_bytes
    with pytest.raises(BudgetError, match=f"needs {needed} bytes in transfer mode {mode}") as caught:
        Session(bundle, mode=mode, budget=needed - 1)
    assert caught.value.smallest_bytes == needed
    with Session(bundle, mode=mode, budget=needed) as session:
        for _ in range(2):
            session.run(None, model.inputs())
            assert session.last_run is not None
            assert session.last_run.memory.peak_bytes <= needed
            assert session.last_run.memory.budget_bytes == needed


def test_the_bundles_budget_is_the_default(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "b.flashmem", budget=100_000)
    with pytest.raises(BudgetError, match="budget 100KB is too small"):
        Session(model.path, mode="map")
    with Session(model.path, mode="map", budget="1MB") as session:
        assert session.budget == 1_000_000


@pytest.mark.parametrize("budget", ["0", "-1", "lots", 0])
def test_a_budget_that_is_no_size_is_refused(budget: str | int, model: MiniModel) -> None:
    with pytest.raises(UserError, match="budget"):
        Session(model.path, budget=budget)


def test_unknown_devices_modes_and_strategies_are_refused(model: MiniModel) -> None:
    with pytest.raises(NoDeviceError, match="no OpenCL device is called 'adreno'"):
        Session(model.path, device="adreno")
    with pytest.raises(UserError, match="transfer mode 'teleport' is unknown"):
        Session(model.path, mode="teleport")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="strategy 'hope' is unknown"):
        Session(model.path, strategy="hope")  # type: ignore[arg-type]


def test_no_device_at_all_says_what_to_install() -> None:
    with pytest.raises(NoDeviceError, match="pip install intel-opencl-rt"):
        choose((), "auto")


def test_a_mode_the_device_lacks_is_refused(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "t.flashmem", "texture")
    for number, device in enumerate(list_devices()):
        if "map" not in descriptor_for(device).modes["texture"]:
            with pytest.raises(UserError, match="cannot do transfer mode 'map' on the texture path"):
                Session(model.path, device=str(number), mode="map")


def test_the_ledger_refuses_what_would_pass_the_budget_and_keeps_accounts() -> None:
    ledger = Ledger(Context(list_devices()[0]), 10_000)
    ledger.buffer("arena", 6_000, "the arena")
    with pytest.raises(RunError, match="the pool needs 5KB, but 6KB of the budget of 10KB are in use"):
        ledger.buffer("weights", 5_000, "the pool")
    ledger.reserve("weights", 4_000, "a slice")
    ledger.release("weights", 3_000)
    assert (ledger.total, ledger.peak) == (7_000, 10_000)
    assert ledger.peak_by_category == {"arena": 6_000, "weights": 4_000}
    assert [held for _, held in ledger.history] == [0, 6_000, 10_000, 7_000]
    assert [(category, held) for _, category, held in ledger.changes] == [
        ("arena", 6_000),
        ("weights", 4_000),
        ("weights", 1_000),
    ]
    times = [at for at, _ in ledger.history]
    spans = np.diff([*times, times[-1] + 1.0])
    expected = np.average([0, 6_000, 10_000, 7_000], weights=spans)
    assert ledger.average(times[-1] + 1.0) == pytest.approx(expected)
    ledger.close()
    assert ledger.total == 0


def test_a_device_that_refuses_memory_is_named() -> None:
    device = list_devices()[0]
    ledger = Ledger(Context(device), None)
    with pytest.raises(RunError, match=r"allocate a buffer of .* (INVALID_BUFFER_SIZE|MEM_OBJECT_ALLOCATION_FAILURE)"):
        ledger.buffer("arena", device.max_alloc_bytes + (1 << 40), "far too much")
    assert ledger.total == 0


@pytest.mark.parametrize("what", ["loads", "kernels"])
def test_an_answer_is_given_where_the_next_run_cannot_be_prepared(
    what: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was computed; the next run repeats the preparation, and raises the error if it recurs."""
    inputs, expected = model.inputs(), model.reference(model.inputs())[0]
    make, made = engine.Run, list[str]()

    def run(*arguments: Any, **options: Any) -> Run:
        made.append("run")
        if len(made) % 2 == 0:  # the next run's, made after those of the run itself
            raise RuntimeError("can't start new thread")
        return make(*arguments, **options)

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with Session(model.path) as session, monkeypatch.context() as patch:
        if what == "loads":
            patch.setattr(engine, "Run", run)
        else:
            patch.setattr(engine.Engine, "prepare", fail)
        for _ in range(2):
            with pytest.warns(
                FlashmemWarning, match="the next run could not be prepared, and begins from nothing: can't start"
            ):
                answer = session.run(None, inputs)
            np.testing.assert_allclose(answer[0], expected, rtol=0, atol=2e-5)
        patch.undo()
        for _ in range(2):
            np.testing.assert_allclose(session.run(None, inputs)[0], expected, rtol=0, atol=2e-5)
    assert loader_threads() == []


@pytest.mark.parametrize("said", ["", "enough"])
def test_an_interrupted_run_says_so(said: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt(*([said] if said else []))

    why = f"its last run failed: {said}" if said else "its last run was interrupted"
    monkeypatch.setattr(Executor, "run", interrupted)
    with Session(model.path) as session:
        with pytest.raises(KeyboardInterrupt):
            session.run(None, model.inputs())
        with pytest.raises(RunError, match=rf"^the session is closed \({why}\); open a new one$"):
            session.run(None, model.inputs())
    with Runtime() as runtime:
        opened = runtime.open(model.path)
        with pytest.raises(KeyboardInterrupt):
            opened.run(None, model.inputs())
        with pytest.raises(RunError, match=rf"^the model is closed \({why}\); open it again$"):
            opened.run(None, model.inputs())


@pytest.mark.parametrize("fails", [PinnedRing, Activations, WarmUp, HostTier], ids=lambda each: each.__name__)
def test_closing_goes_on_after_an_error(fails: Any, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise OSError("broken")

    give_own_memory(monkeypatch, list_devices()[0])
    session = Session(model.path, mode="dma", host_budget="8MB")
    session.run(None, model.inputs())
    engine = session._engine
    budgets, file = [engine.device.budget, engine.opened.tier.ledger.shared], engine.opened.file  # type: ignore[union-attr]
    engine.bindings.warm_up = engine.bindings.warm_up or WarmUp(engine.opened, engine.device, apart=False)
    monkeypatch.setattr(fails, "leave" if fails is Activations else "close", fail)
    with pytest.raises(OSError, match="broken"):
        session.close()
    session.close()
    assert file._file.closed and loader_threads() == []
    assert [budget.total for budget in budgets[: 1 if fails is HostTier else 2]] in ([0], [0, 0])


def test_an_interrupted_prefetch_closes_the_session(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: Run, *arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with Session(model.path) as session, monkeypatch.context() as patch:
        patch.setattr(Run, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.prefetch()
        with pytest.raises(RunError, match="the session is closed"):
            session.run(None, model.inputs())
