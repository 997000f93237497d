"""What a run reports of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem import Session
from flashmem.runtime.engine import report
from flashmem.runtime.engine.ports import are_exactly
from flashmem.runtime.memory.accounts import Account
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.mini_bundle import write_mini_bundle
from tests.support.own_memory import give_own_memory


def test_the_peak_of_a_process_is_read_again_after_it_has_new_pages() -> None:
    before = report.process_peak_rss()
    assert before is not None
    for more in range(1, 4):
        array = np.ones(8 << 20, np.uint8)
        after = report.process_peak_rss()
        assert after is not None and after >= report.process_rss()  # type: ignore[operator]
        assert more > 1 or after >= before
        del array
    left = max(0, before - (report.process_rss() or 0))  # below the peak of earlier tests
    held = np.ones(left + (1 << 26), np.uint8)
    grown = report.process_peak_rss()
    assert grown is not None and grown >= before + (1 << 25) and held.all()


def test_the_history_of_an_account_that_has_not_changed_is_what_it_holds() -> None:
    account = Account(None)
    account.reserve("arena", 100, "an arena")
    account.reserve("outputs", 10, "outputs")
    account.restart_history()
    (begun, held), *others = account.history
    assert held == 110 and not others and account.average(begun + 1) == 110
    account.release("outputs", 10)
    assert [held for _, held in account.history] == [110, 100]
    assert 100 < account.average(account.changes[-1][0] + 1e-9) <= 110


def test_only_numpy_arrays_of_the_types_of_a_model_need_no_other_check() -> None:
    types = {"x": (np.dtype(np.float32), (2, 3)), "n": (np.dtype(np.int64), ())}
    x, n = np.zeros((2, 3), np.float32), np.zeros((), np.int64)
    assert are_exactly(types, {"x": x, "n": n}) and are_exactly(types, {"n": n, "x": x.T.copy().T})
    masked = np.ma.masked_array(x)
    for wrong in (
        {"x": x}, {"x": x, "n": 1}, {"x": x, "n": n, "more": n}, {"x": x, "m": n}, {"x": x.T, "n": n}, [x, n], None,
        {"x": x.astype(np.float64), "n": n}, {"x": x.astype(">f4"), "n": n}, {"x": masked, "n": n}, {"x": x[:1], "n": n},
    ):  # fmt: skip
        assert not are_exactly(types, wrong)


@pytest.mark.parametrize("mode", ["map", "dma"])
def test_the_bytes_of_the_loads_are_known_without_asking_the_device(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies tell their times behind all that are enqueued: those of the next run."""
    asked, ask = list[int](), Queue.clock_apart
    monkeypatch.setattr(Queue, "clock_apart", lambda queue: (asked.append(1), ask(queue))[1])
    give_own_memory(monkeypatch, list_devices()[0]) if mode == "dma" else None
    model = write_mini_bundle(tmp_path / "m.flashmem")
    with Session(model.path, mode=mode) as session:
        for _ in range(2):
            session.run(None, model.inputs())
            run = session.last_run
            assert run is not None and run.loaded_bytes > 0 and not asked
        assert run.loaded_bytes == sum(load.nbytes for load in run.loads) and len(asked) == (mode == "dma")
