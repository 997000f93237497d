"""Loader threads: the plan's loads, in the order and behind the gates that the plan sets.

A `LoaderRun` serves one run (or the preloading of W). Its threads take loads in the order of (g_w, z_w, i_w): w may come in
once layer g_w - 1 is done and everything freed by then has been let go, so that no two slices are ever resident that the plan
kept apart. Loads that pass through staging of a thread's own are read there before that, and copied on when the gate opens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from flashmem.device import Rates, TransferMode
from flashmem.errors import RunError
from flashmem.planning.plan import OverlapPlan
from flashmem.program import Program, Slice
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
    plan: OverlapPlan, slices: Mapping[str, Slice], *, preload: bool, mode: TransferMode | None = None
) -> tuple[Load, ...]:
    """The loads of a run in the order of (g_w, z_w, i_w), W among them (as from layer 1 on) if `preload`.

    In bands, as slices are loaded in `mode`; None: each as a whole.
    """
    chosen = [w for w in plan.weights if preload or not w.preload]
    chosen.sort(key=lambda w: (max(w.read_layer, 1), w.first_mover if mode == "interleave" else w.first_use, w.first_use))
    loads: list[Load] = []
    for w in chosen:
        part, gate = slices[w.name], max(w.read_layer, 1) - 1
        loads += [Load(part, band, gate, w.preload) for band in (bands(part, mode) if mode else (whole(part),))]
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
        self._next = 0
        self._expected = 0
        self._done = 0  # layers that are done
        self._to_free: list[Slice] = []
        self._freeing = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._ahead = threads
        self._announces = transfer.file.missed  # the last time a load was read, or never yet
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
                while not self._stopping and not self._to_free and not self._may_begin(self._next):
                    self._changed.wait()
                if self._stopping:
                    return None
                frees, self._to_free = self._to_free, []
                self._freeing += bool(frees)
                load = None
                if not frees:
                    load = self._loads[self._next]
                    self._next += 1
                    ahead = self._announce() if self._announces or self._transfer.file.missed else ()
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

    def _may_begin(self, index: int) -> bool:
        """Whether a load may begin: its gate is open or it can be read before that, and nothing is just being freed."""
        if index >= len(self._loads) or self._freeing:
            return False
        return self._transfer.reads_ahead or self.is_open(self._loads[index].gate)

    def _announce(self) -> Sequence[Load]:
        """The loads up to a few ahead of the one just taken, so that the disk reads on; only behind open gates."""
        first = max(self._expected, self._next - 1)
        last = first
        while last < min(self._next + self._ahead, len(self._loads)) and self.is_open(self._loads[last].gate):
            last += 1
        self._expected = last
        return self._loads[first:last]


def _as_run_error(error: BaseException) -> BaseException:
    """What the main thread raises for a thread's failure."""
    if isinstance(error, RunError):
        return RunError(str(error))
    return RunError(f"loading weights failed: {type(error).__name__}: {error}")
