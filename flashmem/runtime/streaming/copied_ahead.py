"""`dma` and `interleave` on a device with memory of its own: reads into pinned memory, and copies that follow launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from flashmem.base.threads import call_each
from flashmem.base.types import POOL_ALIGNMENT
from flashmem.bundle.checksums import checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.opencl.copier import Copier, PreparedCopy
from flashmem.runtime.opencl.handles import DeviceMemory
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.streaming.ahead import AheadRun, Copy, Planned, Read
from flashmem.runtime.streaming.background_reads import BackgroundReads
from flashmem.runtime.streaming.copied import staging_slots
from flashmem.runtime.streaming.ring import PinnedRing
from flashmem.runtime.streaming.transfer import Transfer, TransferRequest
from flashmem.runtime.streaming.weight_objects import WeightObjects
from flashmem.schedule.loads import Load
from flashmem.schedule.residency import JOINED_BYTES, SPARE_PIECES


class AheadTransfer(Transfer):
    """Weights pass through the host tier, or through the ring. A transfer made `after` another one reuses its memory.

    In `dma` they are copied to their permanent places, like preloaded ones in `interleave`. Others go to a staging slot there,
    a buffer with one slice at a time, from where kernels copy them on. Slots are no mapped memory, of which the driver would
    keep a second copy on the host (docs/research/opencl-notes.md).
    """

    def __init__(self, asked: TransferRequest) -> None:
        """Raises RunError: the budget or the device refuses."""
        super().__init__(asked)
        ledger = asked.ledger
        layout = asked.layout
        after: AheadTransfer | None = asked.after
        self.tier = tier = asked.tier
        self._copier: Copier = after._copier if after else Copier(asked.context, ahead=True)
        self.clock_apart = self._copier.queue.clock_apart  # reports keep it, and so must not keep the transfer
        objects: WeightObjects | None = after._homes if after else None
        self._homes: WeightObjects = WeightObjects(ledger, asked.slices, layout, objects, apart=True)
        self.memories = self._homes.places
        if after:
            self.arrived = after.arrived
        self.staged = staging_slots(ledger, layout)
        if after is not None and not self.staged and after.ring.open:  # both stay in use
            self.ring: PinnedRing = after.ring
        else:
            host = ledger if tier is None else tier.ledger
            self.ring = PinnedRing(host, layout.ring_bytes, layout.threads + SPARE_PIECES)
        self.reads = BackgroundReads(asked.file, self.ring.pieces)
        self._sums: dict[str, int] = {}  # by slice that is being read: the checksum so far
        self._planned: tuple[object, Planned] | None = None

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

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> DeviceMemory | None:
        """A sub-buffer of the pool, if the slices have the same order there as in the file."""
        return self._homes.joined(parts)

    def planned(self, loads: Sequence[Load], *, apart: bool) -> Planned:
        """The reads and copies of runs with these loads; with `apart`, what the host tier holds completely is not among the
        reads.
        """
        key = (loads, apart, self.tier.version if self.tier is not None else 0)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._plan(loads, apart=apart)
        return self._planned[1]

    def _plan(self, loads: Sequence[Load], *, apart: bool) -> Planned:
        held: dict[int, list[tuple[Copy, int]]] = {}
        others = list[Load]()
        tier = self.tier if apart else None
        for load in loads:
            place = tier.place(load.part, load.segment) if tier is not None and tier.has_all(load.part) else None
            if place is None:
                others.append(load)
                continue
            copy = Copy(load, self._prepare_copy(load, load.segment.first, load.segment.nbytes))
            held.setdefault(load.after, []).append((copy, address_of(place)))
        joined = self._join_neighbours(others) if apart else [[load] for load in others]
        reads = [read for together in joined for read in self._reads(together)]
        return Planned(reads, held, Counter(load.part.name for load in loads), frozenset(load.after for load in loads))

    def _join_neighbours(self, loads: Sequence[Load]) -> list[list[Load]]:
        """The loads, neighbours together whose segments follow each other in the file, are small, and pass through the ring."""
        joined: list[list[Load]] = []
        most = min(JOINED_BYTES, self.ring.piece_bytes)
        tier = self.tier
        for load in loads:
            begin, nbytes = load.place
            if joined and self.checksums is None:
                first = joined[-1][0]
                last = joined[-1][-1]
                gap = begin - last.place[0] - last.place[1]
                small = 0 <= gap < POOL_ALIGNMENT and begin + nbytes - first.place[0] <= most
                alike = load.after <= first.after and load.preload == first.preload
                if small and alike and not (tier is not None and any(map(tier.keeps, (last.part, load.part)))):
                    joined[-1].append(load)
                    continue
            joined.append([load])
        return joined

    def _reads(self, loads: Sequence[Load]) -> Iterator[Read]:
        """The reads of loads that are joined; of a single one in pieces of the ring, images in whole rows."""
        load, (start, nbytes) = loads[0], loads[0].place
        if len(loads) > 1:
            copies = [
                Copy(each, self._prepare_copy(each, each.segment.first, each.segment.nbytes), each.place[0] - start)
                for each in loads
            ]
            yield Read(start, sum(loads[-1].place) - start, copies, load.after)
            return
        most = self.ring.piece_bytes
        part = load.part
        if part.is_image:
            most = most // part.row_pitch * part.row_pitch
        for at in range(0, nbytes, most):
            count = min(most, nbytes - at)
            copy = Copy(load, self._prepare_copy(load, load.segment.first + at, count), last=at + count == nbytes)
            yield Read(start + at, count, [copy], load.after, first=not at)

    def _prepare_copy(self, load: Load, first: int, nbytes: int) -> PreparedCopy:
        """The copy of bytes of a slice from byte `first` on to where the load brings them."""
        part = load.part
        if part.name in self.staged and not load.preload:
            return self._copier.prepare(self.staged[part.name], first, nbytes)
        return self._copier.prepare_slice(self.memories[part.name], part, first, nbytes)

    def has_read(self, read: Read, memory: Bytes, *, in_tier: bool) -> None:
        """Compare the checksum of a slice that is read, and keep it in the host tier. Raises RunError: it is damaged."""
        if self.checksums is None and not in_tier:
            return
        load, _, _, last = read.copies[-1]
        part = load.part
        if self.checksums is not None:
            before = self._sums.pop(part.name, 0)
            value = checksum(memory.data, 0 if read.first else before)  # a load that was stopped leaves one behind
            if not last:
                self._sums[part.name] = value
            else:
                self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
        if in_tier and last and self.tier is not None:
            self.tier.keep(part, load.segment)

    def flush(self) -> None:
        """Submit the copies so far. Raises RunError."""
        self._copier.flush()

    def leave(self) -> None:
        """Free staging and the ring, once nothing reads to it and no copy reads it."""
        self.staged = {}
        call_each(self.reads.close, self._copier.finish, self.ring.close)
