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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, overload

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, Waiters, started
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.opencl.copier import CopyEvent, wait_for_copies
from flashmem.runtime.opencl.handles import Event
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.streaming.background_reads import Reading
from flashmem.runtime.streaming.loading import Loading, said_of_load
from flashmem.schedule.load_queue import LoadQueue
from flashmem.schedule.loads import Load, Step, TimedInterval

if TYPE_CHECKING:
    from flashmem.runtime.streaming.copied_ahead import AheadTransfer
    from flashmem.runtime.streaming.host_tier import HostTier


class Copy(NamedTuple):
    """A copy of a load, or of a part of it. `enqueue` takes the address of the bytes, and the event to wait for.

    `at`: its first byte in what is read. `last`: of its load.
    """

    load: Load
    enqueue: Callable[[int, Event | None], CopyEvent]
    at: int = 0
    last: bool = True


class Read(NamedTuple):
    """`nbytes` bytes to read from the file at `offset`, and the copies to make once launch `after` releases all their loads.
    `first`: of its load.
    """

    offset: int
    nbytes: int
    copies: Sequence[Copy]
    after: int
    first: bool = True


class Planned(NamedTuple):
    """What runs with the same loads, and the same slices in the host tier, have in common.

    `reads`: in the order of first use. `held`: by the launch that releases them, copies of what the host tier holds, with its
    address. `missing`: the number of loads of each slice. `wakes`: the launches that release any.
    """

    reads: Sequence[Read]
    held: Mapping[int, Sequence[tuple[Copy, int]]]
    missing: Mapping[str, int]
    wakes: frozenset[int]


@dataclass(slots=True, eq=False)
class InFlight:
    """A read of this run, or a copy from the host tier. Its times are those of the host.

    `memory`: where to, in the host tier or, with `piece`, in a piece of the ring. `end`: None without a read.
    """

    copies: Sequence[Copy]
    read: Read | None = None
    memory: Bytes | None = None
    address: int = 0
    piece: Bytes | None = None
    reading: Reading | None = None
    start: float = 0.0
    end: float | None = None
    copied: Sequence[CopyEvent] = ()


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
        self._transfer = transfer
        self._admit = admit
        self._done = done
        planned = transfer.planned(loads, apart=admit is None)
        self._held = planned.held
        self.wakes = planned.wakes
        self._missing = dict(planned.missing)
        self.loaded = dict.fromkeys(planned.missing, False)
        self._queue = LoadQueue(planned.reads)
        self._left = len(planned.reads)  # reads that have not begun
        self._lacks_piece = False  # the next one waits for a piece of the ring
        self._places: dict[int, Bytes | None] = {}  # of loads that have begun, by identity: where the host tier keeps them
        self._launches: dict[int, Event] = {}
        self._reading: deque[InFlight] = deque()  # in the order of their begin
        self._unreleased: dict[int, list[InFlight]] = {}  # by launch: what is read, and waits for its release
        self._made: list[InFlight] = []  # all copies are enqueued
        self._intervals = _Intervals(self._made, transfer.clock_apart)
        self._lock = threading.Lock()
        self._changed = Waiters()
        self._failure: str | None = None
        self._stopping = self._taken_over = False
        self._thread: Thread | None = None
        transfer.begins(self)
        try:
            self._begin()
        except BaseException:
            with suppress(RunError):  # that one, or one that it has caused
                self.stop()
            raise

    def _begin(self) -> None:
        with self._lock:
            for layer in self._held:
                if layer <= self._done:
                    self._copy_held(layer, None)
            if self._left:
                self._advance()
                with held_back():
                    self._thread = started(self._work, "flashmem-loader")

    @property
    def intervals(self) -> Sequence[TimedInterval]:
        """See `Loading`. Times are asked of the device at the first use: that takes 10 us a load."""
        return self._intervals

    @property
    def idle(self) -> bool:
        """See `Loading`."""
        with self._lock:
            if self._stopping or not (self._reading or self._left):
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
                self._copy_held(layer, event)
            for made in self._unreleased.pop(layer, ()):
                self._copy(made, event)
            if self._reading or self._left:
                self._advance()

    def wait(self, name: str) -> None:
        """See `Loading`. Makes loads meanwhile."""
        while not self.loaded[name]:
            if self._failure is not None:
                raise RunError(self._failure)
            if not self._step(name):
                with self._lock:
                    if self._advance() or self.loaded[name] or self._failure:
                        continue
                    assert self._admit is not None, f"{name} waits for a launch that is not enqueued"
                    turn = self._changed.turn()
                turn.acquire()

    def stop(self) -> None:
        """See `Loading`. Waits for the copies, and for reads that have begun."""
        self._stopping = True
        with held_back():
            if self._thread is not None:
                self.wake()
                self._thread.join()
                self._thread = None  # here: Ctrl-C that came where a thread's object ends would be lost
            self._transfer.reads.stop()  # their memory is used again
            dropped = [*self._reading, *(made for waiting in self._unreleased.values() for made in waiting)]
            self._reading.clear()
            self._unreleased.clear()
            for made in dropped:
                self._give_back(made, None)
            try:
                wait_for_copies([copy for made in self._made for copy in made.copied])
            except RunError as error:
                self._failure = self._failure or str(error)
            self._transfer.has_stopped(self)
        if self._failure is not None:
            raise RunError(self._failure)

    def _work(self) -> None:
        """What the thread does until `take_over`."""
        try:
            while not (self._taken_over or self._stopping):
                if not self._step():
                    with self._lock:
                        if self._taken_over or self._stopping or self._advance():
                            continue
                        turn = self._changed.turn()
                    turn.acquire()
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or said_of_load(error)
                self._changed.wake()

    def _step(self, wanted: str = "") -> bool:
        """Make calls that are due, or wait for a read or a copy; False if there is only a launch or an admission to wait for.

        `wanted`: a slice to wait for, which can be loaded already.
        """
        with self._lock:
            if self._advance() or self.loaded.get(wanted):
                return True
            reading = self._reading[0].reading if self._reading else None
            copy = self._transfer.ring.oldest if self._lacks_piece else None
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
                advanced = True
                self._finish(self._reading.popleft(), reading)
            while self._left and self._begin_next():
                advanced = True
        except BaseException as error:  # also for the other thread, which would wait for what is lost here
            self._failure = self._failure or said_of_load(error)
            raise
        return advanced

    def _begin_next(self) -> bool:
        """Begin the next read, unless the host tier holds the bytes; False if there is none now, or nothing to make it with."""
        transfer = self._transfer
        admitted = self._admit is None
        self._lacks_piece = False
        if transfer.reads.busy or (number := self._queue.next(self._done, ahead=admitted)) is None:
            return False
        read = self._queue[number]
        place, held = (None, False) if transfer.tier is None else self._tier_place(transfer.tier, read)
        piece = transfer.ring.take() if place is None else None
        memory = place if piece is None else piece[: read.nbytes]
        if memory is None:
            self._lacks_piece = True
            return False
        made = InFlight(read.copies, read, memory, address_of(memory), piece)
        try:
            if self._admit is not None and read.first and not self._admit(read.copies[0].load):
                self._give_back(made, None)
                return False
            if not held:
                made.start = time.perf_counter()
                made.reading = transfer.reads.begin(memory, made.address, read.offset)
        except BaseException:  # it is the next one still
            self._give_back(made, None)
            raise
        self._queue.take(number)
        self._left -= 1
        if held:
            self._release(made, read.after)
        else:
            self._reading.append(made)
        return True

    def _tier_place(self, tier: HostTier, read: Read) -> tuple[Bytes | None, bool]:
        """Where the host tier keeps what is read (None: not there), and whether the bytes are there. All reads of a load go to
        one place, which the tier may get while they go on.
        """
        if len(read.copies) > 1:
            return None, False
        load = read.copies[0].load
        if read.first:
            self._places[id(load)] = tier.place(load.part, load.segment)
        place = self._places[id(load)]
        if place is None:
            return None, False
        at = read.offset - load.place[0]
        return place[at : at + read.nbytes], tier.holds(load.part, load.segment)

    def _finish(self, made: InFlight, reading: Reading) -> None:
        """A read has ended."""
        assert made.read is not None and made.memory is not None
        try:
            reading.finish()
            self._transfer.has_read(made.read, made.memory, in_tier=made.piece is None)
        except BaseException:
            self._give_back(made, None)
            raise
        finally:
            self._transfer.reads.end(reading)
        made.end = time.perf_counter()
        self._release(made, made.read.after)

    def _release(self, made: InFlight, after: int) -> None:
        """Copy what is there, now or when launch `after` releases it."""
        if after <= self._done:
            self._copy(made, self._launches.get(after))
        else:
            self._unreleased.setdefault(after, []).append(made)

    def _copy_held(self, layer: int, behind: Event | None) -> None:
        """Enqueue copies of what the host tier holds and this launch releases."""
        for copy, address in self._held[layer]:
            self._copy(InFlight((copy,), address=address), behind)

    def _copy(self, made: InFlight, behind: Event | None) -> None:
        """Enqueue the copies of what is read."""
        address = made.address
        copied = list[CopyEvent]()
        transfer = self._transfer
        made.copied = copied
        self._made.append(made)
        try:
            for copy in made.copies:
                copied.append(event := copy.enqueue(address + copy.at, behind))
                transfer.arrives(copy.load.part, event)
            transfer.flush()
        finally:
            self._give_back(made, copied[-1] if copied else None)  # the queue is in order, so the last one is complete last
        for copy in made.copies:
            if copy.last:
                name = copy.load.part.name
                self._missing[name] -= 1
                if not self._missing[name]:
                    self.loaded[name] = True

    def _give_back(self, made: InFlight, copy: CopyEvent | None) -> None:
        if made.piece is not None:
            piece = made.piece
            made.piece = None
            self._transfer.ring.give_back(piece, copy)


class _Intervals(Sequence[TimedInterval]):
    """Loads as they are reported, from the device's times of their copies, which are complete when they are first asked for."""

    def __init__(self, made: list[InFlight], clock_apart: Callable[[], float]) -> None:
        self._made = made
        self._clock_apart = clock_apart
        self._found: list[TimedInterval] | None = None

    def _all(self) -> list[TimedInterval]:
        if self._found is None:
            self._found = list(_timed_loads(self._made, self._clock_apart() if self._made else 0.0))
            self._made = []  # nor their events are needed any longer
        return self._found

    @overload
    def __getitem__(self, index: int) -> TimedInterval: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TimedInterval]: ...

    def __getitem__(self, index: int | slice) -> TimedInterval | Sequence[TimedInterval]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


def _timed_loads(made: Sequence[InFlight], apart: float) -> Iterator[TimedInterval]:
    """The loads whose last copies are `made`. `apart`: what the host's clock is ahead of the device's."""
    begun: dict[int, InFlight] = {}  # the first read of loads with several, by identity
    for each in made:
        for copy, event in zip(each.copies, each.copied, strict=True):
            first = begun.setdefault(id(copy.load), each)
            if not copy.last:
                continue
            load = copy.load
            steps = list[tuple[Step, float]]()
            start, end = (seconds + apart for seconds in event.seconds())
            if each.end is not None:
                start = first.start
                steps.append(("read", each.end))
            steps.append(("copy", end))
            thread = first.reading.thread if first.reading is not None else 0
            yield TimedInterval(load.part.name, start, end, thread, tuple(steps), load.segment.nbytes, load.after)
