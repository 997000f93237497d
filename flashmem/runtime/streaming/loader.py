"""Loader threads: make the plan's loads, in the plan's order, not before their release times.

A `LoaderRun` serves one run (or the preloading of W). Its threads start loads in the order of first use, and take the first one
that is released. Slice w may be loaded after the end of the launch that last used its place (mode `map`: launch g_w - 1), and
after all slices due by then are freed. So no two slices are ever resident together that the plan kept apart. Loads through a
thread's own staging are read earlier, and copied on at their release time.

This is for devices that share the host's memory; `ahead.py` is for the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, Waiters, started
from flashmem.program.tensors import Slice
from flashmem.runtime.streaming.loading import Loading, said_of_load
from flashmem.schedule.load_queue import LoadQueue
from flashmem.schedule.loads import Load, Step, TimedInterval

if TYPE_CHECKING:
    from flashmem.runtime.streaming.transfer import ThreadedTransfer


class _StoppedError(Exception):
    """The run stops, so its load stops."""


class _Turn:
    """One load of a run, in a loader thread."""

    __slots__ = ("_run", "load", "start", "steps", "thread")

    def __init__(self, run: LoaderRun, load: Load, thread: int) -> None:
        self._run = run
        self.load = load
        self.thread = thread
        self.start = time.perf_counter()
        self.steps: list[tuple[Step, float]] = []

    def did(self, what: Step) -> None:
        """Record the time since the last call as spent on `what`."""
        self.steps.append((what, time.perf_counter()))

    def wait_for_release(self) -> None:
        """Wait for its release time. Raises _StoppedError if the run stops before."""
        if not self._run.is_done(self.load.after):
            self._run.wait_for(self.load.after)
            self.did("wait")

    def interval(self, end: float) -> TimedInterval:
        """The load as it is recorded, which ended at `end`."""
        load = self.load
        return TimedInterval(load.part.name, self.start, end, self.thread, tuple(self.steps), load.segment.nbytes, load.after)


class LoaderRun(Loading):
    """Loader threads for one sequence of loads."""

    def __init__(
        self,
        transfer: ThreadedTransfer,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> None:
        """Start at once, after `done` launches. `admit` decides for each load, and again after `wake`, until `admit_all`,
        whether memory is available. Until then no thread reads ahead of a release time.
        """
        self.loaded = {load.part.name: False for load in loads}
        self._missing = Counter(load.part.name for load in loads)  # segments, by slice
        self._intervals: list[TimedInterval] = []
        self._transfer = transfer
        self._frees = frees if transfer.frees else {}
        self.wakes = frozenset(load.after for load in loads) | frozenset(self._frees)  # launches to wait for
        self._lock = threading.Lock()
        self._changed = Waiters()  # loader threads without a load: for releases, frees, the end
        self._releases: dict[int, Waiters] = {}  # those with one that is read: by the launch it waits for
        self._arrived = Waiters()  # threads that wait for a slice
        self._wanted: str | None = None  # that slice
        self._queue = LoadQueue(loads)
        self._done = done  # launches that are complete
        self._admit = admit
        self._loading = 0  # threads with a load
        self._unreleased = 0  # of those, the ones that wait for the release
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: str | None = None  # not the exception: its traceback would hold the loaded slices, and this object
        self._stopping = False
        self._ahead = threads
        file = transfer.file
        self._announces = file.missed  # since the start of the last run
        file.missed = False
        self._count = min(threads, len(loads))
        self._threads: list[Thread] = []
        transfer.begins(self)
        try:
            self._start_next()
        except BaseException:
            self.stop()
            raise

    def _start_next(self) -> None:
        """Start one more thread, if needed: each starts the next, so that the caller does not wait for all starts. Raises
        RunError if the system has none.
        """
        with held_back(), self._lock:
            number = len(self._threads)
            if number < self._count and not self._stopping:
                self._threads.append(started(self._work, f"flashmem-loader-{number}", number))

    @property
    def intervals(self) -> Sequence[TimedInterval]:
        """See `Loading`."""
        return self._intervals

    def take_over(self) -> None:
        """See `Loading`."""

    def layer_done(self, layer: int) -> None:
        """See `Loading`."""
        if layer not in self.wakes:
            return
        with self._lock:
            self._to_free.extend(self._frees.get(layer, ()))
            self._release(layer)
            self._tell_freed()

    def _release(self, layer: int) -> None:
        """Release the loads that wait for `layer`. Requires the lock. Wakes only threads that can go on: each takes the
        interpreter's lock from the thread of the launches.
        """
        self._done = layer
        for released in [each for each in self._releases if each <= layer]:
            self._releases[released].wake()
            del self._releases[released]
        if self._to_free or self._admit is not None or not self._transfer.reads_ahead:
            self._changed.wake()

    def _tell_freed(self) -> None:
        """Report how far slices are freed. Requires the lock: no later load may be released before the report."""
        if self.when_freed is not None and not self._to_free and not self._freeing:
            self.when_freed(self._done)

    @property
    def idle(self) -> bool:
        """See `Loading`."""
        with self._lock:
            following = self._queue.next(self._done, ahead=self._transfer.reads_ahead)
            begins = following is not None and (self.is_done(self._queue[following].after) or self._unreleased < self._count)
            return self._stopping or (not begins and self._loading == self._unreleased)

    def wait(self, name: str) -> None:
        """See `Loading`."""
        while True:
            with self._lock:
                self._wanted = name
                if self.loaded[name]:
                    self._wanted = None
                    return
                if self._failure is not None:
                    raise RunError(self._failure)
                turn = self._arrived.turn()
            turn.acquire()

    def stop(self) -> None:
        """See `Loading`."""
        with held_back():
            with self._lock:
                self._end()
            while self._threads:
                self._threads[-1].join()
                self._threads.pop()  # here: Ctrl-C that came where a thread's object ends would be lost
            if self._to_free:
                while self._to_free:
                    self._transfer.free(self._to_free[-1])
                    self._to_free.pop()
                with self._lock:
                    self._tell_freed()
            self._transfer.has_stopped(self)
        if self._failure is not None:
            raise RunError(self._failure)

    def _end(self) -> None:
        """Let all threads end. Requires the lock."""
        self._stopping = True
        self._changed.wake()
        for waiting in self._releases.values():
            waiting.wake()

    def _work(self, thread: int) -> None:
        try:
            self._start_next()
            while (load := self._take()) is not None:
                turn = _Turn(self, load, thread)
                make = self._transfer.preload if load.preload else self._transfer.load
                make(load.part, load.segment, thread, turn)
                self._load_done(turn)
        except _StoppedError:
            return
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or said_of_load(error)
                self._end()
                self._arrived.wake()

    def _load_done(self, turn: _Turn) -> None:
        """Record a load that is complete: its slice is loaded if it was the last one."""
        end = time.perf_counter()
        part = turn.load.part
        with self._lock:
            self._missing[part.name] -= 1
            complete = not self._missing[part.name]
        if complete:
            self._transfer.complete(part, turn)
        with self._lock:
            self._intervals.append(turn.interval(end))
            self._loading -= 1
            if complete:
                self.loaded[part.name] = True
                if part.name == self._wanted:
                    self._arrived.wake()

    def is_done(self, layer: int) -> bool:
        """Whether launch `layer` releases loads: it is known to be complete, or enqueued if copies follow it."""
        return layer <= self._done

    def wait_for(self, layer: int) -> None:
        """Wait until launch `layer` releases loads. Raises _StoppedError if the run stops before."""
        with self._lock:
            self._unreleased += 1
        while True:
            with self._lock:
                if layer <= self._done:
                    self._unreleased -= 1
                    return
                if self._stopping:
                    raise _StoppedError
                turn = self._releases.setdefault(layer, Waiters()).turn()
            turn.acquire()

    def _take(self) -> Load | None:
        """The next released load; frees slices first. None when the run stops."""
        while True:
            load = None
            turn = None
            frees = list[Slice]()
            ahead = list[Load]()
            with self._lock:
                if self._stopping:
                    return None
                if self._to_free:
                    frees = self._to_free
                    self._to_free = []
                    self._freeing += 1
                elif (number := self._next()) is None:
                    turn = self._changed.turn()
                else:
                    load = self._queue.take(number)
                    self._loading += 1
                    file = self._transfer.file
                    # Where the file does not stay, what is read ahead would take the place of what loads read.
                    if file.stays and (self._announces or file.missed):
                        ahead = self._queue.announce(number, self._ahead, self._done)
            if turn is not None:
                turn.acquire()
            elif load is not None:
                for each in ahead:
                    self._transfer.expect(each.part, each.segment)
                return load
            else:
                for part in frees:
                    self._transfer.free(part)
                with self._lock:
                    self._freeing -= 1
                    self._tell_freed()
                    self._changed.wake()

    def _next(self) -> int | None:
        """The next load to start; None while slices are being freed, or without memory for it."""
        number = None if self._freeing else self._queue.next(self._done, ahead=self._transfer.reads_ahead)
        if number is None or self._admit is None:
            return number
        load = self._queue[number]
        return number if self.is_done(load.after) and self._admit(load) else None
