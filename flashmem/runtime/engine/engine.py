"""The engine: a model on a device, and one run of it from inputs to outputs.

A `Session` has an engine whose runs have its own budget (`BoundMemory`). A `Runtime` has one for each model
(`serving.loaded_model`), and an arbiter that grants runs their memory.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import Any, final

from numpy.typing import NDArray

from flashmem.base.errors import BudgetError, FlashmemWarning, RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import call_each, started
from flashmem.base.units import format_size
from flashmem.program.tensors import Port
from flashmem.runtime.engine.bindings import Bindings
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import RequestError, said, why_closed
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.opened import OpenedBundle, PlannedVariant
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.runtime.engine.run import Executed, Run, RunMemory
from flashmem.runtime.engine.stopping import UNCONTROLLED, RunControl, RunStoppedError
from flashmem.runtime.memory.ledger import Ledger
from flashmem.schedule.loads import Load, Schedule
from flashmem.schedule.plan import OverlapPlan, PoolLayout

Array = NDArray[Any]


@final
class Engine:
    """The engine of a model on a device: one run at a time, the prefetch of the next run, and the warm-up of later ones.

    One thread at a time calls its methods, unless a docstring says otherwise.
    """

    def __init__(self, opened: OpenedBundle, device: DeviceInUse, *, apart: bool, warm_up: bool) -> None:
        """Allocates nothing yet.

        Args:
            opened: the bundle, which `close` closes.
            device: the device, its queue and its budget.
            apart: build kernels that no cache has in child processes.
            warm_up: make steady kernels ready between runs.
        """
        self.device = device
        self.bindings = Bindings(opened, device, apart=apart, warms_up=warm_up)
        self.current: Run | None = None  # the run under way, or the next one, which has begun to load
        self.failure: str | None = None  # why it is closed
        self.steady = False  # whether the last run used steady kernels
        self.opening_seconds = 0.0  # added to the first run's latency
        self.left: frozenset[str] = frozenset()  # outputs of the last run that can still be read
        self._direct_bytes = 0  # read past the page cache before the last run ended
        self._loads = False  # whether the last run had weights to load or to free
        self._process = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None

    @property
    def opened(self) -> OpenedBundle:
        """The shape variant that runs."""
        return self.bindings.opened

    @property
    def bound(self) -> BoundProgram | None:
        """Its program, bound to the device; None if it is not."""
        return self.bindings.bound

    def change_variant(self, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant of the bundle (`Bindings.change_variant`).

        Raises:
            RunError: the device or the budget refuses; the engine can only be closed then.
        """
        self.left = frozenset()
        self._stop_current()
        self.bindings.change_variant(opened, plan, layout)

    def preload(self) -> None:
        """Load the preload set W. Raises RunError when a load fails."""
        assert self.bound is not None
        self.bound.weights.preload()

    def begin(self, schedule: Schedule, *, done: int = 0, admit: Callable[[Load], bool] | None = None) -> Run:
        """Begin the next run after launch `done`: start its loads, as far as `admit` permits."""
        assert self.bound is not None
        self.current = Run(self.bound, schedule, done=done, admit=admit)
        return self.current

    def run(
        self,
        names: Sequence[str],
        inputs: dict[str, Input],
        memory: RunMemory,
        control: RunControl = UNCONTROLLED,
        *,
        since: float,
        kept: Mapping[str, OutputValue] = MappingProxyType({}),
    ) -> tuple[list[Array], RunReport]:
        """One run.

        Args:
            names: the outputs to return, in this order.
            inputs: checked arrays by name. They are removed from this dict once the device has its final copy.
            memory: grants the run its memory.
            control: may end the run at its next launch.
            since: when the request began, in seconds of `time.perf_counter()`.
            kept: other outputs, by name, and memory on the device that they are copied to.

        Raises:
            RequestError: the request cannot be answered, for instance because of an index outside a table. Or `control` ended
                the run (RunStoppedError); its weights are freed then, and its states are torn if a launch has begun.
            BudgetError: the budget is too small for the model.
            RunError: the run failed. After any exception, the caller must call `failed`.
        """
        bound = self.bound
        assert bound is not None
        self.left = frozenset()
        program = bound.opened.program
        again = bound.opened.transfer.by_kernels
        host = None if bound.opened.tier is None else bound.opened.tier.ledger
        if not self.opening_seconds:
            for ledger in (bound.ledger, host):
                if ledger is not None:
                    ledger.restart_history()
        ports = bound.opened.outputs
        wanted = [ports[name] for name in dict.fromkeys(names)]
        keeping = [ports[name] for name in kept]
        with _OF_THE_REQUEST:
            bound.activations.write_inputs(inputs)
        if not memory.halts or not again:
            inputs.clear()  # the caller may have dropped its references
        executed = self._execute([*wanted, *keeping], kept, 0, memory, control)
        while executed.done < len(program.launches):
            if control.stops():
                self._clear_stopped(executed.done)
                raise RequestError(RunStoppedError("the run was stopped"))
            memory.give_way()
            if again:  # the copies that kernels made before are overwritten
                executed = replace(executed, done=0, read={})
                bound.activations.write_inputs(inputs)
            executed = self._execute([*wanted, *keeping], kept, executed.done, memory, control).after(executed)
        with _OF_THE_REQUEST:
            bound.activations.check_status()
        results = bound.activations.outputs(wanted, executed.read)
        self.left = bound.activations.left(results.keys())
        if bound.opened.tier is not None:
            bound.opened.tier.begin()
        return [results[name] for name in names], self._report(executed, bound.ledger, host, since)

    def _report(self, executed: Executed, ledger: Ledger, host: Ledger | None, since: float) -> RunReport:
        """About a run that ends now."""
        ended = perf_counter()
        init = self.opening_seconds
        device = self.device
        use = MemoryUse.of(ledger, ended, device.budget.limit, device.start_rss, host)
        latency = Latency(init + ended - since, init, ended - since)
        self.opening_seconds = 0.0
        direct = self.opened.file.direct
        before = self._direct_bytes
        self._direct_bytes = direct.nbytes
        directly = self._direct_bytes - before
        loads = executed.loads
        layers = executed.layers
        nbytes = executed.nbytes
        return RunReport(latency, use, loads, layers, self.steady, ended, directly, direct.refused, nbytes)

    def later_outputs(self, names: Sequence[str]) -> dict[str, Array]:
        """Outputs of the last run that are `left`, by name; none is afterwards.

        Raises:
            RunError: the device fails. The caller must then call `failed`.
        """
        assert self.bound is not None
        self.left = frozenset()
        ports = [port for port in self.bound.opened.program.outputs if port.name in names]
        return self.bound.activations.outputs(ports, {})

    def values_on_device(self, names: Sequence[str], needed: int) -> dict[str, OutputValue]:
        """Memory on the device for these outputs of the next run, by name.

        Not for outputs that a run leaves in host memory anyway: on a device that uses that, without elements, and with a number
        of elements that depends on data. The budget keeps `needed` bytes free of such memory from then on: those of any run.

        Raises:
            RequestError: the budget has no room for them.
        """
        opened = self.opened
        device = self.device
        bound = self.bound
        assert bound is not None
        ports = [port for port in opened.program.outputs if port.name in names and port.tensor and port.count is None]
        if opened.uses_host_memory or not ports:
            return {}
        bound.ledger.promise(needed)
        try:
            return {port.name: OutputValue.on_device(device, port, opened.tensors[str(port.tensor)]) for port in ports}
        except RunError as error:
            raise RequestError(error) from None

    def _clear_stopped(self, done: int) -> None:
        """After a run was stopped behind launch `done`: free the weights that it has loaded, and bind the program as at first.

        Raises:
            RunError: the device refuses.
        """
        bound = self.bound
        assert bound is not None
        if done:
            bound.states.tear()
        if self._loads:
            self.bindings.rebind_weights(bound.weights.plan, bound.weights.layout)

    def follow(self, variant: PlannedVariant, limit: int | None, needed: int) -> None:
        """Between two runs: change the limit of the device's budget, and bind the program under another plan, if it is one.

        `needed`: bytes of any run, for which the budget must have room.

        Raises:
            BudgetError: outputs on the device hold too much of the budget; nothing has changed.
            RunError: the device refuses; the engine can only be closed then.
        """
        bound = self.bound
        budget = self.device.budget
        assert bound is not None
        kept = budget.committed - bound.ledger.commitment
        if limit is not None and needed + kept > limit:
            raise BudgetError(
                f"outputs on the device hold {kept} bytes, which leaves too little of {format_size(limit)}; drop them, or give "
                f"{needed + kept} bytes",
                smallest_bytes=needed + kept,
                binding="outputs on the device",
            )
        if variant.plan is bound.weights.plan:
            budget.limit = limit
            return
        self._stop_current()
        bound.ledger.promise(0)
        budget.limit = limit
        self.bindings.rebind_weights(variant.plan, variant.layout)
        if kept:
            bound.ledger.promise(needed)

    def _execute(
        self, outputs: Sequence[Port], kept: Mapping[str, OutputValue], done: int, memory: RunMemory, control: RunControl
    ) -> Executed:
        """Execute the launches after `done`, until the end or a halt."""
        bindings = self.bindings
        run = memory.begin(done)
        if run is None:
            return Executed((), 0, (), {}, done)
        assert bindings.bound is not None
        self.steady = done == 0 and bindings.warm_up is not None and bindings.warm_up.choose(bindings.bound)
        self._loads = run.loader is not None
        try:
            with memory.executing(run) as pressed:
                return run.execute(outputs, kept, traced=self.device.traced, halted=_either(pressed, control.asked))
        finally:
            self.end()
            memory.ended()

    def end(self) -> None:
        """End the current run, finished or halted."""
        self.current = None

    def prepare(self) -> None:
        """After a run: start the warm-up of the next run's steady kernels."""
        if self.bindings.warm_up is not None and self.bound is not None:
            self.bindings.warm_up.begin(self.bound)

    def prefetch(self) -> None:
        """After a run: start the loads of the next one that wait for no launch, and the warm-up of its steady kernels.

        A failure is a warning here. The next run repeats the work, and raises the error if it recurs.
        """
        assert self.bound is not None
        try:
            self.prepare()
            schedule = self.bound.weights.schedule()
            if schedule.loads:
                self.begin(schedule)
        except Exception as error:
            warnings.warn(
                f"the next run could not be prepared, and begins from nothing: {said(error)}", FlashmemWarning, stacklevel=3
            )

    def wait_prepared(self) -> None:
        """Wait until the warm-up that has begun is complete, and the host tier has its memory. Any thread may call it.

        Raises:
            RunError: memory of the host tier was refused.
        """
        tier = self.opened.tier
        if tier is not None:
            tier.wait()
        warm_up = self.bindings.warm_up
        if warm_up is not None:
            warm_up.wait()

    def stop_ahead(self) -> None:
        """End the next run's loads and the warm-up, and ignore their failures. A forked child has none of these threads."""
        if os.getpid() != self._process:
            return
        call_each(self._stop_current, self.bindings.close_warm_ups)

    def stop_with(self, owner: object) -> None:
        """Call `stop_ahead` when `owner` is garbage-collected without having closed the engine."""
        self._finalizer = weakref.finalize(owner, self._owner_is_gone)
        self._finalizer.atexit = False

    def _owner_is_gone(self) -> None:
        """Runs in any thread, with any lock held; so another thread stops the loads."""
        if self.current is not None or self.bindings.warm_up is not None:
            with suppress(RunError):  # the interpreter is exiting
                started(self.stop_ahead, "flashmem-stop")

    def _stop_current(self) -> None:
        run = self.current
        self.current = None
        if run is not None:
            with suppress(RunError):  # the result of these loads is not needed
                run.stop()

    def unbind(self) -> None:
        """Free all memory, and stop the loads of the next run. The model can be bound again."""
        call_each(self._stop_current, self.bindings.unbind)

    def failed(self, error: BaseException) -> BaseException:
        """End a run that raised `error`. The model stays unchanged after an error of the request, and is closed otherwise.

        Returns the error for the user.
        """
        if isinstance(error, RequestError):
            return error.error
        self.close(why_closed(error))
        return error

    def close(self, why: str) -> None:
        """Free everything and stay closed, also if a part of that fails. Ctrl-C waits for it. Closing again does nothing."""
        with held_back():
            if self.failure is None:
                self.failure = why
                if self._finalizer is not None:
                    self._finalizer.detach()
                call_each(self.unbind, self.stop_ahead, self.bindings.close_kernels, self.opened.close)


def _either(one: Callable[[], bool] | None, other: Callable[[], bool] | None) -> Callable[[], bool] | None:
    """Whether one of two conditions holds, of which None never does."""
    if one is None or other is None:
        return one or other
    return lambda: one() or other()


class _OfTheRequest:
    """While no launch runs: raises RequestError for all errors but RunError, which would fail the next request too."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, RunError):
            raise RequestError(error) from None


_OF_THE_REQUEST = _OfTheRequest()
