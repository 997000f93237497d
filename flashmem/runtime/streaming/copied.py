"""Transfers that copy slices to permanent places: `dma` by copies of the device, `interleave` by copies inside kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Context, Event, Memory, event_seconds, wait
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.ring import Ring
from flashmem.runtime.streaming.transfer import BeginCopy, Transfer, TransferLoad
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.runtime.streaming.weight_objects import WeightObjects
from flashmem.schedule.loads import Load, Segment, whole_words
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import JOINED_BYTES, SPARE_PIECES


class _Homes(WeightObjects):
    """Permanent places of slices in modes that copy: textures for images, parts of buffers for the others."""

    def write(self, copier: Copier, part: Slice, data: Bytes, first_byte: int, behind: Event | None) -> CopyEvent:
        """Begin to copy `data`, which starts at `first_byte` of the slice, to the slice's place, behind an event.

        Images are copied in whole rows.
        """
        memory = self.places[part.name]
        if part.is_image:
            return copier.write_image(
                memory,
                data,
                first_row=first_byte // part.row_pitch,
                width=part.width,
                rows=data.nbytes // part.row_pitch,
                row_pitch=part.row_pitch,
                behind=behind,
            )
        return copier.write(memory, data, offset=first_byte, behind=behind)


def _write_to(copier: Copier, buffer: Memory, data: Bytes, first_byte: int, behind: Event | None) -> CopyEvent:
    return copier.write(buffer, data, offset=first_byte, behind=behind)


class _Copy(NamedTuple):
    """Bytes on the host from byte `first` of a slice on, to copy with `begin` for a load."""

    part: Slice
    data: Bytes
    first: int
    turn: TransferLoad
    begin: BeginCopy


class MovingTransfer(Transfer):
    """Base of transfers that copy slices to permanent places; a transfer made `after` another one reuses its memory objects.

    Loads of slices that the host tier keeps pass through their places there, all others through the ring.
    """

    _ring: Ring

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: MovingTransfer | None,
        tier: HostTier | None,
    ) -> None:
        super().__init__(file)
        self.follows_launches = apart = not context.device.unified_memory
        self.spare_pieces = SPARE_PIECES * apart
        self._tier = tier
        self._staging_ledger = ledger if tier is None else tier.ledger  # counts host memory
        self._copier: Copier = after._copier if after else Copier(context, ahead=apart)
        self._homes: _Homes = _Homes(ledger, slices, layout, after._homes if after else None, apart=apart)
        self.memories = self._homes.places
        if after:
            self.arrived = after.arrived

    def _new_ring(self, layout: PoolLayout) -> Ring:
        """Allocate the ring, with a piece for each thread, and spare ones where copies follow launches."""
        pieces = layout.threads + self.spare_pieces
        return Ring(self._copier.queue, self._staging_ledger, layout.ring_bytes, pieces, own_memory=self.follows_launches)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A sub-buffer of the pool, if the slices have the same order there as in the file."""
        return self._homes.joined(parts)

    def expect(self, part: Slice, segment: Segment) -> None:
        """Announce that a segment of `part` will be read soon; nothing if the host tier holds it."""
        if self._tier is None or not self._tier.holds(part, segment):
            super().expect(part, segment)

    def divided(self, loads: Sequence[Load]) -> tuple[list[Load], list[Load]]:
        """See `Transfer`."""
        tier = self._tier
        missing = {load.part.name for load in loads if tier is None or not tier.holds(load.part, load.segment)}
        return [each for each in loads if each.part.name not in missing], [each for each in loads if each.part.name in missing]

    def joins(self, loads: Sequence[Load], other: Load) -> bool:
        """Whether the segments of `loads` and of `other` follow each other in the file and are small.

        Only where copies follow launches, and the ring is their only memory on the way.
        """
        if not self.follows_launches or self.checksums is not None:
            return False
        (first, _), (last, nbytes), (begin, more) = loads[0].place, loads[-1].place, other.place
        return (
            0 <= begin - last - nbytes < POOL_ALIGNMENT
            and begin + more - first <= min(JOINED_BYTES, self._ring.piece_bytes)
            and (self._tier is None or not any(map(self._tier.keeps, (loads[-1].part, other.part))))
        )

    def load_together(self, loads: Sequence[Load], turns: Sequence[TransferLoad]) -> None:
        """See `Transfer`: the loads share a piece of the ring, and each is a copy of its own."""
        start, (last, nbytes) = loads[0].place[0], loads[-1].place
        piece = self._ring.take()
        try:
            self.file.read_into(piece[: last + nbytes - start], start)
        except BaseException:
            self._ring.give_back(piece, None)
            raise
        copies = []
        for load, turn in zip(loads, turns, strict=True):
            turn.did("read")
            begin = self._home(load.part) if load.preload else self._target(load.part)
            data = piece[load.place[0] - start :][: load.segment.nbytes]
            copies.append(_Copy(load.part, data, load.segment.first, turn, begin))
        self._copy_later(copies, piece)

    def copy_held(self, load: Load, turn: TransferLoad) -> None:
        """See `Transfer`."""
        place = None if self._tier is None else self._tier.place(load.part, load.segment)
        assert place is not None
        begin = self._home(load.part) if load.preload else self._target(load.part)
        self._copy_later([_Copy(load.part, place, load.segment.first, turn, begin)])

    def clock_apart(self) -> float:
        """What the host's clock is ahead of that of copies, in seconds."""
        marker = self._copier.queue.marker()
        wait(marker)
        return time.perf_counter() - event_seconds(marker)[1]

    def _home(self, part: Slice) -> BeginCopy:
        """Copies to the place where kernels read the slice."""
        return partial(self._homes.write, self._copier, part)

    def _target(self, part: Slice) -> BeginCopy:
        """Copies of a streamed slice."""
        return self._home(part)

    def _pass(self, part: Slice, segment: Segment, turn: TransferLoad, begin: BeginCopy) -> None:
        """Read a segment, unless the host tier holds it, and copy it on with `begin`."""
        tier = self._tier
        place = None if tier is None else tier.place(part, segment)
        if tier is None or place is None:
            self._through_ring(part, segment, turn, begin)
            return
        if not tier.holds(part, segment):
            self._read(part, segment, place, turn)
            tier.keep(part, segment)
        copy = _Copy(part, place, segment.first, turn, begin)
        if self.follows_launches:
            self._copy_later([copy])
        else:
            self._copy_now(copy)

    def _through_ring(self, part: Slice, segment: Segment, turn: TransferLoad, begin: BeginCopy) -> None:
        """Read the segment into staging and copy it on, piece by piece; images in whole rows.

        After the release, `begin` receives a piece, its first byte in the slice, and the event that the copy waits for, and
        enqueues the copy. RunError: the slice is damaged, and its last piece is not copied.
        """
        first, end, value = segment.first, segment.first + segment.nbytes, 0
        while first < end:
            piece, passed_on = self._ring.take(), False
            try:
                most = piece.nbytes // part.row_pitch * part.row_pitch if part.is_image else piece.nbytes
                data = piece[: min(most, end - first)]
                self.file.read_into(data, part.offset + first)
                last = first + data.nbytes >= end
                if self.checksums is not None:
                    value = checksum(data.data, value)
                    if last:
                        self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
                turn.did("read")
                copy = _Copy(part, data, first, turn, begin)
                if self.follows_launches:
                    passed_on = True
                    self._copy_later([copy], piece, last=last)
                else:
                    self._copy_now(copy)
                first += data.nbytes
            finally:
                if not passed_on:
                    self._ring.give_back(piece, None)

    def _copy_now(self, copy: _Copy) -> None:
        """Make a copy after the release, and wait for it."""
        copy.turn.wait_for_release()
        event = copy.begin(copy.data, copy.first, None)
        self._arrives(copy.part, event)
        event.wait()
        copy.turn.did("copy")

    def _copy_later(self, copies: Sequence[_Copy], piece: Bytes | None = None, *, last: bool = True) -> None:
        """Let copies be made once the first one's load is released, which is released last. `piece`: of the ring, which gets it
        back with the copies. `last`: of their loads; launches may follow.
        """

        def go(behind: Event | None) -> None:
            event = None
            try:
                for copy in copies:
                    event = copy.begin(copy.data, copy.first, behind)
                    self._arrives(copy.part, event)
                    copy.turn.copying(event)
                self._copier.flush()  # also if others follow: another thread may enqueue the last piece before this one
            finally:
                drop(event)  # the queue is in order, so the last copy is complete last
            for copy in copies if last else ():
                copy.turn.enqueued()

        def drop(event: CopyEvent | None = None) -> None:
            if piece is not None:
                self._ring.give_back(piece, event)

        copies[0].turn.when_released(go, drop)


class DmaTransfer(MovingTransfer):
    """`dma`: reads into a piece of the ring, or the host tier, and copies from there to the slice's place."""

    reads_ahead = True

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: DmaTransfer | None = None,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(context, ledger, file, slices, layout, after, tier)
        if after is not None and after._ring.open:  # both stay in use
            self._ring = after._ring
        else:
            self._ring = self._new_ring(layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read and copy, in pieces of the ring; from the host tier at once."""
        self._pass(part, segment, turn, self._target(part))

    def leave(self) -> None:
        """Unmap the ring."""
        self._ring.close()


class InterleaveTransfer(MovingTransfer):
    """`interleave`: reads into the slice's place in staging; kernels copy it to its permanent place as x_{w,l} of the plan
    says.

    If host and device share memory, the staging place is a part of one buffer, mapped only while a segment is read. Otherwise
    it is a staging slot, a buffer with one slice at a time, and loads are copied there from a host ring. The reason is that for
    mapped staging, the driver would keep a second copy on the host (docs/research/opencl-notes.md). Preloaded slices are always
    copied from the ring.
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: InterleaveTransfer | None = None,
        tier: HostTier | None = None,
    ) -> None:
        super().__init__(context, ledger, file, slices, layout, after, tier)
        self.reads_ahead = bool(layout.staging_slots)
        self._maps = context.queue() if layout.staging else None
        self.staged: dict[str, Memory] = _staging(ledger, slices, layout)  # the source of the kernels' copies
        # Allocated last: it is mapped, and mapped memory must not be released after a later failure.
        self._ring = self._new_ring(layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read into staging."""
        if self._maps is None:
            self._pass(part, segment, turn, self._target(part))
            return
        place, arrives = self.staged[part.name], partial(self._arrives, part)
        with self._maps.mapped(place, segment.nbytes, offset=segment.first, unmapped=arrives) as view:
            self._read(part, segment, view, turn)

    def preload(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read, and copy to the permanent place."""
        self._pass(part, segment, turn, self._home(part))

    def _target(self, part: Slice) -> BeginCopy:
        """Copies to the slice's place in staging."""
        return partial(_write_to, self._copier, self.staged[part.name])

    def leave(self) -> None:
        """Free staging, and unmap the ring."""
        self.staged.clear()
        self._ring.close()


def _staging(ledger: Ledger, slices: Sequence[Slice], layout: PoolLayout) -> dict[str, Memory]:
    """The staging memory of each streamed slice."""
    slots = [ledger.buffer("staging", nbytes, f"staging slot {number}") for number, nbytes in enumerate(layout.staging_slots)]
    if not layout.staging:
        return {name: slots[number] for name, number in layout.staging_slot_of.items()}
    whole = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=True)
    return {
        part.name: ledger.part("staging", whole, layout.staging[part.name], whole_words(part.file_bytes))
        for part in slices
        if part.name in layout.staging
    }
