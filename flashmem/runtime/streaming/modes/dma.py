"""Transfer mode `dma` where the device shares the host's memory: copies from a ring, beside kernels."""

from __future__ import annotations

from flashmem.program.tensors import Slice
from flashmem.runtime.streaming.copied import MovingTransfer
from flashmem.runtime.streaming.transfer import TransferLoad, TransferRequest
from flashmem.schedule.loads import Segment


class DmaTransfer(MovingTransfer):
    """`dma`: reads into a piece of the ring, and copies from there to the slice's place."""

    reads_ahead = True

    def __init__(self, asked: TransferRequest) -> None:
        super().__init__(asked)
        after: DmaTransfer | None = asked.after
        if after is not None and after._ring.open:  # both stay in use
            self._ring = after._ring
        else:
            self._ring = self._new_ring(asked.layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read and copy, in pieces of the ring."""
        self._through_ring(part, segment, turn, self._home(part))

    def leave(self) -> None:
        """Unmap the ring."""
        self._ring.close()
