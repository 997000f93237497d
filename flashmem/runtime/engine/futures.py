"""Futures of runs, and a thread that makes runs one after the other.

A fenced future calls all its callbacks, even if one of them raises. `concurrent.futures` logs an Exception of a callback, and
calls the next one. A KeyboardInterrupt or a SystemExit ends its loop, and leaves the method that completed the future: waiting
threads would wait for ever. Here such an exception waits until all callbacks have run. A user's thread then receives it from
the method that it called. The thread of a runtime, which other models depend on, logs it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from flashmem.base.interrupts import held_back
from flashmem.base.threads import Condition, Thread, started

Result = TypeVar("Result")
_LOGGER = logging.getLogger("flashmem")


class FencedFuture(Future[Result]):
    """A future that calls all its callbacks, even after one raises KeyboardInterrupt or SystemExit."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # Ctrl-C in `result` would leave its own one locked, and who completes it waiting
        self._raised: dict[int, BaseException] = {}  # by the thread that called the callback

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done, or now if it is. In the second case, raises what `fn` raises but
        Exception.
        """
        super().add_done_callback(partial(_call, fn))
        self._raise()

    def cancel(self) -> bool:
        """Cancel a request that has not begun; returns whether it is cancelled. After all callbacks, raises what one of them
        raised, except an Exception.
        """
        cancelled = super().cancel()
        self._raise()
        return cancelled

    def raised(self) -> BaseException | None:
        """The first non-Exception that callbacks called by this thread raised; None at the next call."""
        return self._raised.pop(threading.get_ident(), None)

    def _raise(self) -> None:
        error = self.raised()
        if error is not None:
            raise error


def _call(fn: Callable[[Any], object], future: FencedFuture[Any]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # the future logs it
    except BaseException as error:
        future._raised.setdefault(threading.get_ident(), error)


def complete(future: FencedFuture[Any], act: Callable[[], object]) -> None:
    """Complete `future` by `act`, in a thread that others depend on: exceptions of callbacks are logged."""
    act()
    error = future.raised()
    if error is not None:
        _LOGGER.error("a callback of a future raised %s", type(error).__name__, exc_info=error)


def complete_cancelled(future: FencedFuture[Any]) -> None:
    """Cancel a request in a thread that others depend on, and notify waiting threads."""
    complete(future, partial(Future.cancel, future))
    future.set_running_or_notify_cancel()


class BackgroundRuns(Generic[Result]):
    """Makes runs in a thread, in the order of their submission. The thread ends when none is left. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[FencedFuture[Result], Callable[[Callable[[], bool]], Result]]] = deque()
        self._current: FencedFuture[Result] | None = None
        self._thread: Thread | None = None

    def submit(self, run: Callable[[Callable[[], bool]], Result]) -> Future[Result]:
        """Append a run; its future. `run` is called with a function that says whether the future is cancelled.

        The future can be cancelled until it is done, also during the run.

        Raises:
            RunError: the system has no more threads.
        """
        future = FencedFuture[Result]()
        with held_back(), self._lock:
            if self._thread is None:
                self._thread = started(self._work, "flashmem-async")
            self._waiting.append((future, run))
        return future

    def cancel(self, *, current: bool = False) -> None:
        """Cancel the runs that have not begun; `current`: also the one that has, and wait for its end."""
        with self._lock:
            waiting = self._waiting
            self._waiting = deque()
            running = self._current
            thread = self._thread
        for future, _ in waiting:
            complete_cancelled(future)
        if current and running is not None:
            complete(running, partial(Future.cancel, running))
        if current and thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = self._current = None
                    return
                future, run = self._waiting.popleft()
                self._current = future
            _make(future, run)
            del future, run  # they hold the inputs, which may be large, while the thread ends


def _make(future: FencedFuture[Result], run: Callable[[Callable[[], bool]], Result]) -> None:
    """Make a run, and complete its future unless it is cancelled. It stays pending during the run, so that it can be."""
    if not future.cancelled():
        act: Callable[[], object]
        try:
            act = partial(future.set_result, run(future.cancelled))
        except BaseException as error:  # also KeyboardInterrupt: whoever waits must not wait for ever
            act = partial(future.set_exception, error)
        with suppress(InvalidStateError):  # cancelled since
            complete(future, act)
    if future.cancelled():
        future.set_running_or_notify_cancel()
