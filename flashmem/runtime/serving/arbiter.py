"""Memory arbiter: which models are bound, how much each may hold, and which give memory up for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf

from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.pages import whole_pages
from flashmem.base.units import format_size
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.engine import Run
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.runtime.serving.sharing import Need, latest_needed, may_keep, spare
from flashmem.schedule.loads import Load
from flashmem.schedule.plan import OverlapPlan

_TURNS_AHEAD = 16
"""Requests in the queue whose models may load ahead."""

_POLL_SECONDS = 0.05
"""The thread that loads ahead looks this often at gates of loads, which do not notify it."""


class _Ahead:
    """A model that loads ahead of its turn: how many bytes it may still take, and how many it was refused."""

    def __init__(self, loaded: LoadedModel, running: Run) -> None:
        self.loaded, self.running = loaded, running
        self.left, self.wants = 0.0, 0  # wants: 0 where nothing was refused since


class MemoryArbiter:
    """The models on one device, and the budget that they share.

    Any thread may call `enter`, `models`, `beside_files`, `made_plan` and `unplanned`, and set `pressed`. One thread at a time
    calls all other methods: the runtime's own or, while a run executes, the one that loads ahead (`load_ahead`).
    """

    def __init__(self, device: DeviceInUse, queue: Callable[[], Sequence[LoadedModel]], relieved: Callable[[], None]) -> None:
        """`queue` gives the models of the requests that wait, in order. `relieved` is called when memory was given back."""
        self._device, self._queue, self._relieved = device, queue, relieved
        self.pressed = threading.Event()  # the budget was lowered: the run under way has to give memory back
        self._thread: tuple[threading.Thread, threading.Event] | None = None  # that loads ahead, and what stops it
        self._models: list[LoadedModel] = []  # the one that ran longest ago first
        self._lock = threading.Lock()
        self._ahead: _Ahead | None = None
        self._loading_ahead = threading.Lock()

    def models(self) -> list[LoadedModel]:
        """All models that are open, the one that ran longest ago first."""
        with self._lock:
            return list(self._models)

    def enter(self, loaded: LoadedModel) -> None:
        """Add a model."""
        with self._lock:
            self._models.append(loaded)

    def leave(self, loaded: LoadedModel) -> None:
        """Remove a model, if it is there."""
        with self._lock:
            if loaded in self._models:
                self._models.remove(loaded)

    def has_run(self, loaded: LoadedModel) -> None:
        """A model has run: it is the last one of `models` now."""
        with self._lock:
            if loaded in self._models:
                self._models.remove(loaded)
                self._models.append(loaded)

    def beside_files(self) -> int:
        """Bytes held in memory other than pages of the weight files."""
        held = 0
        for loaded in self.models():
            bound = loaded.bound
            if bound is not None:
                ledger = bound.ledger
                held += ledger.total - (ledger.by_category.get("weights", 0) if loaded.streams_pages else 0)
        return held

    def plan(self, loaded: LoadedModel) -> OverlapPlan:
        """A plan within the budget in force, which leaves room for others.

        While no other model is bound and no plan was made yet, it is the bundle's own.

        Raises:
            BudgetError: there is none.
        """
        if all(other is loaded or other.bound is None for other in self.models()):
            return loaded.plan_at_once(self._device.budget.limit, alone=self._alone)
        return self.made_plan(loaded)

    def made_plan(self, loaded: LoadedModel) -> OverlapPlan:
        """The model's plan for the budget in force, made now if there is none.

        Raises:
            BudgetError: there is none.
        """
        return loaded.plan_for(self._device.budget.limit, alone=self._alone)

    def unplanned(self) -> LoadedModel | None:
        """The first model in the queue that has no plan but its bundle's; None where all have one."""
        waiting = [loaded for loaded in self.models() if loaded.awaits_plan(self._device.budget.limit)]
        return latest_needed(waiting, self._queue())[-1] if waiting else None

    @property
    def _alone(self) -> bool:
        return len(self.models()) == 1

    def bind(self, loaded: LoadedModel) -> None:
        """Bind a model under its plan for the budget in force, if it is not.

        Raises:
            BudgetError: the budget is too small.
            RunError: the device refuses.
        """

        def bind(plan: OverlapPlan) -> None:
            if loaded.current is not None and loaded.begun_under != self._device.budget.limit:
                loaded.unbind()
            if loaded.current is None and not loaded.follows(plan):
                loaded.unbind()
            if loaded.bound is None:
                self._make_room(loaded, lambda: loaded.try_bind(plan, self._device.queue))

        self._with_plan(loaded, bind)

    def give_way(self, loaded: LoadedModel) -> None:
        """After a halt: the model gives its weights back, others what is still too much, and it is bound under another plan.

        Raises:
            BudgetError: there is none.
            RunError: the device refuses.
        """

        def rebind(plan: OverlapPlan) -> None:
            self._make_room(loaded, lambda: loaded.try_rebind(plan))

        self.settle()
        self.pressed.clear()
        loaded.release_weights()
        self._relieve(but=loaded)
        self._relieved()
        self._with_plan(loaded, rebind)

    def relieve(self) -> None:
        """Between two runs: have models give memory up until the budget is kept."""
        self.settle()
        self.pressed.clear()
        self._relieve()
        self._relieved()

    def _with_plan(self, loaded: LoadedModel, bind: Callable[[OverlapPlan], None]) -> None:
        """`bind` it under its plan, and once more if the budget has changed meanwhile."""
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
        """Its run behind layer `done`, with all memory that it will hold; None where the budget has changed meanwhile.

        Raises:
            BudgetError: the budget is too small.
        """
        with self._loading_ahead:  # a load that is being admitted is counted; none is admitted after that
            self._ahead = None
        run = loaded.current or loaded.begin_run(self._may_keep(loaded, self._queue(), self._loaded_ahead([loaded])), done=done)
        try:
            self._make_room(loaded, lambda: loaded.grant(run, done), lambda: loaded.lacks(run, done))
        except BudgetError:
            if loaded.bound_under == loaded.begun_under == self._device.budget.limit:
                raise
            with suppress(RunError):  # it begins again
                run.stop()
            loaded.end()
            return None
        return run

    @contextmanager
    def loading_ahead(self, executing: LoadedModel, run: Run) -> Iterator[None]:
        """While `run` executes: a thread has the next models load when its loads wait, as far as there is memory."""
        stop = threading.Event()
        if len(self.models()) > 1:
            thread = threading.Thread(
                target=self._keep_loading, args=(executing, run, stop), name="flashmem-ahead", daemon=True
            )
            thread.start()
            self._thread = thread, stop
        try:
            yield
        finally:
            self._stop_loading(stop)

    def settle(self) -> None:
        """Wait for the thread that loads ahead, which no answer waits for. From then on models may be bound and closed."""
        if self._thread is not None:
            thread, stop = self._thread
            self._stop_loading(stop)
            thread.join()
            self._thread = None

    def _stop_loading(self, stop: threading.Event) -> None:
        stop.set()
        with self._device.budget.changed:
            self._device.budget.changed.notify_all()

    def _keep_loading(self, executing: LoadedModel, run: Run, stop: threading.Event) -> None:
        budget = self._device.budget
        while not stop.is_set():
            if not self.pressed.is_set() and (run.loader is None or run.loader.idle):
                self.load_ahead(executing, run)
            with budget.changed:
                if not stop.is_set():
                    budget.changed.wait(_POLL_SECONDS)

    def load_ahead(self, executing: LoadedModel, running: Run) -> None:
        """While `running` executes and its loads wait: have the first model in the queue load that needs no layer for it.

        It takes no memory that those before it need.
        """
        waiting = self._ahead
        if waiting is not None and waiting.running is running and self._device.budget.room < waiting.wants:
            return
        queue, models = self._queue()[:_TURNS_AHEAD], self.models()
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
        """Bytes that the last model of `turns` may take before its turn."""
        limit = self._device.budget.limit
        beside = sum(other.committed for other in self.models() if other not in turns)
        return inf if limit is None else spare(limit, beside, [loaded.turn() for loaded in turns])

    def _begin_ahead(self, turns: Sequence[LoadedModel], queue: Sequence[LoadedModel]) -> Run | None:
        """Bind the last model of `turns`, and begin its run; `queue` follows it.

        None if there is no room, or no plan yet: the end of the run under way must not wait for one.
        """
        loaded, room = turns[-1], self._spare(turns)
        if loaded.awaits_plan(self._device.budget.limit):
            return None
        with suppress(RunError, UserError):  # raised again when its turn has come
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
        """Bytes of models that have begun to load ahead, which they give up only when they are unbound."""
        begun = [other for other in self.models() if other not in but and other.current is not None]
        return {other: other.committed - other.bound_bytes for other in begun}

    def _admits(self, loaded: LoadedModel, load: Load) -> bool:
        """Whether it may load that ahead of its turn. Its loader threads call this."""
        with self._loading_ahead:
            ahead, bound = self._ahead, loaded.bound
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
                other.unbind()

    def _make_room(self, loaded: LoadedModel, take: Callable[[], bool], lacks: Callable[[], float] = lambda: inf) -> None:
        """Have others give memory up until `loaded` can `take` what it needs; the budget `lacks` so many bytes of that."""
        if take():
            return
        for other in (givers := self._givers(loaded)):
            other.drop_residents(lacks())
            if take():
                return
        for other in givers:
            other.unbind()
            if take():
                return
        limit, name = self._device.budget.limit or 0, loaded.opened.bundle.path.name
        raise BudgetError(
            f"the budget of {format_size(limit)} is too small for {name}, which takes {loaded.smallest} bytes; raise it",
            smallest_bytes=loaded.smallest,
            binding=name,
        )

    def _givers(self, but: LoadedModel | None) -> list[LoadedModel]:
        """The other models that are bound, the one that is needed latest first."""
        others = [other for other in self.models() if other is not but and other.bound is not None]
        return latest_needed(others, self._queue())

    def _may_keep(self, loaded: LoadedModel, queue: Sequence[LoadedModel], ahead: Mapping[LoadedModel, int]) -> float:
        """Bytes of weights that it may leave resident after its turn; only mode `map` has a choice.

        `queue`: the turns after it. `ahead`: bytes that others have loaded ahead.
        """
        if not loaded.streams_pages:
            return 0
        limit, needs, models = self._device.budget.limit, dict[LoadedModel, Need](), self.models()
        assert loaded.bound is not None
        for other in models:
            with suppress(BudgetError):  # it does not run in this budget
                plan = loaded.bound.weights.plan if other is loaded else other.plan_at_once(limit, alone=self._alone)
                needs[other] = other.need(plan)
        return may_keep(limit, needs, {other: other.resident_bytes for other in models}, ahead, loaded, queue)
