"""Plays the requests of a runtime, one after the other: layers now, the next models' loads as far as there is room for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.program.tensors import Port
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import of_the_request
from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.runtime.engine.run import Played, Run, check_status, collect, write_inputs
from flashmem.runtime.serving.arbiter import Occupancy
from flashmem.runtime.serving.first_plans import Planner
from flashmem.runtime.serving.loaded_model import Tenant
from flashmem.runtime.serving.requests import Answer
from flashmem.schedule.loads import TimedInterval

Array = NDArray[Any]

_GLANCE = 0.05
"""Seconds after which a thread looks again at what it is not told of."""


class Player:
    """All but `close` is called by the runtime's own thread."""

    def __init__(self, device: DeviceInUse, occupancy: Occupancy, relieved: Callable[[], None]) -> None:
        """`relieved` is called when memory has been given back."""
        self._device, self._occupancy, self._relieved = device, occupancy, relieved
        self._planner = Planner(device, occupancy)
        self._ahead: tuple[threading.Thread, threading.Event] | None = None  # that looks ahead, and what stops it
        self.pressed = threading.Event()  # the run under way has to give memory back

    def play(self, answer: Answer) -> list[Array]:
        """The outputs of a request, in the order of its names; its report is filled in.

        The thread that looks ahead may still be at work then, as `settle` says: no answer waits for it.

        Raises:
            BudgetError: the budget is too small for the model.
            RequestError: what was asked cannot be answered, for instance an index outside a table; the model is as it was.
            RunError: the run failed, or the model is closed.
        """
        self.settle()
        tenant, budget = answer.tenant, self._device.budget
        if tenant.failure is not None:
            raise RunError(f"the model is closed ({tenant.failure}); open it again")
        placement = self._occupancy.placed(tenant)
        placement.ledger.restart_history()
        ports = {port.name: port for port in tenant.opened.program.outputs}
        wanted = [ports[name] for name in dict.fromkeys(answer.names)]
        with of_the_request():
            write_inputs(placement, answer.inputs)
        loads: list[TimedInterval] = []
        read: dict[str, Array] = {}
        done, last = 0, len(tenant.opened.program.launches)
        while True:
            played = self._play_from(tenant, wanted, done)
            loads += played.loads
            read |= played.read
            if played.done == last:
                break
            self._give_way(tenant)
            done = played.done
            if tenant.opened.mode == "interleave":  # what kernels were to move before is not at home
                done, read = 0, {}
                write_inputs(placement, answer.inputs)
        with of_the_request():
            check_status(placement)
        results = collect(placement, wanted, read)
        ended = perf_counter()
        answer.report = RunReport(
            Latency(ended - answer.started, 0.0, ended - answer.started),
            MemoryUse.of(placement.ledger, ended, budget.limit, self._device.start_rss),
            tuple(loads),
            (),
            tenant.steady,
        )
        return [results[name] for name in answer.names]

    def relieve(self) -> None:
        """Between two runs: give back what passes the budget."""
        self.settle()
        self.pressed.clear()
        self._occupancy.relieve()
        self._relieved()

    def settle(self) -> None:
        """Return when nothing that was begun beside the last run goes on: from then on models may be placed, and closed."""
        if self._ahead is not None:
            thread, stop = self._ahead
            self._stop_looking(stop)
            thread.join()
            self._ahead = None

    def close(self) -> None:
        """No plan is made any more, and nothing loaded ahead."""
        self.settle()
        self._planner.close()

    def _play_from(self, tenant: Tenant, wanted: Sequence[Port], done: int) -> Played:
        """Play the layers behind `done`; meanwhile the next models load, and plans are made that are not there."""
        run = self._occupancy.begin(tenant, done)
        if run is None:  # the budget has been moved
            return Played((), (), {}, done)
        tenant.choose(done)
        self._planner.wake()
        stop = threading.Event()
        if len(self._occupancy.tenants()) > 1:
            ahead = threading.Thread(target=self._look_ahead, args=(tenant, run, stop), name="flashmem-ahead", daemon=True)
            ahead.start()
            self._ahead = ahead, stop
        try:
            return run.play(wanted, halted=self.pressed.is_set)
        finally:
            self._stop_looking(stop)
            tenant.end()

    def _stop_looking(self, stop: threading.Event) -> None:
        stop.set()
        with self._device.budget.changed:
            self._device.budget.changed.notify_all()

    def _look_ahead(self, tenant: Tenant, run: Run, stop: threading.Event) -> None:
        """While `run` plays: when its loads wait, those of the next models go on, as far as there is memory."""
        budget = self._device.budget
        while not stop.is_set():
            if not self.pressed.is_set() and (run.loader is None or run.loader.idle):
                self._occupancy.load_ahead(tenant, run)
            with budget.changed:
                if not stop.is_set():
                    budget.changed.wait(_GLANCE)

    def _give_way(self, tenant: Tenant) -> None:
        """It was halted: it gives its weights back, others what is still too much, and it goes on under another plan.

        Raises:
            BudgetError: there is none.
        """
        self.settle()
        self.pressed.clear()
        tenant.give_weights_back()
        self._occupancy.relieve(but=tenant)
        self._relieved()
        self._occupancy.place_again(tenant)
