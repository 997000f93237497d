"""Ctrl-C on the command line: at most one line, exit code 130 and no traceback, whenever it comes.

Between `watch` and a command there is nothing to clean up, and the process ends at once. While a command works (`unwinding`)
a KeyboardInterrupt takes it back through its `finally` clauses; when it has ended its exit code stands.

A command that does its work in a child process (`child_environment`) says the line for both: Ctrl-C in a terminal reaches both,
and the parent cannot know whether its own signal is the child's first or second. The child is silent, and cleans up once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT_CODE = 130  # 128 + SIGINT, as shells report it
_RETRY_SECONDS = 0.02
_IMPORTING = "<frozen importlib._bootstrap>"
_PARENT_SPEAKS = "FLASHMEM_PARENT_SPEAKS"

_watching = False


def watch() -> None:
    """From here on Ctrl-C is ours: to be called once, by the process that is the command line."""
    global _watching
    _watching = True
    sys.unraisablehook = _unraisable
    signal.signal(signal.SIGINT, _end_at_once)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # `blocked` held it back while Python started


def child_environment() -> dict[str, str]:
    """The environment of a child process that will `watch`, and leaves the line to this process."""
    return {**os.environ, _PARENT_SPEAKS: "1"}


def is_silent() -> bool:
    """Whether this process leaves the line to its parent."""
    return _PARENT_SPEAKS in os.environ


@contextmanager
def unwinding() -> Iterator[None]:
    """Around a command: Ctrl-C raises KeyboardInterrupt inside, a second one ends the process. Nothing without `watch`."""
    if not _watching:
        yield
        return
    signal.signal(signal.SIGINT, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and done; Python is only to be shut down
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # of `_retry`: without a handler it would kill the process


@contextmanager
def blocked() -> Iterator[Callable[[], None]]:
    """Around the start of a child process that will `watch`, which until then would answer Ctrl-C with a traceback.

    Yields what ends it early: inside the `try` that looks after the child, because a signal that waited is raised there.
    """
    if not _watching or not hasattr(signal, "pthread_sigmask"):
        yield lambda: None
        return
    over, came = False, list[int]()  # the mask is what the child inherits; here, threads of libraries take signals for this one
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
        _retry()  # extension modules print what is raised while they load, and raise something else
        return
    # the first one's line is being said; a child's second may be its parent's word for the first
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
    """Interrupts that came inside a `__del__` or a callback of C, where nothing can be raised, are tried again."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
    elif hasattr(signal, "setitimer"):
        _retry()
