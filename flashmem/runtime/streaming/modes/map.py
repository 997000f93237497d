"""Transfer mode `map`: kernels read pages of the mapped weight file."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from flashmem.base.threads import call_each
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.streaming.shared_pages import SharedSlice
from flashmem.runtime.streaming.transfer import ThreadedTransfer, TransferLoad, TransferRequest, view
from flashmem.schedule.loads import Segment


class MapTransfer(ThreadedTransfer):
    """`map`: kernels read slices in the mapped file; loading reads pages in, freeing drops them.

    A slice that another model on the device has too is used from that model's mapping (`places`). A model is identified by its
    ledger.
    """

    in_place = True

    def __init__(self, asked: TransferRequest) -> None:
        super().__init__(asked)
        file = asked.file
        slices = asked.slices
        together = asked.together
        file.missed = True  # populating pages does not report misses
        self._ledger = asked.ledger
        self._all = asked.places
        self._content_hashes = asked.content_hashes
        self._places: dict[str, SharedSlice] = {}
        self._together: dict[str, Buffer] = {}  # by the slices that they join
        try:
            for part in slices:
                self._places[part.name] = asked.places.take(file, part, asked.content_hashes[part.name])
            elsewhere = {part.name for part in slices if not self._places[part.name].is_in(file, part.offset)}
            apart = {whole.name for name, whole in together.items() if name in elsewhere}
            for part in slices if not self.binds_late else ():
                self.memories[part.name] = self._memory(asked.context, part, together.get(part.name), apart)
        except BaseException:
            self.close()
            raise
        after: MapTransfer | None = asked.after
        if after is not None:
            after._give_places_up(but=self._places)
        self.files = tuple(dict.fromkeys([file, *(place.file for place in self._places.values())]))

    def _memory(self, context: Context, part: Slice, whole: Slice | None, apart: Container[str]) -> DeviceMemory:
        """A slice in the mapping: a buffer, or a sub-buffer of the buffer over its `whole`."""
        if whole is None or whole.name in apart:
            return view(context, context.wrap(self._places[part.name].mapped), part)
        if whole.name not in self._together:  # buffers over one mapping must not overlap, sub-buffers may
            mapped = self.file.mapped[whole.offset : whole.offset + whole.file_bytes]
            self._together[whole.name] = context.wrap(mapped)
        return context.sub_buffer(self._together[whole.name], part.offset - whole.offset, part.file_bytes)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> DeviceMemory | None:
        """The buffer whose sub-buffers they are."""
        return self._together.get(whole.name)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read the pages in."""
        place = self._places[part.name]
        place.load(segment, (self._ledger, part.name), self._ledger, f"slice {part.name}")
        self._check(part, place.mapped[segment.first : segment.first + segment.nbytes])
        turn.did("copy")

    def expect(self, part: Slice, segment: Segment) -> None:
        """Announce that a segment of `part` will be loaded soon, unless it is in memory."""
        place = self._places[part.name]
        if not place.holds(segment):
            place.file.expect(place.offset + segment.first, segment.nbytes)

    def free(self, part: Slice) -> None:
        """Drop the pages, unless another model uses them."""
        self._places[part.name].free((self._ledger, part.name))

    def leave(self) -> None:
        """Release the buffers over the pages."""
        self.memories.clear()
        self._together.clear()

    def close(self) -> None:
        """Free all pages."""
        call_each(super().close, self._give_places_up)

    def _give_places_up(self, but: Container[str] = ()) -> None:
        """Give up all places. Free the pages of slices that are not in `but`: another transfer of this ledger uses those."""
        calls = list[Callable[[], object]]()
        for name, place in self._places.items():
            if name not in but:
                calls.append(partial(place.free, (self._ledger, name)))
            calls.append(partial(self._all.give_up, place, self._content_hashes[name]))
        call_each(*calls, self._places.clear)
