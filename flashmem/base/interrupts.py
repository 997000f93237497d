"""Ctrl-C: where it must not leave work half done (`held_back`), and on the command line.

The command line prints at most one line, no traceback, and ends with exit code 130.

Between `watch` and a command there is nothing to clean up, and the process ends at once. Inside a command (`unwinding`) Ctrl-C
raises KeyboardInterrupt, so that `finally` clauses run. After the command its exit code is final.

A command with a child process (`child_environment`) prints the line for both. Ctrl-C in a terminal signals both processes, and
the parent cannot know whether its own signal is the child's first or second. The child prints nothing and cleans up once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 130  # 128 + SIGINT, as shells report it
_RETRY_SECONDS = 0.02
_IMPORTING = "<frozen importlib._bootstrap>"
_PARENT_SPEAKS = "FLASHMEM_PARENT_SPEAKS"

_watching = False


@contextmanager
def asking_first() -> Iterator[Callable[[], bool]]:
    """In the body the first Ctrl-C only makes the given function true, and the next one acts as before.

    Changes nothing outside the main thread.
    """
    came = False
    before = signal.getsignal(signal.SIGINT)

    def keep(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came and callable(before):
            before(number, frame)
        came = True

    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, keep)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


class _HeldBack:
    """See `held_back`. Nothing is half done before `__enter__` has replaced the handler, and after `__exit__` put it back."""

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before) and before not in (_end_at_once, _end_in_silence):  # these leave nothing half done
                self._before = before
                with suppress(ValueError):  # another interpreter of this process
                    signal.signal(signal.SIGINT, self._keep)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._before(number, frame)
        self._came = number, frame

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)


def held_back() -> AbstractContextManager[None]:
    """In the body, Ctrl-C waits for the end of it; a second one goes through at once.

    No effect in other threads than the main one, where Python raises no KeyboardInterrupt, nor where no function of Python
    handles the signal. Takes some microseconds.
    """
    return _HeldBack()


def watch() -> None:
    """Handle Ctrl-C from here on. Called once, by the process of the command line."""
    global _watching
    _watching = True
    sys.unraisablehook = _unraisable
    signal.signal(signal.SIGINT, _end_at_once)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, (signal.SIGINT,)
        )  # `blocked` of the parent held it back while Python started


def is_command() -> bool:
    """Whether this process is one of the command line: it runs one command."""
    return _watching


def child_environment() -> dict[str, str]:
    """The environment for a child process that calls `watch` and leaves the output line to this process."""
    return {**os.environ, _PARENT_SPEAKS: "1"}


def is_silent() -> bool:
    """Whether this process leaves the output line to its parent."""
    return _PARENT_SPEAKS in os.environ


@contextmanager
def unwinding() -> Iterator[None]:
    """In the body, Ctrl-C raises KeyboardInterrupt and a second Ctrl-C ends the process. No effect without `watch`."""
    if not _watching:
        yield
        return
    signal.signal(signal.SIGINT, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is done; only Python's own shutdown follows
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # an alarm of `_retry` without a handler would kill the process


@contextmanager
def blocked() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back while a child process starts that calls `watch`; before that call it would print a traceback.

    Yields a function that ends the block early. Call it inside the `try` that cleans up the child: a signal that was held back
    is raised there.
    """
    if not _watching or not hasattr(signal, "pthread_sigmask"):
        yield lambda: None
        return
    over = False  # the child inherits the mask
    came = list[int]()  # here, other threads could receive the signal
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))

    def unblock() -> None:
        nonlocal over
        if over:
            return
        over = True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(came.pop())

    try:
        yield unblock
    finally:
        unblock()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    if not is_silent():
        os.write(2, b"flashmem: interrupted\n")
    os._exit(EXIT_CODE)


def _end_in_silence(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)


def _unwind(number: int, frame: FrameType | None) -> None:
    if _is_importing(frame) and hasattr(signal, "setitimer"):
        _retry()  # extension modules that are loading replace the exception by another one
        return
    # The line for the first Ctrl-C is being printed. A child ignores the second: it may be the parent's copy of the first.
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_silent() else _end_in_silence)
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


def _retry() -> None:
    signal.signal(signal.SIGALRM, _unwind)
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)


def _unraisable(unraisable: Any) -> None:
    """Raise an interrupt again that arrived in a `__del__` or a C callback, where exceptions are lost."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "setitimer"):
        _retry()
