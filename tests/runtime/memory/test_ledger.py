"""The ledger: memory objects and what they count, for several threads, and whatever fails."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.memory.ledger import Ledger


class FakeContext:
    """Makes objects with handles; a sub-buffer takes some milliseconds, in which other threads run."""

    device = SimpleNamespace(kind="gpu")

    def __init__(self) -> None:
        self._numbers, self.released = itertools.count(1), list[int]()
        self.failing: BaseException | None = None

    def buffer(self, nbytes: int, **options: Any) -> Any:
        if self.failing is not None:
            raise self.failing
        number = next(self._numbers)
        return SimpleNamespace(int_ptr=number, release=lambda: self._release(number))

    def sub_buffer(self, whole: Any, offset: int, nbytes: int) -> Any:
        time.sleep(0.01)
        return self.buffer(nbytes)

    def _release(self, number: int) -> None:
        if number == 2 and self.failing is not None:
            raise self.failing
        self.released.append(number)


@pytest.fixture
def context() -> FakeContext:
    return FakeContext()


@pytest.fixture
def ledger(context: FakeContext) -> Ledger:
    return Ledger(context, 1000)  # type: ignore[arg-type]


def test_threads_that_ask_for_the_same_bytes_get_the_same_sub_buffer(ledger: Ledger) -> None:
    whole, made = ledger.buffer("weights", 100, "a pool"), list[Any]()
    threads = [threading.Thread(target=lambda: made.append(ledger.part("weights", whole, 0, 10))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({part.int_ptr for part in made}) == 1 and ledger.total == 100


def test_one_thread_frees_while_another_makes_parts(ledger: Ledger) -> None:
    whole, errors, over = ledger.buffer("weights", 100, "a pool"), list[BaseException](), list[bool]()

    class Slow(dict[Any, Any]):
        """Its items are so far apart that another thread adds some."""

        def items(self) -> Any:
            for each in super().items():
                time.sleep(0.005)
                yield each

    def make() -> None:
        for first in range(8):
            ledger.part("weights", whole, first, 1)
        over.append(True)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        while not over:
            ledger._parts = Slow(ledger._parts)
            ledger.free([])
    except BaseException as error:
        errors.append(error)
    thread.join()
    assert not errors and len(ledger._parts) == 8


@pytest.mark.parametrize("error", [RunError("the driver refuses"), MemoryError(), KeyboardInterrupt()], ids=repr)
def test_what_could_not_be_allocated_is_not_counted(error: BaseException, context: FakeContext, ledger: Ledger) -> None:
    context.failing = error
    with pytest.raises(type(error)):
        ledger.buffer("weights", 100, "a pool")
    assert ledger.total == 0


def test_an_object_that_cannot_be_released_keeps_no_other_one(context: FakeContext, ledger: Ledger) -> None:
    for _ in range(3):
        ledger.buffer("arena", 100, "the arena")
    context.failing = RunError("the driver refuses")
    with pytest.raises(RunError, match="the driver refuses"):
        ledger.close()
    assert context.released == [3, 1] and ledger.total == ledger.shared.total == 0
