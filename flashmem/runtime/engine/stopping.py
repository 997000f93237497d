"""Runs with a time limit: deadlines, and the error of a run that its caller stopped."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from flashmem.runtime.engine.given_arrays import described


class RunStoppedError(Exception):
    """A run ended early because its caller stopped it: the model stays usable."""


def never() -> bool:
    """False: a run that nobody stops."""
    return False


def deadline(timeout: Any) -> float:
    """The time of `time.perf_counter()` in `timeout` seconds; infinity for None.

    Raises:
        ValueError: not a number of at least 0.
    """
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise ValueError(f"the timeout is {described(timeout)}; give seconds as a number, or None for no limit")
    if not timeout >= 0:
        raise ValueError(f"the timeout is {timeout}; give seconds of at least 0, or None for no limit")
    return perf_counter() + timeout


@contextmanager
def in_time(timeout: float | None) -> Iterator[None]:
    """Turn RunStoppedError in the body into TimeoutError."""
    try:
        yield
    except RunStoppedError:
        raise TimeoutError(f"the run was stopped by its timeout of {timeout} s; allow more time, or run again") from None


@contextmanager
def held_until(lock: threading.RLock, until: float) -> Iterator[None]:
    """Hold `lock` in the body.

    Raises:
        RunStoppedError: it was not free until `until`, a time of `time.perf_counter()`.
    """
    left = min(max(0.0, until - perf_counter()), threading.TIMEOUT_MAX)
    if not lock.acquire(timeout=-1 if until == math.inf else left):
        raise RunStoppedError("the session was busy")
    try:
        yield
    finally:
        lock.release()
