"""The engine: everything of a session that is on the device, made once and played by every run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flashmem.bundle import Bundle
from flashmem.device import TransferMode
from flashmem.digests import Digest, digest
from flashmem.errors import RunError
from flashmem.planning.plan import LOADER_THREADS, OverlapPlan, PoolLayout
from flashmem.program import lane_kind, output_bytes, scratch_bytes
from flashmem.runtime.devices import Device
from flashmem.runtime.executor import Executor, Resources, make_steps
from flashmem.runtime.kernel_list import wanted_kernels
from flashmem.runtime.lanes import LayerMoves, layer_moves, needed_slices
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.loader import LoaderRun, Span, planned_frees, planned_loads
from flashmem.runtime.opencl import Context, Memory
from flashmem.runtime.program_cache import CachedKernels, ProgramCache
from flashmem.runtime.transfer import InterleaveTransfer, make_transfer
from flashmem.runtime.weight_file import WeightFile

@dataclass(frozen=True)
class Played:
    """What happened in a run, and when. `layers` only if the engine traces."""

    loads: tuple[Span, ...]
    layers: tuple[Span, ...]


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
    ) -> None:
        """Allocate, compile or load the kernels, set their arguments. Reads the constants, no weights.

        Raises:
            RunError: the device or the budget refuses.
        """
        self._bundle, self._file, self._plan, self._trace = bundle, file, plan, trace
        self._context = Context(device)
        self._queue = self._context.queue(profiling=trace)
        self.ledger = Ledger(self._context, budget)
        try:
            self._set_up(mode, layout, lanes, bundle.digests.slices if verify_weights else None)
        except BaseException:
            self.ledger.close()
            raise

    def _set_up(self, mode: TransferMode, layout: PoolLayout, lanes: bool, digests: Mapping[str, Digest] | None) -> None:
        program, plan, context = self._bundle.program, self._plan, self._context
        slices = {part.name: part for part in program.slices}
        moves = layer_moves(plan, slices, lane_kind(program), lanes=lanes) if mode == "interleave" else {}
        later = plan.later()
        self._later_moves = moves if later is plan or not moves else layer_moves(later, slices, lane_kind(program), lanes=lanes)
        self._plain, self._lane = self._open_kernels(moves, self._later_moves)
        arena = self.ledger.buffer("arena", program.arena_bytes, "the activation arena")
        constants = self._load_constants()
        self.ledger.reserve("outputs", output_bytes(program), "the arrays that are handed back")
        self.ledger.reserve("staging", scratch_bytes(program), "conversion of inputs and outputs")
        self._transfer = make_transfer(mode, context, self.ledger, self._file, program.slices, layout, LOADER_THREADS, digests)
        staged = self._transfer.staged if isinstance(self._transfer, InterleaveTransfer) else {}
        resources = Resources(context, arena, constants, self._transfer.memories, staged)
        steps = make_steps(program, needed_slices(plan, moves), moves, resources, self._plain, self._lane)
        self._executor = Executor(self._queue, steps)
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
        banded = mode if digests is None else None  # a digest is of a whole slice
        self._all_loads = planned_loads(plan, slices, preload=True, mode=banded)
        self._later_loads = planned_loads(later, slices, preload=False, mode=banded)
        self._w_loads = [load for load in self._all_loads if load.preload]
        self._frees = planned_frees(plan, slices)
        self._w_is_resident = not self._w_loads
        self._has_run = False

    def _open_kernels(self, *moves: Mapping[int, LayerMoves]) -> tuple[CachedKernels, CachedKernels]:
        """The plain kernels, and those with a stream lane, of the first run and of later ones."""
        cache, options, carried = ProgramCache(), self._bundle.program.build_options, self._bundle.binaries or b""
        plain, lane = wanted_kernels(self._bundle.program, self._bundle.source, *moves)
        return CachedKernels(cache, self._context, options, plain, carried), CachedKernels(
            cache, self._context, options, lane, carried
        )

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
        loader = LoaderRun(self._transfer, self._w_loads, {}, threads=LOADER_THREADS)
        try:
            for load in self._w_loads:
                loader.wait(load.part.name)
        finally:
            loader.stop()
        self._w_is_resident = True

    def run(self) -> Played:
        """Play all layers once; W comes in with them if it is not resident yet.

        Raises:
            RunError: a load or a launch failed; the engine can only be closed then.
        """
        with self._guarded():
            return self._run()

    def _guarded(self) -> AbstractContextManager[None]:
        """Held while kernels or checks read the mapped file, if they do."""
        return self._file.guarded() if self._transfer.in_place else nullcontext()

    def _run(self) -> Played:
        if self._has_run:
            loads = self._later_loads
        else:
            loads = tuple(load for load in self._all_loads if not (load.preload and self._w_is_resident))
        layers: list[Span] = []
        loader = LoaderRun(self._transfer, loads, self._frees, threads=LOADER_THREADS) if loads else None
        try:
            check = self._file.check if self._transfer.in_place else None
            self._executor.run(loader, layers if self._trace else None, check)
        except BaseException:
            self._executor.drain()  # nothing may be freed while the device still reads it
            if loader is not None:
                with suppress(RunError):  # the first failure is the one to tell
                    loader.stop()
            raise
        if loader is not None:
            loader.stop()
        if self._resources is not None:  # what was kept is not moved again
            program, later = self._bundle.program, self._plan.later()
            needs = needed_slices(later, self._later_moves)
            steps = make_steps(program, needs, self._later_moves, self._resources, self._plain, self._lane)
            self._executor, self._resources = Executor(self._queue, steps), None
        self._w_is_resident = self._has_run = True
        return Played(tuple(loader.spans) if loader else (), tuple(layers))

    def write(self, tensor: str, data: NDArray[Any]) -> None:
        """Fill a tensor of a port from contiguous host memory."""
        if data.nbytes:
            self._queue.write(self._ports[tensor], data)

    def read(self, data: NDArray[Any], tensor: str) -> None:
        """Read a tensor of a port into contiguous host memory."""
        if data.nbytes:
            self._queue.read(data, self._ports[tensor])

    def close(self) -> None:
        """Give everything back. Kernels that were compiled go into the cache if their kernels have all run."""
        if self._has_run:
            for kernels in (self._plain, self._lane):
                with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                    kernels.save()
        self._executor.drain()
        with suppress(RunError):  # a lost device has nothing to give back
            self._transfer.close()
        self._ports.clear()
        del self._executor
        with suppress(RunError):
            self.ledger.close()
