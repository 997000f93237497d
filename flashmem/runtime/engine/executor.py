"""Executor: enqueues launches in order on one queue, each after its slices are loaded, a bounded number of them ahead.

Binding the program prepares everything: one kernel object a launch with its arguments set, one prepared call. A run only waits
and launches: `Resident` where it loads nothing, else `Streamed`. `Recorded` is the same loop, in which launches between two
waits are recorded when the same run repeats, and from then on enqueued with one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.runtime.engine.launch_window import LaunchOrders as LaunchOrders
from flashmem.runtime.engine.launch_window import LaunchWindow, SliceArguments, SliceGate, Spacing
from flashmem.runtime.engine.prepared_steps import Part, PreparedSteps
from flashmem.runtime.engine.steps import Step
from flashmem.runtime.opencl.context import Queue, event_seconds
from flashmem.runtime.opencl.handles import LaunchEvent
from flashmem.runtime.opencl.launching import PreparedLaunch, Recorder, not_recorded
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.loads import TimedInterval

FEWEST = 4
"""Fewest launches worth a recording."""

_PLAIN = LaunchOrders()


class Executor:
    """Executes the steps on `queue`, which is in order. `recorder`: records launches of that queue."""

    def __init__(
        self, queue: Queue, steps: Sequence[Step], recorder: Recorder | None = None, transfer: Transfer | None = None
    ) -> None:
        """`transfer` loads the slices that the steps need."""
        self.queue = queue
        self.spacing = Spacing()
        prepared = PreparedSteps(queue, steps)
        slices = SliceArguments(queue, steps, transfer)
        self._resident = Resident(prepared, slices, self.spacing)
        self._streamed = Streamed(prepared, slices, self.spacing)
        self.recorded = None if recorder is None else Recorded(prepared, slices, self.spacing, recorder)

    def run(self, orders: LaunchOrders = _PLAIN, trace: Trace | None = None) -> int:
        """Run all launches after `orders.done`, and record in `trace` when each ran.

        Returns the last launch when it is complete: of all, or of those before the run was halted. Raises RunError when a load
        or a launch fails, and what `orders.check` raises; launches may then still be running.
        """
        recorded = self.recorded
        if recorded is not None and trace is None and not orders.done and recorded.knows(orders):
            return recorded.run(orders)
        if orders.loader is None and orders.halted is None and trace is None and not orders.done:
            return self._resident.run(orders)
        return self._streamed.run(orders, trace)

    def drain(self) -> None:
        """After a failure: wait for what still runs, as far as the device permits."""
        try:
            self.queue.finish()
        except RunError:  # a lost device runs nothing that needs a wait
            return


class Resident:
    """The loop of a run with nothing to load or to free, which nobody halts: part by part, with an event between two parts, and
    one wait at the end.
    """

    def __init__(self, prepared: PreparedSteps, slices: SliceArguments, spacing: Spacing) -> None:
        self._prepared = prepared
        self._slices = slices
        self._spacing = spacing
        self._parts: list[Part] = []
        self._parts_for: tuple[int, frozenset[int]] | None = None

    def run(self, orders: LaunchOrders) -> int:
        """See `Executor.run`."""
        prepared = self._prepared
        queue = self._prepared.queue
        check = orders.check
        after = orders.after
        window = LaunchWindow(self._spacing, orders)
        last = len(prepared.steps)
        self._slices.settle()
        for part in self._in_parts(frozenset(after)):
            if check is not None:
                check()
            launches = part.launches
            if part.first == 1 and len(launches) > 2 * FEWEST:  # the device begins while the others are enqueued
                queue.launch_all(launches[:1])
                queue.flush()
                launches = launches[1:]
            if part.last == last:
                queue.launch_all(launches)
            else:
                window.add(part.last, queue.launch_with_event(launches))
                window.retire_far_from(part.last)
            if part.last in after:
                after[part.last]()
        return window.finish(queue, last)

    def _in_parts(self, stops: frozenset[int]) -> list[Part]:
        """Parts that end at `stops`, and where two events are far enough apart; kept for the next run."""
        wanted = self._spacing.layers, stops
        if wanted != self._parts_for:
            self._parts = self._prepared.in_parts(stops, self._spacing.layers)
            self._parts_for = wanted
        return self._parts


class Streamed:
    """The loop of a run that loads: each launch once its slices are loaded, with an event where something waits for its end.

    It can begin and be halted between any two launches, and be traced.
    """

    def __init__(self, prepared: PreparedSteps, slices: SliceArguments, spacing: Spacing) -> None:
        self._prepared = prepared
        self._slices = slices
        self._spacing = spacing

    def run(self, orders: LaunchOrders, trace: Trace | None = None) -> int:
        """See `Executor.run`. Step by step."""
        prepared = self._prepared
        parts = prepared.singly if not orders.done else prepared.singly_after(orders.done, orders.loader)
        return self._enqueue(parts, orders, trace)

    def _enqueue(self, parts: Sequence[Part], orders: LaunchOrders, trace: Trace | None = None) -> int:
        """Enqueue the parts, and wait for their end. Returns the last step."""
        prepared = self._prepared
        queue = self._prepared.queue
        check = orders.check
        halted = orders.halted
        after = orders.after
        last = len(prepared.steps)
        waking = orders.wakes
        window = LaunchWindow(self._spacing, orders)
        enqueued = _Enqueued(queue, last, orders, window, self._spacing)
        gate = SliceGate(self._slices, window, orders.loader)
        for part in parts:
            if halted is not None and part.may_halt and halted():
                return window.finish(queue, part.first - 1)
            layer = part.last
            needs = part.needs
            if not (part.launches or needs or layer in waking or trace is not None or layer in after or layer == last):
                continue  # a later launch does its work
            if check is not None:
                check()
            window.retire_ended()  # loads begin at their release times
            waited_for = gate.enter(needs, flushed=enqueued.submitted == part.first - 1) if needs else ""
            if trace is None:
                enqueued.add(part, is_first=part is parts[0])
            else:
                enqueued.add_traced(part, trace, prepared.steps[layer - 1].name, waited_for)
            if layer in after:
                after[layer]()
            window.retire_far_from(layer)
        window.retire_all()
        return last


class _Enqueued:
    """The launches of a run on their queue, with an event where something waits for one. `submitted`: the last launch that the
    device knows of.
    """

    def __init__(self, queue: Queue, last: int, orders: LaunchOrders, window: LaunchWindow, spacing: Spacing) -> None:
        self._queue = queue
        self._last = last
        self._window = window
        self._spacing = spacing
        self._waking = orders.wakes
        self._follows = orders.copies_follow
        self._alone = orders.launches_alone
        self._loader = orders.loader
        self.submitted = orders.done

    def add(self, part: Part, *, is_first: bool) -> None:
        """Enqueue a part."""
        layer = part.last
        apart = self._spacing.layers
        window = self._window
        wakes = layer in self._waking
        is_last = layer == self._last
        if part.recording is not None:
            event = self._queue.play(part.recording)
            self.submitted = layer
            window.add(layer, event)
        elif wakes or is_last or layer >= self.submitted + apart:
            event = self._queue.launch_with_event(part.launches, alone=self._alone)
            self.submitted = layer
            if not self._follows or is_last or layer >= window.last + apart:
                window.add(layer, event)
        else:
            self._queue.launch_all(part.launches, alone=self._alone)
            if is_first:
                self._queue.flush()  # the device begins
            return
        self._tell_loader(layer, event)

    def add_traced(self, part: Part, trace: Trace, name: str, waited_for: str) -> None:
        """Enqueue a part, each launch with an event."""
        flush = self._follows and part.last in self._waking
        event = trace.launch(self._queue, name, part.launches, waited_for, flush=flush)
        self._window.add(part.last, event)
        self._tell_loader(part.last, event)

    def _tell_loader(self, layer: int, event: LaunchEvent) -> None:
        """Tell who loads behind this launch."""
        if self._loader is not None and self._follows and layer in self._waking:
            self._loader.launched(layer, event)


class Recorded(Streamed):
    """As `Streamed`; when a run repeats, launches between two waits are recorded, and from then on enqueued with one call."""

    def __init__(self, prepared: PreparedSteps, slices: SliceArguments, spacing: Spacing, recorder: Recorder) -> None:
        super().__init__(prepared, slices, spacing)
        self._recorder: Recorder | None = recorder
        self._stops: frozenset[int] | None = None  # where the parts of the last run end besides
        self._longest = 0  # the distance between events when they were recorded
        self.parts: list[Part] = []

    def knows(self, orders: LaunchOrders) -> bool:
        """Whether it has recordings for this run; not for the first one of its kind. They end before launches that wait."""
        stops = frozenset((*orders.wakes, *orders.after, *self._prepared.before_waits(orders.loader)))
        apart = self._spacing.layers
        if stops != self._stops or (self.parts and not self._longest <= 4 * apart <= 16 * self._longest):
            self._stops = stops
            self.parts = []  # another run, or a large change of the distance between events
            return False
        if not self.parts and self._recorder is not None:
            try:
                self.parts = self._recorded(stops, self._recorder)
                self._longest = apart
            except RunError as error:
                warnings.warn(not_recorded(error), FlashmemWarning, stacklevel=2)
                self._recorder = None
        return bool(self.parts)

    def run(self, orders: LaunchOrders, trace: Trace | None = None) -> int:
        """See `Executor.run`. For a run that it knows."""
        return self._enqueue(self.parts, orders, trace)

    def _recorded(self, stops: frozenset[int], recorder: Recorder) -> list[Part]:
        """All launches in parts, with recordings of those that are long enough. Raises RunError."""
        return [
            replace(part, recording=recorder.record(part.launches)) if FEWEST <= len(part.launches) <= recorder.most else part
            for part in self._prepared.in_parts(stops, self._spacing.layers, recorder.most)
        ]


class Trace:
    """When each step of a run ran on the device, of a queue with profiling."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, str, LaunchEvent, LaunchEvent]] = []

    def launch(
        self, queue: Queue, name: str, launches: Sequence[PreparedLaunch], waited_for: str, *, flush: bool
    ) -> LaunchEvent:
        """Enqueue the launches of a step, each with an event; returns the last one."""
        events = [queue.launch(each) for each in launches] or [queue.marker()]
        self._steps.append((name, waited_for, events[0], events[-1]))
        if flush:
            queue.flush()
        return events[-1]

    def intervals(self, queue: Queue) -> tuple[TimedInterval, ...]:
        """The steps on the host's clock, once they are complete."""
        apart = queue.clock_apart()
        return tuple(
            TimedInterval(name, event_seconds(first)[0] + apart, event_seconds(last)[1] + apart, waited_for=waited_for)
            for name, waited_for, first, last in self._steps
        )
