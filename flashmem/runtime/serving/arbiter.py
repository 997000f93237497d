"""Memory arbiter: decides which models have memory on the device, how much each may hold, and which one frees memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf

from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.pages import whole_pages
from flashmem.base.threads import Thread, started
from flashmem.base.units import format_size
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.run import Run
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.runtime.serving.sharing import Need, latest_needed, may_keep, spare
from flashmem.schedule.loads import Load
from flashmem.schedule.plan import OverlapPlan

_TURNS_AHEAD = 16
"""Number of queued requests whose models may load ahead."""

_POLL_SECONDS = 0.05
"""Interval at which the load-ahead thread checks release times of loads, which do not notify it."""


class _Ahead:
    """A model that loads ahead of its turn: bytes it may still allocate, and bytes it was refused."""

    def __init__(self, loaded: LoadedModel, running: Run) -> None:
        self.loaded = loaded
        self.running = running
        self.left = 0.0
        self.wants = 0  # 0 if nothing was refused since


class MemoryArbiter:
    """Memory arbiter: the models on one device, and the budget that they share.

    Any thread may call `enter`, `models`, `beside_files`, `made_plan` and `unplanned`, and set `pressed`. One thread at a time
    calls all other methods: the runtime's own or, while a run executes, the one that loads ahead (`load_ahead`).
    """

    def __init__(self, device: DeviceInUse, queue: Callable[[], Sequence[LoadedModel]], relieved: Callable[[], None]) -> None:
        """`queue` returns the models of the waiting requests, in order. `relieved` is called after memory is freed."""
        self._device = device
        self._queue = queue
        self._relieved = relieved
        self.pressed = False  # the budget was lowered: the current run must free memory
        self._thread: Thread | None = None  # loads ahead, for this run:
        self._loads_beside: Run | None = None
        self._models: list[LoadedModel] = []  # the least recently run first
        self._lock = threading.Lock()
        self._ahead: _Ahead | None = None
        self._loading_ahead = threading.Lock()

    def models(self) -> list[LoadedModel]:
        """All open models, the least recently run first."""
        with self._lock:
            return list(self._models)

    def enter(self, loaded: LoadedModel) -> None:
        """Add a model."""
        with self._lock:
            self._models.append(loaded)

    def leave(self, loaded: LoadedModel) -> None:
        """Remove a model, if it is present."""
        with self._lock:
            if loaded in self._models:
                self._models.remove(loaded)

    def has_run(self, loaded: LoadedModel) -> None:
        """Record that a model has run: it moves to the end of `models`."""
        with self._lock:
            if loaded in self._models:
                self._models.remove(loaded)
                self._models.append(loaded)

    def beside_files(self) -> int:
        """Bytes in use other than pages of the weight files."""
        held = 0
        for loaded in self.models():
            bound = loaded.bound
            if bound is not None:
                ledger = bound.ledger
                pages = 0
                if loaded.streams_pages:
                    pages = max(0, ledger.by_category.get("weights", 0) - bound.opened.file.owned_bytes)
                held += ledger.total - pages
        return held

    def plan(self, loaded: LoadedModel) -> OverlapPlan:
        """A plan within the current budget, which leaves room for other models.

        While no other model is bound and the model has no plan yet, it is the bundle's own plan.

        Raises:
            BudgetError: no plan fits.
        """
        if all(other is loaded or other.bound is None for other in self.models()):
            return loaded.plan_at_once(self._device.budget.limit, alone=self._alone)
        return self.made_plan(loaded)

    def made_plan(self, loaded: LoadedModel) -> OverlapPlan:
        """The model's plan for the current budget; makes the plan if it does not exist.

        Raises:
            BudgetError: no plan fits.
        """
        return loaded.plan_for(self._device.budget.limit, alone=self._alone)

    def unplanned(self) -> LoadedModel | None:
        """The first model in the queue that has no plan but its bundle's; None if all have one."""
        waiting = [loaded for loaded in self.models() if loaded.awaits_plan(self._device.budget.limit)]
        return latest_needed(waiting, self._queue())[-1] if waiting else None

    @property
    def _alone(self) -> bool:
        return len(self.models()) == 1

    def bind(self, loaded: LoadedModel) -> None:
        """Bind a model under its plan for the current budget, unless it is bound.

        Raises:
            BudgetError: the budget is too small.
            RunError: the device refuses.
        """

        def bind(plan: OverlapPlan) -> None:
            if loaded.current is not None and loaded.begun_under != self._device.budget.limit:
                loaded.engine.unbind()
            if loaded.current is None and not loaded.follows(plan):
                loaded.engine.unbind()
            if loaded.bound is None:
                self._make_room(loaded, lambda: loaded.try_bind(plan, self._device.queue))

        self._with_plan(loaded, bind)

    def give_way(self, loaded: LoadedModel) -> None:
        """After a halt: free the model's weights, have other models free what still exceeds the budget, and bind it again.

        Raises:
            BudgetError: no plan fits.
            RunError: the device refuses.
        """

        def rebind(plan: OverlapPlan) -> None:
            self._make_room(loaded, lambda: loaded.try_rebind(plan))

        self.wait_for_load_ahead()
        self.pressed = False
        loaded.release_weights()
        self._relieve(but=loaded)
        self._relieved()
        self._with_plan(loaded, rebind)

    def relieve(self) -> None:
        """Between two runs: have models free memory until the total is within the budget."""
        self.wait_for_load_ahead()
        self.pressed = False
        self._relieve()
        self._relieved()

    def _with_plan(self, loaded: LoadedModel, bind: Callable[[OverlapPlan], None]) -> None:
        """Call `bind` with the model's plan, and once more if the budget has changed meanwhile."""
        while True:
            limit = self._device.budget.limit
            try:
                bind(self.plan(loaded))
                loaded.bound_under = limit
                return
            except BudgetError:
                if limit == self._device.budget.limit:
                    raise

    def begin(self, loaded: LoadedModel, done: int) -> Run | None:
        """Begin the model's run after launch `done`, with all its memory granted; None if the budget has changed meanwhile.

        Raises:
            BudgetError: the budget is too small.
        """
        with self._loading_ahead:  # counts loads that are being admitted; admits none afterwards
            self._ahead = None
        run = loaded.current or loaded.begin_run(self._may_keep(loaded, self._queue(), self._loaded_ahead([loaded])), done=done)
        try:
            self._make_room(loaded, lambda: loaded.grant(run, done), lambda: loaded.lacks(run, done))
        except BudgetError:
            if loaded.bound_under == loaded.begun_under == self._device.budget.limit:
                raise
            with suppress(RunError):  # it begins again later
                run.stop()
            loaded.engine.end()
            loaded.end_grant()
            return None
        return run

    @contextmanager
    def loading_ahead(self, executing: LoadedModel, run: Run) -> Iterator[None]:
        """While `run` executes: a thread loads slices of the next models when its loads wait, as far as memory permits."""
        if len(self.models()) > 1:
            self._loads_beside = run
            self._thread = started(self._keep_loading, "flashmem-ahead", executing, run)
        try:
            yield
        finally:
            self._stop_loading()

    def wait_for_load_ahead(self) -> None:
        """Wait for the load-ahead thread; no answer waits for it. Afterwards models may be bound and closed."""
        if self._thread is not None:
            self._stop_loading()
            self._thread.join()
            self._thread = None

    def _stop_loading(self) -> None:
        budget = self._device.budget
        with budget.lock:
            self._loads_beside = None
            budget.changed.wake()

    def _keep_loading(self, executing: LoadedModel, run: Run) -> None:
        budget = self._device.budget
        while self._loads_beside is run:
            if not self.pressed and (run.loader is None or run.loader.idle):
                self.load_ahead(executing, run)
            with budget.lock:
                if self._loads_beside is not run:
                    return
                turn = budget.changed.turn()
            if not turn.acquire(timeout=_POLL_SECONDS):
                with budget.lock:
                    budget.changed.leave(turn)

    def load_ahead(self, executing: LoadedModel, running: Run) -> None:
        """While `running` executes and its loads wait: load slices of the first queued model that can load without a launch.

        It uses no memory that the models before it need.
        """
        waiting = self._ahead
        if waiting is not None and waiting.running is running and self._device.budget.room < waiting.wants:
            return
        queue = self._queue()[:_TURNS_AHEAD]
        models = self.models()
        turns = [executing]
        for number, loaded in enumerate(queue):
            if len({*turns}) == len(models):
                break
            turns.append(loaded)
            if loaded is executing:
                continue
            run = loaded.current or self._begin_ahead(turns, queue[number + 1 :])
            if run is None:
                break
            if run.loader is not None and not run.loader.idle:
                with self._loading_ahead:
                    ahead = self._ahead
                    if ahead is None or ahead.loaded is not loaded or ahead.running is not running:
                        ahead = self._ahead = _Ahead(loaded, running)
                    ahead.left = self._spare(turns)
                if ahead.left >= ahead.wants:
                    run.loader.wake()
                return
        self._ahead = None

    def _spare(self, turns: Sequence[LoadedModel]) -> float:
        """Bytes that the last model of `turns` may allocate before its turn."""
        limit = self._device.budget.limit
        beside = sum(other.committed for other in self.models() if other not in turns)
        return inf if limit is None else spare(limit, beside, [loaded.turn() for loaded in turns])

    def _begin_ahead(self, turns: Sequence[LoadedModel], queue: Sequence[LoadedModel]) -> Run | None:
        """Bind the last model of `turns`, and begin its run; `queue` follows it.

        None if memory or a plan is missing: the current run must not end later because of a plan.
        """
        loaded = turns[-1]
        room = self._spare(turns)
        if loaded.awaits_plan(self._device.budget.limit):
            return None
        with suppress(RunError, UserError):  # raised again at its turn
            plan = self.plan(loaded)
            if (loaded.need(plan).fixed if loaded.bound is None else 0) > room:
                return None
            if loaded.bound is None and not loaded.try_bind(plan, self._device.beside):
                return None
            if loaded.follows(plan):
                return loaded.begin_run(
                    self._may_keep(loaded, queue, self._loaded_ahead(turns)), admit=partial(self._admits, loaded)
                )
        return None

    def _loaded_ahead(self, but: Sequence[LoadedModel]) -> dict[LoadedModel, int]:
        """Bytes that models have loaded ahead; only unbinding frees them."""
        begun = [other for other in self.models() if other not in but and other.current is not None]
        return {other: other.committed - other.bound_bytes for other in begun}

    def _admits(self, loaded: LoadedModel, load: Load) -> bool:
        """Whether the model may make this load ahead of its turn. Its loader threads call this."""
        with self._loading_ahead:
            ahead = self._ahead
            bound = loaded.bound
            if ahead is None or ahead.loaded is not loaded or bound is None:
                return False
            if ahead.running.loader is not None and not ahead.running.loader.idle:
                return False
            ahead.wants = whole_pages(load.segment.nbytes)
            if ahead.wants > ahead.left or not bound.ledger.extend(ahead.wants):
                return False
            ahead.left -= ahead.wants
            ahead.wants = 0
            return True

    def _relieve(self, but: LoadedModel | None = None) -> None:
        budget = self._device.budget
        for other in self._givers(but):
            if budget.room < 0:
                other.drop_residents(-budget.room)
            if budget.room < 0:
                other.engine.unbind()

    def _make_room(self, loaded: LoadedModel, take: Callable[[], bool], lacks: Callable[[], float] = lambda: inf) -> None:
        """Have other models free memory until `take` succeeds for `loaded`; `lacks` gives the bytes still missing."""
        if take():
            return
        for other in (givers := self._givers(loaded)):
            other.drop_residents(lacks())
            if take():
                return
        for other in givers:
            other.engine.unbind()
            if take():
                return
        limit = self._device.budget.limit or 0
        name = loaded.opened.bundle.path.name
        raise BudgetError(
            f"the budget of {format_size(limit)} is too small for {name}, which needs {loaded.smallest} bytes; raise it",
            smallest_bytes=loaded.smallest,
            binding=name,
        )

    def _givers(self, but: LoadedModel | None) -> list[LoadedModel]:
        """The other bound models, the one with the latest next turn first."""
        others = [other for other in self.models() if other is not but and other.bound is not None]
        return latest_needed(others, self._queue())

    def _may_keep(self, loaded: LoadedModel, queue: Sequence[LoadedModel], ahead: Mapping[LoadedModel, int]) -> float:
        """Bytes of weights that the model may leave resident after its turn; a choice only in mode `map`.

        `queue`: the turns after it. `ahead`: bytes that other models have loaded ahead.
        """
        if not loaded.streams_pages:
            return 0
        limit = self._device.budget.limit
        needs = dict[LoadedModel, Need]()
        models = self.models()
        assert loaded.bound is not None
        for other in models:
            with suppress(BudgetError):  # it cannot run in this budget
                plan = loaded.bound.weights.plan if other is loaded else other.plan_at_once(limit, alone=self._alone)
                needs[other] = other.need(plan)
        return may_keep(limit, needs, {other: other.resident_bytes for other in models}, ahead, loaded, queue)
