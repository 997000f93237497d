"""Session: one model on a device, with its own budget."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.units import budget_text, parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.request.description import initialised_by
from flashmem.request.opening import SessionCall
from flashmem.runtime.engine.batches import Batch, check_batch, looped
from flashmem.runtime.engine.device_state import DeviceOpening
from flashmem.runtime.engine.engine import Engine
from flashmem.runtime.engine.futures import BackgroundRuns
from flashmem.runtime.engine.given_arrays import arrays_by_name, described
from flashmem.runtime.engine.io_binding import IOBinding
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.engine.planned_engine import PlannedEngine
from flashmem.runtime.engine.ports import PROVIDER, TensorInfo, tensor_infos
from flashmem.runtime.engine.replanned import fitted
from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.engine.session_plans import SessionPlans
from flashmem.runtime.engine.stopping import OneThread, RunControl, RunStoppedError, deadline, too_late
from flashmem.runtime.kernels.background_check import BackgroundCheck
from flashmem.runtime.kernels.bundle_checks import check_bundle_kernels
from flashmem.runtime.opencl.discovery import begin_to_start_drivers
from flashmem.runtime.request.compatibility import for_processor
from flashmem.runtime.request.models import bundle_for, is_model
from flashmem.runtime.request.options import choose_strategy
from flashmem.schedule.residency import Strategy

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]

__all__ = ["RunReport", "Session", "Strategy"]


class Session:
    """A model on a device. Use it as a context manager, or call `close`.

    It executes one run at a time: threads wait for each other. A failed run closes the session; a refused input does not. A
    forked child must open its own sessions.

    Sessions that are open when Python exits are closed then.

    A bundle with several shape variants has one of them bound at a time, at first its own (`Bundle.index`). Inputs of other
    shapes bind another variant instead. Weights that both keep stay resident (docs/how-to/shapes.md).
    """

    @initialised_by(SessionCall)
    def __init__(self, call: SessionCall) -> None:
        """Prepare everything but the weights (`strategy` "preload": weights too).

        Raises:
            UserError: a damaged bundle, no such device, a mode it lacks, a budget below the layout's minimum, a host budget
                where host and device share memory, or an argument of a wrong type. For a model: the errors of
                `flashmem.compile`, or no compiler is installed.
            RunError: the device refuses, or (preload) the weights cannot be read.
        """
        begun = perf_counter()
        _check_call(call)
        self.process_memory = call.process_memory

        def find() -> Bundle:
            return bundle_for(call.bundle, call, build=call.build_apart)

        begin_to_start_drivers()
        compiled = find() if is_model(call.bundle) else None
        with DeviceOpening(call.device, prefer=_device_of(compiled or call.bundle), profiling=call.trace) as opening:
            opened = compiled or find()
            in_use = opening.found()
            self.device = in_use.device
            self._process = os.getpid()
            self._alone = OneThread()
            self._background = BackgroundRuns[list[Array]]()
            opened = for_processor(opened, self.device)
            self.strategy: Strategy = choose_strategy(opened.plan, call.strategy)
            opened, self.mode = fitted(opened, self.device, call.mode, self.strategy)
            if call.check_kernels:
                check_bundle_kernels(opened, self.device)
            plans = SessionPlans(opened, self.device, self.mode, self.strategy)
            budget = call.budget
            if self.process_memory is not None:
                in_use.open()
                budget = plans.fit_process(self.process_memory, in_use.start_rss)
            plans.choose(budget, call.host_budget)
            in_use.budget.limit = plans.budget
            file = OpenedBundle(
                plans.ready.bundle, self.device, self.mode, verify_weights=call.verify_weights, lanes=call.lanes
            )
            prefetches = call.prepare and not call.trace
            self._engine = Engine(file, in_use, apart=call.build_apart, warm_up=prefetches)
            check = BackgroundCheck(opened, self.device) if call.build_apart and prefetches else None
            self._planned = PlannedEngine(self._engine, plans, prefetches=prefetches, check=check)
            try:
                self._planned.bind(in_use)
            except BaseException:
                self._engine.close("it could not be opened")
                raise
        self._engine.stop_with(self)
        _open.add(self)
        if self.strategy == "preload":
            try:
                self._engine.preload()
            except BaseException:
                self.close()
                raise
        self._engine.opening_seconds = perf_counter() - begun

    @property
    def last_run(self) -> RunReport | None:
        """The report of the last run; None before the first one."""
        return self._planned.last_run

    @property
    def _plans(self) -> SessionPlans:
        return self._planned.plans

    @property
    def budget(self) -> int | None:
        """The most bytes to hold; None: no limit."""
        return self._plans.budget

    @property
    def host_budget(self) -> int | None:
        """The most bytes of host memory, where that counts apart; None: no limit, or none is counted."""
        return None if self._plans.host is None else self._plans.host.budget

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, Any],
        *,
        timeout: float | None = None,
        batch: Batch | None = None,
    ) -> list[Array]:
        """Run the model once.

        Args:
            output_names: which outputs, in this order; None for all, in the model's order.
            inputs: an array for every input, of exactly its shape and dtype: a numpy array, or a tensor of another library on
                the CPU (`__dlpack__` or `__array__`). Or numbers and lists of numbers, which become its dtype if that is exact
                (floats are rounded to another float type). For a bundle with several shape variants: the shapes of one of
                them, which then runs.
            timeout: most seconds, from the call on; None for no limit.
            batch: "loop": inputs may have N rows where the model has a first size of 1. It runs once for each row, and the
                outputs have N rows. `last_run` then describes the last of these runs.

        Returns:
            The outputs, in the model's dtypes. `last_run` then holds the report of the run.

        Raises:
            ValueError: an input or an output name is unknown, missing or of another shape or dtype; the session stays usable.
                Or an index is out of range; states are then those of the failed run. Or states are torn.
                Or a batch has different numbers of rows, a model with states, or an output that cannot be stacked.
            TimeoutError: the time is over. The run has ended at a launch, and the session stays usable. If it had begun, its
                states are torn: `reset` or `set_states` must set them before the next run.
            RunError: the run failed, and the session is closed. Or the session was closed before, or was opened before a fork
                of this process. Or this very thread is inside a run, interrupted by a callback or a signal handler.
        """
        return self._answer(output_names, inputs, timeout, batch)(None)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, Any],
        *,
        timeout: float | None = None,
        batch: Batch | None = None,
    ) -> Future[list[Array]]:
        """Begin a run, and return its future at once: `run`, in a thread of the session, after earlier calls of `run_async`.

        A coroutine awaits it with `asyncio.wrap_future`. `cancel` of either future stops the run at its next launch, and the
        session stays usable, as after a timeout. The inputs must not change until the run has ended. The future has the
        exceptions that `run` raises.
        """
        return self._background.submit(self._answer(output_names, inputs, timeout, batch))

    def _answer(
        self, names: Sequence[str] | None, inputs: Mapping[str, Any], timeout: float | None, batch: Batch | None
    ) -> Callable[[Callable[[], bool] | None], list[Array]]:
        """A call of `run`, to be made with a function that says whether it is cancelled. Its time begins now."""
        until = deadline(timeout)
        if batch is not None:
            check_batch(batch)

        def answer(cancelled: Callable[[], bool] | None) -> list[Array]:
            control = RunControl(until, cancelled)

            def run(given: Mapping[str, Any]) -> list[Array]:
                return self._run(names, (), given, control)[0]

            try:
                if batch is None:
                    return run(inputs)
                program = self._plans.ready.program
                if program.states:
                    raise ValueError("the model keeps states from one run to the next; leave batch='loop' out")
                ports = [(each.program.inputs, each.program.outputs) for each in self._plans.variants]
                return looped(run, arrays_by_name(inputs, program.inputs), names, ports)
            except RunStoppedError:
                raise too_late(timeout) from None

        return answer

    def io_binding(self) -> IOBinding:
        """A new binding of inputs and outputs to memory, for `run_with_iobinding`."""
        return IOBinding()

    def run_with_iobinding(self, binding: IOBinding, *, timeout: float | None = None) -> None:
        """Run the model once with the inputs and outputs of `binding`, which then has the results.

        Raises:
            ValueError: as for `run`; or no output is bound, or one to memory of another type or shape.
            TimeoutError: as for `run`.
            RunError: as for `run`. Or the budget has no room for an output that stays on the device: the session stays open.
        """
        control = RunControl(deadline(timeout))
        try:
            binding.run(lambda names, kept: self._run(names, kept, binding.inputs, control))
        except RunStoppedError:
            raise too_late(timeout) from None

    def _run(
        self, output_names: Sequence[str] | None, kept_names: Sequence[str], inputs: Mapping[str, Any], control: RunControl
    ) -> tuple[list[Array], list[OutputValue]]:
        """One run: outputs in host memory, and those that stay on the device.

        Raises:
            RunStoppedError: `control` ended it.
        """
        since = perf_counter()
        return self._alone.during(
            "run", lambda: self._planned.run(output_names, kept_names, inputs, control, since=since), control.until
        )

    def outputs(self, *names: str) -> dict[str, Array]:
        """Outputs of the last run that it was not asked for, by name: they are copied from the device now, and only now.

        Raises:
            ValueError: an unknown name; or the last run has no such output left: it was asked for it, `outputs` was called
                before, another part of the model has used its memory, or no run has ended.
            RunError: the session is closed, or the device fails, which closes it.
        """
        return self._alone.during("outputs", lambda: self._planned.outputs(names))

    @property
    def bundle(self) -> Bundle:
        """The bundle, as the bound shape variant: the one that ran last."""
        return self._plans.ready.bundle

    def get_inputs(self) -> list[TensorInfo]:
        """The inputs: name, shape and type of each, as ONNX Runtime's sessions describe theirs."""
        return tensor_infos([each.program.inputs for each in self._plans.variants])

    def get_outputs(self) -> list[TensorInfo]:
        """The outputs, as `get_inputs`."""
        return tensor_infos([each.program.outputs for each in self._plans.variants])

    def get_providers(self) -> list[str]:
        """The one provider, in the form of ONNX Runtime's names; `device` says which device it is."""
        return [PROVIDER]

    def __repr__(self) -> str:
        failure = self._engine.failure
        state = "open" if failure is None else f"closed: {failure}"
        return f"<Session of {self.bundle.model} on {self.device.name}, mode {self.mode}, {budget_text(self.budget)}, {state}>"

    def states(self, *names: str) -> dict[str, Array]:
        """The states of the model, or those of `names`, by the names of their inputs, each in its own shape and type; copies.

        Raises:
            ValueError: an unknown name.
            RunError: the session is closed, or the device fails.
        """
        return self._alone.during("states", lambda: self._planned.states.read(names))

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from other states: those of `states`, given as `states()` returns them. The others keep their values.

        Raises:
            ValueError: an unknown name, or an array of another shape or type; no state has changed.
            RunError: the session is closed, or the device fails.
        """
        self._alone.during(
            "set_states", lambda: self._planned.states.write(arrays_by_name(states, self._plans.ready.program.states))
        )

    def reset(self) -> None:
        """Set all states to zeros, as they are when a session opens. Raises RunError like `states`."""
        self._alone.during("reset", lambda: self._planned.states.reset())

    def prefetch(self) -> None:
        """Begin to load the first weights of the next run now, as a session does after each run (`prepare`). Returns at once.

        Useful before the first run. A failure is a warning: the next run begins from nothing.

        Raises:
            RunError: the session is closed, or called inside a run of the same thread.
        """
        self._alone.during("prefetch", self._planned.prefetch)

    def set_budget(self, budget: int | str | None) -> None:
        """Change the most bytes to hold, between two runs: plans the model again for `budget`; None for no limit.

        The bundle's own plan is used for its own budget. Weights are freed, and the next run loads them again. States stay.

        Raises:
            UserError: not a size, or the session has a host budget; a BudgetError if no plan fits. The session stays as it was.
            RunError: the session is closed, or the device refuses, which closes it.
        """
        limit = None if budget is None else parse_size(budget, what="budget")
        if self.host_budget is not None:
            raise UserError("the session has a host budget too, and keeps both; open another session for another budget")
        self._alone.during("set_budget", lambda: self._planned.set_budget(limit))

    def prepared(self) -> None:
        """Wait until the steady kernels of the next run are ready, if it has any, and the host tier has its memory. For
        measurements.

        Raises:
            RunError: called inside a run of the same thread, or memory of the host tier was refused.
        """
        self._alone.during("prepared", self._engine.wait_prepared)

    def close(self) -> None:
        """Free everything after the current run, and cancel those of `run_async` that wait. Does nothing if closed, or in a
        forked child, where everything belongs to the parent.

        Raises:
            RunError: called inside a run of the same thread, by a callback or a signal handler.
        """
        if os.getpid() == self._process:
            self._background.cancel()
            self._close()

    def _close(self, until: float = inf) -> None:
        if self._planned.check is not None:
            self._planned.check.close()
        self._alone.during("close", lambda: self._engine.close("close was called"), until)
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _check_call(call: SessionCall) -> None:
    """Raise UserError for arguments of a wrong type, and for those that exclude each other."""
    if not is_model(call.bundle) and not isinstance(call.bundle, Bundle | str | Path):
        raise UserError(f"a session is opened with a bundle, a model or the path of one, not with {described(call.bundle)}")
    if not isinstance(call.device, str):
        raise UserError(f"the device is {described(call.device)}; give its name as text, or 'auto'")
    if call.process_memory is not None and (call.budget is not None or call.host_budget is not None):
        raise UserError("the process memory gives the budget; give either it or budgets")


def _device_of(bundle: Bundle | str | Path | bytes | onnx.ModelProto) -> str | None:
    """The name of the device that a bundle was compiled for; None if that cannot be read."""
    if isinstance(bundle, Bundle):
        return bundle.descriptor.name
    return Bundle.device_name(bundle) if isinstance(bundle, str | Path) else None


_open: weakref.WeakSet[Session] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what nobody closed: Python would release memory objects in another order (`flashmem.runtime.memory.ledger`)."""
    for session in list(_open):
        if session._process == os.getpid():  # else the parent's
            session._background.cancel(current=True)
            with suppress(Exception):  # RunStoppedError: another thread is in a run, which may take long
                session._close(until=0)
