"""The ledger: the only way the runtime gets memory.

It counts every byte held on the device and in host staging by category, refuses what would pass the budget, and remembers the
total over time. Host arrays, buffers, textures and resident pages of the mapped weight file all count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

from flashmem.errors import RunError
from flashmem.program import TEXEL_BYTES, Channel
from flashmem.runtime.opencl import Bytes, Context, Memory, release
from flashmem.units import format_size

Category = Literal["constants", "arena", "outputs", "staging", "weights"]


class Ledger:
    """Accounts of one session. `budget` is in bytes, None for no limit. Safe to use from several threads."""

    def __init__(self, context: Context, budget: int | None) -> None:
        self.budget = budget
        self.by_category: dict[Category, int] = {}
        self.peak_by_category: dict[Category, int] = {}  # when the total was highest
        self.total = 0
        self.peak = 0
        self.changes: list[tuple[float, Category, int]] = []  # (seconds, category, its bytes from then on)
        self._began = (time.perf_counter(), dict[Category, int]())  # what the changes start from
        self._context = context
        self._objects: list[Memory] = []
        self._lock = threading.Lock()

    def reserve(self, category: Category, nbytes: int, what: str) -> None:
        """Count `nbytes` more.

        Raises:
            RunError: they would pass the budget; nothing is counted.
        """
        with self._lock:
            if self.budget is not None and self.total + nbytes > self.budget:
                raise RunError(
                    f"{what} needs {format_size(nbytes)}, but {format_size(self.total)} of the budget of "
                    f"{format_size(self.budget)} are in use; raise the budget or compile for it"
                )
            self._change(category, nbytes)

    def release(self, category: Category, nbytes: int) -> None:
        """Count `nbytes` less."""
        with self._lock:
            self._change(category, -nbytes)

    def _change(self, category: Category, nbytes: int) -> None:
        self.total += nbytes
        self.by_category[category] = self.by_category.get(category, 0) + nbytes
        self.changes.append((time.perf_counter(), category, self.by_category[category]))
        if self.total > self.peak:
            self.peak = self.total
            self.peak_by_category = dict(self.by_category)

    def buffer(self, category: Category, nbytes: int, what: str, *, host_visible: bool = False) -> Memory:
        """A device buffer that lives as long as the session. Raises RunError past the budget or if the device refuses."""
        return self._allocate(category, nbytes, what, lambda: self._context.buffer(nbytes, host_visible=host_visible))

    def wrapped(self, category: Category, data: Bytes, what: str) -> Memory:
        """Host memory that kernels use where it is, for as long as the session lives. Raises RunError as `buffer` does."""
        return self._allocate(category, data.nbytes, what, lambda: self._context.scratch(data))

    def image(self, category: Category, width: int, height: int, channel: Channel, what: str) -> Memory:
        """A texture that lives as long as the session. Raises RunError past the budget or if the device refuses."""
        nbytes = width * height * TEXEL_BYTES[channel]
        return self._allocate(category, nbytes, what, lambda: self._context.image(width, height, channel))

    def _allocate(self, category: Category, nbytes: int, what: str, make: Callable[[], Memory]) -> Memory:
        self.reserve(category, nbytes, what)
        try:
            handle = make()
        except RunError:
            self.release(category, nbytes)
            raise
        self._objects.append(handle)
        return handle

    def restart_history(self) -> None:
        """Begin a new account over time: a new run."""
        with self._lock:
            self._began = (time.perf_counter(), dict(self.by_category))
            self.changes = [(self._began[0], category, nbytes) for category, nbytes in self.by_category.items()]
            self.peak, self.peak_by_category = self.total, dict(self.by_category)

    @property
    def history(self) -> list[tuple[float, int]]:
        """(seconds, bytes of all categories from then on)."""
        with self._lock:
            begun, held = self._began[0], dict(self._began[1])
            moments = [(begun, sum(held.values()))]
            for at, category, nbytes in self.changes[len(held) :]:
                held[category] = nbytes
                moments.append((at, sum(held.values())))
            return moments

    def average(self, until: float) -> float:
        """Time-weighted mean of the total since the history began, in bytes; `until` as `time.perf_counter()` gives it."""
        moments = [*self.history, (until, 0)]
        weighted = sum(held * (after - at) for (at, held), (after, _) in pairwise(moments))
        duration = until - moments[0][0]
        return weighted / duration if duration > 0 else float(moments[0][1])

    def close(self) -> None:
        """Give everything back to the device."""
        while self._objects:
            release(self._objects.pop())
        with self._lock:
            for category, nbytes in self.by_category.items():
                self._change(category, -nbytes)
