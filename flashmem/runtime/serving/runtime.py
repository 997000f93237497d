"""Runtime: several models on one device, under one budget (docs/how-to/many-models.md).

Users call `Runtime`. Its thread (`flashmem.runtime.serving.worker`) answers requests by priority, and those of one priority in
the order of their submission.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, get_args

from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError
from flashmem.base.threads import call_each, started
from flashmem.base.types import TransferMode
from flashmem.base.units import parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.given_arrays import arrays_by_name, described
from flashmem.runtime.engine.ports import chosen_outputs, fitting_variant
from flashmem.runtime.kernels.background_check import BackgroundCheck
from flashmem.runtime.memory.pressure import Follower
from flashmem.runtime.request.options import device_here
from flashmem.runtime.serving.host_memory import SharedHostMemory
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.runtime.serving.requests import Answer, Model
from flashmem.runtime.serving.worker import Worker

Array = NDArray[Any]
OnPressure = Literal["finish", "fail"]


class Runtime:
    """A device, a budget, and the models that share both. Use it as a context manager, or call `close`.

    One that is dropped, with its models and their answers, is closed by a thread. Those that are open when Python exits are
    closed then.

    Any thread may call any method. Futures can be awaited: `await asyncio.wrap_future(runtime.submit(...))`.
    """

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        device: str = "auto",
        host_budget: int | str | None = None,
        on_pressure: OnPressure = "finish",
        verify_weights: bool = False,
        build_apart: bool = True,
        prepare: bool = True,
    ) -> None:
        """Loads nothing yet.

        Args:
            budget: most bytes that all models together may hold, on the device if it has memory of its own; None for no limit,
                "auto" for the memory that the system can spare (`flashmem.runtime.memory.pressure`).
            device: "auto", or a name that `flashmem.runtime.request.options.device_here` accepts.
            host_budget: most bytes of pinned host memory of all models, for a device with memory of its own: for staging and
                outputs, and for weights that later runs copy from there instead of reading them. Models divide the rest by
                bytes of weights, each after its first run. "auto": half of the memory that the system has left now; nothing
                where host and device share memory. None: no limit, and no weights are kept on the host.
            on_pressure: the fate of a run when the budget falls below its model's minimum: "finish" lets it end within its
                earlier grant, "fail" ends it with a BudgetError at the next launch.
            verify_weights: compare every slice and table row that is read with its checksum, as a `Session` does; damage fails
                the run, and closes its model.
            build_apart: as for `Session`.
            prepare: between two runs of a model, prepare its bundle's steady kernels; later runs use them as far as resident
                slices permit. And check a sample of its kernels on a driver that nothing is known of.

        Raises:
            UserError: not a size, no such device, an unknown `on_pressure`, or a host budget where memory is shared.
            RunError: the device refuses, or the system has no more threads.
        """
        if on_pressure not in get_args(OnPressure):
            raise UserError(f"on_pressure {on_pressure!r} is unknown; name one of: {', '.join(get_args(OnPressure))}")
        self._follower: Follower | None = None
        found = device_here(device)
        self._host = SharedHostMemory(host_budget, found)
        self._device = DeviceInUse(found, None)
        self._worker = Worker(self._device)
        if budget == "auto":
            follow = partial(_follow, weakref.ref(self))  # its thread must not keep the runtime
            self._follower = Follower(self._worker.arbiter.beside_files, follow, perf_counter)
            self._device.budget.limit = self._follower.state.budget
        elif budget is not None:
            self._device.budget.limit = parse_size(budget, what="budget")
        self._on_pressure = on_pressure
        self._options = {"build_apart": build_apart, "prepare": prepare, "verify_weights": verify_weights}
        self._process = os.getpid()
        weakref.finalize(self, _end_apart, self._worker, self._follower, self._process).atexit = False
        _open.add(self)
        try:
            self._worker.start()
            if self._follower is not None:
                self._follower.start()
        except BaseException:
            self.close()
            raise

    @property
    def budget(self) -> int | None:
        """The current limit, in bytes."""
        return self._device.budget.limit

    @property
    def host_budget(self) -> int | None:
        """The limit of pinned host memory, in bytes; None if there is none."""
        return self._host.budget.limit

    @property
    def host_peak(self) -> int:
        """Peak bytes of host memory in use, on a device with memory of its own: staging, outputs, and weights kept there."""
        return self._host.budget.peak

    @property
    def held(self) -> int:
        """Bytes in use now."""
        return self._device.budget.total

    @property
    def peak(self) -> int:
        """Peak bytes in use."""
        return self._device.budget.peak

    def over_time(self) -> list[tuple[float, int]]:
        """(seconds of `time.perf_counter()`, bytes in use from then on): the latest 65,536 changes."""
        with self._device.budget.lock:
            return list(self._device.budget.history)

    def open(self, bundle: Bundle | str | Path, *, mode: TransferMode | Literal["auto"] = "auto") -> Model:
        """Open a bundle: builds or loads its kernels now, its weights when it runs.

        Raises:
            UserError: a damaged bundle, or one that the device, the budget or the host budget is too small for.
            RunError: the device refuses, or the runtime is closed.
        """
        if not isinstance(bundle, Bundle | str | Path):
            raise UserError(f"a model is opened with a bundle or its path, not with {type(bundle).__name__}")
        self._refuse_forked()
        self._worker.refuse_closed()
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        if opened.program.states:
            raise UserError(
                f"bundle {opened.path} keeps states from one run to the next, and the requests of a runtime are independent; "
                f"open it in a session"
            )
        variants: list[LoadedModel] = []
        checks = self._options["build_apart"] and self._options["prepare"]
        check = BackgroundCheck(opened, self._device.device) if checks else None
        try:
            for index in range(len(opened.variants)):
                loaded = LoadedModel(opened.variant(index), self._device, mode, self._host, check=check, **self._options)
                variants.append(loaded)
                loaded.refuse_below(self.budget)
            self._refuse_forked()
            self._worker.enter(variants)
        except BaseException:
            for loaded in variants:
                loaded.close("opening failed")
            raise
        return Model(self, variants, opened)

    def submit(
        self, model: Model, inputs: Mapping[str, Any], output_names: Sequence[str] | None = None, *, priority: int = 0
    ) -> Answer:
        """Queue one run of `model`. The inputs must not change until the run has ended.

        It begins after the current run, after waiting requests of a higher `priority`, and after earlier ones of its own. No
        run is interrupted. Requests of a low priority wait as long as others of a higher one keep coming.

        Raises:
            ValueError: an unknown or missing input, an unknown output name, or a priority that is not an integer.
            RunError: the model or the runtime is closed.
        """
        names = chosen_outputs(model.output_ports, output_names)
        arrays = arrays_by_name(inputs, model.ports[0])
        index = fitting_variant(model.ports, arrays)
        if not isinstance(priority, int):
            raise ValueError(f"the priority is {described(priority)}; give an integer, the higher the sooner")
        answer = Answer(model, model.variants[index], arrays, names, priority)
        self._refuse_forked()
        if answer.loaded.check is not None:
            answer.loaded.check.warn()
        self._worker.submit(answer)
        return answer

    def set_budget(self, budget: int | str | None) -> Future[None]:
        """Change the limit, at once for everything not yet granted, and for the current run at its next launch.

        Returns a future. It is done when the memory in use is within the limit, or when a run that may finish above it has
        ended.

        Raises:
            UserError: not a size, or the budget is "auto".
        """
        limit = None if budget is None else parse_size(budget, what="budget")
        if self._follower is not None:
            raise UserError("the budget follows the system; make the runtime with a size to set it")
        return self._set_limit(limit)

    def _set_limit(self, limit: int | None) -> Future[None]:
        self._refuse_forked()
        return self._worker.set_limit(limit, halt_always=self._on_pressure == "fail")

    def prepared(self) -> None:
        """Wait until the steady kernels of the models' next runs are ready, if they have any. For measurements.

        Raises:
            RunError: called by a callback of a future.
        """
        self.refuse_inside("prepared")
        self._worker.have_done(lambda: None)  # the current run is over, and its warm-up has begun
        for loaded in self._worker.arbiter.models():
            loaded.engine.wait_prepared()

    def close_model(self, model: Model) -> None:
        """See `Model.close`."""
        self._worker.close_model(model)

    def close(self) -> None:
        """Free everything after the current run. Cancels waiting requests. Closing again does nothing."""
        if os.getpid() == self._process:
            _end(self._worker, self._follower)

    def refuse_inside(self, what: str) -> None:
        """Raise RunError in the runtime's own thread, where waiting for an answer would never end."""
        if self._worker.is_current_thread:
            raise RunError(f"{what} was called by a callback of a future, and would wait for itself; call submit instead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            raise RunError("the runtime was made before this process was forked; make one in the child")


def _follow(made: weakref.ref[Runtime], limit: int) -> None:
    """Change the limit of a runtime to what the system can spare."""
    runtime = made()
    if runtime is not None:
        with suppress(RunError):  # closed meanwhile
            runtime._set_limit(limit)


def _end(worker: Worker, follower: Follower | None) -> None:
    call_each(None if follower is None else follower.stop, worker.close)


def _end_apart(worker: Worker, follower: Follower | None, process: int) -> None:
    """After a runtime was garbage-collected, in any thread, with any lock held; so another thread closes it."""
    if os.getpid() == process and worker.closing is None:
        with suppress(RunError):  # the interpreter is exiting
            started(_end, "flashmem-stop", worker, follower)


_open: weakref.WeakSet[Runtime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what nobody closed."""
    for runtime in list(_open):
        with suppress(Exception):  # the others too
            runtime.close()
