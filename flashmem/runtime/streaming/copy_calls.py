"""Copies of weights that wait for their release: the thread of the launches enqueues them.

A loader thread that has read a slice before its release hands the copy over, and reads on while a piece of staging is spare. So
it need not wake up at the release. Its core's caches hold what it read, and nothing of Python or the driver: what enqueueing a
copy takes there, 200 us with the interpreter lock, takes 50 in the thread of the launches (docs/research/measurements.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashmem.runtime.opencl.context import Event


@dataclass(eq=False, slots=True)
class CopyCall:
    """A function that enqueues copies behind the event of launch `after`; `drop` replaces it if the run stops before."""

    after: int
    go: Callable[[Event | None], None]
    drop: Callable[[], None]
    caller: threading.Condition | None  # waited on by the loader thread until the call is made; None: no thread waits
    spares: bool  # the loader thread, which reads on with a spare piece
    made: bool = False


class CopyCalls:
    """The calls of one run. Methods require the lock of its `LoaderRun`, but for `make` and `drop`."""

    def __init__(self, lock: threading.Lock, spare: int) -> None:
        """`spare`: pieces of staging beyond one for each thread."""
        self._lock, self._spare = lock, spare
        self._waiting: list[CopyCall] = []

    def add(self, after: int, go: Callable[[Event | None], None], drop: Callable[[], None], *, of_thread: bool) -> CopyCall:
        """Add a call. `of_thread`: of a loader thread, which must then wait for it if it has a `caller`."""
        spares = of_thread and self._spare > 0
        self._spare -= spares
        call = CopyCall(after, go, drop, threading.Condition(self._lock) if of_thread and not spares else None, spares)
        self._waiting.append(call)
        return call

    def due(self, done: int) -> list[CopyCall]:
        """Take the calls of launches up to `done`."""
        due = [call for call in self._waiting if call.after <= done]
        self._waiting = [call for call in self._waiting if call.after > done]
        return due

    def make(self, calls: list[CopyCall], launches: Mapping[int, Event]) -> None:
        """Make calls that were due, each with the event of its launch, if there is one.

        Raises:
            RunError: one failed; those behind it wait again.
        """
        while calls:
            call = calls.pop(0)
            try:
                call.go(launches.get(call.after))
            except BaseException:
                with self._lock:
                    self._waiting += calls
                raise
            finally:
                with self._lock:
                    call.made = True
                    self._spare += call.spares
                    if call.caller is not None:
                        call.caller.notify()

    def wake(self) -> None:
        """Wake the loader threads that wait for calls: the run stops."""
        for call in self._waiting:
            if call.caller is not None:
                call.caller.notify()

    def drop(self) -> None:
        """Drop all calls that were not made; no thread uses them any longer."""
        while self._waiting:
            self._waiting.pop().drop()
