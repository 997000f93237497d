"""The launch window: how many launches a run enqueues ahead of the device, and where it waits for them.

A launch has an event only where something waits for its end: a load for its release, memory to be freed, a trace. A few more
launches have one, so that a run can stop before the end of its queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from flashmem.runtime.engine.steps import Step
from flashmem.runtime.opencl.context import Queue, has_ended, set_memory, wait
from flashmem.runtime.opencl.handles import DeviceMemory, KernelObject, LaunchEvent
from flashmem.runtime.streaming.loading import Loading
from flashmem.runtime.streaming.transfer import Transfer

LAYERS_APART = (4, 64)
"""Fewest and most launches between two events that only the executor waits for. Up to twice as many can be enqueued and not
known to be complete (three times before a recording), which keeps the device busy.
"""

SECONDS_APART = 0.01
"""Target seconds between two such events: an interrupted run ends when the enqueued launches are complete."""


@dataclass(frozen=True, slots=True)
class LaunchOrders:
    """What an execution of the steps does besides launching them.

    Attributes:
        loader: loads the slices that the steps need; None: everything is resident.
        check: called before each launch, or before several of a run that loads nothing; may raise.
        after: by launch, what is called once it is enqueued.
        done: the launches up to this one are complete already.
        halted: whether no further launch may begin; None: nobody halts the run.
    """

    loader: Loading | None = None
    check: Callable[[], None] | None = None
    after: Mapping[int, Callable[[], None]] = field(default_factory=dict)
    done: int = 0
    halted: Callable[[], bool] | None = None

    @property
    def copies_follow(self) -> bool:
        """Whether copies wait on the device for launches: no load waits until the host knows that a launch has ended."""
        return self.loader is not None and self.loader.follows_launches

    @property
    def launches_alone(self) -> bool:
        """Whether no launch waits for what another thread has yet to do."""
        return self.loader is None or self.loader.follows_launches

    @property
    def wakes(self) -> frozenset[int]:
        """The launches that release loads, or free slices."""
        return self.loader.wakes if self.loader is not None else frozenset()


class Spacing:
    """The distance between two events, in launches, by the time that launches have taken."""

    def __init__(self) -> None:
        self.layers = LAYERS_APART[0]

    def measure(self, layers: int, seconds: float) -> None:
        """Learn that `layers` launches took `seconds`."""
        least, most = LAYERS_APART
        self.layers = max(least, min(most, int(layers * SECONDS_APART / max(seconds, 1e-9))))


class LaunchWindow:
    """The launches of one run that have an event and are not known to be complete.

    `last`: the last launch that was added.
    """

    def __init__(self, spacing: Spacing, orders: LaunchOrders) -> None:
        self._spacing = spacing
        self._loader = orders.loader
        self._alone = orders.launches_alone
        self._flying: deque[tuple[int, LaunchEvent]] = deque()
        self.last = self._done = orders.done
        self._since = perf_counter()  # when `_done` was complete

    def add(self, layer: int, event: LaunchEvent) -> None:
        """Launch `layer` is enqueued, and `event` is its event."""
        self._flying.append((layer, event))
        self.last = layer

    def _retire(self) -> None:
        layer, event = self._flying.popleft()
        wait(event)
        now = perf_counter()
        self._spacing.measure(layer - self._done, now - self._since)
        self._done = layer
        self._since = now
        if self._loader is not None:
            self._loader.layer_done(layer)

    def retire_ended(self) -> None:
        """Report the launches that have ended, which releases loads; not where each launch is alone."""
        while not self._alone and self._flying and has_ended(self._flying[0][1]):
            self._retire()

    def retire_far_from(self, layer: int) -> None:
        """Wait until no launch is left that is further before `layer` than two events are apart."""
        while self._flying and layer - self._flying[0][0] >= self._spacing.layers:
            self._retire()

    def retire_all(self) -> None:
        """Wait for all launches, and report their ends."""
        while self._flying:
            self._retire()

    def finish(self, queue: Queue, layer: int) -> int:
        """Wait until all launches up to `layer`, which is returned, are complete: the last ones need not have an event."""
        self.retire_all()
        if self.last < layer:
            queue.finish()
        return layer


class SliceArguments:
    """The slices of `transfer` as arguments of the kernels of `steps`, which `queue` launches."""

    def __init__(self, queue: Queue, steps: Sequence[Step], transfer: Transfer | None) -> None:
        self.queue = queue
        self._transfer = transfer
        self._users: dict[str, list[tuple[KernelObject, int]]] = {}  # by slice: arguments to set before a launch
        self._set: dict[str, DeviceMemory] = {}  # what they were set to
        for command in (each for step in steps for each in step.commands) if transfer and transfer.binds_late else ():
            for index, name in command.slices:
                self._users.setdefault(name, []).append((command.kernel, index))

    def follow(self, names: Iterable[str]) -> None:
        """Make the queue wait for the commands on other queues that load these slices."""
        if self._transfer is not None and (events := self._transfer.take_arrived(names)):
            self.queue.follow(events)

    def follow_all_but(self, loading: Iterable[str]) -> None:
        """Make the queue wait for the commands that have loaded slices, except those of `loading`."""
        if self._transfer is not None and self._transfer.arrived:
            self.follow([name for name in self._transfer.arrived if name not in loading])

    def bind(self, names: Iterable[str]) -> None:
        """Set these slices as arguments of all kernels that use them, where their memory has changed (`binds_late`)."""
        if self._transfer is None or not self._users:
            return
        for name in names:
            memory = self._transfer.memories.get(name)
            if memory is not None and self._set.get(name) is not memory:
                for kernel, index in self._users.get(name, ()):
                    set_memory(kernel, index, memory)
                self._set[name] = memory

    def settle(self) -> None:
        """Use all slices, which are loaded and stay."""
        self.follow_all_but(())
        self.bind(self._users)


class SliceGate:
    """Holds the launches of one run back until their slices are loaded."""

    def __init__(self, slices: SliceArguments, window: LaunchWindow, loader: Loading | None) -> None:
        """From here on, the loads of the run are made in this thread, unless threads make them."""
        self._slices = slices
        self._window = window
        self._loader = loader
        self._loaded: Mapping[str, bool] = {}
        if loader is not None:
            loader.take_over()
            self._loaded = loader.loaded
        slices.follow_all_but(self._loaded)

    def enter(self, needs: Sequence[str], *, flushed: bool) -> str:
        """Wait for the slices `needs`, and let the queue and the kernels use them; returns the last one that was waited for.

        `flushed`: all launches so far are submitted.

        Raises:
            RunError: a load has failed.
        """
        waited_for = ""
        loader = self._loader
        slices = self._slices
        for name in needs:
            if loader is not None and not self._loaded.get(name, True):
                if not flushed:
                    slices.queue.flush()
                    flushed = True
                if not loader.follows_launches:  # the load may wait for the end of a launch
                    self._window.retire_all()
                loader.wait(name)
                waited_for = name
        slices.follow(needs)
        slices.bind(needs)
        return waited_for
