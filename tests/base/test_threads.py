"""Waits, starts and closes that Ctrl-C can end at any moment."""

from __future__ import annotations

import signal
import sys
import threading
import weakref

import pytest

from flashmem.base.apart import Apart
from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Waiters, call_each, started
from tests.support.interrupts import interrupt_everywhere


def test_all_that_wait_go_on_and_those_that_left_are_forgotten() -> None:
    waiters = Waiters()
    turns = [waiters.turn() for _ in range(3)]
    waiters.leave(turns[1])
    waiters.leave(turns[1])
    waiters.wake()
    assert [turn.acquire(blocking=False) for turn in turns] == [True, False, True]
    assert not waiters._turns


def test_nobody_is_forgotten_when_a_wake_is_interrupted() -> None:
    def wake() -> None:
        turns[:] = [waiters.turn() for _ in range(2)]
        waiters.wake()

    def check() -> None:
        waiters.wake()
        assert all(turn.acquire(blocking=False) for turn in turns) and not waiters._turns
        turns.clear()

    waiters, turns = Waiters(), list[threading.Lock]()
    assert interrupt_everywhere(wake, check) > 5


def test_a_wait_that_is_interrupted_waits_again() -> None:
    go, signalled, noted = threading.Event(), threading.Lock(), threading.Event()
    thread = started(lambda: go.wait(20), "flashmem-test")
    signalled.acquire()

    def interrupt() -> None:
        with signalled:
            pass
        while True:  # a signal that comes as the wait of CPython begins, ends no wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if noted.wait(1):
                return

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = threading.Thread(target=interrupt)
    other.start()
    try:
        signalled.release()
        thread.join()
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    finally:
        noted.set()
        signal.signal(signal.SIGINT, before)
    other.join()
    assert interrupted and thread.is_alive()
    threading.Timer(0.02, go.set).start()
    thread.join()
    assert go.is_set() and not thread.is_alive()


def test_a_thread_is_known_or_not_begun() -> None:
    """An interrupt of `Thread.start` of Python can leave the thread waiting for ever."""
    ended, begun = list[int](), list[threading.Thread]()

    def begin() -> None:
        with held_back():
            begun.append(started(ended.append, "flashmem-test", 1))

    def check() -> None:
        for thread in begun:
            thread.join()
        assert len(ended) == len(begun)

    assert interrupt_everywhere(begin, check) > 10
    assert not [thread for thread in threading.enumerate() if thread.name == "flashmem-test" and thread.is_alive()]


def test_nothing_of_python_runs_when_a_thread_object_ends() -> None:
    """Ctrl-C in such a function would be lost."""
    called: list[str] = []
    thread = started(lambda: None, "short")
    thread.join()
    gone = weakref.ref(thread)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del thread
    sys.setprofile(None)
    assert gone() is None and called == []


def test_a_thread_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    for begin in (lambda: started(print, "flashmem-test"), lambda: Apart("flashmem-test", print)):
        with pytest.raises(RunError, match=r"^the thread flashmem-test could not be started \(can't start new thread\); end"):
            begin()


def test_closing_goes_on_after_an_error() -> None:
    closed = list[str]()

    def fail(what: str) -> None:
        closed.append(what)
        raise OSError(what)

    with pytest.raises(OSError, match=r"^one$"):
        call_each(lambda: fail("one"), None, lambda: closed.append("two"), lambda: fail("three"), lambda: closed.append("four"))
    assert closed == ["one", "two", "three", "four"]


def test_closing_ends_before_an_interrupt() -> None:
    def check() -> None:
        assert closed in ([], ["one", "two"])  # [] where the call has not begun
        closed.clear()

    closed = list[str]()
    assert interrupt_everywhere(lambda: call_each(lambda: closed.append("one"), lambda: closed.append("two")), check) > 8
