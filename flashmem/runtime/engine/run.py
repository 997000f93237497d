"""What lives with a run: the inputs that are written, the loader that brings weights in, and the outputs.

A run may begin to load before its layers do, and may halt between two layers and go on as another `Run` behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.program.program import copied_outputs
from flashmem.program.tensors import Port
from flashmem.runtime.engine.bound_program import Placement
from flashmem.runtime.engine.ports import from_device, gather_rows, numpy_dtype, to_device
from flashmem.runtime.opencl.context import Event, wait
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.schedule.loads import Load, Schedule, TimedInterval

Array = NDArray[Any]


@dataclass(frozen=True)
class Played:
    """What happened in a run, and when. `layers` only if the device traces; `read` are outputs, by name, read meanwhile.

    `done` is the last layer; one before the last of all where the run was halted.
    """

    loads: tuple[TimedInterval, ...]
    layers: tuple[TimedInterval, ...]
    read: Mapping[str, Array]
    done: int


class Run:
    """One run of a placement as `schedule` says, behind layer `done`. Its loads begin at once, as far as `admit` lets them."""

    def __init__(
        self, placement: Placement, schedule: Schedule, *, done: int = 0, admit: Callable[[Load], bool] | None = None
    ) -> None:
        self.placement, self.schedule, self._done = placement, schedule, done
        self.loader: LoaderRun | None = None
        if schedule.loads or (schedule.frees and placement.transfer.frees):
            self.loader = LoaderRun(
                placement.transfer, schedule.loads, schedule.frees, threads=placement.layout.threads, done=done, admit=admit
            )

    def play(self, outputs: Sequence[Port], *, traced: bool = False, halted: Callable[[], bool] | None = None) -> Played:
        """Play the layers; of `outputs` those are read whose place in the arena is another tensor's later.

        Raises:
            RunError: a load or a launch failed; the placement can only be closed then.
        """
        early = [port for port in outputs if port.tensor is not None and port.ready is not None]
        try:
            with self.placement.guarded():
                return self._play(early, traced, halted)
        except BaseException:
            with suppress(RunError):  # the first failure is the one to tell
                self.stop()
            raise

    def _play(self, early: Sequence[Port], traced: bool, halted: Callable[[], bool] | None) -> Played:
        placement, loader = self.placement, self.loader
        layers: list[TimedInterval] = []
        arrays: dict[str, Array] = {}
        reading: list[Event] = []

        def read(ports: Sequence[Port]) -> None:
            for port in ports:
                arrays[port.name] = np.empty(port.shape, np.dtype(port.dtype))
                reading.append(placement.read_later(arrays[port.name], str(port.tensor)))

        by_layer: dict[int, list[Port]] = {}
        for port in early:
            by_layer.setdefault(port.ready or 0, []).append(port)
        after = {layer: partial(read, ports) for layer, ports in by_layer.items()}
        check = placement.check_files if placement.transfer.in_place else None
        last = len(placement.opened.program.launches)
        options: dict[str, Any] = {} if halted is None else {"halted": halted}
        try:
            done = placement.ready_executor().run(loader, layers if traced else None, check, after, done=self._done, **options)
            for event in reading:
                wait(event)
        except BaseException:
            placement.executor.drain()  # nothing may be freed while the device still reads it
            raise
        self.stop()
        if done == last:
            placement.settle(self.schedule.resident)
        return Played(tuple(loader.intervals) if loader else (), tuple(layers), arrays, done)

    def stop(self) -> None:
        """End the loads. Raises RunError if one failed."""
        if self.loader is not None:
            self.loader.stop()


def write_inputs(placement: Placement, inputs: Mapping[str, Array]) -> None:
    """Write inputs, which have been checked, and the rows of tables that they ask for.

    Raises:
        ValueError: an index outside a table; nothing has started yet.
        RunError: the device or the disk fails.
    """
    opened = placement.opened
    program = opened.program
    for port in program.inputs:
        if port.tensor is not None:
            placement.write(port.tensor, to_device(opened.tensors[port.tensor], inputs[port.name]))
    if program.status is not None:
        placement.write(program.status, np.zeros(1, np.int32))
    for gather, table in zip(program.host_embeddings, opened.tables, strict=True):
        rows = gather_rows(table, gather, inputs[gather.indices], opened.tensors[gather.tensor].dtype)
        placement.write(gather.tensor, rows)


def check_status(placement: Placement) -> None:
    """Raise ValueError if a layer read an index that is out of range. The placement stays usable."""
    program = placement.opened.program
    if program.status is not None:
        status = np.zeros(1, np.int32)
        placement.read(status, program.status)
        if status[0]:
            raise ValueError(
                f"layer {program.launches[status[0] - 1].name} was given an index outside the tensor it reads from: "
                f"check the inputs that hold indices or rectangles"
            )


def collect(placement: Placement, ports: Sequence[Port], read: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs, by name: `read` in the run, copied now, or memory of the arena."""
    results = {port.name: np.empty(port.shape, numpy_dtype(port.dtype)) for port in ports if port.tensor is None}
    results |= {port.name: read[port.name] for port in ports if port.name in read}
    copied = copied_outputs(placement.opened.program)
    results |= {port.name: _read_output(placement, port) for port in ports if port in copied and port.name not in results}
    return results | placement.hand_over([port for port in ports if port.name not in results])


def _read_output(placement: Placement, port: Port) -> Array:
    data = np.empty(port.shape, np.dtype(placement.opened.tensors[str(port.tensor)].dtype))
    placement.read(data, str(port.tensor))
    return from_device(port, data)
