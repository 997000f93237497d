"""Budgets of a runtime's models: exact accounting of held and pending bytes, however slowly pages are dropped."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem import Runtime, Session
from flashmem.base.errors import BudgetError
from flashmem.runtime.memory.accounts import Account
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.serving.runtime import OnPressure
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.shared_pages import SharedSlice
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.mini_bundle import MiniModel, write_mini_bundle

DEVICES = [str(number) for number in range(len(list_devices()))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("budgets") / "m.flashmem", preload=0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are dropped long after the launch that used them, and loads are counted long after their start."""
    rng = random.Random(1)
    for kind, name in ((WeightFile, "drop"), (SharedSlice, "load")):
        act = getattr(kind, name)

        def later(*arguments: Any, act: Any = act) -> None:
            time.sleep(rng.random() * 0.004)
            act(*arguments)

        monkeypatch.setattr(kind, name, later)


class Promises:
    """How often an account with a grant stayed within it, and how often not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = Counter[str]()
        refuse, promise = Account._refuse_beyond, Account.promise

        def taking(account: Account, nbytes: int, what: str) -> None:
            if account._promised:
                self.note("take", account, account._promised, nbytes)
            refuse(account, nbytes, what)

        def promising(account: Account, nbytes: int) -> bool:
            with account._lock:
                if nbytes < account._promised and nbytes:  # 0: the run is over, and the bytes in use count
                    self.note("lower", account, nbytes, 0)
                return promise(account, nbytes)

        monkeypatch.setattr(Account, "_refuse_beyond", taking)
        monkeypatch.setattr(Account, "promise", promising)

    def note(self, what: str, account: Account, promised: int, nbytes: int) -> None:
        self.seen[what if account.total + account._borrowed + nbytes <= promised else f"{what} beyond"] += 1


def alone(model: MiniModel, device: str) -> list[NDArray[Any]]:
    with Session(model.path, device=device) as session:
        return session.run(None, model.inputs())


def same(answers: list[NDArray[Any]], wanted: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(answers, wanted, strict=True))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_never_holds_or_takes_more_than_it_is_promised(
    device: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completed launches lower the grant by the freed bytes, not by those still to be freed."""
    wanted = alone(model, device)
    with Runtime(device=device, prepare=False) as runtime:
        opened, promises = runtime.open(model.path, mode="map"), Promises(monkeypatch)
        runtime.set_budget(opened.loaded.smallest)
        for _ in range(2):
            assert same(opened.run(None, model.inputs()), wanted)
        assert runtime.peak <= opened.loaded.smallest
    assert promises.seen.keys() == {"take", "lower"}


@pytest.mark.usefixtures("slow")
def test_what_a_run_is_promised_at_its_end_is_what_it_holds(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    left, stop = list[tuple[int, int]](), LoaderRun.stop
    with Runtime(prepare=False) as runtime:
        opened = runtime.open(model.path, mode="map")
        runtime.set_budget(opened.loaded.smallest)

        def noted(run: LoaderRun) -> None:
            bound, deadline = opened.loaded.bound, time.monotonic() + 20
            assert bound is not None
            while run._to_free or run._freeing:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            left.append((bound.ledger._promised, bound.ledger.total))
            stop(run)

        monkeypatch.setattr(LoaderRun, "stop", noted)
        opened.run(None, model.inputs())
    assert left and all(promised == held > 0 for promised, held in left)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("on_pressure", ["finish", "fail"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_run_fails_for_want_of_memory_while_budgets_move(device: str, on_pressure: OnPressure, model: MiniModel) -> None:
    """It ends, or is refused with the smallest budget. `python -m benchmarks.memory.moving_budget --runs 900` tests more."""
    wanted, rng, became = alone(model, device), random.Random(3), Counter[str]()
    with Runtime(device=device, on_pressure=on_pressure, prepare=False) as runtime:
        opened, over = runtime.open(model.path, mode="map"), threading.Event()
        smallest = opened.loaded.smallest
        limits = [smallest // 2, smallest - 1, smallest, int(1.05 * smallest), int(1.5 * smallest)]

        def move() -> None:
            while not over.is_set():
                runtime.set_budget(rng.choice(limits))
                time.sleep(rng.random() * 0.02)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            deadline = time.monotonic() + 20
            while became["right"] < 10 and time.monotonic() < deadline:
                try:
                    became["right" if same(opened.run(None, model.inputs()), wanted) else "wrong"] += 1
                except BudgetError as error:
                    assert error.smallest_bytes == smallest
                    became["refused"] += 1
        finally:
            over.set()
            mover.join()
    assert became["right"] == 10 and became["wrong"] == 0


@pytest.mark.usefixtures("slow")
def test_a_run_that_may_finish_does_so_in_what_it_was_granted(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, done, relieved = alone(model, "0"), LoaderRun.layer_done, list[Future[None]]()
    with Runtime(device="0", prepare=False) as runtime:
        opened = runtime.open(model.path, mode="map")
        runtime.set_budget(opened.loaded.smallest)

        def lower(run: LoaderRun, layer: int) -> None:
            if not relieved:
                relieved.append(runtime.set_budget(opened.loaded.smallest // 2))
            done(run, layer)

        monkeypatch.setattr(LoaderRun, "layer_done", lower)
        assert same(opened.run(None, model.inputs()), wanted)
        relieved[0].result(30)
        assert runtime.budget is not None and runtime.held <= runtime.budget


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem")]
