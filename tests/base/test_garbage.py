"""Python's threshold of garbage collection: raised inside of bodies, also of several threads, and as before after the last."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from threading import Barrier, Thread

import pytest

from flashmem.base.garbage import collecting_seldom


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*before)


def test_the_threshold_is_as_before_after_the_last_body(threshold: tuple[int, int, int]) -> None:
    inside = Barrier(2)
    seen = list[int]()

    def other() -> None:
        with collecting_seldom():
            inside.wait()  # both are in their bodies
            inside.wait()  # the first one has left
            seen.append(gc.get_threshold()[0])

    thread = Thread(target=other)
    thread.start()
    with collecting_seldom(), collecting_seldom():
        inside.wait()
        seen.append(gc.get_threshold()[0])
    inside.wait()
    thread.join()
    assert min(seen) > 10 * threshold[0]
    assert gc.get_threshold() == threshold


def test_an_error_of_the_body_restores_it(threshold: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError), collecting_seldom():
        raise ValueError
    assert gc.get_threshold() == threshold


def test_a_collector_that_is_off_stays_off(threshold: tuple[int, int, int]) -> None:
    gc.set_threshold(0)
    with collecting_seldom():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
