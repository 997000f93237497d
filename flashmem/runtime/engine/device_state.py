"""A device in use: its context, the queue of launches, compiled programs, and the budget that models share."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from weakref import WeakValueDictionary

from flashmem.base.apart import apart
from flashmem.runtime.engine.report import process_rss
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import passed_probes
from flashmem.runtime.opencl.launching import Recorder
from flashmem.runtime.request.options import device_here
from flashmem.runtime.streaming.shared_pages import SharedSlices


class DeviceInUse:
    """The state of a device that all programs bound to it share."""

    def __init__(self, device: Device, budget: int | None, *, profiling: bool = False, later: bool = False) -> None:
        """Make the context and the queue; `later`: begin to, and `open` must follow.

        Raises:
            RunError: the driver refuses.
        """
        self.device = device
        self.context = Context(device, later=later)
        self.queue: Queue
        self.start_rss: int | None
        self._is_open = False
        self.traced = profiling
        self.budget = Budget(budget)
        self.programs: WeakValueDictionary[str, CompiledProgram] = WeakValueDictionary()  # by key, while a bundle holds them
        self.shared_slices = SharedSlices()  # in mode `map`
        self._beside: Queue | None = None
        self._recorders: dict[frozenset[str], Recorder | None] = {}  # by the extensions whose probe has passed
        if not later:
            self.open()

    def open(self) -> None:
        """Wait for the context, and make the queue. Once is enough. Raises RunError: the driver refuses."""
        if not self._is_open:
            self._is_open = True
            self.queue = self.context.queue(profiling=self.traced)
            self.start_rss = process_rss()

    def ledger(self) -> Ledger:
        """A new account on the budget."""
        return Ledger(self.context, self.budget)

    def recorder(self, probed: Mapping[str, str]) -> Recorder | None:
        """The recorder of launches on the queue, if the device can record; `probed` as in a bundle's descriptor."""
        key = frozenset(passed_probes(self.device, probed))
        if key not in self._recorders:
            self._recorders[key] = self.context.recorder(self.queue, probed)
        return self._recorders[key]

    @property
    def beside(self) -> Queue:
        """A second queue, for commands that must not wait for launches in progress. It is created on first use."""
        if self._beside is None:
            self._beside = self.context.queue()
        return self._beside


def begin_to_open(device: str, *, prefer: str | None, profiling: bool) -> Future[DeviceInUse]:
    """The device that `device_here` finds, whose context is being made (`DeviceInUse.open`). A thread waits for the drivers."""

    def work() -> DeviceInUse:
        return DeviceInUse(device_here(device, prefer=prefer), None, profiling=profiling, later=True)

    return apart("flashmem-device", work)
