"""The four transfer modes (DESIGN section 5): how a slice gets from the weight file to where kernels read it.

Each is a `Transfer`; they differ in nothing else, so that every mode gives the same bits. Everything a transfer needs is
allocated when it is made, at the places the plan's `PoolLayout` names. `transfer_modes.py` makes them.

A transfer writes device memory by commands on a queue of its own, one for all loader threads. The queue of the layers waits for
the events of those commands (`arrived`) before a kernel reads what they wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from flashmem.bundle.checksums import Checksum, checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Bytes, Context, Event, Memory
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Segment, Step, whole_words


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

    checksums: Mapping[str, Checksum] | None = None
    """The checksum of each slice, compared when it is loaded, as a whole then; None: not compared."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.files: tuple[WeightFile, ...] = (file,)  # where slices are
        self.memories: dict[str, Memory] = {}  # what kernels take as the slice
        self.arrived: dict[str, list[Event]] = {}  # by slice: what brought it in and the layers' queue does not wait for yet

    @abstractmethod
    def load(self, part: Slice, segment: Segment, thread: int, turn: Turn) -> None:
        """Bring a segment of a streamed slice in, from the disk to where the plan's next step takes it from."""

    def preload(self, part: Slice, segment: Segment, thread: int, turn: Turn) -> None:
        """Bring a segment of a slice of W in, all the way."""
        self.load(part, segment, thread, turn)

    def take_arrived(self, names: Iterable[str]) -> list[Event]:
        """The events in `arrived` of these slices, which are forgotten: the layers' queue is made to wait for them now."""
        return [event for name in names for event in self.arrived.pop(name, ())]

    def _arrives(self, part: Slice, event: Event) -> None:
        self.arrived.setdefault(part.name, []).append(event)

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

    def expect(self, part: Slice, segment: Segment) -> None:
        """A segment of `part` will be loaded soon."""
        self.file.expect(part.offset + segment.first, segment.nbytes)

    def _read(self, part: Slice, segment: Segment, place: Bytes, turn: Turn) -> None:
        """Read the segment into `place`. Raises RunError where the slice is damaged, or cannot be read."""
        self.file.read_into(place, part.offset + segment.first)
        self._check(part, place)
        turn.did("read")

    def _check(self, part: Slice, place: Bytes) -> None:
        if self.checksums is not None:
            self.file.compare_checksum(f"slice {part.name!r}", checksum(place.data), self.checksums[part.name])

    def _copy(
        self, part: Slice, segment: Segment, through: Bytes, turn: Turn, begin: Callable[[Bytes, int], CopyEvent]
    ) -> None:
        """Read the segment into staging and copy it on, a piece after the other; images in whole rows.

        `begin` gets a piece and its first byte in the slice, once its gate is open, and enqueues the copy, which is done before
        the next piece is read. RunError: the slice is damaged, and its last piece is not copied.
        """
        step = through.nbytes // part.row_pitch * part.row_pitch if part.is_image else through.nbytes
        end, value = segment.first + segment.nbytes, 0
        for first in range(segment.first, end, step):
            piece = through[: min(step, end - first)]
            self.file.read_into(piece, part.offset + first)
            if self.checksums is not None:
                value = checksum(piece.data, value)
                if first + step >= end:
                    self.file.compare_checksum(f"slice {part.name!r}", value, self.checksums[part.name])
            turn.did("read")
            turn.opened()
            copy = begin(piece, first)
            self._arrives(part, copy)
            copy.wait()
            turn.did("copy")

    def leave(self) -> None:  # noqa: B027 - some have places of weights only
        """Give back what is not a place of weights: the transfer that is made `after` this one takes those over."""

    def close(self) -> None:
        """Give back what the ledger does not."""
        self.leave()
        self.memories.clear()


def in_pool(context: Context, pool: Memory | None, offsets: Mapping[str, int], parts: Sequence[Slice]) -> Memory | None:
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


def view(context: Context, buffer: Memory, part: Slice) -> Memory:
    """A slice in a buffer of its own as kernels take it: the buffer, or an image over it."""
    if not part.is_image:
        return buffer
    return context.image_view(buffer, part.width, part.height, part.row_pitch, part.channel)
