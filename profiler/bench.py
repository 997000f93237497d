"""The bench: times launches as a session runs them, alone and with bytes streamed during them.

The runtime's own executor repeats a launch in a *burst*. Each repeat reads its weights from another place, so from memory, as
in a model, and not from a cache. Beside a loaded burst the runtime's own loader threads load slices of one chunk each, evenly
spread over the burst. In transfer mode `interleave` the kernels' own copy streams move bytes instead. A burst ends when both
are done.

Other users of the machine can only add time. So bursts with and without load alternate, and the lower quartile of each kind
counts. On a quiet machine it is close to the median, within the spread of a burst.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from flashmem.base.errors import RunError
from flashmem.base.types import POOL_ALIGNMENT, TEXEL_BYTES, TransferMode
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program as BundleProgram
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.executor import Executor, LaunchOrders
from flashmem.runtime.engine.steps import Resources, Step, make_steps
from flashmem.runtime.kernels.cache import CompiledKernels
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.streaming.interleaved import CopyStream, LayerMoves, Move
from flashmem.schedule.loads import WORD
from flashmem.schedule.modes import INTERLEAVE, MODES
from flashmem.target.descriptor import DeviceDescriptor

from .checked import CheckedKernels
from .loads import CHUNK, PARTS, Loads
from .target import Supply, Target

_BURST_SECONDS = 5e-3
_MOST_LAUNCHES = 400
_POOL_BYTES = 128 << 20  # memory over which weights rotate: several times a CPU's last cache
_IMAGE_POOL_BYTES = 32 << 20
LANE_BYTES = 32 << 20
_LANE_WIDTH = 2048  # texels in a row of the texture that copy streams write
_REPEATS = 5
_ALONE = 8  # bursts
_DELAYS = 21
REFERENCE_GEMM = (128, 768, 768)
REFERENCE_SUM = 1 << 20
_PACE_BURSTS = 4
_PACE_SECONDS = 2e-3
_SLOW_SECONDS = 20e-3
_TOO_SLOW_SECONDS = 150e-3


@dataclass(frozen=True)
class Measured:
    """One measurement. `slowdown`: loaded over alone; `spread`: half the range of neighbours' middle ratios, as a fraction."""

    mode: TransferMode
    streamed_bytes: float
    slowdown: float
    spread: float


@dataclass(frozen=True)
class Pace:
    """Present seconds of the two reference launches: a product, and a sum that streams activations."""

    gemm: float
    traffic: float


class Bench:
    """The bench: one device on one memory path. Close it, or use it as a context manager."""

    def __init__(self, device: Device, descriptor: DeviceDescriptor, folder: Path, supply: Supply | None = None) -> None:
        """`folder`: for a temporary file to stream from. `supply`: of launches; None to compile them."""
        self.device = device
        self.descriptor = descriptor
        self.path = descriptor.memory_paths[0]
        self.supply = supply or _compile(descriptor)
        self.context = Context(device)
        self.queue = self.context.queue()
        self._ledger = Ledger(self.context, None)
        self._random = np.random.default_rng(0).uniform(0.5, 1.5, 1 << 20).astype(np.float32).view(np.uint8)
        self._pool_bytes = min(_POOL_BYTES, descriptor.max_alloc_bytes // 2)
        self._pool = self._filled_buffer(self._pool_bytes, self._ledger)
        self._programs: dict[str, CompiledKernels] = {}
        self._checks = CheckedKernels(device)
        self.loads = Loads(self.context, self._ledger, self.path, folder, self._random, descriptor.loader_threads)
        self._lane: tuple[Buffer, DeviceMemory, Slice] | None = None
        self._references: tuple[Prepared, Prepared] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all resources."""
        self._programs.clear()
        self._checks.close()
        with contextlib.suppress(RunError):
            self.queue.finish()
        self.loads.close()
        self._ledger.close()

    # -- memory and kernels

    def program(self, source: str, options: Sequence[str]) -> CompiledKernels:
        """The kernels of `source`, compiled once."""
        if source not in self._programs:
            if len(self._programs) >= 64:
                self._programs.clear()
            self._programs[source] = CompiledKernels(self.context, source, options)
        return self._programs[source]

    def _filled_buffer(self, nbytes: int, ledger: Ledger) -> Buffer:
        """A buffer of ordinary numbers, because zeros or denormals would have unusual timings."""
        buffer = ledger.buffer("weights", nbytes, "a profiling buffer")
        for start in range(0, nbytes, self._random.nbytes):
            self.queue.write(buffer, self._random[: min(self._random.nbytes, nbytes - start)], offset=start)
        return buffer

    def prepare(self, target: Target) -> Prepared:
        """Prepare a launch for timing.

        Raises:
            RunError: the device refuses its kernel or its memory, or miscompiles the kernel.
        """
        self._checks.refuse_wrong(target.program, target.source, target.launch.kernel)
        return Prepared(self, target)

    def pace(self) -> Pace:
        """Measure the present speed of the machine."""
        if self._references is None:
            product = self.supply.matmul(*REFERENCE_GEMM)
            total = self.supply.elementwise(REFERENCE_SUM)
            self._references = self.prepare(product), self.prepare(total)
        gemm, traffic = (lower_quartile(launch.burst_seconds(_PACE_BURSTS, _PACE_SECONDS)) for launch in self._references)
        return Pace(gemm, traffic)

    def lane(self) -> tuple[Buffer, DeviceMemory, Slice]:
        """The source and the target of copy streams, and the slice that represents the target."""
        if self._lane is None:
            source = self._filled_buffer(LANE_BYTES, self._ledger)
            if self.path == "buffer":
                target: DeviceMemory = self._filled_buffer(LANE_BYTES, self._ledger)
                part = Slice("lane", "lane", 0, LANE_BYTES)
            else:
                height = LANE_BYTES // (16 * _LANE_WIDTH)
                target = self._ledger.image("weights", _LANE_WIDTH, height, "float", "a profiling texture")
                part = Slice("lane", "lane", 0, LANE_BYTES, _LANE_WIDTH, height, 16 * _LANE_WIDTH)
            self._lane = (source, target, part)
        return self._lane


class Prepared:
    """One prepared launch on the bench."""

    def __init__(self, bench: Bench, target: Target) -> None:
        self._bench = bench
        program = target.program
        launch = target.launch
        self._slices = {s.name: s for s in program.slices}
        read = [str(arg.value) for arg in launch.args if arg.kind == "slice"]
        self.weight_bytes = sum(self._slices[name].nbytes for name in read)
        self._program = program
        self._launch = launch
        self._source = target.source
        ledger = Ledger(bench.context, None)
        constants = None
        arena = bench._filled_buffer(max(program.arena_bytes, POOL_ALIGNMENT), ledger)
        if target.constants.nbytes:
            constants = ledger.buffer("constants", target.constants.nbytes, "constants")
            bench.queue.write(constants, target.constants)
        self._weights, self._turns = self._place(read)
        self._resources = Resources(ledger, arena, constants, self._weights, {})
        self._steps = self._make(bench.program(target.source.plain, program.build_options), None, {})
        self._settle_integers(arena)
        bench.queue.finish()
        self._play(self._steps, 2)
        self.seconds = min(self._play(self._steps, 1) for _ in range(3))
        if self.seconds < 1e-3:
            n = max(8, min(_MOST_LAUNCHES, math.ceil(2e-3 / self.seconds)))
            self.seconds = min(self._play(self._steps, n) for _ in range(3)) / n
        self.bursts: list[float] = []

    def alone_seconds(self) -> float:
        """Latency alone in seconds: the lower quartile of all bursts without load, or the best of the first tries."""
        return lower_quartile(self.bursts) if self.bursts else self.seconds

    @property
    def too_slow(self) -> bool:
        """Whether the launch takes too long to be measured."""
        return self.seconds > _TOO_SLOW_SECONDS

    def _place(self, read: Sequence[str]) -> tuple[dict[str, DeviceMemory], int]:
        """Memory for the weights of each turn, in different places; and the number of turns."""
        bench = self._bench
        parts = [self._slices[name] for name in read]
        images = [part for part in parts if part.is_image and bench.path == "texture"]
        image_bytes = sum(part.width * part.height * TEXEL_BYTES[part.channel] for part in images)
        plain = sum(-(-part.nbytes // POOL_ALIGNMENT) * POOL_ALIGNMENT for part in parts if part not in images)
        turns = 16
        if image_bytes:
            turns = min(turns, max(1, _IMAGE_POOL_BYTES // image_bytes))
        if plain:
            turns = min(turns, max(1, bench._pool_bytes // plain))
        if not parts:
            turns = 1
        weights: dict[str, DeviceMemory] = {}
        at = 0
        step = bench._pool_bytes // turns // POOL_ALIGNMENT * POOL_ALIGNMENT
        for turn in range(turns):
            at = turn * step
            for part in parts:
                name = f"{part.name}~{turn}"
                if part in images:
                    weights[name] = bench.context.image(part.width, part.height, part.channel)
                    continue
                size = -(-part.nbytes // 16) * 16
                if at + size > bench._pool_bytes:
                    raise RunError(f"slice {part.name} of {part.nbytes} bytes is larger than the profiler's pool")
                weights[name] = bench._ledger.part("weights", bench._pool, at, size)
                at += -(-size // POOL_ALIGNMENT) * POOL_ALIGNMENT
        return weights, turns

    def _settle_integers(self, arena: Buffer) -> None:
        """Fill the integer tensors that the launch reads with zeros, because they may be indices into a table."""
        names = {str(arg.value) for arg in self._launch.args if arg.kind == "tensor"}
        for tensor in self._program.tensors:
            if tensor.name in names and tensor.dtype in ("int32", "int64"):
                self._bench.queue.write(arena, np.zeros(tensor.nbytes, np.uint8), offset=tensor.offset)

    def _make(self, plain: CompiledKernels, lane: CompiledKernels | None, moves: dict[int, LayerMoves]) -> list[Step]:
        launches = [_rename(self._launch, turn) for turn in range(self._turns)]
        program = BundleProgram(**{**vars(self._program), "launches": tuple(launches)})
        return make_steps(program, {}, moves, self._resources, plain, lane)

    # -- timing

    def _play(self, steps: Sequence[Step], count: int) -> float:
        executor = Executor(self._bench.queue, [steps[i % len(steps)] for i in range(count)])
        begun = perf_counter()
        executor.run()
        return perf_counter() - begun

    def _play_loaded(self, mode: TransferMode, count: int, chunks: int) -> float:
        """Run a burst of `count` launches in which `chunks` slices are due, evenly spread."""
        run, parts = self._bench.loads.start(mode, chunks)
        due: dict[int, list[str]] = {}
        for j, part in enumerate(parts):
            due.setdefault((j + 1) * count // chunks, []).append(part.name)
        steps = []
        for i in range(count):
            step = self._steps[i % len(self._steps)]
            steps.append(Step(step.name, step.commands, tuple(due.get(i, ()))))
        transfer = self._bench.loads.transfer(mode)
        executor = Executor(self._bench.queue, steps, None, transfer)
        begun = perf_counter()
        try:
            executor.run(LaunchOrders(run.open()))
            run.wait()
            for event in transfer.take_arrived([part.name for part in parts]):
                event.wait()
            return perf_counter() - begun
        finally:  # no load of this burst may continue into the next one, even after an error
            executor.drain()
            run.stop()

    def burst_seconds(self, bursts: int, seconds: float) -> list[float]:
        """Latencies of each of `bursts` bursts of at least `seconds`."""
        count = min(_MOST_LAUNCHES, max(1, math.ceil(seconds / self.seconds)))
        return [self._play(self._steps, count) / count for _ in range(bursts)]

    def measure_alone(self) -> None:
        """Run bursts without load, for `alone_seconds`."""
        self.bursts += self.burst_seconds(_ALONE if self.seconds < _SLOW_SECONDS else _ALONE // 2, _BURST_SECONDS)

    def delay(self, mode: TransferMode, chunks: int, count: int) -> float:
        """Seconds by which `chunks` slices, loaded at full speed, delay `count` launches: the median of many."""
        delays = []
        before = self._play(self._steps, count)
        for _ in range(_DELAYS):
            loaded = self._play_loaded(mode, count, chunks)
            after = self._play(self._steps, count)
            delays.append(loaded - (before + after) / 2)
            before = after
        return statistics.median(delays)

    def measure(self, mode: TransferMode, streamed_bytes: float) -> Measured | None:
        """The slowdown by about `streamed_bytes` a launch (the result has the exact number); None if that is impossible.

        Raises:
            RunError: the device refuses the load, or the kernel's copy stream.
        """
        count = min(_MOST_LAUNCHES, max(1, math.ceil(_BURST_SECONDS / self.seconds)))
        if MODES[mode].by_kernels:
            return self._measure_lane(streamed_bytes, count)
        wanted = max(count, math.ceil(2 * CHUNK / streamed_bytes))
        count = min(wanted, _MOST_LAUNCHES, max(count, math.ceil(4 * _BURST_SECONDS / self.seconds)))
        chunks = max(1, round(count * streamed_bytes / CHUNK))
        if chunks > PARTS:
            count = max(1, math.floor(PARTS * CHUNK / streamed_bytes))
            chunks = round(count * streamed_bytes / CHUNK)
        actual = chunks * CHUNK / count
        if chunks > PARTS or actual > 1.3 * streamed_bytes + CHUNK / 8:
            return None
        return self._compare(mode, actual, count, lambda: self._play_loaded(mode, count, chunks))

    def _measure_lane(self, streamed_bytes: float, count: int) -> Measured | None:
        source, target, part = self._bench.lane()
        unit = WORD if self._bench.path == "buffer" else 16
        units = max(1, round(streamed_bytes / unit))
        most = LANE_BYTES // unit
        if units > most:
            return None
        width, pitch = (part.width, part.width) if part.is_image else (0, 0)
        moves = {}
        for turn in range(self._turns):
            first = turn * units % max(1, most - units)
            move = Move(part, first, units, width, pitch)
            moves[turn + 1] = LayerMoves(CopyStream(move.kind, (move,)))
        self._resources = replace(self._resources, weights={**self._weights, "lane": target}, staged={"lane": source})
        options = self._program.build_options
        lane = self._bench.program(self._source.lane, options)
        steps = self._make(self._bench.program(self._source.plain, options), lane, moves)
        self._play(steps, 1)
        return self._compare(INTERLEAVE.name, units * unit, count, lambda: self._play(steps, count))

    def _compare(self, mode: TransferMode, streamed: float, count: int, loaded: Callable[[], float]) -> Measured:
        """Compare bursts: alone, loaded, alone, loaded ... alone."""
        slow = loaded() > _SLOW_SECONDS * 3
        alone = [self._play(self._steps, count)]
        with_load: list[float] = []
        for _ in range(3 if slow or self.seconds > _SLOW_SECONDS else _REPEATS):
            with_load.append(loaded())
            alone.append(self._play(self._steps, count))
        self.bursts += [t / count for t in alone]
        ratios = sorted(2 * b / (alone[i] + alone[i + 1]) for i, b in enumerate(with_load))
        middle = ratios[len(ratios) // 4 : len(ratios) - len(ratios) // 4]
        slowdown = lower_quartile(with_load) / lower_quartile(alone)
        return Measured(mode, streamed, slowdown, (middle[-1] - middle[0]) / 2 / slowdown)


def _compile(descriptor: DeviceDescriptor) -> Supply:
    from .cases import Made  # it imports the compiler, which a phone lacks

    return Made(descriptor)


def _rename(launch: Launch, turn: int) -> Launch:
    args: Iterable[Arg] = (replace(a, value=f"{a.value}~{turn}") if a.kind == "slice" else a for a in launch.args)
    return replace(launch, args=tuple(args))


def lower_quartile(times: Sequence[float]) -> float:
    """The lower quartile of `times`."""
    return float(np.quantile(times, 0.25))
