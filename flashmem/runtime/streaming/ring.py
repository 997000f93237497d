"""The staging ring: pinned host memory that loads pass through, with a part for each loader thread.

A thread fills pieces of its part in turn. While the device copies one, the thread reads the next one, and it waits for a copy
only before it writes to the same bytes again.
"""

from __future__ import annotations

from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Queue
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.schedule.loads import WORD


class RingPart:
    """The part of one thread, which alone uses it."""

    def __init__(self, memory: Bytes, pieces: int) -> None:
        self._memory, self._pieces = memory, pieces
        self._end = 0  # of the last piece
        self._copies: list[tuple[int, int, CopyEvent]] = []  # under way: the bytes they read, from and to

    def most(self, unit: int) -> int:
        """Bytes of a piece of `unit` bytes, or several such units. Where units are small, the part has room for all pieces."""
        return max(unit, self._memory.nbytes // self._pieces // unit * unit)

    def piece(self, nbytes: int) -> Bytes:
        """The next `nbytes` bytes, once no copy reads them any longer. Raises RunError if such a copy failed."""
        first = self._end if self._end + nbytes <= self._memory.nbytes else 0
        self._end = first + nbytes
        for begin, end, copy in self._copies:
            if begin < self._end and first < end:
                copy.wait()
        self._copies = [each for each in self._copies if not (each[0] < self._end and first < each[1])]
        return self._memory[first : self._end]

    def copying(self, copy: CopyEvent, nbytes: int) -> None:
        """`copy` reads the last piece, of `nbytes`."""
        self._copies.append((self._end - nbytes, self._end, copy))

    def settle(self) -> None:
        """Wait for all copies. Raises RunError if one failed."""
        copies, self._copies = self._copies, []
        for _, _, copy in copies:
            copy.wait()


class Ring:
    """The ring of all threads, always mapped."""

    def __init__(self, queue: Queue, ledger: Ledger, nbytes: int, threads: int, pieces: int) -> None:
        """Map it through `queue`; a part has room for `pieces` pieces. Raises RunError: the budget or the device refuses."""
        self._ledger = ledger
        self._mapped: Bytes | None = None
        self._parts: list[RingPart] = []
        if nbytes:
            memory = ledger.buffer("staging", nbytes, "the ring that loads pass through", host_visible=True)
            mapped = self._mapped = ledger.mapped(queue, memory, nbytes)
            each = nbytes // threads // WORD * WORD
            self._parts = [RingPart(mapped[number * each : (number + 1) * each], pieces) for number in range(threads)]

    @property
    def open(self) -> bool:
        """Whether it is mapped."""
        return self._mapped is not None

    def part(self, thread: int) -> RingPart:
        """The part of a thread."""
        return self._parts[thread]

    def close(self) -> None:
        """Unmap it, once no copy reads it. Raises RunError if one failed, or the device refuses."""
        parts, self._parts = self._parts, []
        try:
            for part in parts:
                part.settle()
        finally:
            mapped, self._mapped = self._mapped, None
            if mapped is not None:
                self._ledger.unmap(mapped)
