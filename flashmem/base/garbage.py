"""Garbage collection less often, while many objects are made that stay.

A compiler makes a million small objects, and nearly all of them stay until it is done. Python looks for garbage after each 700
new ones, and goes through all that there are again and again: a tenth of a language model's compile time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_OBJECTS = 20000
"""New objects after which Python looks for garbage among them."""


class _Threshold:
    """Python's own threshold, which is one for all threads: as it was before, once the last of several bodies has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._bodies = 0
        self._before = gc.get_threshold()

    def enter(self) -> None:
        with self._lock:
            if not self._bodies:
                self._before = gc.get_threshold()
                gc.set_threshold(max(_OBJECTS, self._before[0]) if self._before[0] else 0, *self._before[1:])
            self._bodies += 1

    def leave(self) -> None:
        with self._lock:
            self._bodies -= 1
            if not self._bodies:
                gc.set_threshold(*self._before)


_THRESHOLD = _Threshold()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for garbage after `_OBJECTS` new objects as long as the body runs. If that is turned off, it stays off."""
    _THRESHOLD.enter()
    try:
        yield
    finally:
        _THRESHOLD.leave()
