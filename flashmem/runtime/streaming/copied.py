"""Base of `dma` and `interleave` where the device shares the host's memory: loader threads copy slices to permanent places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.copier import Copier, PreparedCopy
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.streaming.ring import MappedRing
from flashmem.runtime.streaming.transfer import ThreadedTransfer, TransferLoad, TransferRequest
from flashmem.runtime.streaming.weight_objects import WeightObjects
from flashmem.schedule.loads import Segment
from flashmem.schedule.plan import PoolLayout

Prepare = Callable[[int, int], PreparedCopy]
"""The copy of a piece, given its first byte in the slice, and its number of bytes."""


class MovingTransfer(ThreadedTransfer):
    """Base of transfers that copy slices to permanent places; a transfer made `after` another one reuses its memory objects."""

    _ring: MappedRing

    def __init__(self, asked: TransferRequest) -> None:
        super().__init__(asked)
        self._ledger = asked.ledger
        after: MovingTransfer | None = asked.after
        self._copier: Copier = after._copier if after else Copier(asked.context)
        objects: WeightObjects | None = after._homes if after else None
        self._homes: WeightObjects = WeightObjects(asked.ledger, asked.slices, asked.layout, objects, apart=False)
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
        return partial(self._copier.prepare_slice, self.memories[part.name], part)

    def _through_ring(self, part: Slice, segment: Segment, turn: TransferLoad, prepare: Prepare) -> None:
        """Read the segment into the ring and, after its release, copy it on, piece by piece; images in whole rows.

        RunError: the slice is damaged, and its last piece is not copied.
        """
        first = segment.first
        end = segment.first + segment.nbytes
        value = 0
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


def staging_slots(ledger: Ledger, layout: PoolLayout) -> dict[str, Buffer]:
    """The staging slot of each streamed slice."""
    slots = [ledger.buffer("staging", nbytes, f"staging slot {number}") for number, nbytes in enumerate(layout.staging_slots)]
    return {name: slots[number] for name, number in layout.staging_slot_of.items()}
