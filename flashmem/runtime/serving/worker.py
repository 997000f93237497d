"""Worker: the thread of a runtime, which runs requests by priority, and in order of submission."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from flashmem.base.errors import BudgetError, RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, Waiters, call_each, started
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import RequestError, forget_locals
from flashmem.runtime.engine.futures import FencedFuture, complete, complete_cancelled
from flashmem.runtime.engine.run import Run
from flashmem.runtime.serving.arbiter import MemoryArbiter
from flashmem.runtime.serving.first_plans import Planner
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.runtime.serving.requests import Answer, Model

Array = NDArray[Any]


class _ArbitratedMemory:
    """The memory of one run, as the arbiter grants it."""

    halts = True

    def __init__(self, loaded: LoadedModel, arbiter: MemoryArbiter, planner: Planner) -> None:
        self._loaded = loaded
        self._arbiter = arbiter
        self._planner = planner

    def begin(self, done: int) -> Run | None:
        """The run after launch `done`; None if the budget has changed meanwhile."""
        return self._arbiter.begin(self._loaded, done)

    @contextmanager
    def executing(self, run: Run) -> Iterator[Callable[[], bool]]:
        """While `run` executes: make missing plans, and load slices of the next models."""
        self._planner.wake()
        with self._arbiter.loading_ahead(self._loaded, run):
            yield lambda: self._arbiter.pressed

    def ended(self) -> None:
        """Release what was granted and is not used."""
        self._loaded.end_grant()

    def give_way(self) -> None:
        """After a halt: continue in less memory."""
        self._arbiter.give_way(self._loaded)


class Worker:
    """Request queue, and the thread that answers requests. Any thread may call the public methods."""

    def __init__(self, device: DeviceInUse) -> None:
        """Does not start the thread; `start` does."""
        self._device = device
        self.arbiter = MemoryArbiter(device, self._queue, self._tell_relieved)
        self._planner = Planner(device, self.arbiter)
        self._lock = threading.RLock()  # for the attributes below
        self._changed = Waiters()  # callbacks of futures call `submit`
        self._waiting: deque[Answer] = deque()
        self._chores: deque[tuple[Callable[[], None], FencedFuture[None]]] = deque()  # work for the thread between runs
        self._running: LoadedModel | None = None
        self._relieved: list[FencedFuture[None]] = []  # done when memory is within the budget
        self.closing: str | None = None  # why
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises RunError: the system has no more threads."""
        with held_back():
            self._thread = started(self._work, "flashmem-runtime")

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is the worker's thread, where waiting for an answer would never end."""
        return threading.current_thread() is self._thread

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def refuse_closed(self) -> None:
        """Raise RunError if the runtime is closed."""
        if self.closing is not None:
            raise RunError(f"the runtime is closed ({self.closing}); make a new one")

    def enter(self, models: Sequence[LoadedModel]) -> None:
        """Add models that share the budget. Raises RunError if the runtime is closed."""
        with self._lock:
            self.refuse_closed()
            for loaded in models:
                self.arbiter.enter(loaded)

    def submit(self, answer: Answer) -> None:
        """Queue a request behind those of at least its priority. Raises RunError if its model or the runtime is closed."""
        with self._lock:
            self.refuse_closed()
            if answer.model.failure is not None:
                raise RunError(f"the model is closed ({answer.model.failure}); open it again")
            later = (place for place, other in enumerate(self._waiting) if other.priority < answer.priority)
            self._waiting.insert(next(later, len(self._waiting)), answer)
            self._changed.wake()

    def set_limit(self, limit: int | None, *, halt_always: bool) -> Future[None]:
        """Change the budget's limit. The future is done when the memory in use is within it.

        `halt_always`: the current run halts even if its model cannot run in `limit`. Raises RunError once closed.
        """
        done = FencedFuture[None]()
        budget = self._device.budget
        with self._lock:
            self.refuse_closed()
            budget.limit = limit
            if budget.room >= 0:
                done.set_result(None)
                self._changed.wake()
                return done
            self._relieved.append(done)
            running = self._running
            self._changed.wake()
        # `runs_in` may need a plan, which must not be made while the lock is held.
        if running is None or halt_always or limit is None or running.runs_in(limit):
            with self._lock:
                if budget.room < 0:  # no memory was freed meanwhile
                    self.arbiter.pressed = True
                    self._changed.wake()
        return done

    def have_done(self, chore: Callable[[], None]) -> None:
        """Run `chore` in the thread between two runs, and wait for it."""
        done = FencedFuture[None]()
        with self._lock:
            alive = self._thread is not None and self._thread.is_alive()
            if not self.is_current_thread and alive and self.closing is None:
                self._chores.append((chore, done))
                self._changed.wake()
            else:
                done.cancel()
        if not done.cancelled():
            done.result()
        elif self.is_current_thread:
            chore()
        else:
            self._join()  # the thread frees everything at its end

    def close_model(self, model: Model) -> None:
        """Close a model between two runs. Its waiting requests fail."""
        with self._lock:
            mine = [answer for answer in self._waiting if answer.model is model]
            self._waiting = deque(answer for answer in self._waiting if answer.model is not model)
        raised = []
        for answer in mine:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RunError("the model was closed before its turn; open it again"))
                raised.append(answer.raised())
        self.have_done(lambda: self._close_variants(model, "close was called"))
        for error in raised:
            if error is not None:  # from a callback, for instance KeyboardInterrupt: raised after the close is complete
                raise error

    def close(self) -> None:
        """Close all models after the current run. Cancels waiting requests. Closing again does nothing."""
        with self._lock:
            self.closing = self.closing or "close was called"
            self._changed.wake()
        if not self.is_current_thread:
            self._join()

    # The methods below run in the worker's thread.

    def _work(self) -> None:
        try:
            self._serve_all()
            why = self.closing or ""
        except BaseException as error:  # not caused by a request, but waiting threads must not wait for ever
            why = f"its thread failed: {type(error).__name__}: {error}"
        with self._lock:
            self.closing = self.closing or why
            left = self._waiting
            self._waiting = deque()
            chores = self._chores
            self._chores = deque()
            relieved = self._relieved
            self._relieved = []
        models = self.arbiter.models()
        try:
            call_each(
                self.arbiter.wait_for_load_ahead,
                self._planner.close,
                *(partial(self.arbiter.leave, loaded) for loaded in models),
                *(partial(loaded.close, why) for loaded in models),
            )
        finally:
            for answer in left:
                complete_cancelled(answer)
            _tell([*(done for _, done in chores), *relieved])

    def _serve_all(self) -> None:
        while True:
            with self._lock:
                turn = None
                if not (self._waiting or self._chores or self.closing or self.arbiter.pressed):
                    turn = self._changed.turn()
                chores = self._chores
                self._chores = deque()
                answer = None if chores else self._next_answer()
            if turn is not None:
                turn.acquire()
                continue
            for chore, done in chores:
                _do(chore, done)
            if answer is not None:
                self._serve(answer)
                answer = None  # holds no answer while this waits for the next one
            elif self.closing and not chores:
                return
            self.arbiter.relieve()

    def _next_answer(self) -> Answer | None:
        """The request that is served next, which is running then; None without one. Called with the lock."""
        if self.closing or not self._waiting:
            return None
        answer = self._waiting.popleft()
        if not answer.set_running_or_notify_cancel():
            return None
        self._running = answer.loaded
        return answer

    def _serve(self, answer: Answer) -> None:
        """Answer one request. A failure concerns this request and its model only."""
        answer.started = perf_counter()
        outcome = self._outcome(answer)
        answer.inputs.clear()
        if isinstance(outcome, BaseException):
            forget_locals(outcome)  # from here on it belongs to the user
            outcome = self._fail(answer, outcome)
        answer.finished = perf_counter()
        with self._lock:
            self._running = None
        self.arbiter.has_run(answer.loaded)
        if isinstance(outcome, BaseException):
            complete(answer, partial(answer.set_exception, outcome))
        else:
            answer.model.last_run = answer.report
            complete(answer, partial(answer.set_result, outcome))
            answer.loaded.engine.prepare()
            if answer.loaded.check is not None:
                with suppress(RunError):  # no thread is left for it
                    answer.loaded.check.begin()
        del answer, outcome  # the frames of a stored error refer to their callers

    def _outcome(self, answer: Answer) -> list[Array] | BaseException:
        """The outputs of a request, whose report is filled in, or the exception that it raised."""
        loaded = answer.loaded
        try:
            self.arbiter.wait_for_load_ahead()
            if loaded.failure is not None:
                raise RunError(f"the model is closed ({loaded.failure}); open it again")
            self.arbiter.bind(loaded)
            memory = _ArbitratedMemory(loaded, self.arbiter, self._planner)
            results, answer.report = loaded.engine.run(answer.names, answer.inputs, memory, since=answer.started)
            return results
        except BaseException as error:
            return error

    def _fail(self, answer: Answer, failure: BaseException) -> BaseException:
        """End a run that failed. Returns the error for the user."""
        loaded = answer.loaded
        if not isinstance(failure, RequestError):
            self.arbiter.wait_for_load_ahead()
        if isinstance(failure, BudgetError):  # it can run again in a larger budget
            loaded.engine.unbind()
            return failure
        error = loaded.engine.failed(failure)
        if loaded.failure is not None:
            self._close_variants(answer.model, loaded.failure)
        return error

    def _close_variants(self, model: Model, why: str) -> None:
        """Close all shape variants of a model, outside of runs."""
        self.arbiter.wait_for_load_ahead()
        calls = list[Callable[[], object]]()
        for loaded in model.variants:
            calls += [partial(self.arbiter.leave, loaded), partial(loaded.close, why)]
        call_each(*calls)

    def _tell_relieved(self) -> None:
        with self._lock:
            if self._device.budget.room < 0:
                return
            relieved = self._relieved
            self._relieved = []
        _tell(relieved)

    def _queue(self) -> list[LoadedModel]:
        with self._lock:
            return [each.loaded for each in self._waiting if not each.cancelled() and each.loaded.failure is None]


def _do(chore: Callable[[], None], done: FencedFuture[None]) -> None:
    """Do a chore, and complete its future."""
    try:
        chore()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _tell(waiting: Iterable[FencedFuture[None]]) -> None:
    """Complete futures, some of which may have been cancelled."""
    for done in waiting:
        if done.set_running_or_notify_cancel():
            complete(done, partial(done.set_result, None))
