"""Forces overlap of copies: one stays in flight until another thread of the host has enqueued one too."""

from __future__ import annotations

import itertools
import threading

from tests.support.strict_device.commands import Command

SECONDS = 0.002
"""Longest time that a copy stays in flight for others: many times a thread's interval between two copies."""


class Overlap:
    """The order in which threads enqueue copies. Safe to use from several threads."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._changed = threading.Condition()
        self._count = itertools.count(1)
        self._last: dict[int, int] = {}  # by thread: the number of its last copy
        self._of: dict[Command, tuple[int, int]] = {}  # thread and number of copies without a wait

    def enqueued(self, copy: Command) -> None:
        """Record that the calling thread has enqueued a copy."""
        with self._changed:
            number, thread = next(self._count), threading.get_ident()
            self._last[thread] = number
            self._of[copy] = thread, number
            self._changed.notify_all()

    def wait(self, copies: list[Command]) -> None:
        """Wait until another thread has enqueued a copy after the last of `copies`, or the time is over."""
        with self._changed:
            mine = [self._of.pop(copy) for copy in copies if copy in self._of]
            if not mine or threading.active_count() == 1:
                return
            threads = {thread for thread, _ in mine}
            last = max(number for _, number in mine)

            def joined() -> bool:
                return any(number > last for thread, number in self._last.items() if thread not in threads)

            self._changed.wait_for(joined, self.seconds)
