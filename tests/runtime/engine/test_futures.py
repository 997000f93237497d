"""Runs in the background."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.engine.futures import BackgroundRuns, FencedFuture
from tests.support.interrupts import interrupt_everywhere
from tests.support.refused_threads import refuse_threads


def test_a_thread_that_cannot_start_fails_its_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "flashmem-async")
    runs = BackgroundRuns[str]()
    with pytest.raises(RunError, match="the thread flashmem-async could not be started"):
        runs.submit(lambda cancelled: "the first")
    assert runs.submit(lambda cancelled: "the second").result(20) == "the second"


def test_no_moment_of_an_interrupt_keeps_who_completes_a_future() -> None:
    def ask() -> None:
        futures.append(future := FencedFuture[str]())
        with suppress(TimeoutError, RuntimeError):
            future.result(timeout=0)

    def check() -> None:
        while futures:
            future = futures.pop()
            other = threading.Thread(target=future.set_result, args=("answer",), daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive() and future.result() == "answer"

    futures = list[FencedFuture[str]]()
    assert interrupt_everywhere(ask, check) > 10
