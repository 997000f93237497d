"""A session: a bundle on a device, ready to run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from flashmem.bundle import Bundle
from flashmem.device import TransferMode
from flashmem.digests import table_blocks
from flashmem.errors import RunError, UserError
from flashmem.program import Port, copied_outputs, fixed_bytes
from flashmem.request import choose_budget, choose_mode, choose_strategy, device_here
from flashmem.runtime.engine import Engine, Played
from flashmem.runtime.loader import planned_loads, read_while_opening
from flashmem.runtime.ports import check_inputs, from_device, gather_rows, numpy_dtype, to_device
from flashmem.runtime.report import Latency, MemoryUse, RunReport, process_peak_rss
from flashmem.runtime.residence import Strategy, preloaded, preloaded_layout, streamed_layout
from flashmem.runtime.target import playable
from flashmem.runtime.weight_file import CheckedTable, Reader, WeightFile

Array = NDArray[Any]

__all__ = ["RunReport", "Session", "Strategy"]


class Session:
    """A bundle on a device. Use it as a context manager, or call `close`.

    Runs are made one at a time: threads wait for each other. A run that fails closes the session; an input that is refused
    does not. A forked child has to open sessions of its own.
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
    ) -> None:
        """Make everything ready that is not weights (`strategy` "preload": weights too).

        Args:
            bundle: a bundle or its path.
            device: "auto", or what `flashmem.request.device_here` understands.
            mode: how weights travel; "auto" takes the one the bundle was planned for, else the device's first.
            strategy: "auto" follows the plan, whatever strategy made it; "preload" makes everything resident first, as engines
                do; any other name must be the strategy that the bundle was compiled with.
            budget: most bytes to hold; the bundle's by default, and none with "preload".
            lanes: in mode "interleave", whether kernels move weights while they compute; if not, launches between them do, to
                compare with.
            trace: record when each layer ran on the device.
            verify_weights: compare every slice and table row that is read with its digest; a damaged one fails the run.
                Constants are compared always.
            build_apart: kernels that no cache has are built in child processes, whose memory goes with them; if not, in this
                one, which keeps a compiler's 200 to 400 MB. For those who open many sessions, or cannot start processes.

        Raises:
            UserError: a damaged bundle, no such device, a mode it lacks, a budget below what the layout needs, an argument of
                another type.
            RunError: the device refuses, or (preload) the weights cannot be read.
        """
        begun = perf_counter()
        if not isinstance(bundle, Bundle | str | Path):
            raise UserError(f"a session is opened with a bundle or its path, not with {_described(bundle)}")
        if not isinstance(device, str):
            raise UserError(f"the device is {_described(device)}; give its name as text, or 'auto'")
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        program, plan = self.bundle.program, self.bundle.plan
        self.device = device_here(device, prefer=self.bundle.descriptor.name)
        self.strategy: Strategy = choose_strategy(plan, strategy)
        self.mode = choose_mode(
            playable(self.bundle, self.device, mode),
            mode,
            path=program.memory_path,
            planned=self.bundle.meta.get("mode"),
            strategy=self.strategy,
        )
        if self.strategy == "preload":
            layout = preloaded_layout(program, self.mode, plan.loader_threads, shares_memory=self.device.unified_memory)
            plan = preloaded(plan)
        else:
            layout = streamed_layout(program, plan, self.mode, shares_memory=self.device.unified_memory)
        if program.hands_over and not self._uses_host_memory:  # compiled for a CPU, run elsewhere
            program = replace(program, hands_over=False)
        self._program = program
        needed = fixed_bytes(program) + layout.total_bytes
        self.budget = choose_budget(budget, self.bundle.budget_bytes, needed, mode=self.mode, strategy=self.strategy)
        self.last_run: RunReport | None = None
        self._runs = 0
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._busy = False  # seen by the thread that holds the lock
        self._closed: str | None = None  # why
        self._file = WeightFile(self.bundle.weights_path, program.weights_bytes)
        self._tensors = {tensor.name: tensor for tensor in program.tensors}
        stored = zip(program.row_gathers, self.bundle.digests.tables, strict=True)
        self._tables: list[Reader] = [
            CheckedTable(self._file, table_blocks(gather), values) if verify_weights else self._file
            for gather, values in stored
        ]
        # The disk may start now: it needs nothing that is still to be made. Constants are wanted first.
        loads = planned_loads(plan, {part.name: part for part in program.slices}, layout, self.mode, preload=True)
        first = read_while_opening(loads, program, self.bundle.descriptor.rates)
        constants = (program.constants_offset, program.constants_bytes)
        self._file.announce([constants, *(load.place for load in first)])
        try:
            self._engine = Engine(
                replace(self.bundle, program=program), self._file, self.device, self.mode, plan, layout, self.budget,
                lanes=lanes, trace=trace, verify_weights=verify_weights, build_apart=build_apart,
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

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the model once.

        Args:
            output_names: which outputs, in this order; None for all, in the model's order.
            inputs: an array for every input, of exactly its shape and dtype.

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
            outputs = {port.name: port for port in self.bundle.program.outputs}
            chosen = list(outputs) if output_names is None else _names(output_names)
            for name in chosen:
                if name not in outputs:
                    raise ValueError(f"the model has no output {name!r}; it gives: {', '.join(outputs)}")
            inputs = _arrays(inputs)
            check_inputs(self.bundle.program.inputs, inputs)
            if self._runs:
                self._engine.ledger.restart_history()
            with self._closed_by_failure(but=ValueError):  # an index outside a table: nothing has started yet
                self._write_inputs(inputs)
            inputs.clear()  # of this run: who calls may have given them for good
            with self._closed_by_failure():
                played = self._engine.run([outputs[name] for name in dict.fromkeys(chosen)])
            self._check_status()
            with self._closed_by_failure():
                results = self._collect([outputs[name] for name in dict.fromkeys(chosen)], played)
            self._report(begun, played)
            return [results[name] for name in chosen]

    @property
    def _uses_host_memory(self) -> bool:
        """Whether kernels use the host's memory where it is."""
        return self.device.kind == "cpu"

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

    def _write_inputs(self, inputs: Mapping[str, Array]) -> None:
        program, tensors = self.bundle.program, self._tensors
        for port in program.inputs:
            if port.tensor is not None:
                self._engine.write(port.tensor, to_device(tensors[port.tensor], inputs[port.name]))
        if program.status is not None:
            self._engine.write(program.status, np.zeros(1, np.int32))
        for gather, table in zip(program.row_gathers, self._tables, strict=True):
            self._engine.write(gather.tensor, gather_rows(table, gather, inputs[gather.indices], tensors[gather.tensor].dtype))

    def _check_status(self) -> None:
        """Raise ValueError if a layer read an index that is out of range. The session stays usable."""
        program = self.bundle.program
        if program.status is not None:
            status = np.zeros(1, np.int32)
            self._engine.read(status, program.status)
            if status[0]:
                raise ValueError(
                    f"layer {program.launches[status[0] - 1].name} was given an index outside the tensor it reads from: "
                    f"check the inputs that hold indices or rectangles"
                )

    def _collect(self, ports: Sequence[Port], played: Played) -> dict[str, Array]:
        """The outputs, by name: read in the run, copied now, or memory of the arena."""
        results = {port.name: np.empty(port.shape, numpy_dtype(port.dtype)) for port in ports if port.tensor is None}
        results |= {port.name: played.read[port.name] for port in ports if port.name in played.read}
        copied = copied_outputs(self._program)
        results |= {port.name: self._read_output(port) for port in ports if port in copied and port.name not in results}
        return results | self._engine.hand_over([port for port in ports if port.name not in results])

    def _read_output(self, port: Port) -> Array:
        data = np.empty(port.shape, np.dtype(self._tensors[str(port.tensor)].dtype))
        self._engine.read(data, str(port.tensor))
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
                self._engine.start_rss,
                tuple(ledger.changes),
            ),
            played.loads,
            played.layers,
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
            self._engine.close()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _names(output_names: Any) -> list[str]:
    """The outputs asked for. Raises ValueError for anything but a sequence of names."""
    if not isinstance(output_names, Sequence) or isinstance(output_names, str | bytes):
        raise ValueError(f"the outputs asked for are {_described(output_names)}; give a list of names, or None for all")
    for name in output_names:
        if not isinstance(name, str):
            raise ValueError(f"the outputs asked for hold {_described(name)}; give their names as text")
    return list(output_names)


def _arrays(inputs: Any) -> dict[str, Array]:
    """The inputs, each asked for once: an .npz file reads it anew every time.

    Raises:
        ValueError: not a mapping from names, or an array with a mask, which the device would not see.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(f"the inputs are {_described(inputs)}; give a dict of numpy arrays by name")
    for name in inputs:
        if not isinstance(name, str):
            raise ValueError(f"the inputs are called by {_described(name)}; call them by their names as text")
    arrays = {name: inputs[name] for name in inputs}
    for name, array in arrays.items():
        if isinstance(array, np.ma.MaskedArray):
            raise ValueError(f"input {name!r} is a masked array; give one without a mask, for instance with filled")
    return arrays


def _described(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
