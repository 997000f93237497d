"""Loader threads: the plan's loads, in the order and behind the gates that the plan sets.

A `LoaderRun` serves one run (or the preloading of W). Its threads take loads in the order of what waits for them, the first one
whose gate is open: w may come in once the layer is done that was the last to need its place (mode `map`: layer g_w - 1) and
everything freed by then has been let go, so that no two slices are ever resident that the plan kept apart. Loads that pass
through staging of a thread's own are read there before that, and copied on when the gate opens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile

from flashmem.device import Rates, TransferMode
from flashmem.errors import RunError
from flashmem.planning.plan import OverlapPlan, PlannedWeight, PoolLayout
from flashmem.program import Program, Slice
from flashmem.runtime.residence import free_from
from flashmem.runtime.transfer import Band, Step, Transfer, bands, whole


@dataclass(frozen=True)
class Load:
    """A band of a slice to bring in: `gate` is the layer that must be done first (0: none), `preload` whether it is of W."""

    part: Slice
    band: Band
    gate: int = 0
    preload: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Offset and bytes in the weight file."""
        return self.part.offset + self.band.first, self.band.nbytes


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds of `time.perf_counter()`.

    Of a load: `thread` made it, in `steps`, one after the other, each with when it ended.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    steps: tuple[tuple[Step, float], ...] = ()


def planned_loads(
    plan: OverlapPlan,
    slices: Mapping[str, Slice],
    layout: PoolLayout,
    mode: TransferMode,
    *,
    preload: bool,
    banded: bool = True,
) -> tuple[Load, ...]:
    """The loads of a run in the order of what waits for them, W among them (as from layer 1 on) if `preload`.

    In bands, as slices are loaded in `mode`, or each as a whole.
    """
    free = free_from(plan, slices, layout, mode)

    def order(w: PlannedWeight) -> tuple[int, ...]:
        needed = w.first_mover if mode == "interleave" and not w.preload else w.first_use
        return (max(w.read_layer, 1) if mode == "map" else 0, needed, w.first_use)

    loads: list[Load] = []
    for w in sorted((w for w in plan.weights if preload or not w.preload), key=order):
        part, gate = slices[w.name], free.get(w.name, 0)
        loads += [Load(part, band, gate, w.preload) for band in (bands(part, mode) if banded else (whole(part),))]
    return tuple(loads)


def read_while_opening(loads: Sequence[Load], program: Program, rates: Rates) -> tuple[Load, ...]:
    """The first loads behind no gate, as many as the disk brings in while a session opens.

    A longer queue before the disk would only hold up what nobody could announce: table rows, and whatever opening reads.
    """
    first = tuple(takewhile(lambda load: load.gate == 0, loads))
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    read = accumulate(load.band.nbytes for load in first)
    return tuple(load for load, nbytes in zip(first, read, strict=True) if nbytes <= opening * rates.disk_bandwidth)


def planned_frees(plan: OverlapPlan, slices: Mapping[str, Slice]) -> dict[int, tuple[Slice, ...]]:
    """The streamed slices that are let go when a layer is done: those that are not kept for later runs."""
    frees: dict[int, tuple[Slice, ...]] = {}
    for w in plan.weights:
        if not (w.preload or w.keep):
            frees[w.last_use] = (*frees.get(w.last_use, ()), slices[w.name])
    return frees


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
    ) -> None:
        self.loaded = {load.part.name: False for load in loads}
        self._missing = Counter(load.part.name for load in loads)  # bands, by slice
        self.spans: list[Span] = []
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
        self._done = 0  # layers that are done
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._ahead = threads
        self._announces = transfer.file.missed  # since the last run began
        transfer.file.missed = False
        self._count = min(threads, len(loads))
        self._threads: list[threading.Thread] = []
        self._start_next()

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
                    raise _as_run_error(self._failure)
                self._arrived.wait()
            self._wanted = None

    def stop(self) -> None:
        """End the threads, and let go what is still to be freed. Raises RunError if a load failed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._to_free:
            self._transfer.free(self._to_free.pop())
        if self._failure is not None:
            raise _as_run_error(self._failure)

    def _work(self, thread: int) -> None:
        try:
            self._start_next()
            while (load := self._take()) is not None:
                turn, name = _Turn(self, load.gate), load.part.name
                if load.preload:
                    self._transfer.preload(load.part, load.band, thread, turn)
                else:
                    self._transfer.load(load.part, load.band, thread, turn)
                span = Span(name, turn.start, time.perf_counter(), thread, tuple(turn.steps))
                with self._changed:
                    self.spans.append(span)
                    self._missing[name] -= 1
                    if not self._missing[name]:
                        self.loaded[name] = True
                        if name == self._wanted:
                            self._arrived.notify_all()
        except _StoppedError:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._stopping = True
                self._changed.notify_all()
                self._arrived.notify_all()

    def is_open(self, gate: int) -> bool:
        """Whether layer `gate` is known to be done."""
        return gate <= self._done

    def wait_for_gate(self, gate: int) -> None:
        """Return once layer `gate` is done. Raises _StoppedError if the run stops before."""
        with self._changed:
            while gate > self._done:
                if self._stopping:
                    raise _StoppedError
                self._changed.wait()

    def _take(self) -> Load | None:
        """The next load whose gate is open; frees on the way. None when the run stops."""
        while True:
            with self._changed:
                while (number := self._next()) is None and not self._stopping and not self._to_free:
                    self._changed.wait()
                if self._stopping:
                    return None
                frees, self._to_free = self._to_free, []
                self._freeing += bool(frees)
                load = None
                if not frees and number is not None:
                    load = self._loads[number]
                    self._taken[number] = True
                    ahead = self._announce(number) if self._announces or self._transfer.file.missed else ()
            if load is not None:
                for each in ahead:
                    self._transfer.expect(each.part, each.band)
                return load
            try:
                for part in frees:
                    self._transfer.free(part)
            finally:
                with self._changed:
                    self._freeing -= 1
                    self._changed.notify_all()

    def _next(self) -> int | None:
        """The load to begin with: the first whose gate is open, else one to read ahead; none while something is freed."""
        if self._freeing:
            return None
        waiting = self._waiting(LOOKED_AT)
        first = None
        for number in waiting:
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
        """The load just taken and a few that come next behind open gates, so that the disk reads on."""
        ahead = [taken, *(number for number in self._waiting(self._ahead) if self.is_open(self._loads[number].gate))]
        ahead = [number for number in ahead if not self._announced[number]]
        for number in ahead:
            self._announced[number] = True
        return [self._loads[number] for number in ahead]


LOOKED_AT = 64
"""Loads among which one with an open gate is looked for."""


def _as_run_error(error: BaseException) -> BaseException:
    """What the main thread raises for a thread's failure."""
    if isinstance(error, RunError):
        return RunError(str(error))
    return RunError(f"loading weights failed: {type(error).__name__}: {error}")
