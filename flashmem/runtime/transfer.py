"""The four transfer modes (DESIGN section 5): how a slice gets from the weight file to where kernels read it.

Each is a `Transfer`; they differ in nothing else, so that every mode gives the same bits. Everything a transfer needs is
allocated when it is made, at the places the plan's `PoolLayout` names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, cast

from flashmem.device import TransferMode
from flashmem.digests import Digest, digest
from flashmem.planning.plan import PoolLayout
from flashmem.program import Slice
from flashmem.runtime.common import Place, Places
from flashmem.runtime.copier import Copier
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.opencl import Bytes, Context, Memory, Queue
from flashmem.runtime.schedule import WORD, Band, Step, whole_words
from flashmem.runtime.weight_file import WeightFile


class Turn(Protocol):
    """One load of a run, as a transfer sees it."""

    def opened(self) -> None:
        """Return once its read gate is open: only then may places that the plan gave to it be written."""
        ...

    def did(self, what: Step) -> None:
        """What it has done since it began, or since this was called last."""
        ...


class Transfer(ABC):
    """One mode in use. `load` and `free` are called by loader threads, each with its own `thread` number."""

    in_place = False
    """Whether kernels read the mapped file."""

    reads_ahead = False
    """Whether a load may begin before its gate is open: what it reads waits in a part of staging that is its thread's own."""

    digests: Mapping[str, Digest] | None = None
    """What each slice must have when it comes in, as a whole then; None: that is not checked."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.files: tuple[WeightFile, ...] = (file,)  # where slices are
        self.memories: dict[str, Memory] = {}  # what kernels take as the slice

    @abstractmethod
    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring a band of a streamed slice in, from the disk to where the plan's next step takes it from."""

    def preload(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring a band of a slice of W in, all the way."""
        self.load(part, band, thread, turn)

    def free(self, part: Slice) -> None:  # noqa: B027 - most modes reuse a fixed place and have nothing to do
        """Let a streamed slice go, after its last use."""

    @property
    def frees(self) -> bool:
        """Whether `free` does anything."""
        return type(self).free is not Transfer.free

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """The memory of slices that are `whole` together, side by side in the file, as one buffer; None where they are apart
        here.
        """
        return None

    def expect(self, part: Slice, band: Band) -> None:
        """A band of `part` will be loaded soon."""
        self.file.expect(part.offset + band.first, band.nbytes)

    def _read(self, part: Slice, band: Band, place: Bytes, turn: Turn) -> None:
        """Read the band into `place`. Raises RunError where the slice is damaged, or cannot be read."""
        self.file.read_into(place, part.offset + band.first)
        self._check(part, place)
        turn.did("read")

    def _check(self, part: Slice, place: Bytes) -> None:
        if self.digests is not None:
            self.file.check_digest(f"slice {part.name!r}", digest(place.data), self.digests[part.name])

    def _pieces(self, part: Slice, band: Band, ring: Bytes, turn: Turn) -> Iterator[tuple[Bytes, int]]:
        """The band, read into `ring` a piece after the other, each with its first byte in the slice; images in whole rows.

        Its gate is open when a piece is given out, and who takes it copies it.
        """
        step = ring.nbytes // part.row_pitch * part.row_pitch if part.is_image else ring.nbytes
        end, value = band.first + band.nbytes, digest(b"")
        for first in range(band.first, end, step):
            piece = ring[: min(step, end - first)]
            self.file.read_into(piece, part.offset + first)
            if self.digests is not None:
                value = digest(piece.data, value)
            turn.did("read")
            turn.opened()
            yield piece, first
            turn.did("copy")
        if self.digests is not None:
            self.file.check_digest(f"slice {part.name!r}", value, self.digests[part.name])

    def leave(self) -> None:  # noqa: B027 - some have places of weights only
        """Give back what is not a place of weights: the transfer that is made `after` this one takes those over."""

    def close(self) -> None:
        """Give back what the ledger does not."""
        self.leave()
        self.memories.clear()


class MapTransfer(Transfer):
    """`map`: slices are used in place from the mapped file; loading brings pages in, freeing drops them.

    With `places`, a slice that another placement on the device has too is used where that one has it. A placement is known by
    its ledger.
    """

    in_place = True

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        places: Places,
        identities: Mapping[str, bytes],
        together: Mapping[str, Slice],
        after: MapTransfer | None = None,
    ) -> None:
        super().__init__(file)
        file.missed = True  # populating does not tell
        self._ledger = ledger
        self._all, self._identities = places, identities
        self._places: dict[str, Place] = {}
        self._together: dict[str, Memory] = {}  # by the slices that they join
        try:
            for part in slices:
                self._places[part.name] = places.take(file, part, identities[part.name])
            elsewhere = {part.name for part in slices if not self._places[part.name].is_in(file, part.offset)}
            apart = {whole.name for name, whole in together.items() if name in elsewhere}
            for part in slices:
                self.memories[part.name] = self._memory(context, part, together.get(part.name), apart)
        except BaseException:
            self.close()
            raise
        if after is not None:
            after._give_places_up(but=self._places)
        self.files = tuple(dict.fromkeys([file, *(place.file for place in self._places.values())]))

    def _memory(self, context: Context, part: Slice, whole: Slice | None, apart: Container[str]) -> Memory:
        """A slice where it is mapped, by itself or as a part of the one buffer over its `whole`."""
        if whole is None or whole.name in apart:
            return _view(context, context.wrap(self._places[part.name].mapped), part)
        if whole.name not in self._together:  # buffers over one mapping must not overlap, parts of a buffer may
            mapped = self.file.mapped[whole.offset : whole.offset + whole.file_bytes]
            self._together[whole.name] = context.wrap(mapped)
        return context.sub_buffer(self._together[whole.name], part.offset - whole.offset, part.file_bytes)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """The buffer of which they are parts."""
        return self._together.get(whole.name)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Bring the pages in."""
        place = self._places[part.name]
        place.load(band, (self._ledger, part.name), self._ledger, f"slice {part.name}")
        self._check(part, place.mapped[band.first : band.first + band.nbytes])
        turn.did("copy")

    def expect(self, part: Slice, band: Band) -> None:
        """A band of `part` will be loaded soon, if it is not there."""
        place = self._places[part.name]
        if not place.holds(band):
            place.file.expect(place.offset + band.first, band.nbytes)

    def free(self, part: Slice) -> None:
        """Drop the pages, unless somebody else uses them."""
        self._places[part.name].free((self._ledger, part.name))

    def leave(self) -> None:
        """No buffer is over the pages any more."""
        self.memories.clear()
        self._together.clear()

    def close(self) -> None:
        """Let all pages go, and their places."""
        super().close()
        self._give_places_up()

    def _give_places_up(self, but: Container[str] = ()) -> None:
        """All places; the pages of those slices, too, that are not in `but`: another transfer of the same ledger has those."""
        for name, place in self._places.items():
            if name not in but:
                place.free((self._ledger, name))
            self._all.give_up(place, self._identities[name])
        self._places.clear()


class AliasTransfer(Transfer):
    """`alias`: one host-visible pool; the read lands where kernels look.

    Each slice is a part of the pool, mapped only while a band of it is read: kernels may not touch memory that is mapped for
    writing, and the pool as a whole is not touched by anyone.
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: AliasTransfer | None = None,
    ) -> None:
        super().__init__(file)
        self._context, self._offsets = context, layout.offsets
        self._queue: Queue = context.queue() if after is None else after._queue
        self._pool: Memory | None = None
        self._places: dict[str, Memory] = {}
        if after is not None:
            self._pool, self._places, self.memories = after._pool, after._places, after.memories
            return
        if not slices:  # a device has no buffers without bytes
            return
        self._pool = pool = ledger.buffer("weights", layout.pool_bytes, "the weight pool", host_visible=True)
        for part in slices:
            place = context.sub_buffer(pool, layout.offsets[part.name], whole_words(part.file_bytes))
            self._places[part.name] = place
            self.memories[part.name] = _view(context, place, part)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read straight into the pool."""
        with self._queue.mapped(self._places[part.name], band.nbytes, offset=band.first) as place:
            self._read(part, band, place, turn)

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A part of the pool, if they lie there as in the file."""
        return _in_pool(self._context, self._pool, self._offsets, parts)

    def close(self) -> None:
        """Forget the places."""
        super().close()
        self._places.clear()
        self._pool = None


class _Homes:
    """Where slices live in modes that move them there: texture slots for images, the pool for plain buffers."""

    def __init__(self, context: Context, ledger: Ledger, slices: Sequence[Slice], layout: PoolLayout) -> None:
        self.memories: dict[str, Memory] = {}
        textures = [
            ledger.image("weights", slot.width, slot.height, slot.channel, f"texture slot {number}")
            for number, slot in enumerate(layout.slots)
        ]
        self._context, self._offsets = context, layout.offsets
        self._pool = pool = ledger.buffer("weights", layout.pool_bytes, "the weight pool") if layout.pool_bytes else None
        for part in slices:
            if part.name in layout.slot_of:
                self.memories[part.name] = textures[layout.slot_of[part.name]]
            else:
                self.memories[part.name] = context.sub_buffer(pool, layout.offsets[part.name], whole_words(part.file_bytes))

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A part of the pool, if they lie there as in the file."""
        return _in_pool(self._context, self._pool, self._offsets, parts)

    def write(self, copier: Copier, part: Slice, data: Bytes, first_byte: int) -> None:
        """Copy `data`, which starts at `first_byte` of the slice, home; images in whole rows."""
        memory = self.memories[part.name]
        if part.is_image:
            copier.write_image(
                memory,
                data,
                first_row=first_byte // part.row_pitch,
                width=part.width,
                rows=data.nbytes // part.row_pitch,
                row_pitch=part.row_pitch,
            )
        else:
            copier.write(memory, data, offset=first_byte)


class _Ring:
    """Pinned host memory that loads pass through: a part for each loader thread, and a queue that copies out of it."""

    def __init__(self, context: Context, ledger: Ledger, nbytes: int, threads: int) -> None:
        self.copiers = [Copier(context) for _ in range(threads)]
        self._part_bytes = nbytes // threads // WORD * WORD
        self._mapped: Bytes | None = None
        if nbytes:
            memory = ledger.buffer("staging", nbytes, "the part of staging that loads pass through", host_visible=True)
            self._mapped = self.copiers[0].queue.map(memory, nbytes)

    def part(self, thread: int) -> Bytes:
        """What that thread has of it."""
        assert self._mapped is not None
        return self._mapped[thread * self._part_bytes : (thread + 1) * self._part_bytes]

    def close(self) -> None:
        """Unmap it."""
        if self._mapped is not None:
            self.copiers[0].queue.unmap(self._mapped)
            self._mapped = None


class _MovingTransfer(Transfer):
    """Slices are moved to homes of their own, which a transfer `after` another one takes over."""

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: _MovingTransfer | None,
    ) -> None:
        super().__init__(file)
        self._homes: _Homes = after._homes if after else _Homes(context, ledger, slices, layout)
        self.memories = self._homes.memories

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> Memory | None:
        """A part of the pool, if they lie there as in the file."""
        return self._homes.joined(whole, parts)


class DmaTransfer(_MovingTransfer):
    """`dma`: read into the thread's part of staging, then copied home by the thread's own queue."""

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
        self._ring = _Ring(context, ledger, layout.staging_bytes, layout.threads)

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read and copy, a staging part at a time."""
        for piece, first in self._pieces(part, band, self._ring.part(thread), turn):
            self._homes.write(self._ring.copiers[thread], part, piece, first)

    def leave(self) -> None:
        """Unmap staging."""
        self._ring.close()


class InterleaveTransfer(_MovingTransfer):
    """`interleave`: read into the slice's place in staging; kernels move it home as the plan's x_{w,l} say.

    Where host and device share memory, each slice is a part of staging that is mapped only while a band of it is read.
    Elsewhere staging is the device's, and loads are copied there out of a ring that is the host's: were staging mapped, the
    driver would keep a second one on the host (docs/opencl-notes.md). Preloaded slices are copied home out of that ring, or
    out of the entrance that staging has for W, while layers run.
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        file: WeightFile,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: InterleaveTransfer | None = None,
    ) -> None:
        super().__init__(context, ledger, file, slices, layout, after)
        self._context, self._layout = context, layout
        self._ring = _Ring(context, ledger, layout.ring_bytes, layout.threads)
        self.reads_ahead = bool(layout.ring_bytes)
        self.staged: dict[str, tuple[Memory, int]] = {}  # what stream lanes read, and from which byte on
        self._shared: Queue | None = None  # what staging is mapped by, where it is shared
        if not layout.staging_bytes:
            return
        if not layout.ring_bytes:
            self._shared = context.queue()
        shared = self._shared is not None
        self._staging = ledger.buffer("staging", layout.staging_bytes, "staging", host_visible=shared)
        for part in slices:
            start, nbytes = layout.staging[part.name], whole_words(part.file_bytes)
            if start + nbytes > layout.staging_bytes:  # it is of W, and passes through in pieces
                continue
            place = context.sub_buffer(self._staging, start, nbytes) if shared else self._staging
            self.staged[part.name] = place, 0 if shared else start

    def load(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read into staging."""
        if self._shared is not None:
            with self._shared.mapped(self.staged[part.name][0], band.nbytes, offset=band.first) as place:
                self._read(part, band, place, turn)
            return
        for piece, first in self._pieces(part, band, self._ring.part(thread), turn):
            self._ring.copiers[thread].write(self._staging, piece, offset=self._layout.staging[part.name] + first)

    def preload(self, part: Slice, band: Band, thread: int, turn: Turn) -> None:
        """Read, and copy home."""
        if self._shared is None:
            self._copy_home(part, band, self._ring.part(thread), thread, turn)
            return
        nbytes = self._layout.entrance_bytes
        start = self._layout.staging[part.name] + thread * nbytes
        with self._shared.mapped(self._context.sub_buffer(self._staging, start, nbytes), nbytes, offset=0) as through:
            self._copy_home(part, band, through, thread, turn)

    def _copy_home(self, part: Slice, band: Band, through: Bytes, thread: int, turn: Turn) -> None:
        for piece, first in self._pieces(part, band, through, turn):
            self._homes.write(self._ring.copiers[thread], part, piece, first)

    def leave(self) -> None:
        """Unmap the ring."""
        self.staged.clear()
        self._ring.close()


def make_transfer(
    mode: TransferMode,
    context: Context,
    ledger: Ledger,
    file: WeightFile,
    slices: Sequence[Slice],
    layout: PoolLayout,
    places: Places,
    identities: Mapping[str, bytes],
    digests: Mapping[str, Digest] | None = None,
    together: Mapping[str, Slice] = MappingProxyType({}),
    after: Transfer | None = None,
) -> Transfer:
    """The transfer of `mode`, which checks slices against `digests`. `together`: by slice, the whole that may be asked for by
    `joined`. `after`: one of the same mode for another shape variant of the bundle, which has left; its places of weights,
    which are those of `layout` (`residence.share_places`), are taken over.

    Raises:
        RunError: device or budget refuse.
    """
    made: Transfer
    if mode == "map":
        made = MapTransfer(context, ledger, file, slices, places, identities, together, cast(MapTransfer | None, after))
    elif mode == "alias":
        made = AliasTransfer(context, ledger, file, slices, layout, cast(AliasTransfer | None, after))
    elif mode == "dma":
        made = DmaTransfer(context, ledger, file, slices, layout, cast(DmaTransfer | None, after))
    else:
        made = InterleaveTransfer(context, ledger, file, slices, layout, cast(InterleaveTransfer | None, after))
    made.digests = digests
    return made


def _in_pool(context: Context, pool: Memory | None, offsets: Mapping[str, int], parts: Sequence[Slice]) -> Memory | None:
    """The part of a pool that holds `parts`, if they lie there side by side."""
    places = [offsets.get(part.name) for part in parts]
    start, nbytes = places[0], 0
    if start is None or pool is None:
        return None
    for part, place in zip(parts, places, strict=True):
        if place != start + nbytes:
            return None
        nbytes += part.nbytes
    return context.sub_buffer(pool, start, whole_words(nbytes))


def _view(context: Context, buffer: Memory, part: Slice) -> Memory:
    if not part.is_image:
        return buffer
    return context.image_view(buffer, part.width, part.height, part.row_pitch, part.channel)
