"""Runs with a time limit: deadlines, and the error of a run that its caller stopped."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

from flashmem.base.errors import RunError
from flashmem.runtime.engine.given_arrays import described

Result = TypeVar("Result")


class RunStoppedError(Exception):
    """A run ended early because its caller stopped it: the model stays usable."""


class RunControl:
    """What may end a run before its last launch.

    `asked`: what is asked before each launch; None: nothing can end the run.
    """

    __slots__ = ("asked", "cancelled", "until")

    def __init__(self, until: float = math.inf, cancelled: Callable[[], bool] | None = None) -> None:
        """`until`: the time of `time.perf_counter()` at which it ends. `cancelled`: whether its caller has cancelled it."""
        self.until = until
        self.cancelled = cancelled
        self.asked = cancelled if until == math.inf else self.stops

    def stops(self) -> bool:
        """Whether the run must end at its next launch."""
        return perf_counter() >= self.until or (self.cancelled is not None and self.cancelled())


UNCONTROLLED = RunControl()


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
    """Exclusive use of a session, in the process that opened it: one thread at a time, not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None  # the thread that has it
        self._process = os.getpid()

    @property
    def busy(self) -> bool:
        """Whether a thread has it."""
        return self._holder is not None

    def during(self, what: str, act: Callable[[], Result], until: float = math.inf) -> Result:
        """Wait for it, and call `act` for `what`, a method's name; returns its result.

        Not by a context manager: Ctrl-C can end one where its `__exit__` begins, and nobody gets the session then.

        Raises:
            RunStoppedError: another thread had it until `until`, a time of `time.perf_counter()`.
            RunError: this very thread has it; or the process was forked since.
        """
        if os.getpid() != self._process:
            raise RunError("the session was opened before this process was forked; open one in the child")
        here = threading.get_ident()
        lock = self._lock
        if self._holder == here:
            raise RunError(f"{what} was called while the same thread is in a run of the session; let the run end first")
        left = -1.0 if until == math.inf else min(max(0.0, until - perf_counter()), threading.TIMEOUT_MAX)
        try:
            if not lock.acquire(timeout=left):
                raise RunStoppedError("the session was busy")
            self._holder = here
            return act()
        finally:
            if self._holder == here:
                self._holder = None
            try:  # noqa: SIM105 - functions of Python would be more places for Ctrl-C
                lock.release()
            except RuntimeError:  # this thread did not get it
                pass
