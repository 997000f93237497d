"""Staging: pinned host memory that loads pass through on their way to the device, a part for each loader thread."""

from __future__ import annotations

from flashmem.runtime.copier import CopyEvent
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.opencl import Bytes, Queue
from flashmem.runtime.schedule import WORD


class StagingPart:
    """Staging of one thread, in two halves: one is read into while the other is copied from.

    A half is given out again once the copy that reads it is done; nobody waits for a copy before that.
    """

    def __init__(self, memory: Bytes) -> None:
        half = memory.nbytes // 2 // WORD * WORD
        self._memory, self._half = memory, half
        self._copies: list[CopyEvent | None] = [None, None]
        self._turn = 0

    def piece_bytes(self, unit: int) -> int:
        """The most bytes of a piece of whole units: of a half, or of all where that is less than one unit."""
        room = self._half if unit <= self._half else self._memory.nbytes
        return room // unit * unit

    def next(self, nbytes: int) -> Bytes:
        """Where the next piece is read to, of `nbytes` bytes. Raises RunError: the copy of an earlier piece failed."""
        self._turn ^= 1
        if nbytes > self._half:
            self.settle()
            return self._memory[:nbytes]
        self._wait(self._turn)
        start = self._turn * self._half
        return self._memory[start : start + nbytes]

    def copying(self, copy: CopyEvent) -> None:
        """`copy` reads the piece that was given out last."""
        self._copies[self._turn] = copy

    def settle(self) -> None:
        """Return when no copy reads it. Raises RunError: one failed."""
        for half in (0, 1):
            self._wait(half)

    def _wait(self, half: int) -> None:
        copy, self._copies[half] = self._copies[half], None
        if copy is not None:
            copy.wait()


class Staging:
    """The parts of all threads. They are mapped as long as it lives: copies read the host's pointer."""

    def __init__(self, queue: Queue, ledger: Ledger, nbytes: int, threads: int) -> None:
        """Mapped by way of `queue`. Raises RunError past the budget or if the device refuses."""
        self._queue = queue
        self._mapped: Bytes | None = None
        self.parts: list[StagingPart] = []
        if nbytes:
            memory = ledger.buffer("staging", nbytes, "the part of staging that loads pass through", host_visible=True)
            self._mapped, size = queue.map(memory, nbytes), nbytes // threads // WORD * WORD
            self.parts = [StagingPart(self._mapped[n * size : (n + 1) * size]) for n in range(threads)]

    def close(self) -> None:
        """Unmap it, when nothing is copied any more. Raises RunError: a copy failed."""
        parts, self.parts = self.parts, []
        try:
            for part in parts:
                part.settle()
        finally:
            if self._mapped is not None:
                self._queue.unmap(self._mapped)
                self._mapped = None
