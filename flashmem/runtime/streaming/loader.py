"""Loader threads: the plan's loads, in the order and behind the gates that the plan sets.

A `LoaderRun` serves one run (or the preloading of W). Its threads take loads in the order of what waits for them, the first one
whose gate is open: w may be loaded once the layer is done that was the last to need its place (mode `map`: layer g_w - 1) and
all slices freed by then are gone, so that no two slices are ever resident that the plan kept apart. Loads that pass
through staging of a thread's own are read there before that, and copied on when the gate opens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from flashmem.base.errors import RunError
from flashmem.program.tensors import Slice
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.loads import LOOKED_AT, Load, Step, TimedInterval


class _Turn:
    """One load of a run: its steps, and when its gate is open."""

    __slots__ = ("_run", "gate", "start", "steps")

    def __init__(self, run: LoaderRun, gate: int) -> None:
        self._run, self.gate = run, gate
        self.start = time.perf_counter()
        self.steps: list[tuple[Step, float]] = []

    def did(self, what: Step) -> None:
        """Note that it has done this until now."""
        self.steps.append((what, time.perf_counter()))

    def opened(self) -> None:
        """Wait for its gate. Raises _StoppedError if the run stops before."""
        if not self._run.is_open(self.gate):
            self._run.wait_for_gate(self.gate)
            self.did("gate")


class _StoppedError(Exception):
    """The run ends, and with it the load."""


class LoaderRun:
    """Threads at work on one sequence of loads. Call `layer_done` for every layer, `wait` before using, `stop` at the end."""

    def __init__(
        self,
        transfer: Transfer,
        loads: Sequence[Load],
        frees: Mapping[int, Sequence[Slice]],
        *,
        threads: int,
        done: int = 0,
        admit: Callable[[Load], bool] | None = None,
    ) -> None:
        """Begin at once, with `done` layers behind it. `admit` is asked before each load, and again after `wake`, until
        `admit_all`: whether there is memory for it. Until then nothing is read ahead of its gate.
        """
        self.loaded = {load.part.name: False for load in loads}
        self._missing = Counter(load.part.name for load in loads)  # segments, by slice
        self.intervals: list[TimedInterval] = []
        self._transfer = transfer
        self._loads = loads
        self._frees = frees if transfer.frees else {}
        self.wakes = frozenset(load.gate for load in loads) | frozenset(self._frees)  # layers whose end is waited for
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for loader threads: gates, what is to be freed, the end
        self._arrived = threading.Condition(lock)  # for who waits for a slice
        self._wanted: str | None = None  # that slice
        self._taken = bytearray(len(loads))
        self._announced = bytearray(len(loads))
        self._first = 0  # all loads before this one are taken
        self._done = done  # layers that are done
        self._admit = admit
        self._loading = 0  # threads that have a load
        self._at_gates = 0  # of those, the ones that wait for its gate
        self.when_freed: Callable[[int], None] | None = None  # called with a layer that is done, once its slices are freed
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: str | None = None  # no exception: its traceback would hold on to what is loaded, and to this
        self._stopping = False
        self._ahead = threads
        self._announces = transfer.file.missed  # since the last run began
        transfer.file.missed = False
        self._count = min(threads, len(loads))
        self._threads: list[threading.Thread] = []
        try:
            self._start_next()
        except BaseException:  # nobody gets this object, and could stop what it began
            self._stopping = True
            raise

    def _start_next(self) -> None:
        """Start one more thread, if there is to be one: each starts the next, so that nobody waits for all of them."""
        with self._changed:
            number = len(self._threads)
            if number < self._count and not self._stopping:
                thread = threading.Thread(target=self._work, args=(number,), name=f"flashmem-loader-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def layer_done(self, layer: int) -> None:
        """Layer `layer` and all before it are done: frees what it used last, and opens the gates behind it."""
        if layer not in self.wakes:
            return
        with self._changed:
            self._done = layer
            self._to_free.extend(self._frees.get(layer, ()))
            self._tell_freed()
            self._changed.notify_all()

    def _tell_freed(self) -> None:
        """Say how far slices are freed. The lock is held, so that no load behind a later gate begins before that is said."""
        if self.when_freed is not None and not self._to_free and not self._freeing:
            self.when_freed(self._done)

    @property
    def idle(self) -> bool:
        """Whether the disk is another's: nothing is being loaded, and nothing can be before a layer is done."""
        with self._changed:
            following = self._following()
            begins = following is not None and (self.is_open(self._loads[following].gate) or self._at_gates < self._count)
            return self._stopping or (not begins and self._loading == self._at_gates)

    def wake(self) -> None:
        """There may be memory now for a load that was not admitted."""
        with self._changed:
            self._changed.notify_all()

    def admit_all(self) -> None:
        """From now on there is memory for every load whose gate is open."""
        with self._changed:
            self._admit = None
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Return once slice `name` is loaded.

        Raises:
            RunError: a load failed.
        """
        with self._arrived:
            self._wanted = name
            while not self.loaded[name]:
                if self._failure is not None:
                    raise RunError(self._failure)
                self._arrived.wait()
            self._wanted = None

    def stop(self) -> None:
        """End the threads, and free the slices that are due. Raises RunError if a load failed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._to_free:
            self._transfer.free(self._to_free.pop())
        if self._failure is not None:
            raise RunError(self._failure)

    def _work(self, thread: int) -> None:
        try:
            self._start_next()
            while (load := self._take()) is not None:
                turn, name = _Turn(self, load.gate), load.part.name
                if load.preload:
                    self._transfer.preload(load.part, load.segment, thread, turn)
                else:
                    self._transfer.load(load.part, load.segment, thread, turn)
                interval = TimedInterval(name, turn.start, time.perf_counter(), thread, tuple(turn.steps))
                with self._changed:
                    self.intervals.append(interval)
                    self._loading -= 1
                    self._missing[name] -= 1
                    if not self._missing[name]:
                        self.loaded[name] = True
                        if name == self._wanted:
                            self._arrived.notify_all()
        except _StoppedError:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or _said(error)
                self._stopping = True
                self._changed.notify_all()
                self._arrived.notify_all()

    def is_open(self, gate: int) -> bool:
        """Whether layer `gate` is known to be done."""
        return gate <= self._done

    def wait_for_gate(self, gate: int) -> None:
        """Return once layer `gate` is done. Raises _StoppedError if the run stops before."""
        with self._changed:
            self._at_gates += 1
            while gate > self._done:
                if self._stopping:
                    raise _StoppedError
                self._changed.wait()
            self._at_gates -= 1

    def _take(self) -> Load | None:
        """The next load whose gate is open; frees on the way. None when the run stops."""
        while True:
            with self._changed:
                number = None
                while not self._stopping and not self._to_free and (number := self._next()) is None:
                    self._changed.wait()
                if self._stopping:
                    return None
                frees, self._to_free = self._to_free, []
                self._freeing += bool(frees)
                load = None
                if number is not None:
                    load = self._loads[number]
                    self._taken[number] = True
                    self._loading += 1
                    ahead = self._announce(number) if self._announces or self._transfer.file.missed else ()
            if load is not None:
                for each in ahead:
                    self._transfer.expect(each.part, each.segment)
                return load
            for part in frees:
                self._transfer.free(part)
            if frees:
                with self._changed:
                    self._freeing -= 1
                    self._tell_freed()
                    self._changed.notify_all()

    def _next(self) -> int | None:
        """The load to begin with; none while something is freed, or where there is no memory for it."""
        number = None if self._freeing else self._following()
        if number is None or self._admit is None:
            return number
        load = self._loads[number]
        return number if self.is_open(load.gate) and self._admit(load) else None

    def _following(self) -> int | None:
        """The first load whose gate is open, else one to read ahead."""
        first = None
        for number in self._waiting(LOOKED_AT):
            if self.is_open(self._loads[number].gate):
                return number
            first = number if first is None else first
        return first if self._transfer.reads_ahead else None

    def _waiting(self, most: int) -> Iterator[int]:
        """The first loads that are not taken."""
        taken, last = self._taken, len(self._taken)
        while self._first < last and taken[self._first]:
            self._first += 1
        return islice((number for number in range(self._first, last) if not taken[number]), most)

    def _announce(self, taken: int) -> Sequence[Load]:
        """Announce the load just taken and a few next ones behind open gates, so that the disk reads on."""
        ahead = [taken, *(number for number in self._waiting(self._ahead) if self.is_open(self._loads[number].gate))]
        ahead = [number for number in ahead if not self._announced[number]]
        for number in ahead:
            self._announced[number] = True
        return [self._loads[number] for number in ahead]


def _said(error: BaseException) -> str:
    """What the main thread says of a thread's failure."""
    return str(error) if isinstance(error, RunError) else f"loading weights failed: {type(error).__name__}: {error}"
