"""Transfer mode `interleave` where the device shares the host's memory: kernels copy from staging (`streaming.interleaved`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.handles import Buffer
from flashmem.runtime.streaming.copied import MovingTransfer, staging_slots
from flashmem.runtime.streaming.transfer import TransferLoad, TransferRequest
from flashmem.schedule.loads import Segment, whole_words
from flashmem.schedule.plan import PoolLayout


class InterleaveTransfer(MovingTransfer):
    """`interleave`: reads into the slice's place in staging; kernels copy it to its permanent place as the plan says (x_{w,l}).

    The place is a part of one buffer, mapped only while a segment is read. In a plan for a device with memory of its own it is
    a slot, a buffer with one slice at a time, to which loads are copied from the ring, like preloaded slices to their places.
    """

    def __init__(self, asked: TransferRequest) -> None:
        super().__init__(asked)
        ledger = asked.ledger
        layout = asked.layout
        self.reads_ahead = bool(layout.staging_slots)
        self._maps = asked.context.queue()
        self.staged = staging_slots(ledger, layout) if layout.staging_slots else _allocate_staging(ledger, asked.slices, layout)
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


def _allocate_staging(ledger: Ledger, slices: Sequence[Slice], layout: PoolLayout) -> dict[str, Buffer]:
    """The part of one buffer that each streamed slice passes through."""
    if not layout.staging:
        return {}
    whole = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=True)
    return {
        part.name: ledger.part("staging", whole, layout.staging[part.name], whole_words(part.file_bytes))
        for part in slices
        if part.name in layout.staging
    }
