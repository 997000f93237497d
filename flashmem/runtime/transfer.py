"""The four transfer modes (DESIGN section 5): how a slice gets from the weight file to where kernels read it.

Each is a `Transfer`; they differ in nothing else, so that every mode gives the same bits. Everything a transfer needs is
allocated when it is made, at the places the plan's `PoolLayout` names.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

from flashmem.device import TransferMode
from flashmem.digests import Digest, digest
from flashmem.pages import whole_pages
from flashmem.planning.plan import PoolLayout
from flashmem.program import Slice
from flashmem.runtime.copier import Copier
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.opencl import Bytes, Context, Memory, Queue
from flashmem.runtime.schedule import WORD, Band, Step, whole_words
from flashmem.runtime.weight_file import WeightFile


class Turn(Protocol):
    """One load of a run, as a transfer sees it."""

    def opened(self) -> None:
        """Return once its read gate is open: only then may places that the plan gave to it be written."""
        ...

    def did(self, what: Step) -> None:
        """What it has done since it began, or since this was called last."""
        ...


class Transfer(ABC):
    """One mode in use. `load` and `free` are called by loader threads, each with its own `thread` number."""

    in_place = False
    """Whether kernels read the mapped file."""

    reads_ahead = False
    """Whether a load may begin before its gate is open: what it reads waits in a part of staging that is its thread's own."""

    digests: Mapping[str, Digest] | None = None
    """What each slice must have when it comes in, as a whole then; None: that is not checked."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.memories: dict[str, Memory] = {}  # what kernels take as the slice

    @abstractmethod
    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring a band of a streamed slice in, from the disk to where the plan's next step takes it from."""

    def preload(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring a band of a slice of W in, all the way."""
        self.load(part, band, thread, turn)

    def free(self, part: Slice) -> None:  # noqa: B027 - most modes reuse a fixed place and have nothing to do
        """Let a streamed slice go, after its last use."""

    @property
    def frees(self) -> bool:
        """Whether `free` does anything."""
        return type(self).free is not Transfer.free

    def expect(self, part: Slice, band: Band) -> None:
        """A band of `part` will be loaded soon."""
        self.file.expect(part.offset + band.first, band.nbytes)

    def _read(self, part: Slice, band: Band, place: Bytes, turn: Turn) -> None:
        """Read the band into `place`. Raises RunError where the slice is damaged, or cannot be read."""
        self.file.read_into(place, part.offset + band.first)
        self._check(part, place)
        turn.did("read")

    def _check(self, part: Slice, place: Bytes) -> None:
        if self.digests is not None:
            self.file.check_digest(f"slice {part.name!r}", digest(place.data), self.digests[part.name])

    def _pieces(self, part: Slice, band: Band, ring: Bytes, turn: Turn) -> Iterator[tuple[Bytes, int]]:
        """The band, read into `ring` a piece after the other, each with its first byte in the slice; images in whole rows.

        Its gate is open when a piece is given out, and who takes it copies it.
        """
        step = ring.nbytes // part.row_pitch * part.row_pitch if part.is_image else ring.nbytes
        end, value = band.first + band.nbytes, digest(b"")
        for first in range(band.first, end, step):
            piece = ring[: min(step, end - first)]
            self.file.read_into(piece, part.offset + first)
            if self.digests is not None:
                value = digest(piece.data, value)
            turn.did("read")
            turn.opened()
            yield piece, first
            turn.did("copy")
        if self.digests is not None:
            self.file.check_digest(f"slice {part.name!r}", value, self.digests[part.name])

    def leave(self) -> None:  # noqa: B027 - some have places of weights only
        """Give back what is not a place of weights: the transfer that is made `after` this one takes those over."""

    def close(self) -> None:
        """Give back what the ledger does not."""
        self.leave()
        self.memories.clear()


class MapTransfer(Transfer):
    """`map`: slices are used in place from the mapped file; loading brings pages in, freeing drops them."""

    in_place = True

    def __init__(
        self, context: Context, ledger: Ledger, file: WeightFile, slices: Sequence[Slice], after: MapTransfer | None = None
    ) -> None:
        super().__init__(file)
        file.missed = True  # populating does not tell
        self._ledger = ledger
        self._slices = slices
        self._entered: Counter[str] = after._entered if after else Counter()  # bytes, by slice
        self._lock = threading.Lock()
        for part in slices:
            if after and part.name in after.memories:
                self.memories[part.name] = after.memories[part.name]
                continue
            buffer = context.wrap(file.mapped[part.offset : part.offset + part.file_bytes])
            self.memories[part.name] = _view(context, buffer, part)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring the pages in."""
        start = part.offset + band.first
        self._ledger.reserve("weights", whole_pages(band.nbytes), f"slice {part.name}")
        with self._lock:
            self._entered[part.name] += whole_pages(band.nbytes)
        self.file.populate(start, band.nbytes)
        self._check(part, self.file.mapped[start : start + band.nbytes])
        turn.did("copy")

    def free(self, part: Slice) -> None:
        """Drop the pages."""
        with self._lock:
            entered = self._entered.pop(part.name, 0)
        if entered:
            self.file.drop(part.offset, part.file_bytes)
            self._ledger.release("weights", entered)

    def close(self) -> None:
        """Drop all pages that came in."""
        super().close()
        for part in self._slices:
            self.free(part)


class AliasTransfer(Transfer):
    """`alias`: one host-visible pool, mapped for as long as the session lives; the read lands where kernels look."""

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: AliasTransfer | None = None,
    ) -> None:
        super().__init__(file)
        self._offsets = layout.offsets
        self._queue: Queue = context.queue() if after is None else after._queue
        self._pool: Bytes | None = None
        if after is not None:
            self._pool, self.memories = after._pool, after.memories
            return
        if not slices:  # a device has no buffers without bytes
            return
        pool = ledger.buffer("weights", layout.pool_bytes, "the weight pool", host_visible=True)
        self._pool = self._queue.map(pool, layout.pool_bytes)
        for part in slices:
            place = context.sub_buffer(pool, layout.offsets[part.name], whole_words(part.file_bytes))
            self.memories[part.name] = _view(context, place, part)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read straight into the pool."""
        start = self._offsets[part.name] + band.first
        assert self._pool is not None
        self._read(part, band, self._pool[start : start + band.nbytes], turn)

    def close(self) -> None:
        """Unmap the pool."""
        super().close()
        if self._pool is not None:
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
                self.memories[part.name] = context.sub_buffer(pool, layout.offsets[part.name], whole_words(part.file_bytes))

    def write(self, copier: Copier, part: Slice, data: Bytes, first_byte: int) -> None:
        """Copy `data`, which starts at `first_byte` of the slice, home; images in whole rows."""
        memory = self.memories[part.name]
        if part.is_image:
            copier.write_image(
                memory,
                data,
                first_row=first_byte // part.row_pitch,
                width=part.width,
                rows=data.nbytes // part.row_pitch,
                row_pitch=part.row_pitch,
            )
        else:
            copier.write(memory, data, offset=first_byte)


class _Ring:
    """Pinned host memory that loads pass through: a part for each loader thread, and a queue that copies out of it."""

    def __init__(self, context: Context, ledger: Ledger, nbytes: int, threads: int) -> None:
        self.copiers = [Copier(context) for _ in range(threads)]
        self._part_bytes = nbytes // threads // WORD * WORD
        self._mapped: Bytes | None = None
        if nbytes:
            memory = ledger.buffer("staging", nbytes, "the part of staging that loads pass through", host_visible=True)
            self._mapped = self.copiers[0].queue.map(memory, nbytes)

    def part(self, thread: int) -> Bytes:
        """What that thread has of it."""
        assert self._mapped is not None
        return self._mapped[thread * self._part_bytes : (thread + 1) * self._part_bytes]

    def close(self) -> None:
        """Unmap it."""
        if self._mapped is not None:
            self.copiers[0].queue.unmap(self._mapped)
            self._mapped = None


class DmaTransfer(Transfer):
    """`dma`: read into the thread's part of staging, then copied home by the thread's own queue."""

    reads_ahead = True

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: DmaTransfer | None = None,
    ) -> None:
        super().__init__(file)
        self._homes: _Homes = after._homes if after else _Homes(context, ledger, slices, layout)
        self.memories = self._homes.memories
        self._ring = _Ring(context, ledger, layout.staging_bytes, layout.threads)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read and copy, a staging part at a time."""
        for piece, first in self._pieces(part, band, self._ring.part(thread), turn):
            self._homes.write(self._ring.copiers[thread], part, piece, first)

    def leave(self) -> None:
        """Unmap staging."""
        self._ring.close()


class InterleaveTransfer(Transfer):
    """`interleave`: read into the slice's place in staging; kernels move it home as the plan's x_{w,l} say.

    Where host and device share memory, staging is mapped for as long as the session lives. Elsewhere it is the device's, and
    loads are copied there out of a ring that is the host's: were staging mapped, the driver would keep a second one on the
    host (docs/opencl-notes.md). Preloaded slices are copied home out of that ring, or out of the entrance that staging has
    for W, while layers run.
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: InterleaveTransfer | None = None,
    ) -> None:
        super().__init__(file)
        self._homes: _Homes = after._homes if after else _Homes(context, ledger, slices, layout)
        self.memories = self._homes.memories
        self._offsets = layout.staging
        self._entrance = layout.entrance_bytes
        self._ring = _Ring(context, ledger, layout.ring_bytes, layout.threads)
        self.reads_ahead = bool(layout.ring_bytes)
        self._mapped: Bytes | None = None  # staging, where it is shared
        self.staged: dict[str, tuple[Memory, int]] = {}  # what stream lanes read, and from which byte on
        if layout.staging_bytes:
            shared = not layout.ring_bytes
            self._staging = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=shared)
            for part in slices:
                start, nbytes = layout.staging[part.name], whole_words(part.file_bytes)
                if start + nbytes <= layout.staging_bytes:  # else it is of W, and passes through in pieces
                    self.staged[part.name] = self._staging, start
            if shared:
                self._queue = context.queue()
                self._mapped = self._queue.map(self._staging, layout.staging_bytes)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read into staging."""
        if self._mapped is not None:
            self._read(part, band, self._place(part, band.first, band.nbytes), turn)
            return
        for piece, first in self._pieces(part, band, self._ring.part(thread), turn):
            self._ring.copiers[thread].write(self._staging, piece, offset=self._offsets[part.name] + first)

    def preload(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read, and copy home."""
        if self._mapped is None:
            through = self._ring.part(thread)
        else:
            through = self._place(part, thread * self._entrance, self._entrance)
        for piece, first in self._pieces(part, band, through, turn):
            self._homes.write(self._ring.copiers[thread], part, piece, first)

    def _place(self, part: Slice, first: int, nbytes: int) -> Bytes:
        """Where bytes of the slice are staged, as the host sees them."""
        assert self._mapped is not None
        start = self._offsets[part.name] + first
        return self._mapped[start : start + nbytes]

    def leave(self) -> None:
        """Unmap staging."""
        self.staged.clear()
        self._ring.close()
        if self._mapped is not None:
            self._queue.unmap(self._mapped)
            self._mapped = None


def make_transfer(
    mode: TransferMode,
    context: Context,
    ledger: Ledger,
    file: WeightFile,
    slices: Sequence[Slice],
    layout: PoolLayout,
    digests: Mapping[str, Digest] | None = None,
    after: Transfer | None = None,
) -> Transfer:
    """The transfer of `mode`, which checks slices against `digests`. `after`: one of the same mode for another shape variant of
    the bundle, which has left; its places of weights, which are those of `layout` (`residence.share_places`), are taken over.

    Raises:
        RunError: device or budget refuse.
    """
    made: Transfer
    if mode == "map":
        made = MapTransfer(context, ledger, file, slices, cast(MapTransfer | None, after))
    elif mode == "alias":
        made = AliasTransfer(context, ledger, file, slices, layout, cast(AliasTransfer | None, after))
    elif mode == "dma":
        made = DmaTransfer(context, ledger, file, slices, layout, cast(DmaTransfer | None, after))
    else:
        made = InterleaveTransfer(context, ledger, file, slices, layout, cast(InterleaveTransfer | None, after))
    made.digests = digests
    return made


def _view(context: Context, buffer: Memory, part: Slice) -> Memory:
    if not part.is_image:
        return buffer
    return context.image_view(buffer, part.width, part.height, part.row_pitch, part.channel)
