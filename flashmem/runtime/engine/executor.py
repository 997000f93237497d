"""Executor: enqueues launches in order on one queue, each after its slices are loaded, a bounded number of them ahead.

Binding the program prepares everything: one kernel object a launch with its arguments set, one prepared call. A run only waits
and launches. A launch has an event only where something waits for it. These are release times of loads, slices to be freed, and
a trace. A few more launches have one, so that a run can stop before the end of its queue. With a recorder, launches between two
such events are recorded when the same run repeats, and from then on enqueued with one call.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType

from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.runtime.engine.steps import Step
from flashmem.runtime.engine.stopping import never
from flashmem.runtime.opencl.context import Event, Kernel, Memory, Queue, event_seconds, has_ended, set_memory, wait
from flashmem.runtime.opencl.launching import PreparedLaunch, Recorder, Recording, not_recorded
from flashmem.runtime.streaming.loading import Loading
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.loads import TimedInterval

LAYERS_APART = (4, 64)
"""Fewest and most launches between two events that only the executor waits for. Up to twice as many can be enqueued and not
known to be complete (three times before a recording), which keeps the device busy.
"""

SECONDS_APART = 0.01
"""Target seconds between two such events: an interrupted run ends when the enqueued launches are complete."""

FEWEST = 4
"""Fewest launches worth a recording."""

_NOTHING: Mapping[int, Callable[[], None]] = MappingProxyType({})


class Executor:
    """Executes the steps on `queue`, which is in order. `recorder`: records launches of that queue."""

    def __init__(
        self, queue: Queue, steps: Sequence[Step], recorder: Recorder | None = None, transfer: Transfer | None = None
    ) -> None:
        """`transfer` loads the slices that the steps need."""
        self._queue = queue
        self._transfer = transfer
        self._steps = steps
        self._recorder = recorder
        self._recordings: dict[int, tuple[int, Recording]] | None = None  # by first launch: the last one, and the recording
        self._stops: frozenset[int] | None = None  # where the recordings of the last run end
        self._longest = 0  # most launches in one recording
        self._users: dict[str, list[tuple[Kernel, int]]] = {}  # by slice: arguments to set before a launch
        self._set: dict[str, Memory] = {}  # what they were set to
        for command in (each for step in steps for each in step.commands) if transfer and transfer.binds_late else ():
            for index, name in command.slices:
                self._users.setdefault(name, []).append((command.kernel, index))
        self._launches = [[queue.prepare(c.kernel, c.global_size, c.local_size) for c in step.commands] for step in steps]
        self._busy = [layer for layer, launches in enumerate(self._launches, start=1) if launches]
        self._apart = LAYERS_APART[0]
        self._parts: tuple[int, list[tuple[int, list[PreparedLaunch]]]] = (0, [])  # for a distance between events: `_in_parts`

    def run(
        self,
        loader: Loading | None,
        trace: list[TimedInterval] | None = None,
        check: Callable[[], None] | None = None,
        after: Mapping[int, Callable[[], None]] = _NOTHING,
        *,
        done: int = 0,
        halted: Callable[[], bool] = never,
    ) -> int:
        """Run all launches after `done`; `loader` loads the slices that they need (None: everything is resident). Calls `check`
        before each launch, or before several of a run that loads nothing, and `after[launch]` once that launch is enqueued. No
        launch begins once `halted()` is true.

        Returns the last launch when it is complete. Raises RunError when a load or a launch fails, and what `check` raises;
        launches may then still be running.
        """
        if loader is None and trace is None and self._recorder is None and halted is never and not after and not done:
            return self._run_resident(check)
        queue = self._queue
        waking = loader.wakes if loader is not None else frozenset()
        flying: deque[tuple[int, Event]] = deque()  # launches with events, not known to be complete
        traced: list[tuple[str, str, Event, Event]] = []
        recordings = self._recorded(loader, {*waking, *after}) if self._recorder is not None and trace is None else {}
        first, since = done + 1, perf_counter()  # `done`: the last launch known to be complete, `since` when
        launched, last = done, len(self._steps)  # the last launch with an event; the last of all
        spaced = done  # the last launch in `flying`
        layer = done  # the last one that is enqueued, or about to be

        def retire() -> None:
            nonlocal done, since
            layer, event = flying.popleft()
            wait(event)
            now = perf_counter()
            self._space(layer - done, now - since)
            done, since = layer, now
            if loader is not None:
                loader.layer_done(layer)

        ahead = loader is not None and loader.follows_launches  # nothing waits for the host to know that a launch has ended
        alone = loader is None or ahead  # no launch waits for what another thread has yet to do
        if loader is not None:
            loader.take_over()
        loaded = loader.loaded if loader is not None else {}
        arrived = list(self._transfer.arrived) if self._transfer is not None else []
        self._follow([name for name in arrived if name not in loaded])
        again = [name for step in self._steps[:done] for name in step.needs if name in loaded]  # used before and after
        while layer < last:
            if halted() and (layer == 0 or self._launches[layer - 1]):  # these launches do the work of all up to here
                if launched < layer:
                    queue.finish()
                last = layer
                break
            step, launches = self._steps[layer], self._launches[layer]
            layer += 1
            needs = step.needs if layer > first else (*again, *step.needs)
            if not (launches or needs or trace is not None or layer in waking or layer in after or layer == last):
                continue  # a later launch does its work
            if check is not None:
                check()
            while not alone and flying and has_ended(flying[0][1]):  # start loads at their release times
                retire()
            waited_for = ""
            for name in needs:
                if loader is not None and not loaded.get(name, True):
                    if launched < layer - 1:
                        queue.flush()
                    while flying and not ahead:  # the load may wait for the end of a launch
                        retire()
                    loader.wait(name)
                    waited_for = name
            if needs:
                self._follow(needs)
            self._bind(needs)
            if trace is not None:
                events = [queue.launch(each) for each in launches] or [queue.marker()]
                event = events[-1]
                traced.append((step.name, waited_for, events[0], event))
                flying.append((layer, event))
            elif layer in recordings:
                layer, recording = recordings[layer]
                event = queue.play(recording)
                flying.append((layer, event))
                queue.flush()
                launched = layer
            elif layer in waking or layer >= launched + self._apart or layer == last:
                if len(launches) > 1:
                    queue.launch_all(launches[:-1], alone=alone)
                event = queue.launch(launches[-1], alone=alone) if launches else queue.marker()
                queue.flush()
                launched = layer
                if not ahead or layer == last or layer >= spaced + self._apart:
                    flying.append((layer, event))
                    spaced = layer
            else:
                queue.launch_all(launches, alone=alone)
                if layer == first:
                    queue.flush()
            if loader is not None and ahead and layer in waking:
                if trace is not None:
                    queue.flush()
                loader.launched(layer, event)
            if layer in after:
                after[layer]()
            while flying and layer - flying[0][0] >= self._apart:
                retire()
        while flying:
            retire()
        if trace is not None:
            trace.extend(self._intervals(traced))
        return last

    def _run_resident(self, check: Callable[[], None] | None) -> int:
        """Run all launches, with nothing to load, to free or to read, and nobody who halts it: part by part, with an event
        between two parts, and one wait at the end. See `run`.
        """
        queue, transfer, begun = self._queue, self._transfer, perf_counter()
        if transfer is not None and transfer.arrived:
            self._follow(list(transfer.arrived))
        self._bind(self._users)
        parts, done = self._in_parts(), 0
        flying: Event | None = None  # of the last part but one
        for layer, launches in parts:
            if check is not None:
                check()
            if not done and len(launches) > 2 * FEWEST:  # the device begins while the others are enqueued
                queue.launch_all(launches[:1])
                queue.flush()
                launches = launches[1:]
            done = layer
            if done == parts[-1][0]:
                queue.launch_all(launches)
                break
            queue.launch_all(launches[:-1])
            event = queue.launch(launches[-1])
            queue.flush()
            if flying is not None:
                wait(flying)
            flying = event
        queue.finish()
        self._space(len(self._busy), perf_counter() - begun)
        return len(self._steps)

    def _in_parts(self) -> list[tuple[int, list[PreparedLaunch]]]:
        """The launches of a run in parts, each with its last step. Two events are apart by the steps of one part."""
        apart, parts = self._parts
        if apart != self._apart:
            apart, parts = self._apart, []
            for first in range(0, len(self._busy), apart):
                layers = self._busy[first : first + apart]
                parts.append((layers[-1], [each for layer in layers for each in self._launches[layer - 1]]))
            self._parts = apart, parts
        return parts

    def _follow(self, names: Iterable[str]) -> None:
        """Make the queue wait for the commands on other queues that load these slices."""
        if self._transfer is not None and (events := self._transfer.take_arrived(names)):
            self._queue.follow(events)

    def _bind(self, names: Iterable[str]) -> None:
        """Set these slices as arguments of all kernels that use them, where their memory has changed (`binds_late`)."""
        if self._transfer is None or not self._users:
            return
        for name in names:
            memory = self._transfer.memories[name]
            if memory is not None and self._set.get(name) is not memory:
                for kernel, index in self._users.get(name, ()):
                    set_memory(kernel, index, memory)
                self._set[name] = memory

    def _recorded(self, loader: Loading | None, stops: Iterable[int]) -> Mapping[int, tuple[int, Recording]]:
        """The recordings for this run; none for the first run of its kind. They end at `stops` and before waiting launches."""
        waiting = loader.loaded if loader is not None else {}
        waits = [n for n, step in enumerate(self._steps) if any(name in waiting for name in step.needs)]
        here = frozenset((*stops, *waits))
        unfit = self._recordings is not None and not self._longest <= 4 * self._apart <= 16 * self._longest
        if here != self._stops or unfit:  # another run, or a large change of the distance between events
            self._stops, self._recordings = here, None
            return {}
        if self._recordings is None:
            try:
                self._recordings = self._record(here)
            except RunError as error:
                warnings.warn(not_recorded(error), FlashmemWarning, stacklevel=2)
                self._recorder = None
                return {}
        return self._recordings

    def _record(self, stops: frozenset[int]) -> dict[int, tuple[int, Recording]]:
        """Record the launches between two `stops` or two events. Raises RunError."""
        assert self._recorder is not None
        found: dict[int, tuple[int, Recording]] = {}
        begun, last, self._longest = 0, len(self._steps), self._apart
        launches: list[PreparedLaunch] = []
        for layer, each in enumerate(self._launches, start=1):
            launches += each
            following = len(self._launches[layer]) if layer < last else 0
            full = layer - begun == self._apart or len(launches) + following > self._recorder.most
            if full or layer in stops or layer == last:
                if FEWEST <= len(launches) <= self._recorder.most:
                    found[begun + 1] = (layer, self._recorder.record(launches))
                begun, launches = layer, []
        return found

    def _space(self, layers: int, seconds: float) -> None:
        """Set the distance between events, given that `layers` launches took `seconds`."""
        least, most = LAYERS_APART
        self._apart = max(least, min(most, int(layers * SECONDS_APART / max(seconds, 1e-9))))

    def _intervals(self, traced: Sequence[tuple[str, str, Event, Event]]) -> list[TimedInterval]:
        """Device times on the host's clock."""
        apart = self._queue.clock_apart()
        return [
            TimedInterval(name, event_seconds(first)[0] + apart, event_seconds(last)[1] + apart, waited_for=waited_for)
            for name, waited_for, first, last in traced
        ]

    def drain(self) -> None:
        """After a failure: wait for what still runs, as far as the device permits."""
        try:
            self._queue.finish()
        except RunError:  # a lost device runs nothing that needs a wait
            return
