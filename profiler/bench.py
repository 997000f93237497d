"""The bench: launches timed as a session plays them, alone and with bytes streamed beside them.

A launch is repeated in a *burst* by the runtime's own executor. Its weights change place from one repeat to the next, so that
they come from memory as in a model and not from a cache that holds them. Beside a loaded burst the runtime's own loader threads
bring in slices of one chunk each, evenly spread over the burst, or (transfer mode `interleave`) the kernels' own lanes move
bytes. A burst ends when both are done.

Others may use the machine, and what they take only ever adds time. So bursts with and without load take turns, and of each kind
the lower quartile counts: on a quiet machine it is the median but for the spread of a burst.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import RunError
from flashmem.planning.plan import PoolLayout, TextureSlot
from flashmem.program import Arg, Launch, Slice
from flashmem.program import Program as BundleProgram
from flashmem.runtime.devices import Device
from flashmem.runtime.engine import LOADER_THREADS
from flashmem.runtime.executor import Executor, Resources, Step, make_steps
from flashmem.runtime.lanes import LayerMoves, Move
from flashmem.runtime.ledger import Ledger
from flashmem.runtime.loader import Load, LoaderRun
from flashmem.runtime.opencl import TEXEL_BYTES, Context, Memory, Program
from flashmem.runtime.transfer import WORD, Transfer, make_transfer
from flashmem.runtime.weight_file import WeightFile

from .cases import Target

CHUNK = 1 << 20
"""Bytes are streamed in slices of the planner's usual chunk."""

_BURST_SECONDS = 5e-3
_MOST_LAUNCHES = 400
_PARTS = 64  # slices in each of the two sets that loaded bursts take in turn
_POOL_BYTES = 128 << 20  # weights wander over this much: several times a CPU's last cache
_IMAGE_POOL_BYTES = 32 << 20
_LANE_BYTES = 32 << 20
_LANE_WIDTH = 2048  # texels a row of the texture that lanes write
_REPEATS = 5
_SLOW_SECONDS = 20e-3
_TOO_SLOW_SECONDS = 150e-3


@dataclass(frozen=True)
class Measured:
    """One answer. `slowdown`: loaded over alone; `spread`: half the range of neighbours' middle ratios, as a share."""

    mode: TransferMode
    streamed_bytes: float
    slowdown: float
    spread: float


class _Run(LoaderRun):
    """Loads that wait at a gate until the clock is started; layers that are done open nothing else."""

    def open(self) -> None:
        super().layer_done(1)

    def layer_done(self, layer: int) -> None:
        return


class Bench:
    """One device on one memory path. Close it, or use it as a context manager."""

    def __init__(self, device: Device, descriptor: DeviceDescriptor, folder: Path) -> None:
        """`folder`: where a file to stream from is made (and removed again)."""
        self.device, self.descriptor = device, descriptor
        self.path = descriptor.memory_paths[0]
        self.context = Context(device)
        self.queue = self.context.queue()
        self._ledger = Ledger(self.context, None)
        self._random = np.random.default_rng(0).uniform(0.5, 1.5, 1 << 20).astype(np.float32).view(np.uint8)
        self._pool_bytes = min(_POOL_BYTES, descriptor.max_alloc_bytes // 2)
        self._pool = self._filled(self._pool_bytes)
        self._arena: tuple[int, Memory] = (0, None)
        self._arena_ledger = Ledger(self.context, None)
        self._programs: dict[str, Program] = {}
        descriptor_, name = tempfile.mkstemp(prefix=".flashmem-profile-", dir=folder)
        os.close(descriptor_)
        self._file_path = Path(name)
        self._transfers: dict[TransferMode, Transfer] = {}
        try:
            with self._file_path.open("wb") as file:
                for _ in range(2 * _PARTS):
                    file.write(self._random[:CHUNK].data)
            self._file = WeightFile(self._file_path, 2 * _PARTS * CHUNK)
        except BaseException:
            self._file_path.unlink()
            raise
        self._sets = [[self._slice(i) for i in range(k * _PARTS, (k + 1) * _PARTS)] for k in (0, 1)]
        self._turn = 0
        self._loaded: dict[TransferMode, list[Slice]] = {}
        self._lane: tuple[Memory, Memory, Slice] | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back."""
        self._programs.clear()
        with contextlib.suppress(RunError):
            self.queue.finish()
        for transfer in self._transfers.values():
            transfer.close()
        self._ledger.close()
        self._arena_ledger.close()
        self._file.close()
        self._file_path.unlink(missing_ok=True)

    # -- what launches need

    def program(self, source: str, options: Sequence[str]) -> Program:
        """`source` compiled, once for each text."""
        if source not in self._programs:
            if len(self._programs) >= 64:
                self._programs.clear()
            self._programs[source] = self.context.build(source, options)
        return self._programs[source]

    def _filled(self, nbytes: int, ledger: Ledger | None = None) -> Memory:
        """A buffer of ordinary numbers: zeros or denormal ones would not take the usual time."""
        buffer = (ledger or self._ledger).buffer("weights", nbytes, "a profiling buffer")
        for start in range(0, nbytes, self._random.nbytes):
            self.queue.write(buffer, self._random[: min(self._random.nbytes, nbytes - start)], offset=start)
        return buffer

    def _arena_for(self, nbytes: int) -> Memory:
        if self._arena[0] < nbytes:
            self._arena_ledger.close()
            self._arena = (nbytes, self._filled(nbytes, self._arena_ledger))
        return self._arena[1]

    def prepare(self, target: Target) -> Prepared:
        """A launch, ready to be timed.

        Raises:
            RunError: the device refuses its kernel or its memory.
        """
        return Prepared(self, target)

    def _slice(self, index: int) -> Slice:
        if self.path == "buffer":
            return Slice(f"part{index}", "part", index * CHUNK, CHUNK)
        width = 256
        return Slice(f"part{index}", "part", index * CHUNK, CHUNK, width, CHUNK // (16 * width), 16 * width)

    def lane(self) -> tuple[Memory, Memory, Slice]:
        """Where lanes read, where they write, and the slice that stands for it."""
        if self._lane is None:
            source = self._filled(_LANE_BYTES)
            if self.path == "buffer":
                target, part = self._filled(_LANE_BYTES), Slice("lane", "lane", 0, _LANE_BYTES)
            else:
                height = _LANE_BYTES // (16 * _LANE_WIDTH)
                target = self._ledger.image("weights", _LANE_WIDTH, height, "float", "a profiling texture")
                part = Slice("lane", "lane", 0, _LANE_BYTES, _LANE_WIDTH, height, 16 * _LANE_WIDTH)
            self._lane = (source, target, part)
        return self._lane

    # -- loads

    def transfer(self, mode: TransferMode) -> Transfer:
        """The runtime's transfer of `mode`, for the slices of the profiling file."""
        if mode not in self._transfers:
            parts = [part for half in self._sets for part in half]
            places = {part.name: i % _PARTS * CHUNK for i, part in enumerate(parts)}
            layout = PoolLayout(pool_bytes=_PARTS * CHUNK, offsets=places)
            if self.path == "texture" and mode in ("dma", "interleave"):
                shape = self._sets[0][0]
                slot = TextureSlot(shape.width, shape.height, "float", CHUNK)
                layout = PoolLayout(slots=(slot,) * 8, slot_of={part.name: i % 8 for i, part in enumerate(parts)})
            if mode == "dma":
                layout = replace(layout, staging_bytes=LOADER_THREADS * CHUNK)
            elif mode == "interleave":
                layout = replace(layout, staging_bytes=_PARTS * CHUNK, staging=places)
            self._transfers[mode] = make_transfer(mode, self.context, self._ledger, self._file, parts, layout, LOADER_THREADS)
        return self._transfers[mode]

    def load_run(self, mode: TransferMode, count: int) -> tuple[_Run, list[Slice]]:
        """Loader threads that will bring in `count` slices once opened, and let go those of the last time."""
        self._turn ^= 1
        parts = self._sets[self._turn][:count]
        loads = [Load(part, gate=1) for part in parts]
        frees = {1: self._loaded.get(mode, [])}
        self._loaded[mode] = parts
        return _Run(self.transfer(mode), loads, frees, threads=LOADER_THREADS), parts

    def load_seconds(self, mode: TransferMode, count: int) -> float:
        """Seconds to bring in `count` slices (of the page cache) with nothing else going on."""
        run, parts = self.load_run(mode, count)
        begun = perf_counter()
        run.open()
        for part in parts:
            run.wait(part.name)
        elapsed = perf_counter() - begun
        run.stop()
        return elapsed

    def transfer_rate(self, mode: TransferMode) -> float:
        """Bytes per second of a transfer alone: the median of several."""
        self.load_seconds(mode, _PARTS)
        self.load_seconds(mode, _PARTS)
        return _PARTS * CHUNK / statistics.median(self.load_seconds(mode, _PARTS) for _ in range(7))

    def cold_rate(self, mode: TransferMode) -> float:
        """Bytes per second of loads whose pages were dropped from the page cache: the median of several.

        A virtual machine's host may still hold the file; nothing here can tell.
        """
        rates = []
        for _ in range(5):
            self._let_go(mode)
            with self._file_path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            rates.append(_PARTS * CHUNK / self.load_seconds(mode, _PARTS))
        return statistics.median(rates)

    def slice_seconds(self, mode: TransferMode) -> float:
        """What a slice costs beside its bytes: the time of loads of one page each."""
        width = 256
        image = (width, 1, 16 * width) if self.path == "texture" else (0, 0, 0)
        parts = [Slice(f"page{i}", "page", i * CHUNK, 4096, *image) for i in range(2 * _PARTS)]
        places = {part.name: i * 4096 for i, part in enumerate(parts)}
        layout = PoolLayout(pool_bytes=len(parts) * 4096, offsets=places)
        if self.path == "texture" and mode in ("dma", "interleave"):
            slots = (TextureSlot(width, 1, "float", 4096),)
            layout = PoolLayout(slots=slots, slot_of=dict.fromkeys(places, 0))
        if mode == "dma":
            layout = replace(layout, staging_bytes=LOADER_THREADS * 4096)
        elif mode == "interleave":
            layout = replace(layout, staging_bytes=len(parts) * 4096, staging=places)
        ledger = Ledger(self.context, None)
        transfer = make_transfer(mode, self.context, ledger, self._file, parts, layout, LOADER_THREADS)
        try:
            times = []
            for _ in range(7):
                run = _Run(transfer, [Load(part, gate=1) for part in parts], {}, threads=LOADER_THREADS)
                begun = perf_counter()
                run.open()
                for part in parts:
                    run.wait(part.name)
                times.append(perf_counter() - begun)
                run.stop()
                for part in parts:
                    transfer.free(part)
            return statistics.median(times) / len(parts)
        finally:
            transfer.close()
            ledger.close()

    def _let_go(self, mode: TransferMode) -> None:
        """Free what the last loads of `mode` brought in."""
        for part in self._loaded.pop(mode, []):
            self.transfer(mode).free(part)


class Prepared:
    """One launch on the bench."""

    def __init__(self, bench: Bench, target: Target) -> None:
        self._bench = bench
        program, launch = target.program, target.launch
        self._slices = {s.name: s for s in program.slices}
        read = [str(arg.value) for arg in launch.args if arg.kind == "slice"]
        self.weight_bytes = sum(self._slices[name].nbytes for name in read)
        self._program = program
        self._launch = launch
        self._source = target.source
        constants = None
        if target.constants.nbytes:
            constants = bench.context.buffer(target.constants.nbytes)
            bench.queue.write(constants, target.constants)
        arena = bench._arena_for(max(program.arena_bytes, 4096))
        self._weights, self._turns = self._place(read)
        self._resources = Resources(bench.context, arena, constants, self._weights, {})
        self._steps = self._make(bench.program(target.source.plain, program.build_options), None, {})
        self._settle_integers(arena)
        bench.queue.finish()
        self._play(self._steps, 2)
        self.seconds = min(self._play(self._steps, 1) for _ in range(3))
        if self.seconds < 1e-3:
            n = max(8, min(_MOST_LAUNCHES, math.ceil(2e-3 / self.seconds)))
            self.seconds = min(self._play(self._steps, n) for _ in range(3)) / n
        self.bursts: list[float] = []

    def settled_seconds(self) -> float:
        """Latency alone: the lower quartile of all bursts without load, or the best of the first tries."""
        return lower_quartile(self.bursts) if self.bursts else self.seconds

    @property
    def too_slow(self) -> bool:
        """Whether measuring it would take more time than it is worth."""
        return self.seconds > _TOO_SLOW_SECONDS

    def _place(self, read: Sequence[str]) -> tuple[dict[str, Memory], int]:
        """Homes for the weights of each turn, each turn's in another place; and how many turns there are."""
        bench = self._bench
        parts = [self._slices[name] for name in read]
        images = [part for part in parts if part.is_image and bench.path == "texture"]
        image_bytes = sum(part.width * part.height * TEXEL_BYTES[part.channel] for part in images)
        plain = sum(-(-part.nbytes // 4096) * 4096 for part in parts if part not in images)
        turns = 16
        if image_bytes:
            turns = min(turns, max(1, _IMAGE_POOL_BYTES // image_bytes))
        if plain:
            turns = min(turns, max(1, bench._pool_bytes // plain))
        if not parts:
            turns = 1
        weights: dict[str, Memory] = {}
        at = 0
        step = bench._pool_bytes // turns // 4096 * 4096
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
                weights[name] = bench.context.sub_buffer(bench._pool, at, size)
                at += -(-size // 4096) * 4096
        return weights, turns

    def _settle_integers(self, arena: Memory) -> None:
        """Integer tensors that the launch reads hold zeros: they may be places in a table."""
        names = {str(arg.value) for arg in self._launch.args if arg.kind == "tensor"}
        for tensor in self._program.tensors:
            if tensor.name in names and tensor.dtype == "int32":
                self._bench.queue.write(arena, np.zeros(tensor.nbytes, np.uint8), offset=tensor.offset)

    def _make(self, plain: Program, lane: Program | None, moves: dict[int, LayerMoves]) -> list[Step]:
        launches = [_renamed(self._launch, turn) for turn in range(self._turns)]
        program = BundleProgram(**{**vars(self._program), "launches": tuple(launches)})
        return make_steps(program, {}, moves, self._resources, plain, lane)

    # -- timing

    def _play(self, steps: Sequence[Step], count: int) -> float:
        executor = Executor(self._bench.queue, [steps[i % len(steps)] for i in range(count)])
        begun = perf_counter()
        executor.run(None)
        return perf_counter() - begun

    def _play_loaded(self, mode: TransferMode, count: int, chunks: int) -> float:
        """A burst of `count` launches that `chunks` slices are due in, evenly spread."""
        run, parts = self._bench.load_run(mode, chunks)
        due: dict[int, list[str]] = {}
        for j, part in enumerate(parts):
            due.setdefault((j + 1) * count // chunks, []).append(part.name)
        steps = []
        for i in range(count):
            step = self._steps[i % len(self._steps)]
            steps.append(Step(step.name, step.commands, tuple(due.get(i, ()))))
        executor = Executor(self._bench.queue, steps)
        begun = perf_counter()
        run.open()
        executor.run(run)
        for part in parts:
            run.wait(part.name)
        elapsed = perf_counter() - begun
        run.stop()
        return elapsed

    def measure(self, mode: TransferMode, streamed_bytes: float) -> Measured | None:
        """The slowdown by about `streamed_bytes` a launch (the answer says how many it was); None where that cannot be had."""
        count = min(_MOST_LAUNCHES, max(1, math.ceil(_BURST_SECONDS / self.seconds)))
        if mode == "interleave":
            return self._measure_lane(streamed_bytes, count)
        wanted = max(count, math.ceil(2 * CHUNK / streamed_bytes))
        count = min(wanted, _MOST_LAUNCHES, max(count, math.ceil(4 * _BURST_SECONDS / self.seconds)))
        chunks = max(1, round(count * streamed_bytes / CHUNK))
        if chunks > _PARTS:
            count = max(1, math.floor(_PARTS * CHUNK / streamed_bytes))
            chunks = round(count * streamed_bytes / CHUNK)
        actual = chunks * CHUNK / count
        if chunks > _PARTS or actual > 1.3 * streamed_bytes + CHUNK / 8:
            return None
        return self._compare(mode, actual, count, lambda: self._play_loaded(mode, count, chunks))

    def _measure_lane(self, streamed_bytes: float, count: int) -> Measured | None:
        source, target, part = self._bench.lane()
        unit = WORD if self._bench.path == "buffer" else 16
        units = max(1, round(streamed_bytes / unit))
        most = _LANE_BYTES // unit
        if units > most:
            return None
        width, pitch = (part.width, part.width) if part.is_image else (0, 0)
        moves = {}
        for turn in range(self._turns):
            first = turn * units % max(1, most - units)
            moves[turn + 1] = LayerMoves(Move(part, first, units, width, pitch), ())
        self._resources = replace(self._resources, weights={**self._weights, "lane": target}, staged={"lane": source})
        options = self._program.build_options
        lane = self._bench.program(self._source.lane, options)
        steps = self._make(self._bench.program(self._source.plain, options), lane, moves)
        self._play(steps, 1)
        return self._compare("interleave", units * unit, count, lambda: self._play(steps, count))

    def _compare(self, mode: TransferMode, streamed: float, count: int, loaded: Callable[[], float]) -> Measured:
        """Alone, loaded, alone, loaded ... alone."""
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


def _renamed(launch: Launch, turn: int) -> Launch:
    args: Iterable[Arg] = (replace(a, value=f"{a.value}~{turn}") if a.kind == "slice" else a for a in launch.args)
    return replace(launch, args=tuple(args))


def lower_quartile(times: Sequence[float]) -> float:
    """The value a quarter of the way up."""
    return float(np.quantile(times, 0.25))
