"""`dma` and `interleave` on a device with memory of its own: reads into pinned memory, and copies that follow launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Context, Event, Memory
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.streaming.ahead import AheadRun, Copy, Divided, Read, TimedLoad
from flashmem.runtime.streaming.background_reads import BackgroundReads
from flashmem.runtime.streaming.copied import staging_slots
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.ring import PinnedRing
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.runtime.streaming.weight_objects import WeightObjects, begin_copy
from flashmem.schedule.loads import Load
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import JOINED_BYTES, SPARE_PIECES


class AheadTransfer(Transfer):
    """Weights pass through the host tier, or through the ring. A transfer made `after` another one reuses its memory.

    In `dma` they are copied to their permanent places, like preloaded ones in `interleave`. Others go to a staging slot there,
    a buffer with one slice at a time, from where kernels copy them on. Slots are no mapped memory, of which the driver would
    keep a second copy on the host (docs/research/opencl-notes.md).
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: AheadTransfer | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """Raises RunError: the budget or the device refuses."""
        super().__init__(file)
        self._tier = tier
        self._copier: Copier = after._copier if after else Copier(context, ahead=True)
        self.clock_apart = self._copier.queue.clock_apart  # reports keep it, and so must not keep the transfer
        self._homes: WeightObjects = WeightObjects(ledger, slices, layout, after._homes if after else None, apart=True)
        self.memories = self._homes.places
        if after:
            self.arrived = after.arrived
        self.staged = staging_slots(ledger, layout)
        if after is not None and not self.staged and after.ring.open:  # both stay in use
            self.ring: PinnedRing = after.ring
        else:
            host = ledger if tier is None else tier.ledger
            self.ring = PinnedRing(host, layout.ring_bytes, layout.threads + SPARE_PIECES)
        self.reads = BackgroundReads(file, self.ring.pieces)
        self._sums: dict[str, int] = {}  # by slice that is being read: the checksum so far
        self._divided: tuple[object, Divided] | None = None

    def begin(
        self,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> AheadRun:
        """See `Transfer`."""
        return AheadRun(self, loads, done=done, admit=admit)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A sub-buffer of the pool, if the slices have the same order there as in the file."""
        return self._homes.joined(parts)

    def divided(self, loads: Sequence[Load], *, apart: bool) -> Divided:
        """The loads of a run; with `apart`, those of slices that the host tier holds completely are apart from the others."""
        held = len(self._tier.complete) if self._tier is not None else 0
        key = (loads, apart, held)
        if self._divided is None or self._divided[0] != key:
            self._divided = key, self._divide(loads, apart=apart)
        return self._divided[1]

    def _divide(self, loads: Sequence[Load], *, apart: bool) -> Divided:
        places = [self._place(load, held=True) for load in loads]
        whole = {load.part.name for load in loads} if apart else set()
        whole -= {load.part.name for load, place in zip(loads, places, strict=True) if place is None}
        held: dict[int, list[tuple[Load, Bytes]]] = {}
        for load, place in zip(loads, places, strict=True):
            if place is not None and load.part.name in whole:
                held.setdefault(load.after, []).append((load, place))
        others = [load for load in loads if load.part.name not in whole]
        return Divided(held, others, Counter(load.part.name for load in loads), frozenset(load.after for load in loads))

    def _place(self, load: Load, *, held: bool) -> Bytes | None:
        """Where the host tier keeps the bytes of a load; None if it does not, or, with `held`, not yet."""
        tier = self._tier
        if tier is None or (held and not tier.holds(load.part, load.segment)):
            return None
        return tier.place(load.part, load.segment)

    def joins(self, loads: Sequence[Load], other: Load) -> bool:
        """Whether the segments of `loads` and `other` follow each other in the file, are small, and pass through the ring."""
        if self.checksums is not None:
            return False
        (first, _), (last, nbytes), (begin, more) = loads[0].place, loads[-1].place, other.place
        return (
            0 <= begin - last - nbytes < POOL_ALIGNMENT
            and begin + more - first <= min(JOINED_BYTES, self.ring.piece_bytes)
            and (self._tier is None or not any(map(self._tier.keeps, (loads[-1].part, other.part))))
        )

    def reads_of(self, loads: Sequence[Load]) -> Iterator[Read]:
        """The reads of loads that are joined; of a single one in pieces of the ring, images in whole rows."""
        start, (last, nbytes) = loads[0].place[0], loads[-1].place
        if len(loads) > 1:
            copies = [Copy(TimedLoad(load), load.segment.first, load.segment.nbytes, load.place[0] - start) for load in loads]
            yield Read(start, last + nbytes - start, copies)
            return
        load, timed = loads[0], TimedLoad(loads[0])
        part, segment, place = load.part, load.segment, self._place(load, held=False)
        most = self.ring.piece_bytes
        if part.is_image:
            most = most // part.row_pitch * part.row_pitch
        held = place is not None and self._tier is not None and self._tier.holds(part, segment)
        for at in range(0, nbytes, nbytes if held else most):
            count = nbytes if held else min(most, nbytes - at)
            copies = [Copy(timed, segment.first + at, count, last=at + count == nbytes)]
            yield Read(start + at, count, copies, None if place is None else place[at : at + count], held)

    def has_read(self, read: Read) -> None:
        """Compare the checksum of a slice that is read, and keep it in the host tier. Raises RunError: it is damaged."""
        if self.checksums is None and read.piece is not None:
            return
        copy, memory = read.copies[-1], read.memory
        part, segment = copy.timed.load.part, copy.timed.load.segment
        assert memory is not None
        if self.checksums is not None:
            value = checksum(memory.data, self._sums.pop(part.name, 0))
            if not copy.last:
                self._sums[part.name] = value
            else:
                self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
        if read.piece is None and copy.last and self._tier is not None:
            self._tier.keep(part, segment)

    def copy(self, load: Load, data: Bytes, first: int, behind: Event | None) -> CopyEvent:
        """Enqueue a copy of bytes of a slice from byte `first` on to where the load brings them, behind an event. `flush` must
        follow. Raises RunError.
        """
        part = load.part
        if part.name in self.staged and not load.preload:
            event = self._copier.write(self.staged[part.name], data, offset=first, behind=behind)
        else:
            event = begin_copy(self._copier, self.memories[part.name], part, data, first, behind)
        self.arrives(part, event)
        return event

    def flush(self) -> None:
        """Submit the copies so far. Raises RunError."""
        self._copier.flush()

    def leave(self) -> None:
        """Free staging and the ring."""
        self.staged = {}
        self.ring.close()
        self.reads.close()
