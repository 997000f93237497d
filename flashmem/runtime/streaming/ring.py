"""The staging ring: host memory that loads pass through, in pieces that are used in turn."""

from __future__ import annotations

from collections import deque

from flashmem.base.apart import Apart
from flashmem.base.threads import call_each
from flashmem.runtime.memory.arena import large_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Queue
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.schedule.loads import WORD

_WHAT = "the ring that loads pass through"


def _piece_bytes(nbytes: int, pieces: int) -> int:
    """The size of each of so many equal pieces."""
    return nbytes // pieces // WORD * WORD


def _divide(memory: Bytes, pieces: int) -> list[Bytes]:
    """So many equal pieces of the memory."""
    each = _piece_bytes(memory.nbytes, pieces)
    return [memory[number * each : (number + 1) * each] for number in range(pieces)]


class MappedRing:
    """A ring on a device that shares the host's memory: a buffer that stays mapped, with a piece for each loader thread.

    Threads call `take` and `give_back`.
    """

    def __init__(self, queue: Queue, ledger: Ledger, nbytes: int, pieces: int) -> None:
        """Allocate `nbytes` in equal `pieces`; none for 0 bytes. Raises RunError: the budget or the device refuses it."""
        self._ledger = ledger
        self._mapped = None
        self._free: list[Bytes] = []
        if nbytes:
            buffer = ledger.buffer("staging", nbytes, _WHAT, host_visible=True)
            self._mapped = ledger.mapped(queue, buffer, nbytes)
            self._free = _divide(self._mapped, pieces)

    @property
    def open(self) -> bool:
        """Whether it has memory."""
        return self._mapped is not None

    def take(self) -> Bytes:
        """A piece that no other thread has."""
        return self._free.pop()

    def give_back(self, piece: Bytes) -> None:
        """Return a piece that no copy reads."""
        self._free.append(piece)

    def close(self) -> None:
        """Unmap it."""
        self._free.clear()
        mapped = self._mapped
        self._mapped = None
        if mapped is not None:
            self._ledger.unmap(mapped)


class PinnedRing:
    """A ring for a device with memory of its own: pages of the process, pinned by a buffer that nothing uses. One that is
    mapped takes memory of the device too (docs/research/opencl-notes.md, pinned memory).

    The device copies some pieces while others are read into. One thread at a time calls.
    """

    def __init__(self, ledger: Ledger, nbytes: int, pieces: int) -> None:
        """Begin to allocate `nbytes` in equal `pieces`, in a thread for which the first `take` waits: 96 MiB take 14 ms, while
        the program is bound.
        """
        self._ledger = ledger
        self._free: list[Bytes] = []
        self._copying: deque[tuple[Bytes, CopyEvent]] = deque()
        self.pieces = pieces
        self.piece_bytes = _piece_bytes(nbytes, pieces)
        self._pages: Apart[Bytes] | None = Apart("flashmem-ring", large_pages, nbytes) if nbytes else None

    @property
    def open(self) -> bool:
        """Whether it has memory."""
        return bool(self._pages or self._free or self._copying)

    def take(self) -> Bytes | None:
        """A piece whose bytes no copy reads; None if there is none now. Raises RunError if such a copy failed, or the memory is
        refused.
        """
        if self._pages is not None:
            memory = self._pages.result()
            self._ledger.wrapped("staging", memory, _WHAT)
            self._pages = None
            self._free = _divide(memory, self.pieces)
        if self._free:
            return self._free.pop()
        if not self._copying or not self._copying[0][1].ended:
            return None
        piece, copy = self._copying.popleft()
        copy.wait(ended=True)
        return piece

    @property
    def oldest(self) -> CopyEvent | None:
        """The copy after which a piece is free."""
        return self._copying[0][1] if self._copying else None

    def give_back(self, piece: Bytes, copy: CopyEvent | None) -> None:
        """Return a piece, which `copy` still reads."""
        if copy is None:
            self._free.append(piece)
        else:
            self._copying.append((piece, copy))

    def close(self) -> None:
        """Drop it, once no copy reads it. Raises RunError if one failed."""
        pages = self._pages
        self._pages = None
        if pages is not None:
            pages.wait()  # who took a piece of pages that were refused got the error
        copying = [copy for _, copy in self._copying]
        call_each(*(copy.wait for copy in copying), self._free.clear, self._copying.clear)
