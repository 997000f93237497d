"""A device in use: its context, the queue of launches, compiled programs, and the budget that models share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from flashmem.base.apart import Apart
from flashmem.base.errors import RunError, UserError
from flashmem.runtime.engine.report import process_rss
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import CompiledProgram, Context, Queue
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import passed_probes
from flashmem.runtime.opencl.discovery import leave_surroundings
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
            self.queue = self.context.queue(profiling=self.traced)
            self.start_rss = process_rss()
            self._is_open = True

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


class DeviceOpening:
    """A device that is being opened in threads, while the rest of a session is prepared: the drivers start, then it is found,
    then its context is made. In a `with`: if the body fails, none of these threads goes on.
    """

    def __init__(self, name: str, *, prefer: str | None, profiling: bool) -> None:
        """Begin. `name` and `prefer` are those of `device_here`."""

        def find() -> DeviceInUse:
            return DeviceInUse(device_here(name, prefer=prefer), None, profiling=profiling, later=True)

        self._finding = Apart("flashmem-device", find)

    def found(self) -> DeviceInUse:
        """The device, whose `open` must follow. Raises what `device_here` and `DeviceInUse` raise."""
        try:
            return self._finding.result()
        finally:
            leave_surroundings()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            with suppress(UserError, RunError):
                self.found().context.wait()
