"""One run of a bound program: its loads and its launches, and where its memory comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.program.tensors import Port
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.engine.executor import Trace
from flashmem.runtime.engine.launch_window import LaunchOrders
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.opencl.context import wait
from flashmem.runtime.opencl.handles import Event
from flashmem.runtime.streaming.loading import Loading
from flashmem.schedule.loads import Load, Schedule, TimedInterval

if TYPE_CHECKING:
    from flashmem.runtime.engine.engine import Engine

Array = NDArray[Any]


@dataclass(frozen=True)
class Executed:
    """The launches of a run up to `done`, which is less than the last launch if the run was halted.

    `loads`: those that were made, of `nbytes` bytes; their times may have to be asked of the device. `layers` only if the
    device traces. `read`: outputs that were read during the run, by name.
    """

    loads: Sequence[TimedInterval]
    nbytes: int
    layers: tuple[TimedInterval, ...]
    read: dict[str, Array]
    done: int

    def after(self, before: Executed) -> Executed:
        """Both parts of a run."""
        loads = (*before.loads, *self.loads) if before.nbytes else self.loads  # times are asked for as late as possible
        layers = before.layers + self.layers
        return Executed(loads, before.nbytes + self.nbytes, layers, before.read | self.read, self.done)


class Run:
    """One run of a bound program after launch `done`. Its loads begin at once, as far as `admit` permits.

    It can be halted between two launches; another `Run` then continues after them.
    """

    def __init__(
        self, bound: BoundProgram, schedule: Schedule, *, done: int = 0, admit: Callable[[Load], bool] | None = None
    ) -> None:
        self.bound = bound
        self.schedule = schedule
        self._done = done
        weights = bound.weights
        if schedule.loads:
            weights.look_at_memory()
        self.loader: Loading | None = None
        if schedule.loads or (schedule.frees and weights.transfer.frees):
            self.loader = weights.transfer.begin(
                schedule.loads, schedule.frees, threads=weights.layout.threads, done=done, admit=admit
            )

    def execute(
        self,
        outputs: Sequence[Port],
        kept: Mapping[str, OutputValue] = MappingProxyType({}),
        *,
        traced: bool = False,
        halted: Callable[[], bool] | None = None,
    ) -> Executed:
        """Execute the launches, and enqueue reads of `outputs`: behind the last launch, or earlier where another tensor gets
        their memory in the arena.

        Copies those that `kept` names to its values on the device instead, all of them.

        Raises:
            RunError: a load or a launch failed; the bound program can only be closed then.
        """
        weights = self.bound.weights
        try:
            if not weights.transfer.in_place:
                return self._execute(outputs, kept, traced, halted)
            with weights.guarded():
                return self._execute(outputs, kept, traced, halted)
        except BaseException:
            with suppress(RunError):  # the first failure is the one to report
                self.stop()
            raise

    def _execute(
        self, outputs: Sequence[Port], kept: Mapping[str, OutputValue], traced: bool, halted: Callable[[], bool] | None
    ) -> Executed:
        bound = self.bound
        loader = self.loader
        trace = Trace() if traced else None
        arrays: dict[str, Array] = {}
        reading: list[Event] = []

        def read(ports: Sequence[Port]) -> None:
            for port in ports:
                if port.name in kept:
                    event = bound.activations.keep(port, kept[port.name])
                else:
                    arrays[port.name], event = bound.activations.read_later(port)
                reading.append(event)

        after = {layer: partial(read, ports) for layer, ports in self._read_after(outputs, kept).items()}
        check = bound.weights.check_files if bound.weights.transfer.in_place else None
        try:
            executor = bound.kernels.ready_executor()
            done = executor.run(LaunchOrders(loader, check, after, self._done, halted), trace)
            self.stop()  # while the outputs are copied
            for event in reading:
                wait(event)
        except BaseException:
            bound.kernels.executor.drain()  # nothing may be freed while the device reads it
            raise
        layers = trace.intervals(executor.queue) if trace is not None else ()
        loads = loader.intervals if loader else ()
        nbytes = self.schedule.nbytes
        if done == len(bound.opened.program.launches):
            bound.ran(self.schedule.resident)
        else:
            nbytes = sum(load.nbytes for load in loads)
        return Executed(loads, nbytes, layers, arrays, done)

    def _read_after(self, outputs: Sequence[Port], kept: Mapping[str, OutputValue]) -> dict[int, list[Port]]:
        """The outputs whose reads or copies are enqueued behind a launch, by launch."""
        by_layer: dict[int, list[Port]] = {}
        for port in outputs:
            enqueued = port.name in kept or port.ready is not None or self.bound.activations.can_read_later(port)
            if port.tensor is not None and enqueued:
                by_layer.setdefault(port.ready or len(self.bound.opened.program.launches), []).append(port)
        return by_layer

    def stop(self) -> None:
        """End the loads. Raises RunError if one failed."""
        if self.loader is not None:
            self.loader.stop()


class RunMemory(Protocol):
    """Where an engine's run has its memory from."""

    halts: bool
    """Whether runs may have to halt, and continue in less memory."""

    def begin(self, done: int) -> Run | None:
        """The run after launch `done`, with all its memory granted; None if the budget has changed meanwhile."""

    def executing(self, run: Run) -> AbstractContextManager[Callable[[], bool] | None]:
        """Enter while `run` executes its launches. Yields a function: whether the run must halt before the next one."""

    def ended(self) -> None:
        """The run has ended or halted."""

    def give_way(self) -> None:
        """After a halt: free memory, and bind the model again within the rest."""


class BoundMemory:
    """The memory of a model with a budget of its own: all of it is bound already."""

    halts = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def begin(self, done: int) -> Run:
        """See `RunMemory`. The run may have begun to load after the last one."""
        engine = self._engine
        assert engine.bound is not None
        return engine.current or engine.begin(engine.bound.weights.schedule())

    def executing(self, run: Run) -> AbstractContextManager[None]:
        """See `RunMemory`."""
        return nullcontext()

    def ended(self) -> None:
        """See `RunMemory`."""

    def give_way(self) -> None:
        """See `RunMemory`."""
        raise AssertionError("nothing halts it")
