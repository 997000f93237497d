"""The host tier: packed weights in pinned host memory, for a device with memory of its own.

The first run that finds the place of a slice allocated reads it straight into that place, and copies it to the device from
there. Later runs only copy. A place is written once, before the first copy from it, and never again. So copies from the tier
need no order among themselves; those to the device follow the rules of all copies (docs/research/opencl-notes.md, copies in
defined order).

Memory is a few blocks of pages of the process, each with a buffer over it (CL_MEM_USE_HOST_PTR), which pins it. Only the pages
are used: commands copy from them, and neither a command nor a map sees the buffers. For a buffer that was ever mapped, NVIDIA's
driver takes as much memory of the device (docs/research/opencl-notes.md, pinned memory).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, call_each, started
from flashmem.base.units import format_size
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.arena import large_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Context
from flashmem.schedule.host_tier import SliceIdentity, identity, tier_bytes
from flashmem.schedule.loads import Segment

_BLOCK_BYTES = 16 << 20
"""Most bytes of one pinned buffer with several slices. Pinning one takes a millisecond, while no other thread runs Python."""


class HostTier:
    """Pinned places for a fixed set of slices, and the account of a session's host memory: this tier and staging.

    After `begin`, a thread allocates the places in the order of their use. A slice that is loaded before it has a place is
    loaded without. The loads of a run call `place`, `holds` and `keep`. No segment is loaded twice at once.
    """

    def __init__(
        self, context: Context, budget: int | Budget | None, slices: Sequence[Slice] | Callable[[], Sequence[Slice]]
    ) -> None:
        """Allocates nothing yet.

        Args:
            budget: the most bytes of pinned host memory, staging included, of this session or of all that share it; None: no
                limit.
            slices: those that have places, or a function that `begin` asks for them.
        """
        self.ledger = Ledger(context, budget if isinstance(budget, Budget) else Budget(budget, "host budget"))
        self.complete: set[SliceIdentity] = set()  # slices of which all bytes have been read; it only grows
        self.version = 0  # of the places and of `complete`: what was found before may have changed with it
        self._lock = threading.Lock()
        self._places: dict[SliceIdentity, Bytes] = {}
        self._read: dict[SliceIdentity, set[Segment]] = {}
        self._closing = False
        self._failure: str | None = None
        self._slices = slices
        self._most = context.device.max_alloc_bytes
        self._blocks: list[list[Slice]] | None = None  # not begun
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Begin to allocate, unless that has begun. The first answer would wait for it: a GiB takes 0.2 s.

        Raises:
            RunError: the system has no more threads.
        """
        if self._blocks is not None or self._closing:
            return
        blocks = list(_blocks(self._slices() if callable(self._slices) else self._slices, self._most))
        with held_back():
            if blocks:
                self._thread = started(self._allocate_all, "flashmem-host-tier", blocks)
            self._blocks = blocks

    def _allocate_all(self, blocks: Sequence[Sequence[Slice]]) -> None:
        try:
            for block in blocks:
                if self._closing:
                    return
                self._allocate(block)
        except (RunError, OSError, MemoryError) as error:
            nbytes = sum(tier_bytes(part) for block in blocks for part in block)
            self._failure = (
                f"{format_size(nbytes)} of pinned host memory for weights were refused ({error}); lower the host budget"
            )

    def _allocate(self, slices: Sequence[Slice]) -> None:
        nbytes = sum(map(tier_bytes, slices))
        view = large_pages(nbytes)
        self.ledger.wrapped("weights", view, "the host tier")
        first = 0
        places = dict[SliceIdentity, Bytes]()
        for part in slices:
            places[identity(part)] = view[first : first + part.file_bytes]
            first += tier_bytes(part)
        self._places |= places
        self.version += 1

    def wait(self) -> None:
        """Wait until the places are allocated, if that has begun. Raises RunError if the budget or the device refused them."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise RunError if the budget or the device refused places."""
        if self._failure is not None:
            raise RunError(self._failure)

    def place(self, part: Slice, segment: Segment) -> Bytes | None:
        """The place of a segment; None if the tier does not keep the slice, or not yet. Raises RunError like `check`."""
        self.check()
        place = self._places.get(identity(part))
        return None if place is None else place[segment.first : segment.first + segment.nbytes]

    def keeps(self, part: Slice) -> bool:
        """Whether a slice has a place."""
        return identity(part) in self._places

    def has_all(self, part: Slice) -> bool:
        """Whether the bytes of a slice are in their place."""
        return identity(part) in self.complete

    def holds(self, part: Slice, segment: Segment) -> bool:
        """Whether the bytes of a segment are in their place."""
        key = identity(part)
        return key in self.complete or segment in self._read.get(key, ())

    def keep(self, part: Slice, segment: Segment) -> None:
        """Record that a segment has been read into its place. All loads divide a slice into the same segments until then."""
        key = identity(part)
        with self._lock:
            read = self._read.setdefault(key, set())
            read.add(segment)
            if sum(each.nbytes for each in read) == part.file_bytes:
                self.complete.add(key)
                self.version += 1
                del self._read[key]

    def close(self) -> None:
        """Free everything. No load may be in progress. Closing again does nothing."""
        self._closing = True
        call_each(None if self._thread is None else self._thread.join, self.ledger.close, self._places.clear)


def _blocks(slices: Sequence[Slice], most: int) -> Iterator[list[Slice]]:
    """Divide slices among buffers of at most `most` bytes each (0: unknown), larger ones with a single slice."""
    limit = min(_BLOCK_BYTES, most) if most else _BLOCK_BYTES
    block: list[Slice] = []
    held = 0
    for part in slices:
        if block and held + tier_bytes(part) > limit:
            yield block
            block = []
            held = 0
        block.append(part)
        held += tier_bytes(part)
    if block:
        yield block
