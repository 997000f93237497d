"""The engine: a model on a device, and one run of it from inputs to outputs.

A `Session` is an engine with one model and its own budget. A `Runtime` has an engine for each model (`serving.loaded_model`),
and an arbiter that divides one budget among them.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import MappingProxyType, TracebackType
from typing import Any

from numpy.typing import NDArray

from flashmem.base.errors import BudgetError, FlashmemWarning, RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import call_each, started
from flashmem.base.units import format_size
from flashmem.program.tensors import Port
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import RequestError, said, why_closed
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.opened import Kernels, OpenedBundle, PlannedVariant
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.runtime.engine.run import Executed, Run, RunMemory
from flashmem.runtime.engine.stopping import RunStoppedError
from flashmem.runtime.engine.warm_up import WarmUp
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Queue
from flashmem.schedule.loads import Load, Schedule, TimedInterval
from flashmem.schedule.plan import OverlapPlan, PoolLayout

Array = NDArray[Any]


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
        self.opened, self.device = opened, device
        self.bound: BoundProgram | None = None
        self.current: Run | None = None  # the run under way, or the next one, which has begun to load
        self.failure: str | None = None  # why it is closed
        self.steady = False  # whether the last run used steady kernels
        self.opening_seconds = 0.0  # added to the first run's latency
        self.left: frozenset[str] = frozenset()  # outputs of the last run that can still be read
        self._direct_bytes = 0  # read past the page cache before the last run ended
        self._loads = False  # whether the last run had weights to load or to free
        self._apart, self._warms_up = apart, warm_up
        self._warm_up = self._new_warm_up()
        self._kernels: dict[int, tuple[OverlapPlan, Kernels]] = {}  # by shape variant
        self._waiting: dict[int, tuple[BoundProgram, WarmUp | None]] = {}  # other shape variants bound in the same memory
        self._process = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None

    def _new_warm_up(self) -> WarmUp | None:
        if not self._warms_up or not self.opened.program.steady:
            return None
        return WarmUp(self.opened, self.device, apart=self._apart)

    def kernels_for(self, plan: OverlapPlan) -> Kernels:
        """The kernels for runs of `plan`. They depend on the plan where they copy weights.

        Raises:
            UserError: the kernels compute in half precision, and the device does not.
            RunError: the driver refuses them.
        """
        index = self.opened.bundle.index
        if index in self._kernels:
            planned, kernels = self._kernels[index]
            if not self.opened.transfer.by_kernels or planned is plan:
                return kernels
            kernels.close()  # a thread may still be loading kernels that only later runs use
        kernels = Kernels(self.opened, self.device, plan, apart=self._apart)
        self._kernels[index] = plan, kernels
        return kernels

    def bind(self, plan: OverlapPlan, layout: PoolLayout, ledger: Ledger, queue: Queue) -> None:
        """Bind the program: allocate its memory under `plan`, and read the constants through `queue`.

        Raises:
            RunError: the device or the budget refuses; nothing is allocated then.
        """
        self.bound = BoundProgram(self.device, self.opened, self.kernels_for(plan), plan, layout, ledger, queue)

    def change_variant(self, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant of the bundle, in the memory of this one; weights of both stay resident.

        Where their memory is alike, both stay bound.

        Raises:
            RunError: the device or the budget refuses; the engine can only be closed then.
        """
        assert self.bound is not None
        self.left = frozenset()
        if self.bound.has_room_for(opened, layout):
            self._alternate(opened, plan, layout)
            return
        self.stop_ahead()
        self._end_waiting()
        self.opened = opened
        self._warm_up = self._new_warm_up()
        self.bound.change_variant(opened, self.kernels_for(plan), plan, layout)

    def _alternate(self, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant that is, or will be, bound in the same memory."""
        before = self.bound
        assert before is not None
        self._stop_current()
        self._waiting[self.opened.bundle.index] = before, self._warm_up
        self.opened = opened
        after, warm_up = self._waiting.pop(opened.bundle.index, (None, None))
        if after is None:
            warm_up, kernels = self._new_warm_up(), self.kernels_for(plan)
            after = BoundProgram(self.device, opened, kernels, plan, layout, before.ledger, self.device.queue, before)
        else:
            after.take_turn(before)
        self.bound, self._warm_up = after, warm_up

    def _end_waiting(self) -> None:
        """Drop the other shape variants that are bound."""
        waiting, self._waiting = self._waiting, {}
        for bound, warm_up in waiting.values():
            call_each(None if warm_up is None else warm_up.close, bound.forget)

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
        memory: RunMemory | None = None,
        *,
        since: float,
        kept: Mapping[str, OutputValue] = MappingProxyType({}),
        stopped: Callable[[], bool] | None = None,
    ) -> tuple[list[Array], RunReport]:
        """One run.

        Args:
            names: the outputs to return, in this order.
            inputs: checked arrays by name. They are removed from this dict once the device has its final copy.
            memory: grants the run its memory; None: all of it is bound already.
            since: when the request began, in seconds of `time.perf_counter()`.
            kept: other outputs, by name, and memory on the device that they are copied to.
            stopped: whether the run must end at the next launch; only without `memory`.

        Raises:
            RequestError: the request cannot be answered, for instance because of an index outside a table. Or `stopped` ended
                the run (RunStoppedError); its weights are freed then, and its states are torn if a launch has begun.
            BudgetError: the budget is too small for the model.
            RunError: the run failed. After any exception, the caller must call `failed`.
        """
        bound = self.bound
        assert bound is not None
        self.left = frozenset()
        program, again = bound.opened.program, bound.opened.transfer.by_kernels
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
        if memory is None or not again:
            inputs.clear()  # the caller may have dropped its references
        loads: Sequence[TimedInterval] = ()
        nbytes = 0
        layers: list[TimedInterval] = []
        read: dict[str, Array] = {}
        done = 0
        while True:
            executed = self._execute([*wanted, *keeping], kept, done, memory, stopped)
            loads = executed.loads if not nbytes else (*loads, *executed.loads)
            nbytes += executed.nbytes
            layers += executed.layers
            read |= executed.read
            done = executed.done
            if done == len(program.launches):
                break
            if memory is None:
                self._clear_stopped(done)
                raise RequestError(RunStoppedError("the run was stopped"))
            memory.give_way()
            if again:  # the copies that kernels made before are overwritten
                done, read = 0, {}
                bound.activations.write_inputs(inputs)
        with _OF_THE_REQUEST:
            bound.activations.check_status()
        results = bound.activations.outputs(wanted, read)
        self.left = bound.activations.left(results.keys())
        if bound.opened.tier is not None:
            bound.opened.tier.begin()
        ended, init, device = perf_counter(), self.opening_seconds, self.device
        use = MemoryUse.of(bound.ledger, ended, device.budget.limit, device.start_rss, host)
        latency = Latency(init + ended - since, init, ended - since)
        self.opening_seconds = 0.0
        direct = self.opened.file.direct
        before, self._direct_bytes = self._direct_bytes, direct.nbytes
        directly = self._direct_bytes - before
        report = RunReport(latency, use, loads, tuple(layers), self.steady, ended, directly, direct.refused, nbytes)
        return [results[name] for name in names], report

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
        opened, device, bound = self.opened, self.device, self.bound
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
            self._bind_weights(bound.weights.plan, bound.weights.layout)

    def _bind_weights(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Free the memory of all weights, and bind the program under `plan`; activations and states stay."""
        assert self.bound is not None
        self._end_waiting()
        Engine.release_weights(self)
        self.bound.rebind_weights(plan, layout, self.kernels_for(plan))

    def follow(self, variant: PlannedVariant, limit: int | None, needed: int) -> None:
        """Between two runs: change the limit of the device's budget, and bind the program under another plan, if it is one.

        `needed`: bytes of any run, for which the budget must have room.

        Raises:
            BudgetError: outputs on the device hold too much of the budget; nothing has changed.
            RunError: the device refuses; the engine can only be closed then.
        """
        bound, budget = self.bound, self.device.budget
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
        self._bind_weights(variant.plan, variant.layout)
        if kept:
            bound.ledger.promise(needed)

    def _execute(
        self,
        outputs: Sequence[Port],
        kept: Mapping[str, OutputValue],
        done: int,
        memory: RunMemory | None,
        stopped: Callable[[], bool] | None,
    ) -> Executed:
        """Execute the launches after `done`, until the end or a halt."""
        assert self.bound is not None
        if memory is None:
            run = self.current or self.begin(self.bound.weights.schedule())
        elif (begun := memory.begin(done)) is not None:
            run = begun
        else:
            return Executed((), 0, (), {}, done)
        self.steady = done == 0 and self._warm_up is not None and self._warm_up.choose(self.bound)
        self._loads = run.loader is not None
        try:
            if memory is None:
                return run.execute(outputs, kept, traced=self.device.traced, halted=stopped)
            with memory.executing(run) as halted:
                return run.execute(outputs, kept, halted=halted)
        finally:
            self.end()

    def end(self) -> None:
        """End the current run, finished or halted."""
        self.current = None

    def prepare(self) -> None:
        """After a run: start the warm-up of the next run's steady kernels."""
        if self._warm_up is not None and self.bound is not None:
            self._warm_up.begin(self.bound)

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
        warm_up = self._warm_up
        if warm_up is not None:
            warm_up.wait()

    def stop_ahead(self) -> None:
        """End the next run's loads and the warm-up, and ignore their failures. A forked child has none of these threads."""
        if os.getpid() != self._process:
            return
        warm_ups = [self._warm_up, *(warm_up for _, warm_up in self._waiting.values())]
        self._warm_up = None
        call_each(self._stop_current, *(warm_up.close for warm_up in warm_ups if warm_up is not None))

    def stop_with(self, owner: object) -> None:
        """Call `stop_ahead` when `owner` is garbage-collected without having closed the engine."""
        self._finalizer = weakref.finalize(owner, self._owner_is_gone)
        self._finalizer.atexit = False

    def _owner_is_gone(self) -> None:
        """Runs in any thread, with any lock held; so another thread stops the loads."""
        if self.current is not None or self._warm_up is not None:
            with suppress(RunError):  # the interpreter is exiting
                started(self.stop_ahead, "flashmem-stop")

    def _stop_current(self) -> None:
        run, self.current = self.current, None
        if run is not None:
            with suppress(RunError):  # the result of these loads is not needed
                run.stop()

    def release_weights(self) -> None:
        """Free the memory of all weights; activations stay. No run may be loading."""
        assert self.bound is not None
        if self._warm_up is not None:
            self._warm_up.leave()
        self.bound.release_weights()

    def unbind(self) -> None:
        """Free all memory, and stop the loads of the next run. The model can be bound again."""
        call_each(self._stop_current, self._end_waiting, self._leave_bound)

    def _leave_bound(self) -> None:
        bound, self.bound = self.bound, None
        if bound is not None:
            call_each(None if self._warm_up is None else self._warm_up.leave, bound.close)

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
                kernels = [kernels.close for _, kernels in self._kernels.values()]
                call_each(self.unbind, self.stop_ahead, *kernels, self.opened.close)


class _OfTheRequest:
    """While no launch runs: raises RequestError for all errors but RunError, which would fail the next request too."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, RunError):
            raise RequestError(error) from None


_OF_THE_REQUEST = _OfTheRequest()
