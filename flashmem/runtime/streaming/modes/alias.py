"""Transfer mode `alias`: the host reads into a pool that it shares with the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from flashmem.base.threads import call_each
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.streaming.transfer import ThreadedTransfer, TransferLoad, TransferRequest, view
from flashmem.runtime.streaming.weight_objects import WeightObjects
from flashmem.schedule.loads import Segment


class AliasTransfer(ThreadedTransfer):
    """`alias`: host-visible buffers; the disk read writes directly to where kernels read.

    Each slice is a part of a buffer, mapped only while a segment of it is read. Kernels may not access memory that is mapped
    for writing. No kernel accesses a buffer as a whole. A transfer made `after` another one reuses its buffers.
    """

    def __init__(self, asked: TransferRequest) -> None:
        super().__init__(asked)
        after: AliasTransfer | None = asked.after
        self._queue: Queue = asked.context.queue() if after is None else after._queue
        if after is not None:
            self.arrived = after.arrived
        objects: WeightObjects | None = after._objects if after is not None else None
        self._objects: WeightObjects = WeightObjects(
            asked.ledger, asked.slices, asked.layout, objects, apart=False, host_visible=True
        )
        for part in asked.slices:
            self.memories[part.name] = view(asked.context, cast(Buffer, self._objects.places[part.name]), part)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read directly into the slice's place."""
        here = cast(Buffer, self._objects.places[part.name])
        arrives = partial(self.arrives, part)
        with self._queue.mapped(here, segment.nbytes, offset=segment.first, unmapped=arrives) as place:
            self._read(part, segment, place, turn)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> DeviceMemory | None:
        """A sub-buffer, if the slices have the same order there as in the file."""
        return self._objects.joined(parts)

    def leave(self) -> None:
        """Drop the views of the places, which would keep buffers that the transfer after this one frees."""
        self.memories.clear()

    def close(self) -> None:
        """Drop the references to the places."""
        call_each(super().close, self._objects.places.clear)
