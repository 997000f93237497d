"""Ctrl-C that waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from flashmem.base.interrupts import held_back


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_it_waits_for_the_end_of_the_body() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("outside")
        with held_back():
            signal.raise_signal(signal.SIGINT) if not done else done.append("inside")
        done.append("again outside")
    assert done == ["outside", "inside", "again outside"]
    with held_back():
        pass


def test_the_outer_body_holds_what_an_inner_one_held() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt), held_back():
        with held_back():
            signal.raise_signal(signal.SIGINT)
        done.append("after the inner one")
    assert done


def test_a_second_one_goes_through_at_once() -> None:
    done = list[str]()
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("the first")
        signal.raise_signal(signal.SIGINT)
        done.append("the second")
    assert done == ["the first"]


def test_an_error_of_the_body_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, held_back():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("both")
    assert isinstance(caught.value.__context__, ValueError)


def test_other_threads_and_ignored_signals_are_left_as_they_are() -> None:
    seen = list[object]()

    def work() -> None:
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        seen.append(signal.getsignal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]
