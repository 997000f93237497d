"""Futures whose callbacks are all called, whatever one of them raises.

`concurrent.futures` logs an Exception that a callback raises, and calls the next one. A KeyboardInterrupt or a SystemExit ends
its loop, and leaves the method that completed the future: others would wait for ever. Here it is held back until all callbacks
were called. A thread of the user's then gets it from the method that it called; the thread of a runtime, which other models
depend on, logs it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")
_LOGGER = logging.getLogger("flashmem")


class FencedFuture(Future[Result]):
    """A future that calls all its callbacks, also after one that raises KeyboardInterrupt or SystemExit."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: dict[int, BaseException] = {}  # by the thread that called the callback

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done; at once, if it is. Raises then what `fn` raises that is no Exception."""
        super().add_done_callback(partial(_call, fn))
        self._raise()

    def cancel(self) -> bool:
        """Cancel a request that has not begun; returns whether it is cancelled. Raises, after all callbacks, what one of them
        raised that is no Exception.
        """
        cancelled = super().cancel()
        self._raise()
        return cancelled

    def raised(self) -> BaseException | None:
        """What callbacks that this thread called raised that is no Exception, the first one; None the next time."""
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
    """`act` completes `future`, in a thread that others depend on: what callbacks raise is logged."""
    act()
    error = future.raised()
    if error is not None:
        _LOGGER.error("a callback of a future raised %s", type(error).__name__, exc_info=error)


def complete_cancelled(future: FencedFuture[Any]) -> None:
    """Cancel a request for good, in a thread that others depend on: who waits for it is told."""
    complete(future, partial(Future.cancel, future))
    future.set_running_or_notify_cancel()
