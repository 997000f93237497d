"""The staging ring: pinned host memory that loads pass through, in pieces that loader threads take in turn.

On a device with memory of its own there are more pieces than threads. While the device copies some, each thread reads into
another one, and waits for a copy only if no piece is free.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future

from flashmem.base.apart import apart
from flashmem.runtime.memory.arena import large_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Queue
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.schedule.loads import WORD

_WHAT = "the ring that loads pass through"


class Ring:
    """The pieces of the ring. Threads call `take` and `give_back`."""

    def __init__(self, queue: Queue, ledger: Ledger, nbytes: int, pieces: int, *, own_memory: bool) -> None:
        """Allocate `nbytes` in equal `pieces`, at least one for each thread.

        `own_memory`: of the device. Then the ring is pages of the process, pinned by a buffer that nothing uses:
        one that is mapped takes memory of the device too (docs/research/opencl-notes.md, pinned memory). Otherwise it is a
        buffer that stays mapped through `queue`.

        The pages are allocated in a thread, for which the first `take` waits: 96 MiB take 14 ms, while the program is bound.

        Raises:
            RunError: the budget or the device refuses it.
        """
        self._ledger, self._lock = ledger, threading.Lock()
        self._mapped: Bytes | None = None
        self._free: list[Bytes] = []
        self._copying: deque[tuple[Bytes, CopyEvent]] = deque()
        self._pieces, self.piece_bytes = pieces, nbytes // pieces // WORD * WORD
        self._pages: Future[Bytes] | None = None
        if not nbytes:
            return
        if own_memory:
            self._pages = apart("flashmem-ring", large_pages, nbytes)
        else:
            buffer = ledger.buffer("staging", nbytes, _WHAT, host_visible=True)
            self._mapped = ledger.mapped(queue, buffer, nbytes)
            self._divide(self._mapped)

    def _divide(self, memory: Bytes) -> None:
        each = self.piece_bytes
        self._free = [memory[number * each : (number + 1) * each] for number in range(self._pieces)]

    @property
    def open(self) -> bool:
        """Whether it has memory."""
        return bool(self._pages or self._free or self._copying)

    def take(self) -> Bytes:
        """A piece, whose bytes no copy reads. Raises RunError if such a copy failed, or the memory is refused."""
        with self._lock:
            if self._pages is not None:
                memory = self._pages.result()
                self._ledger.wrapped("staging", memory, _WHAT)
                self._pages = None
                self._divide(memory)
            if self._free:
                return self._free.pop()
            piece, copy = self._copying.popleft()
        copy.wait()  # also if it is complete: only a wait lets the host write these bytes again
        return piece

    def give_back(self, piece: Bytes, copy: CopyEvent | None) -> None:
        """Return a piece, which `copy` still reads."""
        with self._lock:
            if copy is None:
                self._free.append(piece)
            else:
                self._copying.append((piece, copy))

    def close(self) -> None:
        """Unmap it, once no copy reads it. Raises RunError if one failed, or the device refuses."""
        if self._pages is not None:
            self._pages.result()
            self._pages = None
        copying = [copy for _, copy in self._copying]
        self._free.clear()
        self._copying.clear()
        try:
            for copy in copying:
                copy.wait()
        finally:
            mapped, self._mapped = self._mapped, None
            if mapped is not None:
                self._ledger.unmap(mapped)
