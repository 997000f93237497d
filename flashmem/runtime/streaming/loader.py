"""Loader threads: make the plan's loads, in the plan's order, not before their release times.

A `LoaderRun` serves one run (or the preloading of W). Its threads start loads in the order of first use, and take the first one
that is released. Slice w may be loaded after the end of the launch that last used its place (mode `map`: launch g_w - 1), and
after all slices due by then are freed. So no two slices are ever resident together that the plan kept apart. Loads through a
thread's own staging are read earlier, and copied on at their release time.

Where copies follow launches on the device (`Transfer.follows_launches`), a load is released when its launch is enqueued, and
loaded when its last copy is. The thread of the launches enqueues the copies of what is read before that, and of what the host
tier holds. So no thread has to wake up, or to learn that a command has ended, before the next command is enqueued.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flashmem.base.errors import RunError
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Event
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.runtime.streaming.copy_calls import CopyCalls
from flashmem.runtime.streaming.load_queue import LoadQueue
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.loads import Load, Schedule, Step, TimedInterval


class _StoppedError(Exception):
    """The run stops, so its load stops."""


class _Turn:
    """One load of a run, in a loader thread; None: of the host tier, and without a thread."""

    __slots__ = ("_run", "end", "last_copy", "load", "loaded", "start", "steps", "thread")

    def __init__(self, run: LoaderRun, load: Load, thread: int | None) -> None:
        self._run, self.load, self.thread = run, load, thread
        self.loaded = False
        self.start = time.perf_counter()
        self.end: float | None = None  # of the thread's part
        self.steps: list[tuple[Step, float]] = []
        self.last_copy: CopyEvent | None = None  # under way

    def did(self, what: Step) -> None:
        """Record the time since the last call as spent on `what`."""
        self.steps.append((what, time.perf_counter()))

    def wait_for_release(self) -> None:
        """Wait for its release time. Raises _StoppedError if the run stops before."""
        if not self._run.is_done(self.load.after):
            self._run.wait_for(self.load.after)
            self.did("wait")

    def when_released(self, go: Callable[[Event | None], None], drop: Callable[[], None]) -> None:
        """Call `go` at its release time, here or in the thread of the launches; `drop` if the run stops before."""
        self._run.call_when_released(self, go, drop)

    def copying(self, copy: CopyEvent) -> None:
        """Keep a copy that the run waits for at its end."""
        self.last_copy = copy
        self._run.copying(copy)

    def enqueued(self) -> None:
        """Let launches follow: the last copy is enqueued."""
        self._run.load_enqueued(self)

    def interval(self, end: float) -> TimedInterval:
        """The load as it is recorded, which ended at `end`."""
        load, thread = self.load, self.thread or 0
        return TimedInterval(load.part.name, self.start, end, thread, tuple(self.steps), load.segment.nbytes, load.after)


class LoaderRun:
    """Loader threads for one sequence of loads. Call `launched` and `layer_done` for every launch, `wait` before a use, `stop`
    at the end.
    """

    def __init__(
        self,
        transfer: Transfer,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
        held: Sequence[Load] = (),
    ) -> None:
        """Start at once, after `done` launches. `admit` decides for each load, and again after `wake`, until `admit_all`,
        whether memory is available. Until then no thread reads ahead of a release time. `held`: loads of slices that the host
        tier holds.

        Raises:
            RunError: the device refuses a copy.
        """
        self.loaded = {load.part.name: False for load in (*loads, *held)}
        self._missing = Counter(load.part.name for load in (*loads, *held))  # segments, by slice
        self.intervals: list[TimedInterval] = []
        self._copies: list[CopyEvent] = []  # for which no thread waits
        self._copying: list[_Turn] = []  # loads whose last copy is one of them
        self._transfer = transfer
        self._frees = frees if transfer.frees else {}
        self.wakes = frozenset(load.after for load in (*loads, *held)) | frozenset(self._frees)  # launches to wait for
        lock = threading.Lock()
        self._lock = lock
        self._changed = threading.Condition(lock)  # for loader threads without a load: releases, frees, the end
        self._releases: dict[int, threading.Condition] = {}  # for those with one that is read: by the launch it waits for
        self._arrived = threading.Condition(lock)  # for threads that wait for a slice
        self._wanted: str | None = None  # that slice
        self._queue = LoadQueue(loads, lambda load: load.after <= self._done)
        self._done = done  # launches that are complete, or enqueued if copies follow them
        self._launches: dict[int, Event] = {}  # the events of those that are not known to be complete
        self._calls = CopyCalls(lock, transfer.spare_pieces) if transfer.follows_launches else None
        self._admit = admit
        self._loading = 0  # threads with a load
        self._unreleased = 0  # of those, the ones that wait for the release
        self.when_freed: Callable[[int], None] | None = None  # called with a completed launch, after its slices are freed
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: str | None = None  # not the exception: its traceback would hold the loaded slices, and this object
        self._stopping = False
        self._ahead = threads
        file = transfer.file
        self._announces = file.missed  # since the start of the last run
        file.missed = False
        self._count = min(threads, len(loads))
        self._threads: list[threading.Thread] = []
        try:
            for load in held:  # before there are threads, which a refusal would leave behind
                transfer.copy_held(load, _Turn(self, load, None))
            self._start_next()
        except BaseException:  # the caller gets no object to stop the threads with
            self._stopping = True
            raise

    def _start_next(self) -> None:
        """Start one more thread, if needed: each starts the next, so that the caller does not wait for all starts."""
        with self._changed:
            number = len(self._threads)
            if number < self._count and not self._stopping:
                thread = threading.Thread(target=self._work, args=(number,), name=f"flashmem-loader-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    @property
    def follows_launches(self) -> bool:
        """Whether loads are released by `launched`."""
        return self._transfer.follows_launches

    def launched(self, layer: int, event: Event) -> None:
        """Launch `layer` is enqueued and flushed, and `event` is its event: release loads that wait for it on the device.

        Raises:
            RunError: the device refuses a copy.
        """
        if layer not in self.wakes:
            return
        assert self._calls is not None
        with self._changed:
            self._launches[layer] = event
            self._release(layer)
            calls = self._calls.due(layer)
        self._calls.make(calls, self._launches)

    def layer_done(self, layer: int) -> None:
        """Launch `layer` and all before it are complete: free slices last used there, and release waiting loads."""
        if layer not in self.wakes:
            return
        if self.follows_launches:
            self._launches.pop(layer, None)
            return
        with self._changed:
            self._to_free.extend(self._frees.get(layer, ()))
            self._release(layer)
            self._tell_freed()

    def _release(self, layer: int) -> None:
        """Release the loads that wait for `layer`. Requires the lock. Wakes only threads that can go on: each takes the
        interpreter's lock from the thread of the launches.
        """
        self._done = layer
        for released in [each for each in self._releases if each <= layer]:
            self._releases.pop(released).notify_all()
        if self._to_free or self._admit is not None or not self._transfer.reads_ahead:
            self._changed.notify_all()

    def _tell_freed(self) -> None:
        """Report how far slices are freed. Requires the lock: no later load may be released before the report."""
        if self.when_freed is not None and not self._to_free and not self._freeing:
            self.when_freed(self._done)

    @property
    def idle(self) -> bool:
        """Whether the disk is free for other models: nothing is loading, and nothing can before the next launch ends."""
        with self._changed:
            following = self._queue.next(ahead=self._transfer.reads_ahead)
            begins = following is not None and (self.is_done(self._queue[following].after) or self._unreleased < self._count)
            return self._stopping or (not begins and self._loading == self._unreleased)

    def wake(self) -> None:
        """Retry loads that were not admitted: memory may be available now."""
        with self._changed:
            self._changed.notify_all()

    def admit_all(self) -> None:
        """Admit every released load from now on."""
        with self._changed:
            self._admit = None
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Wait until slice `name` is loaded, and make the calls of loader threads meanwhile.

        Raises:
            RunError: a load failed.
        """
        with self._arrived:
            self._wanted = name
            while True:
                if self._failure is not None:
                    raise RunError(self._failure)
                if self._calls is not None and (calls := self._calls.due(self._done)):
                    self._lock.release()
                    try:
                        self._calls.make(calls, self._launches)
                    finally:
                        self._lock.acquire()
                elif self.loaded[name]:
                    break
                else:
                    self._arrived.wait()
            self._wanted = None

    def stop(self) -> None:
        """End the threads, and free the slices that are due. Raises RunError if a load failed."""
        with self._changed:
            self._end()
        for thread in self._threads:
            thread.join()
        if self._calls is not None:
            self._calls.drop()
        self.collect()
        if self._to_free:
            while self._to_free:
                self._transfer.free(self._to_free.pop())
            with self._changed:
                self._tell_freed()
        if self._failure is not None:
            raise RunError(self._failure)

    def _end(self) -> None:
        """Let all threads end. Requires the lock."""
        self._stopping = True
        self._changed.notify_all()
        if self._calls is not None:
            self._calls.wake()
        for waiting in self._releases.values():
            waiting.notify_all()

    def copying(self, copy: CopyEvent) -> None:
        """Keep a copy until `collect`."""
        with self._changed:
            self._copies.append(copy)

    def collect(self) -> None:
        """Wait for the copies so far, and record when the device made them. A copy that failed is a failure of the run.

        For the thread of the launches when it has enqueued all of them: the device works meanwhile.
        """
        with self._changed:
            copies, turns = self._copies, self._copying
            self._copies, self._copying = [], []
        try:
            for copy in copies:
                copy.wait()
            apart = self._transfer.clock_apart() if turns else 0.0
            for turn in turns:
                assert turn.last_copy is not None
                start, end = (each + apart for each in turn.last_copy.seconds())
                if turn.thread is None:
                    turn.start = start
                turn.steps.append(("copy", end))
                self.intervals.append(turn.interval(end))
        except RunError as error:
            self._failure = self._failure or str(error)

    def _work(self, thread: int) -> None:
        try:
            self._start_next()
            while loads := self._take():
                turns = [_Turn(self, load, thread) for load in loads]
                load, turn = loads[0], turns[0]
                if len(loads) > 1:
                    self._transfer.load_together(loads, turns)
                elif load.preload:
                    self._transfer.preload(load.part, load.segment, thread, turn)
                else:
                    self._transfer.load(load.part, load.segment, thread, turn)
                self._note(turns)
        except _StoppedError:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or _said(error)
                self._end()
                self._arrived.notify_all()

    def _note(self, turns: Sequence[_Turn]) -> None:
        """A thread has made its part of some loads: record those that are complete."""
        end = time.perf_counter()
        for turn in turns:
            if not self.follows_launches:
                self._load_done(turn)
        with self._changed:
            for turn in turns:
                turn.end = end
                if not self.follows_launches:
                    self.intervals.append(turn.interval(end))
                elif turn.loaded:
                    self._copying.append(turn)
            self._loading -= len(turns)

    def load_enqueued(self, turn: _Turn) -> None:
        """The last copy of a load is enqueued and flushed."""
        self._load_done(turn)
        with self._changed:
            turn.loaded = True
            if turn.end is not None or turn.thread is None:
                self._copying.append(turn)

    def _load_done(self, turn: _Turn) -> None:
        """A load has ended, or launches may follow it on the device: its slice is loaded if it was the last one."""
        part = turn.load.part
        with self._changed:
            self._missing[part.name] -= 1
            complete = not self._missing[part.name]
        if complete:
            self._transfer.complete(part, turn)
            with self._changed:
                self.loaded[part.name] = True
                if part.name == self._wanted:
                    self._arrived.notify_all()

    def is_done(self, layer: int) -> bool:
        """Whether launch `layer` releases loads: it is known to be complete, or enqueued if copies follow it."""
        return layer <= self._done

    def wait_for(self, layer: int) -> None:
        """Wait until launch `layer` releases loads. Raises _StoppedError if the run stops before."""
        with self._changed:
            self._unreleased += 1
            while layer > self._done:
                if self._stopping:
                    raise _StoppedError
                self._releases.setdefault(layer, threading.Condition(self._lock)).wait()
            self._unreleased -= 1

    def call_when_released(self, turn: _Turn, go: Callable[[Event | None], None], drop: Callable[[], None]) -> None:
        """See `TransferLoad.when_released`. A loader thread waits for the call, unless a piece of staging is spare.

        What is released already, the thread of the launches enqueues too if it waits for a slice.

        Raises:
            RunError: `go` does.
            _StoppedError: the run stops before.
        """
        after, of_thread = turn.load.after, turn.thread is not None
        assert self._calls is not None
        with self._changed:
            if self._stopping:
                drop()
                raise _StoppedError
            released = after <= self._done
            if not released or (of_thread and self._wanted is not None):
                call = self._calls.add(after, go, drop, of_thread=of_thread)
                if released:
                    self._arrived.notify_all()
                if call.caller is not None:
                    self._unreleased += 1
                    while not call.made:
                        if self._stopping:
                            raise _StoppedError
                        call.caller.wait()
                    self._unreleased -= 1
                return
            event = self._launches.get(after)
        go(event)

    def _take(self) -> list[Load]:
        """The next released load, and those to make with it; frees slices first. Empty when the run stops."""
        while True:
            with self._changed:
                number = None
                while not self._stopping and not self._to_free and (number := self._next()) is None:
                    self._changed.wait()
                if self._stopping:
                    return []
                frees, self._to_free = self._to_free, []
                self._freeing += bool(frees)
                loads = []
                if number is not None:
                    loads = self._queue.take(number, self._transfer.joins if self._admit is None else None)
                    self._loading += len(loads)
                    file = self._transfer.file
                    # Where the file does not stay, what is read ahead would take the place of what loads read.
                    announces = file.stays and (self._announces or file.missed)
                    ahead = self._queue.announce(number, self._ahead) if announces else []
            if loads:
                for each in ahead:
                    self._transfer.expect(each.part, each.segment)
                return loads
            for part in frees:
                self._transfer.free(part)
            if frees:
                with self._changed:
                    self._freeing -= 1
                    self._tell_freed()
                    self._changed.notify_all()

    def _next(self) -> int | None:
        """The next load to start; None while slices are being freed, or without memory for it."""
        number = None if self._freeing else self._queue.next(ahead=self._transfer.reads_ahead)
        if number is None or self._admit is None:
            return number
        load = self._queue[number]
        return number if self.is_done(load.after) and self._admit(load) else None


def _said(error: BaseException) -> str:
    """The main thread's message for a failure of a loader thread."""
    return str(error) if isinstance(error, RunError) else f"loading weights failed: {type(error).__name__}: {error}"


def begin_loads(
    transfer: Transfer,
    schedule: Schedule,
    *,
    threads: int,
    done: int = 0,
    admit: Callable[[Load], bool] | None = None,
) -> LoaderRun | None:
    """Begin the loads of a run after `done` launches, as far as `admit` permits; None if there are none.

    Raises:
        RunError: the device refuses a copy.
    """
    held, others = transfer.divided(schedule.loads) if admit is None else ([], schedule.loads)
    if not schedule.loads and not (schedule.frees and transfer.frees):
        return None
    return LoaderRun(transfer, others, schedule.frees, threads=threads, done=done, admit=admit, held=held)
