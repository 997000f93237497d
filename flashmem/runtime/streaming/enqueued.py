"""Loads of a run whose bytes are in the host tier: copies that the host only enqueues.

The thread of the launches enqueues each copy when the launch that releases it is enqueued. On the device the copy waits for
that launch, and the launches that need the slice wait for the copy. So no thread has to learn that a command has ended before
it enqueues the next one.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence

from flashmem.base.errors import RunError
from flashmem.runtime.opencl.context import Event
from flashmem.runtime.opencl.copier import CopyEvent
from flashmem.runtime.streaming.copied import MovingTransfer
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.loads import Load, Schedule, TimedInterval


class EnqueuedLoads:
    """The loads of one run, in the order of their releases. The interface is that of `LoaderRun`; `idle` is always true."""

    follows_launches = True
    idle = True  # the disk is free for other models

    def __init__(self, transfer: MovingTransfer, loads: Sequence[Load], *, done: int = 0) -> None:
        """Enqueue those that are released after `done` launches. Raises RunError."""
        self.loaded = {load.part.name: False for load in loads}
        self._missing = Counter(load.part.name for load in loads)  # segments, by slice
        self.wakes = frozenset(load.after for load in loads)
        self.intervals: list[TimedInterval] = []
        self.when_freed: Callable[[int], None] | None = None  # never called: no slice is freed
        self._transfer = transfer
        self._waiting: list[Load] = list(loads)
        self._copies: list[tuple[Load, CopyEvent]] = []
        self._failure: str | None = None
        self._enqueue(done, None)

    def launched(self, layer: int, event: Event) -> None:
        """Launch `layer` is enqueued and flushed, and `event` is its event: enqueue the copies that it releases.

        Raises:
            RunError: the device refuses one.
        """
        if layer in self.wakes:
            self._enqueue(layer, event)

    def _enqueue(self, layer: int, event: Event | None) -> None:
        waiting = self._waiting
        self._waiting = [load for load in waiting if load.after > layer]
        for load in waiting:
            if load.after <= layer:
                self._copies.append((load, self._transfer.copy_held(load, event)))
                self._missing[load.part.name] -= 1
                self.loaded[load.part.name] = not self._missing[load.part.name]

    def layer_done(self, layer: int) -> None:
        """Launch `layer` is complete: nothing to do."""

    def wake(self) -> None:
        """Retry loads that were not admitted: there are none."""

    def admit_all(self) -> None:
        """Admit every load: they are."""

    def wait(self, name: str) -> None:
        """Require that slice `name` is loaded: a launch that needs it comes after the one that released its load."""
        assert self.loaded[name]

    def collect(self) -> None:
        """Wait for the copies so far, and record when the device made them; `stop` raises the error of one that failed."""
        copies, self._copies = self._copies, []
        try:
            for _, copy in copies:
                copy.wait()
            apart = self._transfer.clock_apart() if copies else 0.0
            times = [copy.seconds() for _, copy in copies]
        except RunError as error:
            self._failure = self._failure or str(error)
            return
        for (load, _), (start, end) in zip(copies, times, strict=True):
            start, end, nbytes = start + apart, end + apart, load.segment.nbytes
            self.intervals.append(TimedInterval(load.part.name, start, end, 0, (("copy", end),), nbytes, load.after))

    def stop(self) -> None:
        """End the loads. Raises RunError if a copy failed."""
        self._waiting = []
        self.collect()
        if self._failure is not None:
            raise RunError(self._failure)


class PartlyEnqueuedLoads:
    """The loads of one run of which the host tier holds some slices: those are enqueued, and threads load the others.

    A thread with a load that is not released waits, so that it reads nothing meanwhile; these loads need none. The interface is
    that of `LoaderRun`.
    """

    follows_launches = True

    def __init__(self, enqueued: EnqueuedLoads, threads: LoaderRun) -> None:
        self._enqueued, self._threads = enqueued, threads
        self.loaded: Mapping[str, bool] = ChainMap(enqueued.loaded, threads.loaded)
        self.wakes = enqueued.wakes | threads.wakes
        self.when_freed: Callable[[int], None] | None = None  # never called: no slice is freed

    @property
    def intervals(self) -> list[TimedInterval]:
        """The loads that have ended."""
        return [*self._enqueued.intervals, *self._threads.intervals]

    @property
    def idle(self) -> bool:
        """Whether the disk is free for other models."""
        return self._threads.idle

    def launched(self, layer: int, event: Event) -> None:
        """See `EnqueuedLoads`. Raises RunError if the device refuses a copy."""
        self._threads.launched(layer, event)
        self._enqueued.launched(layer, event)

    def layer_done(self, layer: int) -> None:
        """Launch `layer` is complete."""
        self._threads.layer_done(layer)

    def wake(self) -> None:
        """Retry loads that were not admitted: there are none."""

    def admit_all(self) -> None:
        """Admit every load: they are."""

    def wait(self, name: str) -> None:
        """Wait until slice `name` is loaded. Raises RunError if a load failed."""
        (self._enqueued if name in self._enqueued.loaded else self._threads).wait(name)

    def collect(self) -> None:
        """Wait for the copies so far, and record when the device made them."""
        self._enqueued.collect()
        self._threads.collect()

    def stop(self) -> None:
        """End the loads. Raises RunError if one failed."""
        try:
            self._threads.stop()
        finally:
            self._enqueued.stop()


RunLoads = LoaderRun | EnqueuedLoads | PartlyEnqueuedLoads
"""The loads of a run."""


def begin_loads(
    transfer: Transfer,
    schedule: Schedule,
    *,
    threads: int,
    done: int = 0,
    admit: Callable[[Load], bool] | None = None,
) -> RunLoads | None:
    """Begin the loads of a run after `done` launches, as far as `admit` permits; None if there are none.

    Raises:
        RunError: the device refuses a copy.
    """
    others: Sequence[Load] = schedule.loads
    enqueued: EnqueuedLoads | None = None
    if admit is None and transfer.follows_launches and isinstance(transfer, MovingTransfer):
        held, others = transfer.divided(schedule.loads)
        enqueued = EnqueuedLoads(transfer, held, done=done) if held else None
    if not others and (enqueued is not None or not (schedule.frees and transfer.frees)):
        return enqueued
    loading = LoaderRun(transfer, others, schedule.frees, threads=threads, done=done, admit=admit)
    return loading if enqueued is None else PartlyEnqueuedLoads(enqueued, loading)
