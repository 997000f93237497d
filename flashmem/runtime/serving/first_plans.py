"""First plans of models: a thread makes them while the first run follows the plan of its bundle."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import ClassVar

from flashmem.base.errors import BudgetError
from flashmem.base.threads import Thread, started
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.serving.arbiter import MemoryArbiter

_TURN_SECONDS = 1e-4
"""Longest time that a planning thread keeps the interpreter from other threads."""


class ShortTurns:
    """Context manager: while it is entered, Python threads switch at least every `_TURN_SECONDS`.

    By default a thread that computes keeps the interpreter for 5 ms after another thread requests it. The thread that enqueues
    launches requests it after each call of the driver, and the device waits with it. A plan of 0.4 s delayed a run by as much.
    """

    _lock: ClassVar = threading.Lock()
    _entered: ClassVar = 0
    _before: ClassVar = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not ShortTurns._entered:
                ShortTurns._before = sys.getswitchinterval()
                sys.setswitchinterval(min(ShortTurns._before, _TURN_SECONDS))
            ShortTurns._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            ShortTurns._entered -= 1
            if not ShortTurns._entered:
                sys.setswitchinterval(ShortTurns._before)


class Planner:
    """Makes plans in a thread, which ends when all models have one."""

    def __init__(self, device: DeviceInUse, arbiter: MemoryArbiter) -> None:
        self._device = device
        self._arbiter = arbiter
        self._thread: Thread | None = None
        self._closing = False

    def wake(self) -> None:
        """Make the missing plans. One thread calls this."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._arbiter.unplanned() is not None:
            self._thread = started(self._work, "flashmem-planner")

    def _work(self) -> None:
        with ShortTurns():
            planned = []
            while not self._closing and (loaded := self._arbiter.unplanned()) is not None:
                planned.append(loaded)
                with suppress(BudgetError):  # raised again at its turn
                    self._arbiter.made_plan(loaded)
            for loaded in planned:
                if not self._closing:
                    with suppress(BudgetError):
                        _ = loaded.smallest  # computed now, because a change of the budget needs it while others wait

    def close(self) -> None:
        """End after the current plan."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
