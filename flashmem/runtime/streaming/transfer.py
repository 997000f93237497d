"""Transfers: ways to move a slice from the weight file to where kernels read it.

Each mode of `schedule.modes` has its `Transfer`. Every mode gives the same bits. A transfer allocates all
its memory at creation, at the places of the plan's `PoolLayout`. `streaming/modes` has one for each mode.

A transfer writes device memory by commands on its own queue, one for all threads. The queue of launches waits for the events of
those commands (`arrived`) before a kernel reads the data. Where memory is shared, loader threads move the slices
(`ThreadedTransfer`). With memory of its own, the device also keeps the other order: a copy waits there for the launch that last
read its place, so that the host enqueues both ahead (`copied_ahead.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashmem.base.errors import RunError
from flashmem.base.threads import call_each
from flashmem.bundle.checksums import Checksum, checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Bytes, Context
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory, Event
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.loading import Loading
from flashmem.runtime.streaming.shared_pages import SharedSlices
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Load, Segment, Step, whole_words
from flashmem.schedule.plan import PoolLayout


@dataclass(frozen=True)
class TransferRequest:
    """What a transfer is made of; each mode uses what it needs.

    `places`, `content_hashes`: slices that other models on the device have too. `together`: by slice, the whole slice, for
    requests to `joined`. `after`: a transfer of the same mode for another shape variant of the bundle, after its `leave` (not
    if it stays in use too). The new one reuses its memory: the pages in a mode of pages, else the objects that both layouts
    have (`schedule.shared_memory`). `tier`: keeps slices in host memory in modes that copy, and counts the memory that loads
    pass through. `checksums`: of each slice, compared at its load, which then covers the whole slice; None: not compared.
    """

    context: Context
    ledger: Ledger
    file: WeightFile
    slices: Sequence[Slice]
    layout: PoolLayout
    places: SharedSlices = field(default_factory=SharedSlices)
    content_hashes: Mapping[str, bytes] = field(default_factory=dict)
    together: Mapping[str, Slice] = field(default_factory=dict)
    after: Any = None
    tier: HostTier | None = None
    checksums: Mapping[str, Checksum] | None = None


class TransferLoad(Protocol):
    """One load of a run, as a transfer sees it."""

    def wait_for_release(self) -> None:
        """Wait until the load is released. Only then may its planned places be written."""
        ...

    def did(self, what: Step) -> None:
        """Record the time since its begin, or since the last call, as spent on `what`."""
        ...


class Transfer(ABC):
    """A transfer mode in use."""

    in_place = False
    """Whether kernels read the mapped file."""

    binds_late = False
    """Whether a slice has a memory object only while it is loaded (`memories`), so that arguments are set before a launch."""

    def __init__(self, asked: TransferRequest) -> None:
        """Raises RunError: the budget or the device refuses."""
        self.file = asked.file
        self.files: tuple[WeightFile, ...] = (asked.file,)  # the files with the slices
        self.checksums = asked.checksums
        self.memories: dict[str, DeviceMemory] = {}  # of each slice, as a kernel argument; only while loaded if `binds_late`
        self.staged: Mapping[str, Buffer] = {}  # where kernels read a streamed slice that they copy to its place
        self.arrived: dict[str, list[Event]] = {}  # by slice: events of its copies that the launch queue does not wait for yet
        self._under_way: Loading | None = None

    def begins(self, loading: Loading) -> None:
        """These loads begin, and `has_stopped` must follow. Ends others, which nobody knows of: those that had just begun when
        Ctrl-C came.
        """
        self._end_loads()
        self._under_way = loading

    def has_stopped(self, loading: Loading) -> None:
        """These loads have ended."""
        if self._under_way is loading:
            self._under_way = None

    def _end_loads(self) -> None:
        if self._under_way is not None:
            with suppress(RunError):  # whoever began them has got another error
                self._under_way.stop()

    @abstractmethod
    def begin(
        self,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> Loading:
        """Begin the loads of a run after `done` launches, as far as `admit` permits. `frees`: slices to free, by launch.

        Raises:
            RunError: the device refuses a copy, or the system a read.
        """

    def take_arrived(self, names: Iterable[str]) -> list[Event]:
        """Remove and return the events of these slices in `arrived`; the caller makes the launch queue wait for them."""
        return [event for name in names for event in self.arrived.pop(name, ())]

    def arrives(self, part: Slice, event: Event) -> None:
        """Let launches that use the slice wait for the event."""
        self.arrived.setdefault(part.name, []).append(event)

    def free(self, part: Slice) -> None:  # noqa: B027 - most modes reuse a fixed place and have nothing to do
        """Free a streamed slice after its last use."""

    @property
    def frees(self) -> bool:
        """Whether `free` does anything."""
        return type(self).free is not Transfer.free

    def joined(self, whole: Slice, parts: Sequence[Slice]) -> DeviceMemory | None:
        """The memory of slices that form `whole`, adjacent in the file, as one buffer; None if they are not adjacent here."""
        return None

    def leave(self) -> None:  # noqa: B027 - some have places of weights only
        """Free everything but the places of weights, which the transfer made `after` this one reuses."""

    def close(self) -> None:
        """Free what the ledger does not own."""
        call_each(self._end_loads, self.leave, self.memories.clear)


class ThreadedTransfer(Transfer):
    """A transfer by loader threads, which call `load` and `free`, each with its own `thread` number."""

    reads_ahead = False
    """Whether a load may begin before its release: the data waits in the thread's own part of staging."""

    def begin(
        self,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> LoaderRun:
        """See `Transfer`."""
        return LoaderRun(self, loads, frees, threads=threads, done=done, admit=admit)

    @abstractmethod
    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Load a segment of a streamed slice from the disk to the source of the plan's next step."""

    def preload(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        """Load a segment of a slice of W completely."""
        self.load(part, segment, thread, turn)

    def complete(self, part: Slice, turn: TransferLoad) -> None:
        """Finish the load of a slice whose segments are all loaded. Launches wait for it. Raises RunError."""

    def expect(self, part: Slice, segment: Segment) -> None:
        """Announce that a segment of `part` will be loaded soon."""
        self.file.expect(part.offset + segment.first, segment.nbytes)

    def _read(self, part: Slice, segment: Segment, place: Bytes, turn: TransferLoad) -> None:
        """Read the segment into `place`. Raises RunError if the slice is damaged, or cannot be read."""
        self.file.read_into(place, part.offset + segment.first)
        self._check(part, place)
        turn.did("read")

    def _check(self, part: Slice, place: Bytes) -> None:
        if self.checksums is not None:
            self.file.compare_checksum(f"slice {part.name!r}", checksum(place.data), self.checksums[part.name])


def in_pool(ledger: Ledger, pool: Buffer | None, offsets: Mapping[str, int], parts: Sequence[Slice]) -> DeviceMemory | None:
    """The part of a pool that holds `parts`, if they are adjacent there."""
    places = [offsets.get(part.name) for part in parts]
    start = places[0]
    nbytes = 0
    if start is None or pool is None:
        return None
    for part, place in zip(parts, places, strict=True):
        if place != start + nbytes:
            return None
        nbytes += part.nbytes
    return ledger.part("weights", pool, start, whole_words(nbytes))


def view(context: Context, buffer: Buffer, part: Slice) -> DeviceMemory:
    """A slice in its own buffer as a kernel argument: the buffer, or an image over it."""
    if not part.is_image:
        return buffer
    return context.image_view(buffer, part.width, part.height, part.row_pitch, part.channel)
