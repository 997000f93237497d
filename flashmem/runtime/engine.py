"""The engine: everything of a session that is on the device, made once and played by every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.bundle import Bundle
from flashmem.device import TransferMode
from flashmem.digests import Digest, digest
from flashmem.errors import RunError
from flashmem.planning.plan import OverlapPlan, PoolLayout
from flashmem.program import Port, array_bytes, lane_kind, output_bytes, scratch_bytes
from flashmem.runtime.arena import Bytes, move_out, new_pages
from flashmem.runtime.devices import Device
from flashmem.runtime.executor import Executor, Resources, make_steps
from flashmem.runtime.kernel_list import Wanted, wanted_kernels
from flashmem.runtime.kernel_processes import build_apart as kernels_built_apart
from flashmem.runtime.lanes import LayerMoves, layer_moves, needed_slices
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.loader import LoaderRun, Span, planned_frees, planned_loads
from flashmem.runtime.opencl import Context, Event, Memory, wait
from flashmem.runtime.program_cache import CachedKernels, ProgramCache
from flashmem.runtime.report import process_rss
from flashmem.runtime.transfer import InterleaveTransfer, make_transfer
from flashmem.runtime.weight_file import WeightFile

Array = NDArray[Any]


@dataclass(frozen=True)
class Played:
    """What happened in a run, and when. `layers` only if the engine traces; `read` are outputs, by name, read meanwhile."""

    loads: tuple[Span, ...]
    layers: tuple[Span, ...]
    read: Mapping[str, Array]


class Engine:
    """Device, memory, kernels and loaders of one session."""

    def __init__(
        self,
        bundle: Bundle,
        file: WeightFile,
        device: Device,
        mode: TransferMode,
        plan: OverlapPlan,
        layout: PoolLayout,
        budget: int | None,
        *,
        lanes: bool,
        trace: bool,
        verify_weights: bool,
        build_apart: bool,
    ) -> None:
        """Allocate, load the kernels or have them built, set their arguments. Reads the constants, no weights.

        Raises:
            RunError: the device or the budget refuses.
        """
        self._bundle, self._file, self._plan, self._trace = bundle, file, plan, trace
        self._context = Context(device)
        self._queue = self._context.queue(profiling=trace)
        self.start_rss = process_rss()
        self.ledger = Ledger(self._context, budget)
        try:
            self._set_up(mode, layout, lanes, bundle.digests.slices if verify_weights else None, build_apart)
        except BaseException:
            self.ledger.close()
            raise

    def _set_up(
        self,
        mode: TransferMode,
        layout: PoolLayout,
        lanes: bool,
        digests: Mapping[str, Digest] | None,
        build_apart: bool,
    ) -> None:
        program, plan, context = self._bundle.program, self._plan, self._context
        slices = {part.name: part for part in program.slices}
        moves = layer_moves(plan, slices, lane_kind(program), lanes=lanes) if mode == "interleave" else {}
        later = plan.later()
        self._later_moves = moves if later is plan or not moves else layer_moves(later, slices, lane_kind(program), lanes=lanes)
        self._plain, self._lane = self._open_kernels(build_apart, moves, self._later_moves)
        arena = self._make_arena()
        constants = self._load_constants()
        self.ledger.reserve("outputs", output_bytes(program), "the arrays that outputs are copied to")
        self.ledger.reserve("staging", scratch_bytes(program), "conversion of inputs and outputs")
        self._transfer = make_transfer(mode, context, self.ledger, self._file, program.slices, layout, digests)
        staged = self._transfer.staged if isinstance(self._transfer, InterleaveTransfer) else {}
        resources = Resources(context, arena, constants, self._transfer.memories, staged)
        steps = make_steps(program, needed_slices(plan, moves), moves, resources, self._plain, self._lane)
        self._recorder = self._context.recorder(self._queue) if self._bundle.descriptor.command_buffers else None
        self._executor = Executor(self._queue, steps, self._recorder)
        self._resources = resources if later is not plan and moves else None  # for the steps of later runs, if they differ
        ports = (
            {port.tensor for port in (*program.inputs, *program.outputs)}
            | {g.tensor for g in program.row_gathers}
            | {program.status}
        )
        self._ports: dict[str, Memory] = {
            tensor.name: context.sub_buffer(arena, tensor.offset, tensor.nbytes)
            for tensor in program.tensors
            if tensor.name in ports
        }
        banded = digests is None  # a digest is of a whole slice
        self._threads = layout.threads
        self._all_loads = planned_loads(plan, slices, layout, mode, preload=True, banded=banded)
        self._later_loads = planned_loads(later, slices, layout, mode, preload=False, banded=banded)
        self._w_loads = [load for load in self._all_loads if load.preload]
        self._frees = planned_frees(plan, slices)
        self._w_is_resident = not self._w_loads
        self._has_run = False

    def _open_kernels(self, apart: bool, *moves: Mapping[int, LayerMoves]) -> tuple[CachedKernels, CachedKernels]:
        """The plain kernels, and those with a stream lane, of the first run and of later ones.

        `apart`: what no cache has is built by child processes.
        """
        program, context, cache = self._bundle.program, self._context, ProgramCache()

        def build(missing: Mapping[str, Wanted]) -> Mapping[str, bytes]:
            return kernels_built_apart(missing, program, context.device, cache)

        plain, lane = (
            CachedKernels(cache, context, program.build_options, wanted, self._bundle.binaries or b"", build if apart else None)
            for wanted in wanted_kernels(program, self._bundle.source, *moves)
        )
        return plain, lane

    def _make_arena(self) -> Memory:
        """The arena; in `_host`, where it is host memory, as the host sees it."""
        program, what = self._bundle.program, "the activation arena"
        self._host: Bytes | None = None
        if not program.hands_over:
            self._arena = self.ledger.buffer("arena", program.arena_bytes, what)
        else:
            self._host = new_pages(program.arena_bytes)[: program.arena_bytes]
            self._arena = self.ledger.wrapped("arena", self._host, what)
        return self._arena

    def _load_constants(self) -> Memory | None:
        program = self._bundle.program
        if not program.constants_bytes:
            return None
        constants = self.ledger.buffer("constants", program.constants_bytes, "the constants", host_visible=True)
        view = self._queue.map(constants, program.constants_bytes, invalidate=True)
        self._file.read_into(view, program.constants_offset)
        self._file.check_digest("the part with the constants", digest(view.data), self._bundle.digests.constants)
        self._queue.unmap(view)
        return constants

    def preload(self) -> None:
        """Make W resident. Raises RunError when a load fails."""
        if self._w_is_resident:
            return
        with self._guarded():
            self._preload()

    def _preload(self) -> None:
        loader = LoaderRun(self._transfer, self._w_loads, {}, threads=self._threads)
        try:
            for load in self._w_loads:
                loader.wait(load.part.name)
        finally:
            loader.stop()
        self._w_is_resident = True

    def run(self, outputs: Sequence[Port] = ()) -> Played:
        """Play all layers once; W comes in with them if it is not resident yet.

        Of `outputs` those are read whose place in the arena is another tensor's later.

        Raises:
            RunError: a load or a launch failed; the engine can only be closed then.
        """
        with self._guarded():
            return self._run([port for port in outputs if port.tensor is not None and port.ready is not None])

    def _guarded(self) -> AbstractContextManager[None]:
        """Held while kernels or checks read the mapped file, if they do."""
        return self._file.guarded() if self._transfer.in_place else nullcontext()

    def _run(self, early: Sequence[Port]) -> Played:
        if self._has_run:
            loads = self._later_loads
            if self._resources is not None:  # what was kept is not moved again
                program, later = self._bundle.program, self._plan.later()
                needs = needed_slices(later, self._later_moves)
                steps = make_steps(program, needs, self._later_moves, self._resources, self._plain, self._lane)
                self._executor, self._resources = Executor(self._queue, steps, self._recorder), None
        else:
            loads = tuple(load for load in self._all_loads if not (load.preload and self._w_is_resident))
        layers: list[Span] = []
        arrays: dict[str, Array] = {}
        reading: list[Event] = []

        def read(ports: Sequence[Port]) -> None:
            for port in ports:
                arrays[port.name] = np.empty(port.shape, np.dtype(port.dtype))
                reading.append(self._queue.read_later(arrays[port.name], self._ports[str(port.tensor)]))

        by_layer: dict[int, list[Port]] = {}
        for port in early:
            by_layer.setdefault(port.ready or 0, []).append(port)
        after = {layer: partial(read, ports) for layer, ports in by_layer.items()}
        loader = LoaderRun(self._transfer, loads, self._frees, threads=self._threads) if loads else None
        try:
            check = self._file.check if self._transfer.in_place else None
            self._executor.run(loader, layers if self._trace else None, check, after)
            for event in reading:
                wait(event)
        except BaseException:
            self._executor.drain()  # nothing may be freed while the device still reads it
            if loader is not None:
                with suppress(RunError):  # the first failure is the one to tell
                    loader.stop()
            raise
        if loader is not None:
            loader.stop()
        self._w_is_resident = self._has_run = True
        return Played(tuple(loader.spans) if loader else (), tuple(layers), arrays)

    def write(self, tensor: str, data: NDArray[Any]) -> None:
        """Fill a tensor of a port from contiguous host memory."""
        if data.nbytes:
            self._queue.write(self._ports[tensor], data)

    def read(self, data: NDArray[Any], tensor: str) -> None:
        """Read a tensor of a port into contiguous host memory."""
        if data.nbytes:
            self._queue.read(data, self._ports[tensor])

    def hand_over(self, ports: Sequence[Port]) -> dict[str, Array]:
        """Outputs by name, as arrays that were their places in the arena. Nothing can be read from it before the next run."""
        if self._host is None or not ports:
            return {}
        tensors = {tensor.name: tensor for tensor in self._bundle.program.tensors}
        places = [(tensors[str(port.tensor)].offset, array_bytes(port)) for port in ports]
        view = self._queue.map(self._arena, self._host.nbytes)  # the host may look at it now
        if view.ctypes.data == self._host.ctypes.data:
            taken = move_out(self._host, places)
        else:  # a driver that has the buffer elsewhere, too
            taken = [view[offset : offset + nbytes].copy() for offset, nbytes in places]
        self._queue.unmap(view)
        return {port.name: data.view(port.dtype).reshape(port.shape) for port, data in zip(ports, taken, strict=True)}

    def close(self) -> None:
        """Give everything back. Kernels that were compiled go into the cache if their kernels have all run."""
        for kernels in (self._plain, self._lane):
            with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                if self._has_run:
                    kernels.save()
                else:
                    kernels.wait()
        self._executor.drain()
        with suppress(RunError):  # a lost device has nothing to give back
            self._transfer.close()
        self._ports.clear()
        self._arena = self._host = self._resources = None
        del self._executor
        with suppress(RunError):
            self.ledger.close()
