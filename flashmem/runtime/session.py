"""A session: a bundle on a device, ready to run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from flashmem.bundle import Bundle
from flashmem.device import TRANSFER_MODES, TransferMode
from flashmem.digests import table_blocks
from flashmem.errors import RunError, UserError
from flashmem.program import Port, fixed_bytes
from flashmem.runtime.devices import descriptor_for
from flashmem.runtime.engine import LOADER_THREADS, Engine, Played
from flashmem.runtime.loader import planned_loads, read_while_opening
from flashmem.runtime.opencl import find_device
from flashmem.runtime.ports import check_inputs, device_dtype, from_device, gather_rows, to_device
from flashmem.runtime.report import Latency, MemoryUse, RunReport, process_peak_rss
from flashmem.runtime.residence import Strategy, choose_strategy, preloaded, preloaded_layout, require_budget, streamed_layout
from flashmem.runtime.weight_file import CheckedTable, Reader, WeightFile
from flashmem.units import parse_size

Array = NDArray[Any]

__all__ = ["RunReport", "Session", "Strategy"]


class Session:
    """A bundle on a device. Use it as a context manager, or call `close`.

    Runs are made one at a time. A run that fails closes the session; an input that is refused does not.
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
    ) -> None:
        """Make everything ready that is not weights (`strategy` "preload": weights too).

        Args:
            bundle: a bundle or its path.
            device: "auto", or what `runtime.devices.choose` understands.
            mode: how weights travel; "auto" takes the one the bundle was planned for, else the device's first.
            strategy: "auto" follows the plan, whatever strategy made it; "preload" makes everything resident first, as engines
                do; any other name must be the strategy that the bundle was compiled with.
            budget: most bytes to hold; the bundle's by default, and none with "preload".
            lanes: in mode "interleave", whether kernels move weights while they compute; if not, every move is a launch of its
                own between them, to compare with.
            trace: record when each layer ran on the device. verify_weights: compare every slice and table row that is read
            with its digest; a damaged one fails the run. Constants
                are compared always.

        Raises:
            UserError: a damaged bundle, no such device, a mode it lacks, a budget below what the layout needs.
            RunError: the device refuses, or (preload) the weights cannot be read.
        """
        begun = perf_counter()
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.device = find_device(device, prefer=self.bundle.descriptor.name)
        self.strategy: Strategy = choose_strategy(self.bundle.plan, strategy)
        self.mode = self._choose_mode(mode)
        program, plan = self.bundle.program, self.bundle.plan
        if self.strategy == "preload":
            plan, layout = preloaded(plan), preloaded_layout(program, self.mode, LOADER_THREADS)
        else:
            layout = streamed_layout(plan, self.mode)
        self.budget = self._settle_budget(budget, fixed_bytes(program) + layout.total_bytes)
        self.last_run: RunReport | None = None
        self._runs = 0
        self._lock = threading.Lock()
        self._closed: str | None = None  # why
        self._file = WeightFile(self.bundle.weights_path, program.weights_bytes)
        stored = zip(program.row_gathers, self.bundle.digests.tables, strict=True)
        self._tables: list[Reader] = [
            CheckedTable(self._file, table_blocks(gather), values) if verify_weights else self._file
            for gather, values in stored
        ]
        # The disk may start now: it needs nothing that is still to be made. Constants are wanted first.
        loads = planned_loads(plan, {part.name: part for part in program.slices}, preload=True)
        first = read_while_opening(loads, program, self.bundle.descriptor.rates)
        constants = (program.constants_offset, program.constants_bytes)
        self._file.announce([constants, *((load.part.offset, load.part.nbytes) for load in first)])
        try:
            self._engine = Engine(
                self.bundle, self._file, self.device, self.mode, plan, layout, self.budget,
                lanes=lanes, trace=trace, verify_weights=verify_weights,
            )  # fmt: skip
        except BaseException:
            self._file.close()
            raise
        if self.strategy == "preload":
            try:
                self._engine.preload()
            except BaseException:
                self.close()
                raise
        self._init_seconds = perf_counter() - begun

    def _choose_mode(self, mode: TransferMode | Literal["auto"]) -> TransferMode:
        path = self.bundle.program.memory_path
        descriptor = descriptor_for(self.device)
        if path not in descriptor.memory_paths:
            raise UserError(f"device {self.device.name} has no memory path {path!r}, which the bundle uses; compile for it")
        modes = descriptor.modes[path]
        if mode == "auto":
            if self.strategy == "preload":
                return "dma"
            planned = self.bundle.meta.get("mode")
            return next((m for m in modes if m == planned), modes[0])
        if mode not in TRANSFER_MODES:
            raise UserError(f"transfer mode {mode!r} is unknown; name one of: auto, {', '.join(TRANSFER_MODES)}")
        if mode not in modes:
            raise UserError(
                f"device {self.device.name} cannot do transfer mode {mode!r} on the {path} path, only: {', '.join(modes)}"
            )
        return mode

    def _settle_budget(self, budget: int | str | None, needed: int) -> int | None:
        """The budget in bytes, which covers what is needed."""
        limit = None if self.strategy == "preload" else self.bundle.budget_bytes
        if budget is not None:
            limit = parse_size(budget, what="budget")
        require_budget(limit, needed, self.mode)
        return limit

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the model once.

        Args:
            output_names: which outputs, in this order; None for all, in the model's order.
            inputs: an array for every input, of exactly its shape and dtype.

        Returns:
            The outputs, in the model's dtypes. `last_run` then reports how it went.

        Raises:
            ValueError: an input or an output name that does not fit; the session stays usable.
            RunError: the run failed, and the session is closed; or it was closed before.
        """
        with self._lock:
            if self._closed is not None:
                raise RunError(f"the session is closed ({self._closed}); open a new one")
            begun = perf_counter()
            outputs = {port.name: port for port in self.bundle.program.outputs}
            chosen = list(outputs) if output_names is None else list(output_names)
            for name in chosen:
                if name not in outputs:
                    raise ValueError(f"the model has no output {name!r}; it gives: {', '.join(outputs)}")
            check_inputs(self.bundle.program.inputs, inputs)
            if self._runs:
                self._engine.ledger.restart_history()
            with self._closed_by_failure(but=ValueError):  # an index outside a table: nothing has started yet
                self._write_inputs(inputs)
            with self._closed_by_failure():
                played = self._engine.run()
                results = {name: self._read_output(outputs[name]) for name in dict.fromkeys(chosen)}
            self._report(begun, played)
            return [results[name] for name in chosen]

    def _write_inputs(self, inputs: Mapping[str, Array]) -> None:
        program = self.bundle.program
        for port in program.inputs:
            if port.tensor is not None:
                self._engine.write(port.tensor, to_device(port, inputs[port.name]))
        for gather, table in zip(program.row_gathers, self._tables, strict=True):
            self._engine.write(gather.tensor, gather_rows(table, gather, inputs[gather.indices]))

    def _read_output(self, port: Port) -> Array:
        assert port.tensor is not None
        data = np.empty(port.shape, device_dtype(port))
        self._engine.read(data, port.tensor)
        return from_device(port, data)

    @contextmanager
    def _closed_by_failure(self, but: type[Exception] | None = None) -> Iterator[None]:
        """Whatever fails inside closes the session, so that it is never half-alive."""
        try:
            yield
        except BaseException as error:
            if but is None or not isinstance(error, but):
                self._close(f"its last run failed: {error}")
            raise

    def _report(self, begun: float, played: Played) -> None:
        ended = perf_counter()
        init = 0.0 if self._runs else self._init_seconds
        ledger = self._engine.ledger
        self.last_run = RunReport(
            Latency(init + ended - begun, init, ended - begun),
            MemoryUse(
                ledger.peak,
                ledger.average(ended),
                self.budget,
                dict(ledger.peak_by_category),
                process_peak_rss(),
                tuple(ledger.history),
            ),
            played.loads,
            played.layers,
        )
        self._runs += 1

    def page_cache_bytes(self) -> int | None:
        """Bytes of the weight file in the page cache, whoever read them; None where the system does not say.

        They are the system's, not the session's: it takes them back when memory is short.
        """
        return None if self._closed else self._file.cached_bytes()

    def close(self) -> None:
        """Give everything back. Closing again does nothing."""
        with self._lock:
            self._close("close was called")

    def _close(self, why: str) -> None:
        if self._closed is None:
            self._closed = why
            self._engine.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
