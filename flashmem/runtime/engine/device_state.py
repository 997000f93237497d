"""A device in use: its context, the queue of launches, compiled programs, and the budget that models share."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

from flashmem.runtime.engine.report import process_rss
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import passed_probes
from flashmem.runtime.opencl.launching import Recorder
from flashmem.runtime.streaming.shared_pages import SharedSlices


class DeviceInUse:
    """The state of a device that all programs bound to it share."""

    def __init__(self, device: Device, budget: int | None, *, profiling: bool = False) -> None:
        """Make the context and the queue.

        Raises:
            RunError: the driver refuses.
        """
        self.device = device
        self.context = Context(device)
        self.queue = self.context.queue(profiling=profiling)
        self.traced = profiling
        self.budget = Budget(budget)
        self.programs: WeakValueDictionary[str, CompiledProgram] = WeakValueDictionary()  # by key, while a bundle holds them
        self.shared_slices = SharedSlices()  # in mode `map`
        self.start_rss = process_rss()
        self._beside: Queue | None = None
        self._recorders: dict[frozenset[str], Recorder | None] = {}  # by the extensions whose probe has passed

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
