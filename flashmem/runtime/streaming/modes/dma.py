"""Transfer mode `dma` where the device shares the host's memory: copies from a ring, beside kernels."""

from __future__ import annotations

from collections.abc import Sequence

from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.streaming.copied import MovingTransfer
from flashmem.runtime.streaming.transfer import TransferLoad
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Segment
from flashmem.schedule.plan import PoolLayout


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
