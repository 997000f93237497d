"""The first plans of models, made beside the first run, which follows the plan of its bundle meanwhile."""

from __future__ import annotations

import threading
from contextlib import suppress

from flashmem.errors import BudgetError
from flashmem.runtime.device_in_use import DeviceInUse
from flashmem.runtime.occupancy import Occupancy


class Planner:
    """One thread while there is something to plan, and none else."""

    def __init__(self, device: DeviceInUse, occupancy: Occupancy) -> None:
        self._device, self._occupancy = device, occupancy
        self._thread: threading.Thread | None = None
        self._closing = False

    def wake(self) -> None:
        """Plan what was never planned. Called by one thread."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self._occupancy.unplanned() is not None:
            self._thread = threading.Thread(target=self._work, name="flashmem-planner", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closing and (tenant := self._occupancy.unplanned()) is not None:
            with suppress(BudgetError):  # its turn will tell
                self._occupancy.made_plan(tenant)
                _ = tenant.smallest  # asked for when the budget moves, while others wait

    def close(self) -> None:
        """End after the plan that is being made."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
