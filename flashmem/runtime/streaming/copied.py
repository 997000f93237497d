"""`dma` and `interleave` where the device shares the host's memory: loader threads copy slices to permanent places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.copier import Copier, PreparedCopy
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.streaming.ring import MappedRing
from flashmem.runtime.streaming.transfer import ThreadedTransfer, TransferLoad
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.runtime.streaming.weight_objects import WeightObjects, prepared_copy
from flashmem.schedule.loads import Segment, whole_words
from flashmem.schedule.plan import PoolLayout

Prepare = Callable[[int, int], PreparedCopy]
"""The copy of a piece, given its first byte in the slice, and its number of bytes."""


class MovingTransfer(ThreadedTransfer):
    """Base of transfers that copy slices to permanent places; a transfer made `after` another one reuses its memory objects."""

    _ring: MappedRing

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: MovingTransfer | None,
    ) -> None:
        super().__init__(file)
        self._ledger = ledger
        self._copier: Copier = after._copier if after else Copier(context)
        self._homes: WeightObjects = WeightObjects(ledger, slices, layout, after._homes if after else None, apart=False)
        self.memories = self._homes.places
        if after:
            self.arrived = after.arrived

    def _new_ring(self, layout: PoolLayout) -> MappedRing:
        """Allocate the ring, with a piece for each thread."""
        return MappedRing(self._copier.queue, self._ledger, layout.ring_bytes, layout.threads)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> DeviceMemory | None:
        """A sub-buffer of the pool, if the slices have the same order there as in the file."""
        return self._homes.joined(parts)

    def _home(self, part: Slice) -> Prepare:
        """Copies to the place where kernels read the slice."""
        return partial(prepared_copy, self._copier, self.memories[part.name], part)

    def _through_ring(self, part: Slice, segment: Segment, turn: TransferLoad, prepare: Prepare) -> None:
        """Read the segment into the ring and, after its release, copy it on, piece by piece; images in whole rows.

        RunError: the slice is damaged, and its last piece is not copied.
        """
        first, end, value = segment.first, segment.first + segment.nbytes, 0
        while first < end:
            piece = self._ring.take()
            try:
                most = piece.nbytes // part.row_pitch * part.row_pitch if part.is_image else piece.nbytes
                data = piece[: min(most, end - first)]
                self.file.read_into(data, part.offset + first)
                if self.checksums is not None:
                    value = checksum(data.data, value)
                    if first + data.nbytes >= end:
                        self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
                turn.did("read")
                turn.wait_for_release()
                event = prepare(first, data.nbytes)(address_of(data))
                self.arrives(part, event)
                event.wait()
                turn.did("copy")
                first += data.nbytes
            finally:
                self._ring.give_back(piece)


class DmaTransfer(MovingTransfer):
    """`dma`: reads into a piece of the ring, and copies from there to the slice's place."""

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
        super().__init__(context, ledger, file, slices, layout, after)
        if after is not None and after._ring.open:  # both stay in use
            self._ring = after._ring
        else:
            self._ring = self._new_ring(layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read and copy, in pieces of the ring."""
        self._through_ring(part, segment, turn, self._home(part))

    def leave(self) -> None:
        """Unmap the ring."""
        self._ring.close()


class InterleaveTransfer(MovingTransfer):
    """`interleave`: reads into the slice's place in staging; kernels copy it to its permanent place as the plan says (x_{w,l}).

    The place is a part of one buffer, mapped only while a segment is read. In a plan for a device with memory of its own it is
    a slot, a buffer with one slice at a time, to which loads are copied from the ring, like preloaded slices to their places.
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
        super().__init__(context, ledger, file, slices, layout, after)
        self.reads_ahead = bool(layout.staging_slots)
        self._maps = context.queue()
        self.staged = staging_slots(ledger, layout) if layout.staging_slots else _staging(ledger, slices, layout)
        # Allocated last: it is mapped, and mapped memory must not be released after a later failure.
        self._ring = self._new_ring(layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read into staging."""
        place = self.staged[part.name]
        if self.reads_ahead:
            self._through_ring(part, segment, turn, partial(self._copier.prepare, place))
            return
        with self._maps.mapped(place, segment.nbytes, offset=segment.first, unmapped=partial(self.arrives, part)) as view:
            self._read(part, segment, view, turn)

    def preload(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read, and copy to the permanent place."""
        self._through_ring(part, segment, turn, self._home(part))

    def leave(self) -> None:
        """Free staging, and unmap the ring."""
        self.staged = {}
        self._ring.close()


def staging_slots(ledger: Ledger, layout: PoolLayout) -> dict[str, Buffer]:
    """The staging slot of each streamed slice."""
    slots = [ledger.buffer("staging", nbytes, f"staging slot {number}") for number, nbytes in enumerate(layout.staging_slots)]
    return {name: slots[number] for name, number in layout.staging_slot_of.items()}


def _staging(ledger: Ledger, slices: Sequence[Slice], layout: PoolLayout) -> dict[str, Buffer]:
    """The part of one buffer that each streamed slice passes through."""
    if not layout.staging:
        return {}
    whole = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=True)
    return {
        part.name: ledger.part("staging", whole, layout.staging[part.name], whole_words(part.file_bytes))
        for part in slices
        if part.name in layout.staging
    }
