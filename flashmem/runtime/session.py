"""A session: a bundle on a device, ready to run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.shape_variants import which_fits
from flashmem.runtime.engine.bound_program import Placement
from flashmem.runtime.engine.compatibility import laid_out, playable
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import why_closed
from flashmem.runtime.engine.fitted import Fitted, fit
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.engine.ports import arrays_by_name, check_inputs, chosen_outputs, described
from flashmem.runtime.engine.prefetch import Idle
from flashmem.runtime.engine.report import Latency, MemoryUse, RunReport
from flashmem.runtime.engine.run import Played, Run, check_status, collect, write_inputs
from flashmem.runtime.options import choose_budget, choose_mode, choose_strategy, device_here
from flashmem.schedule.loads import planned_loads, read_while_opening
from flashmem.schedule.residency import Strategy

Array = NDArray[Any]

__all__ = ["RunReport", "Session", "Strategy"]


class Session:
    """A bundle on a device. Use it as a context manager, or call `close`.

    Runs are made one at a time: threads wait for each other. A run that fails closes the session; an input that is refused
    does not. A forked child has to open sessions of its own.

    Of a bundle with several shape variants one is ready at a time, at first the one that the bundle stands for (the first). A
    run with inputs of other shapes takes that one's place: memory is that of one variant, never of two, and weights that both
    leave resident are not read again (docs/shapes.md).
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        device: str = "auto",
        mode: TransferMode | Literal["auto"] = "auto",
        strategy: Strategy | Literal["auto"] = "auto",
        budget: int | str | None = None,
        lanes: bool = True,
        trace: bool = False,
        verify_weights: bool = False,
        build_apart: bool = True,
        prepare: bool = True,
    ) -> None:
        """Make everything ready that is not weights (`strategy` "preload": weights too).

        Args:
            bundle: a bundle or its path.
            device: "auto", or what `flashmem.runtime.options.device_here` understands.
            mode: how weights travel; "auto" takes the one the bundle was planned for, else the device's first.
            strategy: "auto" follows the plan, whatever strategy made it; "preload" makes everything resident first, as engines
                do; any other name must be the strategy that the bundle was compiled with.
            budget: most bytes to hold; the bundle's by default, and none with "preload".
            lanes: in mode "interleave", whether kernels move weights while they compute; if not, launches between them do, to
                compare with.
            trace: record when each layer ran on the device.
            verify_weights: compare every slice and table row that is read with its checksum; a damaged one fails the run.
                Constants are compared always.
            build_apart: kernels that no cache has are built in child processes, whose memory goes with them; if not, in this
                one, which keeps a compiler's 200 to 400 MB. For those who open many sessions, or cannot start processes.
            prepare: between two runs, load what the next one begins with, and get the bundle's steady kernels ready, which
                later runs are then played by. A session that traces prepares nothing.

        Raises:
            UserError: a damaged bundle, no such device, a mode it lacks, a budget below what the layout needs, an argument of
                another type.
            RunError: the device refuses, or (preload) the weights cannot be read.
        """
        begun = perf_counter()
        if not isinstance(bundle, Bundle | str | Path):
            raise UserError(f"a session is opened with a bundle or its path, not with {described(bundle)}")
        if not isinstance(device, str):
            raise UserError(f"the device is {described(device)}; give its name as text, or 'auto'")
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.device = device_here(device, prefer=opened.descriptor.name)
        self.strategy: Strategy = choose_strategy(opened.plan, strategy)
        self.mode = choose_mode(
            playable(opened, self.device, mode),
            mode,
            path=opened.program.memory_path,
            planned=opened.meta.get("mode"),
            strategy=self.strategy,
            layouts=laid_out(opened),
        )
        self._variants = [
            fit(opened.variant(index), self.device, self.mode, self.strategy) for index in range(len(opened.variants))
        ]
        self._ready = self._variants[opened.index]
        needed = max(variant.needed for variant in self._variants)
        self.budget = choose_budget(budget, opened.budget_bytes, needed, mode=self.mode, strategy=self.strategy)
        plan, layout, program = self._ready.plan, self._ready.layout, self._ready.program
        self.last_run: RunReport | None = None
        self._runs = 0
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._busy = False  # seen by the thread that holds the lock
        self._closed: str | None = None  # why
        self._build_apart = build_apart
        self._kernels: dict[int, Kernels] = {}  # of the variants that were ready so far
        self._opened = OpenedBundle(self.bundle, self.device, self.mode, verify_weights=verify_weights, lanes=lanes)
        try:
            # The disk may start now: it needs nothing that is still to be made. Constants are wanted first.
            loads = planned_loads(plan, self._opened.slices, layout, self.mode, preload=True)
            first = read_while_opening(loads, program, self.bundle.descriptor.rates)
            constants = (program.constants_offset, program.constants_bytes)
            self._opened.file.announce([constants, *(load.place for load in first)])
            self._device = DeviceInUse(self.device, self.budget, profiling=trace)
            kernels = self._kernels[opened.index] = Kernels(self._opened, self._device, plan, apart=build_apart)
            ledger, queue = self._device.ledger(), self._device.queue
            self._placement = Placement(self._device, self._opened, kernels, plan, layout, ledger, queue)
        except BaseException:
            self._opened.close()
            raise
        idle = Idle(self._placement, self._device, apart=build_apart, owner=self)
        self._idle = idle if prepare and not trace else None
        if self.strategy == "preload":
            try:
                self._placement.preload()
            except BaseException:
                self.close()
                raise
        self._init_seconds = perf_counter() - begun

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the model once.

        Args:
            output_names: which outputs, in this order; None for all, in the model's order.
            inputs: an array for every input, of exactly its shape and dtype; of a bundle with several shape variants, of the
                shapes of one of them, which then runs.

        Returns:
            The outputs, in the model's dtypes. `last_run` then reports how it went.

        Raises:
            ValueError: an input or an output name that does not fit; the session stays usable.
            RunError: the run failed, and the session is closed; or it was closed before; or it is in a run of this very thread,
                which a callback or a signal handler interrupted; or it was opened before this process was forked.
        """
        with self._alone("run"):
            if self._closed is not None:
                raise RunError(f"the session is closed ({self._closed}); open a new one")
            begun = perf_counter()
            chosen = chosen_outputs(self._ready.program.outputs, output_names)
            inputs = arrays_by_name(inputs)
            fitting = self._variants[which_fits([variant.program.inputs for variant in self._variants], inputs)]
            check_inputs(fitting.program.inputs, inputs)
            if fitting is not self._ready:
                with self._closed_by_failure():
                    self._go_on_with(fitting)
            if self._runs:
                self._placement.ledger.restart_history()
            with self._closed_by_failure(but=ValueError):  # an index outside a table: nothing has started yet
                write_inputs(self._placement, inputs)
            inputs.clear()  # of this run: who calls may have given them for good
            outputs = {port.name: port for port in fitting.program.outputs}
            ports = [outputs[name] for name in dict.fromkeys(chosen)]
            with self._closed_by_failure():
                run, steady = self._idle.take() if self._idle else (Run(self._placement, self._placement.schedule()), False)
                played = run.play(ports, traced=self._device.traced)
            check_status(self._placement)
            with self._closed_by_failure():
                results = collect(self._placement, ports, played.read)
            self._report(begun, played, steady=steady)
            if self._idle is not None:
                with self._closed_by_failure():  # an interrupt: what fails costs the next run time, and this one nothing
                    self._idle.begin()
            return [results[name] for name in chosen]

    @property
    def bundle(self) -> Bundle:
        """The bundle, standing for the shape variant that is ready: the one that ran last."""
        return self._ready.bundle

    def _go_on_with(self, variant: Fitted) -> None:
        """Have another shape variant ready: its activations in the place of those that are there, the weights kept.
        What was prepared for the next run is let go.
        """
        if self._idle is not None:
            self._idle.stop()
        index = variant.bundle.index
        opened = self._opened.variant(variant.bundle)
        if index not in self._kernels:
            self._kernels[index] = Kernels(opened, self._device, variant.plan, apart=self._build_apart)
        self._placement.become(opened, self._kernels[index], variant.plan, variant.layout)
        self._ready = variant

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One thread at a time, and that one once."""
        if os.getpid() != self._process:
            raise RunError("the session was opened before this process was forked; open one in the child")
        with self._lock:
            if self._busy:
                raise RunError(f"{what} was called while the same thread is in a run of the session; let the run end first")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    @contextmanager
    def _closed_by_failure(self, but: type[Exception] | None = None) -> Iterator[None]:
        """Whatever fails inside closes the session, so that it is never half-alive."""
        try:
            yield
        except BaseException as error:
            if but is None or not isinstance(error, but):
                self._close(why_closed(error))
            raise

    def prepared(self) -> None:
        """Return when the steady kernels are ready that the next run is played by, where there are any: to measure with.

        Raises:
            RunError: called inside a run of the same thread.
        """
        with self._alone("prepared"):
            if self._idle is not None and self._closed is None:
                self._idle.wait()

    def _report(self, begun: float, played: Played, *, steady: bool) -> None:
        ended = perf_counter()
        init = 0.0 if self._runs else self._init_seconds
        self.last_run = RunReport(
            Latency(init + ended - begun, init, ended - begun),
            MemoryUse.of(self._placement.ledger, ended, self.budget, self._device.start_rss),
            played.loads,
            played.layers,
            steady,
        )
        self._runs += 1

    def close(self) -> None:
        """Give everything back. Closing again does nothing; nor does a forked child, where all is still its parent's.

        Raises:
            RunError: called inside a run of the same thread, by a callback or a signal handler.
        """
        if os.getpid() == self._process:
            with self._alone("close"):
                self._close("close was called")

    def _close(self, why: str) -> None:
        if self._closed is None:
            self._closed = why
            if self._idle is not None:
                self._idle.stop()
            self._placement.close()
            for kernels in self._kernels.values():
                kernels.close()
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
