"""Runs with a time limit: deadlines, and the error of a run that its caller stopped."""

from __future__ import annotations

import math
import os
import threading
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from flashmem.base.errors import RunError
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


def too_late(timeout: float | None) -> TimeoutError:
    """The error of a run that RunStoppedError ended."""
    return TimeoutError(f"the run was stopped by its timeout of {timeout} s; allow more time, or run again")


class OneThread:
    """Exclusive use of a session, in the process that opened it: one thread at a time, not reentrant.

    `with one_thread.takes("run"):` has it in the body.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False  # read and written by the thread that holds the lock
        self._process = os.getpid()

    def takes(self, what: str, until: float = math.inf) -> Self:
        """Wait for it, and take it for `what`, a method's name.

        Raises:
            RunStoppedError: another thread had it until `until`, a time of `time.perf_counter()`.
            RunError: this very thread has it; or the process was forked since.
        """
        if os.getpid() != self._process:
            raise RunError("the session was opened before this process was forked; open one in the child")
        if not self.lock.acquire(blocking=False):
            left = min(max(0.0, until - perf_counter()), threading.TIMEOUT_MAX)
            if not self.lock.acquire(timeout=-1 if until == math.inf else left):
                raise RunStoppedError("the session was busy")
        if self.busy:
            self.lock.release()
            raise RunError(f"{what} was called while the same thread is in a run of the session; let the run end first")
        self.busy = True
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.busy = False
        self.lock.release()
