"""The four transfer modes (DESIGN section 5): how a slice gets from the weight file to where kernels read it.

Each is a `Transfer`; they differ in nothing else, so that every mode gives the same bits. Everything a transfer needs is
allocated when it is made, at the places the plan's `PoolLayout` names.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flashmem.device import TransferMode
from flashmem.planning.plan import PoolLayout
from flashmem.program import Slice
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.opencl import Bytes, Context, Memory, Queue
from flashmem.runtime.weight_file import WeightFile

WORD = 16
"""Bytes of one unit of a stream lane that moves plain buffers; device places of slices are whole words."""


def file_bytes(part: Slice) -> int:
    """Bytes of a slice in the weight file, row padding included."""
    return part.row_pitch * part.height if part.is_image else part.nbytes


def whole_words(nbytes: int) -> int:
    """`nbytes` rounded up to words."""
    return -(-nbytes // WORD) * WORD


class Transfer(ABC):
    """One mode in use. `load` and `free` are called by loader threads, each with its own `thread` number."""

    preload_threads: int | None = None
    """How many threads may load W at once; None: all of them, and W may come in while layers run."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.memories: dict[str, Memory] = {}  # what kernels take as the slice

    @abstractmethod
    def load(self, part: Slice, thread: int) -> None:
        """Bring a streamed slice in, from the disk to where the plan's next step takes it from."""

    def preload(self, part: Slice, thread: int) -> None:
        """Bring a slice of W in, all the way."""
        self.load(part, thread)

    def free(self, part: Slice) -> None:  # noqa: B027 - most modes reuse a fixed place and have nothing to do
        """Let a streamed slice go, after its last use."""

    @property
    def frees(self) -> bool:
        """Whether `free` does anything."""
        return type(self).free is not Transfer.free

    def expect(self, part: Slice) -> None:
        """`part` will be loaded soon."""
        self.file.expect(part.offset, file_bytes(part))

    def close(self) -> None:
        """Give back what the ledger does not."""
        self.memories.clear()


class MapTransfer(Transfer):
    """`map`: slices are used in place from the mapped file; loading brings pages in, freeing drops them."""

    def __init__(self, context: Context, ledger: Ledger, file: WeightFile, slices: Sequence[Slice]) -> None:
        super().__init__(file)
        self._ledger = ledger
        for part in slices:
            buffer = context.wrap(file.mapped[part.offset : part.offset + file_bytes(part)])
            self.memories[part.name] = _view(context, buffer, part)

    def load(self, part: Slice, thread: int) -> None:
        """Bring the pages in."""
        self._ledger.reserve("weights", _pages(part), f"slice {part.name}")
        self.file.populate(part.offset, file_bytes(part))

    def free(self, part: Slice) -> None:
        """Drop the pages."""
        self.file.drop(part.offset, file_bytes(part))
        self._ledger.release("weights", _pages(part))


class AliasTransfer(Transfer):
    """`alias`: one host-visible pool, mapped for as long as the session lives; the read lands where kernels look."""

    def __init__(self, context: Context, ledger: Ledger, file: WeightFile, slices: Sequence[Slice], layout: PoolLayout) -> None:
        super().__init__(file)
        self._queue = context.queue()
        self._offsets = layout.offsets
        pool = ledger.buffer("weights", layout.pool_bytes, "the weight pool", host_visible=True)
        self._pool = self._queue.map(pool, layout.pool_bytes)
        for part in slices:
            place = context.sub_buffer(pool, layout.offsets[part.name], whole_words(file_bytes(part)))
            self.memories[part.name] = _view(context, place, part)

    def load(self, part: Slice, thread: int) -> None:
        """Read straight into the pool."""
        start = self._offsets[part.name]
        self.file.read_into(self._pool[start : start + file_bytes(part)], part.offset)

    def close(self) -> None:
        """Unmap the pool."""
        super().close()
        self._queue.unmap(self._pool)


class _Homes:
    """Where slices live in modes that move them there: texture slots for images, the pool for plain buffers."""

    def __init__(self, context: Context, ledger: Ledger, slices: Sequence[Slice], layout: PoolLayout) -> None:
        self.memories: dict[str, Memory] = {}
        textures = [
            ledger.image("weights", slot.width, slot.height, slot.channel, f"texture slot {number}")
            for number, slot in enumerate(layout.slots)
        ]
        pool = ledger.buffer("weights", layout.pool_bytes, "the weight pool") if layout.pool_bytes else None
        for part in slices:
            if part.name in layout.slot_of:
                self.memories[part.name] = textures[layout.slot_of[part.name]]
            else:
                self.memories[part.name] = context.sub_buffer(pool, layout.offsets[part.name], whole_words(file_bytes(part)))

    def write(self, queue: Queue, part: Slice, data: Bytes, first_byte: int) -> None:
        """Copy `data`, which starts at `first_byte` of the slice, home; images in whole rows."""
        memory = self.memories[part.name]
        if part.is_image:
            queue.write_image(
                memory,
                data,
                first_row=first_byte // part.row_pitch,
                width=part.width,
                rows=data.nbytes // part.row_pitch,
                row_pitch=part.row_pitch,
            )
        else:
            queue.write(memory, data, offset=first_byte)


class DmaTransfer(Transfer):
    """`dma`: read into a host-visible staging part (one a thread), then copied home by the thread's own queue."""

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        threads: int,
    ) -> None:
        super().__init__(file)
        self._homes = _Homes(context, ledger, slices, layout)
        self.memories = self._homes.memories
        self._queues = [context.queue() for _ in range(threads)]
        self._part_bytes = layout.staging_bytes // threads // mmap.PAGESIZE * mmap.PAGESIZE
        self._staging: Bytes | None = None
        if layout.staging_bytes:
            staging = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=True)
            self._staging = self._queues[0].map(staging, layout.staging_bytes)

    def load(self, part: Slice, thread: int) -> None:
        """Read and copy, a staging part at a time."""
        assert self._staging is not None
        start = thread * self._part_bytes
        ring = self._staging[start : start + self._part_bytes]
        step = self._part_bytes // part.row_pitch * part.row_pitch if part.is_image else self._part_bytes
        total = file_bytes(part)
        for first in range(0, total, step):
            piece = ring[: min(step, total - first)]
            self.file.read_into(piece, part.offset + first)
            self._homes.write(self._queues[thread], part, piece, first)

    def close(self) -> None:
        """Unmap staging."""
        super().close()
        if self._staging is not None:
            self._queues[0].unmap(self._staging)


class InterleaveTransfer(Transfer):
    """`interleave`: read into the slice's place in staging; kernels move it home as the plan's x_{w,l} say.

    A preloaded slice passes through the one place that staging has for all of W, so they come in one after the other.
    """

    preload_threads = 1

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        threads: int,
    ) -> None:
        super().__init__(file)
        self._homes = _Homes(context, ledger, slices, layout)
        self.memories = self._homes.memories
        self._queues = [context.queue() for _ in range(threads)]
        self._offsets = layout.staging
        self._persistent: Bytes | None = None
        self.staged: dict[str, Memory] = {}  # what stream lanes read
        if layout.staging_bytes:
            staging = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=True)
            for part in slices:
                self.staged[part.name] = context.sub_buffer(staging, layout.staging[part.name], whole_words(file_bytes(part)))
            if context.device.unified_memory:
                self._persistent = self._queues[0].map(staging, layout.staging_bytes)

    def load(self, part: Slice, thread: int) -> None:
        """Read into staging."""
        with self._host_view(part, thread) as view:
            self.file.read_into(view, part.offset)

    def preload(self, part: Slice, thread: int) -> None:
        """Read into staging, and copy home."""
        with self._host_view(part, thread) as view:
            self.file.read_into(view, part.offset)
            self._homes.write(self._queues[thread], part, view, 0)

    @contextmanager
    def _host_view(self, part: Slice, thread: int) -> Iterator[Bytes]:
        """The slice's staging place, writable by the host. Where memory is not shared, unmapping sends it to the device."""
        nbytes = file_bytes(part)
        if self._persistent is not None:
            start = self._offsets[part.name]
            yield self._persistent[start : start + nbytes]
            return
        queue = self._queues[thread]
        view = queue.map(self.staged[part.name], nbytes, invalidate=True)
        try:
            yield view
        finally:
            queue.unmap(view)

    def close(self) -> None:
        """Unmap staging."""
        super().close()
        self.staged.clear()
        if self._persistent is not None:
            self._queues[0].unmap(self._persistent)


def make_transfer(
    mode: TransferMode,
    context: Context,
    ledger: Ledger,
    file: WeightFile,
    slices: Sequence[Slice],
    layout: PoolLayout,
    threads: int,
) -> Transfer:
    """The transfer of `mode`. Raises RunError where the device or the budget refuses the memory."""
    if mode == "map":
        return MapTransfer(context, ledger, file, slices)
    if mode == "alias":
        return AliasTransfer(context, ledger, file, slices, layout)
    if mode == "dma":
        return DmaTransfer(context, ledger, file, slices, layout, threads)
    return InterleaveTransfer(context, ledger, file, slices, layout, threads)


def _view(context: Context, buffer: Memory, part: Slice) -> Memory:
    if not part.is_image:
        return buffer
    return context.image_view(buffer, part.width, part.height, part.row_pitch, part.channel)


def _pages(part: Slice) -> int:
    return -(-file_bytes(part) // mmap.PAGESIZE) * mmap.PAGESIZE
