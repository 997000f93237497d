"""The loads of a run on a device with memory of its own, without loader threads: one thread enqueues launches and copies.

The device keeps the order of launches and copies by their events. So a load is released when its launch is enqueued, and loaded
when its last copy is, and the host enqueues both ahead. Reads are made in the background (`background_reads.py`). What is left
for the host is a few calls for each load. The thread of the launches makes them between its launches, and while it waits for a
slice: its core's caches hold Python and the driver, and no thread has to wake up, or to take the interpreter's lock, first
(docs/research/measurements.md).

Before the launches begin, while a session opens or another model runs, a thread makes these calls, until `take_over`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

from flashmem.base.errors import RunError
from flashmem.runtime.opencl.context import Bytes, Event
from flashmem.runtime.opencl.copier import CopyEvent, wait_for_copies
from flashmem.runtime.streaming.background_reads import Reading
from flashmem.runtime.streaming.load_queue import LoadQueue
from flashmem.runtime.streaming.loading import Loading, said_of_load
from flashmem.schedule.loads import Load, Step, TimedInterval

if TYPE_CHECKING:
    from flashmem.runtime.streaming.copied_ahead import AheadTransfer


@dataclass(slots=True, eq=False)
class TimedLoad:
    """When a load was made: its begin and the end of its read (None: the host tier held it) on the host, and its last copy."""

    load: Load
    start: float = 0.0
    read: float | None = None
    thread: int = 0
    copy: CopyEvent | None = None

    def interval(self, apart: float) -> TimedInterval:
        """The load as it is reported; `apart`: what the host's clock is ahead of the device's."""
        load, steps = self.load, list[tuple[Step, float]]()
        assert self.copy is not None
        start, end = (each + apart for each in self.copy.seconds())
        if self.read is not None:
            start = self.start
            steps.append(("read", self.read))
        steps.append(("copy", end))
        return TimedInterval(load.part.name, start, end, self.thread, tuple(steps), load.segment.nbytes, load.after)


@dataclass(slots=True, eq=False)
class Copy:
    """A copy of `nbytes` bytes of a slice from byte `first` on, which are at byte `at` of what is read. `last`: of its load."""

    timed: TimedLoad
    first: int
    nbytes: int
    at: int = 0
    last: bool = True


@dataclass(slots=True, eq=False)
class Read:
    """Bytes to read from the file at `offset`, and the copies to make once the first one's load is released.

    `memory`: where to, in the host tier or, with `piece`, in a piece of the ring; None until there is one. `held`: the host
    tier has them already.
    """

    offset: int
    nbytes: int
    copies: list[Copy]
    memory: Bytes | None = None
    held: bool = False
    piece: Bytes | None = None
    reading: Reading | None = None

    @property
    def after(self) -> int:
        """The launch that releases its loads: none of them is released after the first one."""
        return self.copies[0].timed.load.after


class Divided(NamedTuple):
    """The loads of a run. `held`: by the launch that releases them, those that the host tier holds, and their bytes there.
    `others`: those to read. `missing`: the number of loads of each slice. `wakes`: the launches that release any.
    """

    held: Mapping[int, Sequence[tuple[Load, Bytes]]]
    others: Sequence[Load]
    missing: Mapping[str, int]
    wakes: frozenset[int]


class AheadRun(Loading):
    """The loads of one run."""

    follows_launches = True

    def __init__(
        self, transfer: AheadTransfer, loads: Sequence[Load], *, done: int = 0, admit: Callable[[Load], bool] | None = None
    ) -> None:
        """Begin at once, after `done` launches. `admit` decides for each load, and again after `wake`, until `admit_all`,
        whether memory is available. Until then nothing is read ahead of a release time. `loads` are in the order of first use.

        Raises:
            RunError: the device refuses a copy, or the system a read.
        """
        self._transfer, self._admit, self._done = transfer, admit, done
        held, others, missing, self.wakes = transfer.divided(loads, apart=admit is None)
        self.loaded = dict.fromkeys(missing, False)
        self._missing, self._held = dict(missing), held
        self._queue = LoadQueue(others)
        self._left = len(others)  # loads that are not taken
        self._launches: dict[int, Event] = {}
        self._to_read: deque[Read] = deque()  # of loads that are taken
        self._reading: deque[Read] = deque()  # in the order of their begin
        self._unreleased: dict[int, list[Read]] = {}  # by launch: what is read, and waits for its release
        self._copies: list[CopyEvent] = []
        self._timed: list[TimedLoad] = []  # loads whose last copy is enqueued
        self._intervals = _Intervals(self._timed, transfer.clock_apart)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failure: str | None = None
        self._stopping = self._taken_over = False
        self._thread: threading.Thread | None = None
        with self._lock:
            for layer in held:
                if layer <= done:
                    self._copy_held(held[layer], None)
            if others:
                self._advance()
                self._thread = threading.Thread(target=self._work, name="flashmem-loader", daemon=True)
                self._thread.start()

    @property
    def intervals(self) -> Sequence[TimedInterval]:
        """See `Loading`. Times are asked of the device at the first use: that takes 10 us a load."""
        return self._intervals

    @property
    def idle(self) -> bool:
        """See `Loading`."""
        with self._lock:
            if self._stopping or not (self._reading or self._to_read or self._left):
                return True
            if self._admit is not None:
                return not self._reading and self._queue.next(self._done, ahead=False) is None
            return not self._reading and sum(map(len, self._unreleased.values())) >= self._transfer.ring.pieces

    def take_over(self) -> None:
        """See `Loading`."""
        self._taken_over = True
        if self._thread is not None:
            self.wake()

    def launched(self, layer: int, event: Event) -> None:
        """See `Loading`."""
        if layer not in self.wakes:
            return
        with self._lock:
            self._done = layer
            self._launches[layer] = event
            if layer in self._held:
                self._copy_held(self._held[layer], event)
            for read in self._unreleased.pop(layer, ()):
                self._copy(read, event)
            if self._reading or self._to_read or self._left:
                self._advance()

    def wait(self, name: str) -> None:
        """See `Loading`. Makes loads meanwhile."""
        while not self.loaded[name]:
            if self._failure is not None:
                raise RunError(self._failure)
            if not self._step(name):
                with self._changed:
                    if not (self._advance() or self.loaded[name] or self._failure):
                        assert self._admit is not None, f"{name} waits for a launch that is not enqueued"
                        self._changed.wait()

    def stop(self) -> None:
        """See `Loading`. Waits for the copies, and for reads that have begun."""
        self._stopping = True
        if self._thread is not None:
            self.wake()
            self._thread.join()
        dropped = [read for waiting in self._unreleased.values() for read in waiting]
        self._unreleased.clear()
        while self._reading:
            read = self._reading.popleft()
            dropped.append(read)
            assert read.reading is not None
            read.reading.wait()  # its memory is used again
            self._transfer.reads.end(read.reading)
        for read in dropped:
            self._give_back(read, None)
        copies, self._copies = self._copies, []
        try:
            wait_for_copies(copies)
        except RunError as error:
            self._failure = self._failure or str(error)
        if self._failure is not None:
            raise RunError(self._failure)

    def _work(self) -> None:
        """What the thread does until `take_over`."""
        try:
            while not (self._taken_over or self._stopping):
                if not self._step():
                    with self._changed:
                        if not (self._taken_over or self._stopping or self._advance()):
                            self._changed.wait()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or said_of_load(error)
                self._changed.notify_all()

    def _step(self, wanted: str = "") -> bool:
        """Make calls that are due, or wait for a read or a copy; False if there is only a launch or an admission to wait for.

        `wanted`: a slice to wait for, which can be loaded already.
        """
        with self._lock:
            if self._advance() or self.loaded.get(wanted):
                return True
            reading = self._reading[0].reading if self._reading else None
            copy = self._transfer.ring.oldest if self._to_read else None
        if reading is not None:
            reading.wait()
        elif copy is not None:
            copy.wait()
        return reading is not None or copy is not None

    def _advance(self) -> bool:
        """Copy what is read, and begin reads for which there is memory; whether anything was done. Requires the lock.

        Raises:
            RunError: a read failed, a slice is damaged, or the device refuses a copy.
        """
        advanced = False
        try:
            while self._reading and (reading := self._reading[0].reading) is not None and reading.ended:
                read, advanced = self._reading.popleft(), True
                self._finish(read, reading)
            while (self._to_read or self._take_next()) and self._begin(self._to_read[0]):
                self._to_read.popleft()
                advanced = True
        except BaseException as error:  # also for the other thread, which would wait for what is lost here
            self._failure = self._failure or said_of_load(error)
            raise
        return advanced

    def _take_next(self) -> bool:
        """Take the next load, and those to read with it, for which `_to_read` has reads then; False if there is none."""
        if (number := self._queue.next(self._done, ahead=self._admit is None)) is not None:
            if self._admit is not None and not self._admit(self._queue[number]):
                return False
            loads = self._queue.take(number, self._transfer.joins if self._admit is None else None)
            self._left -= len(loads)
            self._to_read.extend(self._transfer.reads_of(loads))
            return True
        return False

    def _begin(self, read: Read) -> bool:
        """Begin a read, unless the host tier holds the bytes; False if there is no thread or no memory for it now."""
        if read.held:
            self._release(read)
            return True
        reads = self._transfer.reads
        if reads.busy:
            return False
        if read.memory is None:
            read.piece = self._transfer.ring.take()
            if read.piece is None:
                return False
            read.memory = read.piece[: read.nbytes]
        now = time.perf_counter()
        try:
            read.reading = reads.begin(read.memory, read.offset)
        except BaseException:  # it is the next one still
            if read.piece is not None:
                self._give_back(read, None)
                read.memory = None
            raise
        for copy in read.copies:
            timed = copy.timed
            timed.start, timed.thread = timed.start or now, read.reading.thread
        self._reading.append(read)
        return True

    def _finish(self, read: Read, reading: Reading) -> None:
        """A read has ended."""
        try:
            reading.finish()
            self._transfer.has_read(read)
        except BaseException:
            self._give_back(read, None)
            raise
        finally:
            self._transfer.reads.end(reading)
        now = time.perf_counter()
        for copy in read.copies:
            copy.timed.read = now
        self._release(read)

    def _release(self, read: Read) -> None:
        """Copy what is there, now or at its release."""
        if read.after <= self._done:
            self._copy(read, self._launches.get(read.after))
        else:
            self._unreleased.setdefault(read.after, []).append(read)

    def _copy(self, read: Read, behind: Event | None) -> None:
        """Enqueue the copies of what is read."""
        assert read.memory is not None
        copied: CopyEvent | None = None
        try:
            for copy in read.copies:
                data = read.memory[copy.at : copy.at + copy.nbytes]
                copied = copy.timed.copy = self._transfer.copy(copy.timed.load, data, copy.first, behind)
                self._copies.append(copied)
            self._transfer.flush()
        finally:
            self._give_back(read, copied)  # the queue is in order, so the last copy is complete last
        for copy in read.copies:
            if copy.last:
                self._enqueued(copy.timed)

    def _copy_held(self, held: Sequence[tuple[Load, Bytes]], behind: Event | None) -> None:
        """Enqueue copies of loads that the host tier holds."""
        for load, data in held:
            timed = TimedLoad(load, copy=(copied := self._transfer.copy(load, data, load.segment.first, behind)))
            self._copies.append(copied)
            self._transfer.flush()
            self._enqueued(timed)

    def _enqueued(self, timed: TimedLoad) -> None:
        """The last copy of a load is enqueued and flushed: launches may follow."""
        self._timed.append(timed)
        name = timed.load.part.name
        self._missing[name] -= 1
        if not self._missing[name]:
            self.loaded[name] = True

    def _give_back(self, read: Read, copy: CopyEvent | None) -> None:
        if read.piece is not None:
            piece, read.piece = read.piece, None
            self._transfer.ring.give_back(piece, copy)


class _Intervals(Sequence[TimedInterval]):
    """Loads as they are reported, from the device's times of their copies, which are complete when they are first asked for."""

    def __init__(self, timed: list[TimedLoad], clock_apart: Callable[[], float]) -> None:
        self._timed, self._clock_apart = timed, clock_apart
        self._made: list[TimedInterval] | None = None

    def _all(self) -> list[TimedInterval]:
        if self._made is None:
            apart = self._clock_apart() if self._timed else 0.0
            self._made = [each.interval(apart) for each in self._timed]
            self._timed = []  # nor their events are needed any longer
        return self._made

    @overload
    def __getitem__(self, index: int) -> TimedInterval: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TimedInterval]: ...

    def __getitem__(self, index: int | slice) -> TimedInterval | Sequence[TimedInterval]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._timed) if self._made is None else len(self._made)
