"""Transfers that copy slices to permanent places: `dma` by copies of the device, `interleave` by copies inside kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Context, Event, Memory, event_seconds, wait
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.streaming.homes import Homes
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.ring import Ring
from flashmem.runtime.streaming.transfer import BeginCopy, Transfer, TransferLoad
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Load, Segment, whole_words
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import JOINED_BYTES, SPARE_PIECES


def _write_to(copier: Copier, buffer: Memory, data: Bytes, first_byte: int, behind: Event | None) -> CopyEvent:
    return copier.write(buffer, data, offset=first_byte, behind=behind)


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
        self._tier = tier
        self._reserved: dict[int, Bytes] = {}  # by thread: a piece for its next load
        self._staging_ledger = ledger if tier is None else tier.ledger  # counts host memory
        self._copier: Copier = after._copier if after else Copier(context, profiling=apart)
        self._homes: Homes = Homes(ledger, slices, layout, after._homes if after else None, apart=apart)
        self.memories = self._homes.memories
        if after:
            self.arrived = after.arrived

    def _new_ring(self, layout: PoolLayout) -> Ring:
        """Allocate the ring, with a piece for each thread, and spare ones where copies follow launches."""
        pieces = layout.threads + SPARE_PIECES * self.follows_launches
        self.most_ahead = pieces
        return Ring(self._copier.queue, self._staging_ledger, layout.ring_bytes, pieces, apart=self.follows_launches)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A sub-buffer of the pool, if the slices have the same order there as in the file."""
        return self._homes.joined(whole, parts)

    def expect(self, part: Slice, segment: Segment) -> None:
        """Announce that a segment of `part` will be read soon; nothing if the host tier holds it."""
        if self._tier is None or not self._tier.holds(part, segment):
            super().expect(part, segment)

    def holds_all(self, loads: Sequence[Load]) -> bool:
        """Whether the host tier holds the bytes of all `loads`."""
        return self._tier is not None and all(self._tier.holds(load.part, load.segment) for load in loads)

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

    def load_together(self, loads: Sequence[Load], thread: int, turns: Sequence[TransferLoad]) -> None:
        """See `Transfer`: the loads share a piece of the ring, and each is a copy of its own."""
        start, (last, nbytes) = loads[0].place[0], loads[-1].place
        piece = self._piece(thread)
        data = piece[: last + nbytes - start]
        self._read_piece(data, start, piece)
        copies = _Copies(self, piece)
        for load, turn in zip(loads, turns, strict=True):
            turn.did("read")
            begin = self._home(load.part) if load.preload else self._target(load.part)
            copies.add(load.part, data[load.place[0] - start :][: load.segment.nbytes], load.segment.first, turn, begin)
        turns[0].when_released(copies)

    def prepare(self, thread: int, stopped: Callable[[], bool]) -> bool:
        """Before a thread takes a load: get a piece. A load that is needed first thus never waits for those behind it, whose
        pieces wait for their release.
        """
        if self.follows_launches and self._ring.open and thread not in self._reserved:
            piece = self._ring.take(stopped)
            if piece is None:
                return False
            self._reserved[thread] = piece
        return True

    def settle(self, thread: int) -> None:
        """Return the piece that a thread has got."""
        piece = self._reserved.pop(thread, None)
        if piece is not None:
            self._ring.give_back(piece, None)

    def wake(self) -> None:
        """Let threads that wait for a piece look whether the run was stopped."""
        self._ring.wake()

    def _piece(self, thread: int) -> Bytes:
        piece = self._reserved.pop(thread, None)
        if piece is None:
            piece = self._ring.take()
        assert piece is not None
        return piece

    def _read_piece(self, data: Bytes, offset: int, piece: Bytes) -> None:
        """Read into `data`, in a piece that goes back if that fails. Raises RunError."""
        try:
            self.file.read_into(data, offset)
        except BaseException:
            self._ring.give_back(piece, None)
            raise

    def copy_held(self, load: Load, behind: Event | None) -> CopyEvent:
        """Enqueue and flush the copy of a load that the host tier holds. Raises RunError."""
        place = None if self._tier is None else self._tier.place(load.part, load.segment)
        assert place is not None
        begin = self._home(load.part) if load.preload else self._target(load.part)
        copy = begin(place, load.segment.first, behind)
        self._copier.flush()
        self._arrives(load.part, copy)
        return copy

    def began(self, part: Slice, copy: CopyEvent) -> None:
        """A copy of a slice is enqueued, for which launches that use it wait."""
        self._arrives(part, copy)

    def flush(self) -> None:
        """Let launches wait for the copies so far. Raises RunError."""
        self._copier.flush()

    def give_back(self, piece: Bytes, copy: CopyEvent | None) -> None:
        """Return a piece, which `copy` still reads, to the ring."""
        self._ring.give_back(piece, copy)

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

    def _pass(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad, begin: BeginCopy) -> None:
        """Read a segment, unless the host tier holds it, and copy it on with `begin`."""
        tier = self._tier
        place = None if tier is None else tier.place(part, segment)
        if tier is None or place is None:
            if self.follows_launches and self.checksums is None and segment.nbytes <= self._ring.piece_bytes:
                self._through_a_piece(part, segment, thread, turn, begin)
            else:
                self._through_ring(part, segment, thread, turn, begin)
            return
        if not tier.holds(part, segment):
            self._read(part, segment, place, turn)
            tier.keep(part, segment)
        copies = _Copies(self, None)
        copies.add(part, place, segment.first, turn, begin)
        turn.when_released(copies)

    def _through_a_piece(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad, begin: BeginCopy) -> None:
        """Read a segment into one piece. It is copied on when it is released, while the thread makes other loads."""
        piece = self._piece(thread)
        data = piece[: segment.nbytes]
        self._read_piece(data, part.offset + segment.first, piece)
        turn.did("read")
        copies = _Copies(self, piece)
        copies.add(part, data, segment.first, turn, begin)
        turn.when_released(copies)

    def _through_ring(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad, begin: BeginCopy) -> None:
        """Read the segment into staging and copy it on, in several turns of a piece; images in whole rows.

        After the release, `begin` receives the data, its first byte in the slice, and the event that the copy waits for, and
        enqueues the copy. It completes before the next turn. RunError: the slice is damaged, and its last part is not copied.
        """
        piece, end, value = self._piece(thread), segment.first + segment.nbytes, 0
        step = piece.nbytes // part.row_pitch * part.row_pitch if part.is_image else piece.nbytes
        try:
            for first in range(segment.first, end, step):
                data = piece[: min(step, end - first)]
                self.file.read_into(data, part.offset + first)
                if self.checksums is not None:
                    value = checksum(data.data, value)
                    if first + step >= end:
                        self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
                turn.did("read")
                copy = begin(data, first, turn.wait_for_release())
                self._arrives(part, copy)
                copy.wait()
                turn.did("copy")
        finally:
            self._ring.give_back(piece, None)


class _Copies:
    """The copies of loads whose bytes are in host memory: in a piece of the ring, or in the host tier."""

    def __init__(self, transfer: MovingTransfer, piece: Bytes | None) -> None:
        """`piece`: goes back to the ring with the copies."""
        self._transfer, self._piece = transfer, piece
        self._parts: list[tuple[Slice, Bytes, int, TransferLoad, BeginCopy]] = []

    def add(self, part: Slice, data: Bytes, first: int, turn: TransferLoad, begin: BeginCopy) -> None:
        """Add the copy of `data`, which starts at byte `first` of the slice."""
        self._parts.append((part, data, first, turn, begin))

    def begin(self, *, late: bool) -> None:
        """Enqueue and flush all of them; launches may follow. Raises RunError."""
        copy: CopyEvent | None = None
        try:
            for part, data, first, turn, begin in self._parts:
                if late:
                    turn.did("wait")
                copy = begin(data, first, turn.launch())
                self._transfer.began(part, copy)
                turn.copying(copy)
            self._transfer.flush()
        finally:  # the queue is in order, so the last copy is complete last
            self._give_back(copy)
        for *_, turn, _ in self._parts:
            turn.enqueued()

    def cancel(self) -> None:
        """They will never begin."""
        self._give_back(None)

    def _give_back(self, copy: CopyEvent | None) -> None:
        if self._piece is not None:
            self._transfer.give_back(self._piece, copy)


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
            self._ring, self.most_ahead = after._ring, after.most_ahead
        else:
            self._ring = self._new_ring(layout)

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read and copy, in pieces of the ring; from the host tier at once."""
        self._pass(part, segment, thread, turn, self._target(part))

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
            self._pass(part, segment, thread, turn, self._target(part))
            return
        place, arrives = self.staged[part.name], partial(self._arrives, part)
        with self._maps.mapped(place, segment.nbytes, offset=segment.first, unmapped=arrives) as view:
            self._read(part, segment, view, turn)

    def preload(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Read, and copy to the permanent place."""
        self._pass(part, segment, thread, turn, self._home(part))

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
