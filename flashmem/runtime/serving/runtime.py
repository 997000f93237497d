"""Several models under one budget: requests in the order in which they come, weights in the room that others leave.

What users call, and the one thread that takes requests in their order; `flashmem.runtime.serving.worker` plays each of them
(docs/many-models.md).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, get_args

from numpy.typing import NDArray

from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.base.units import parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.shape_variants import which_fits
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import RequestError, forget_locals, why_closed
from flashmem.runtime.engine.ports import arrays_by_name, check_inputs, chosen_outputs
from flashmem.runtime.memory.pressure import Follower
from flashmem.runtime.options import device_here
from flashmem.runtime.serving.arbiter import Occupancy
from flashmem.runtime.serving.futures import FencedFuture, complete, complete_cancelled
from flashmem.runtime.serving.loaded_model import Tenant
from flashmem.runtime.serving.requests import Answer, Model
from flashmem.runtime.serving.worker import Player

Array = NDArray[Any]
OnPressure = Literal["finish", "fail"]


class Runtime:
    """A device, a budget, and the models that share both. Use it as a context manager, or call `close`.

    All methods may be called from any thread. Futures may be awaited: `await asyncio.wrap_future(runtime.submit(...))`.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        device: str = "auto",
        on_pressure: OnPressure = "finish",
        verify_weights: bool = False,
        build_apart: bool = True,
        prepare: bool = True,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            budget: most bytes that all models together hold on the device and in host staging; None for no limit, "auto" for
                what the system can spare (`flashmem.runtime.memory.pressure`).
            device: "auto", or what `flashmem.runtime.options.device_here` understands.
            on_pressure: what becomes of a run when the budget is lowered below the least that its model takes: "finish" lets it
                end in what it was granted before, "fail" ends it with a BudgetError at the next layer.
            verify_weights: compare every slice and table row that is read with its checksum, as a `Session` does; a damaged one
                fails the run, and closes its model.
            build_apart: as for `Session`.
            prepare: between two runs of a model, get its bundle's steady kernels ready, which later runs are then played by as
                far as what is resident allows.

        Raises:
            UserError: not a size, no such device, another word.
            RunError: the device refuses.
        """
        if on_pressure not in get_args(OnPressure):
            raise UserError(f"on_pressure {on_pressure!r} is unknown; name one of: {', '.join(get_args(OnPressure))}")
        self._follower: Follower | None = None
        self._device = DeviceInUse(device_here(device), None)
        self._occupancy = Occupancy(self._device, self._queue)
        if budget == "auto":
            self._follower = Follower(lambda: self._occupancy.beside_files(), self._follow, perf_counter)
            self._device.budget.limit = self._follower.state.budget
        elif budget is not None:
            self._device.budget.limit = parse_size(budget, what="budget")
        self._on_pressure = on_pressure
        self._options = {"build_apart": build_apart, "prepare": prepare, "verify_weights": verify_weights}
        self._process = os.getpid()
        self._state = threading.Condition()
        self._waiting: deque[Answer] = deque()
        self._chores: deque[tuple[Callable[[], None], FencedFuture[None]]] = (
            deque()
        )  # for the runtime's own thread, between runs
        self._running: Tenant | None = None
        self._player = Player(self._device, self._occupancy, self._tell_relieved)
        self._relieved: list[FencedFuture[None]] = []
        self._closing: str | None = None
        self._thread = threading.Thread(target=self._work, name="flashmem-runtime", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        if self._follower is not None:
            self._follower.start()

    # What users call.

    @property
    def budget(self) -> int | None:
        """The limit in force, in bytes."""
        return self._device.budget.limit

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._device.budget.total

    @property
    def peak(self) -> int:
        """The most bytes that were ever held."""
        return self._device.budget.peak

    def over_time(self) -> list[tuple[float, int]]:
        """(seconds of `time.perf_counter()`, bytes held from then on): the latest 65,536 changes."""
        with self._device.budget.changed:
            return list(self._device.budget.history)

    def open(self, bundle: Bundle | str | Path, *, mode: TransferMode | Literal["auto"] = "auto") -> Model:
        """Open a bundle; its kernels are built or loaded now, its weights when it runs.

        Raises:
            UserError: a damaged bundle, or one that the device or the budget is too small for.
            RunError: the device refuses, or the runtime is closed.
        """
        if not isinstance(bundle, Bundle | str | Path):
            raise UserError(f"a model is opened with a bundle or its path, not with {type(bundle).__name__}")
        self._refuse_closed()
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        tenants: list[Tenant] = []
        try:
            for index in range(len(opened.variants)):
                tenant = Tenant(opened.variant(index), self._device, mode, **self._options)
                tenants.append(tenant)
                tenant.refuse_below(self.budget)
            with self._state:
                self._refuse_closed()
                for tenant in tenants:
                    self._occupancy.enter(tenant)
        except BaseException:
            for tenant in tenants:
                tenant.close("opening failed")
            raise
        return Model(self, tenants, opened)

    def submit(self, model: Model, inputs: Mapping[str, Array], output_names: Sequence[str] | None = None) -> Answer:
        """Have `model` run once, after all that was submitted before. The inputs must stay as they are until it has.

        Raises:
            ValueError: an input or an output name that does not fit.
            RunError: the model or the runtime is closed.
        """
        names, arrays = chosen_outputs(model.bundle.program.outputs, output_names), arrays_by_name(inputs)
        variants = [variant.program.inputs for variant in model.bundle.variants]
        index = which_fits(variants, arrays)
        check_inputs(variants[index], arrays)
        answer = Answer(model, model.tenants[index], arrays, names)
        with self._state:
            self._refuse_closed()
            if model.failure is not None:
                raise RunError(f"the model is closed ({model.failure}); open it again")
            self._waiting.append(answer)
            self._state.notify_all()
        return answer

    def set_budget(self, budget: int | str | None) -> Future[None]:
        """Change the limit: in force at once for all that is not granted yet, and for a run under way at its next layer.

        Returns a future that is done when no more than that is held, or when the run that may finish above it is over.

        Raises:
            UserError: not a size, or the budget is "auto".
        """
        limit = None if budget is None else parse_size(budget, what="budget")
        if self._follower is not None:
            raise UserError("the budget follows the system; make the runtime with a size to set it")
        return self._set_limit(limit)

    def _follow(self, limit: int) -> None:
        with suppress(RunError):  # closed meanwhile
            self._set_limit(limit)

    def _set_limit(self, limit: int | None) -> Future[None]:
        done = FencedFuture[None]()
        with self._state:
            self._refuse_closed()
            self._device.budget.limit = limit
            if self._device.budget.room >= 0:
                done.set_result(None)
                self._state.notify_all()
                return done
            self._relieved.append(done)
            running = self._running
            self._state.notify_all()
        # Whether the run can go on in less may need a plan, for which nobody waits who holds the lock.
        if running is None or self._on_pressure == "fail" or limit is None or running.runs_in(limit):
            with self._state:
                if self._device.budget.room < 0:  # nobody has given it back meanwhile
                    self._player.pressed.set()
                    self._state.notify_all()
        return done

    def prepared(self) -> None:
        """Return when the steady kernels are ready that the models' next runs are played by, where there are any: to measure
        with.

        Raises:
            RunError: called by a callback of a future.
        """
        self.refuse_inside("prepared")
        self._have_done(lambda: None)  # the run under way is over, and what it wants prepared has begun
        for tenant in self._occupancy.tenants():
            tenant.wait_prepared()

    def close_model(self, model: Model) -> None:
        """See `Model.close`."""
        with self._state:
            mine = [answer for answer in self._waiting if answer.model is model]
            self._waiting = deque(answer for answer in self._waiting if answer.model is not model)
        raised = []
        for answer in mine:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RunError("the model was closed before its turn came; open it again"))
                raised.append(answer.raised())
        self._have_done(lambda: self._forget(model, "close was called"))
        for error in raised:
            if error is not None:  # of a callback, KeyboardInterrupt for instance: now that all is closed
                raise error

    def close(self) -> None:
        """Give everything back when the run under way is over. Waiting requests are cancelled. Closing again does nothing."""
        if os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        if self._follower is not None:
            self._follower.stop()
        with self._state:
            self._closing = self._closing or "close was called"
            self._state.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def refuse_inside(self, what: str) -> None:
        """Raise RunError in the runtime's own thread, where waiting for an answer would never end."""
        if threading.current_thread() is self._thread:
            raise RunError(f"{what} was called by a callback of a future, and would wait for itself; call submit instead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closing is not None:
            raise RunError(f"the runtime is closed ({self._closing}); make a new one")
        if os.getpid() != self._process:
            raise RunError("the runtime was made before this process was forked; make one in the child")

    def _have_done(self, chore: Callable[[], None]) -> None:
        """Have the runtime's own thread do it between two runs, and wait for that."""
        done = FencedFuture[None]()
        with self._state:
            if threading.current_thread() is not self._thread and self._thread.is_alive() and self._closing is None:
                self._chores.append((chore, done))
                self._state.notify_all()
            else:
                done.cancel()
        if not done.cancelled():
            done.result()
        elif threading.current_thread() is self._thread:
            chore()
        else:
            self._thread.join()  # it gives everything back as it ends

    # The runtime's own thread.

    def _work(self) -> None:
        try:
            self._serve_all()
            why = self._closing or ""
        except BaseException as error:  # nothing that a request may cause, but nobody must wait for ever
            why = f"its thread failed: {type(error).__name__}: {error}"
        with self._state:
            self._closing = self._closing or why
            left, self._waiting = self._waiting, deque()
            chores, self._chores = self._chores, deque()
            relieved, self._relieved = self._relieved, []
        try:
            self._player.close()
            for tenant in self._occupancy.tenants():
                self._occupancy.leave(tenant)
                tenant.close(why)
        finally:
            for answer in left:
                complete_cancelled(answer)
            _tell([*(done for _, done in chores), *relieved])

    def _serve_all(self) -> None:
        while True:
            with self._state:
                while not (self._waiting or self._chores or self._closing or self._player.pressed.is_set()):
                    self._state.wait()
                chores, self._chores = self._chores, deque()
                answer = self._waiting.popleft() if self._waiting and not chores and not self._closing else None
                if answer is not None and answer.set_running_or_notify_cancel():
                    self._running = answer.tenant
                else:
                    answer = None
            for chore, done in chores:
                try:
                    chore()
                except BaseException as error:
                    done.set_exception(error)
                else:
                    done.set_result(None)
            if answer is not None:
                self._serve(answer)
                answer = None  # while this waits for the next one
            elif self._closing and not chores:
                return
            self._player.relieve()

    def _serve(self, answer: Answer) -> None:
        """Answer one request. Whatever fails is the request's, and its model's."""
        answer.started = perf_counter()
        outcome = self._outcome(answer)
        answer.inputs.clear()
        if isinstance(outcome, BaseException):
            forget_locals(outcome)  # it is the user's now
            outcome = self._given_up(answer, outcome)
        answer.finished = perf_counter()
        with self._state:
            self._running = None
        self._occupancy.has_run(answer.tenant)
        if isinstance(outcome, BaseException):
            complete(answer, partial(answer.set_exception, outcome))
        else:
            answer.model.last_run = answer.report
            complete(answer, partial(answer.set_result, outcome))
            answer.tenant.prepare()
        del answer, outcome  # the calls of an error, which somebody may keep, know who called them

    def _outcome(self, answer: Answer) -> list[Array] | BaseException:
        try:
            return self._player.play(answer)
        except BaseException as error:
            return error

    def _given_up(self, answer: Answer, failure: BaseException) -> BaseException:
        """Have the model give up what a failed run cannot leave as it is. Returns what the user gets."""
        if isinstance(failure, RequestError):
            return failure.error
        self._player.settle()
        if isinstance(failure, BudgetError):
            answer.tenant.leave()
        else:
            self._forget(answer.model, why_closed(failure))
        return failure

    def _tell_relieved(self) -> None:
        with self._state:
            if self._device.budget.room < 0:
                return
            relieved, self._relieved = self._relieved, []
        _tell(relieved)

    def _forget(self, model: Model, why: str) -> None:
        """Close a model; the runtime's own thread calls it, outside of runs."""
        self._player.settle()
        for tenant in model.tenants:
            self._occupancy.leave(tenant)
            tenant.close(why)

    def _queue(self) -> list[Tenant]:
        with self._state:
            return [each.tenant for each in self._waiting if not each.cancelled() and each.tenant.failure is None]


def _tell(waiting: Iterable[FencedFuture[None]]) -> None:
    """What each of them is for is done. Whoever has one may have cancelled it."""
    for done in waiting:
        if done.set_running_or_notify_cancel():
            complete(done, partial(done.set_result, None))
