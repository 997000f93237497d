"""Instance of the overlap-plan-generation problem: the input of the planner (docs/planner.md; FlashMem §3.1)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.schedule.plan import LOADER_THREADS, PASSING_BYTES
from flashmem.target.descriptor import DeviceDescriptor, Rates

if TYPE_CHECKING:
    from flashmem.planning.capacity.model import CapacityModel


@dataclass(frozen=True)
class LayerSpec:
    """Layer l. `capacity` is C_l in chunks; `seconds` is its predicted latency while nothing is streamed.

    `beside` is the slowdown s_l as a polyline of (bytes moved beside it, factor), both ascending, from (0, 1). Beyond its end
    the last slope continues. If it is empty, moved bytes do not slow the layer down.
    """

    name: str
    operator_class: OperatorClass
    capacity: int
    seconds: float
    beside: tuple[tuple[float, float], ...] = ()

    def loaded_seconds(self, nbytes: float) -> float:
        """t_l * s_l(b_l): the latency in seconds while `nbytes` bytes are moved beside the layer."""
        if not nbytes or len(self.beside) < 2:
            return self.seconds
        at = min(bisect_right(self.beside, (nbytes, 0.0), 1), len(self.beside) - 1)
        (low, slow), (high, slower) = self.beside[at - 1], self.beside[at]
        return self.seconds * (slow + (slower - slow) * (nbytes - low) / (high - low))

    def bytes_within(self, seconds: float) -> float:
        """The most bytes on the curve for which `loaded_seconds` is at most `seconds`; 0 if nothing slows the layer down."""
        reached = 0.0
        for (low, slow), (high, slower) in pairwise(self.beside):
            if self.seconds * slower > seconds:
                return low + (high - low) * max(0.0, seconds / self.seconds - slow) / (slower - slow)
            reached = high
        return reached


@dataclass(frozen=True)
class WeightSpec:
    """Weight w: one slice. `first_use` is i_w, `last_use` the layer after which it is freed; layers count from 1."""

    name: str
    nbytes: int
    first_use: int
    last_use: int


@dataclass(frozen=True)
class Problem:
    """Layers 1..N, the weights they use, S (`chunk_bytes`) and M_peak (`m_peak`, bytes in flight beside W).

    Resources: the disk reads `load_bandwidth` bytes per second into unified memory, from the opening of the session on. Layers
    run from `opening_seconds` on. The host forwards the bytes read at `host_bandwidth` bytes per second, to the source of
    transfer `mode`. Each of `loader_threads` forwards `piece_bytes` of a slice at a time. `shares_memory`: host and device
    share memory. `w_may_grow`: slices too large for M_peak may join W, also for the first answer, because slices will not get
    smaller.
    """

    layers: tuple[LayerSpec, ...]
    weights: tuple[WeightSpec, ...]
    chunk_bytes: int
    m_peak: int
    load_bandwidth: float
    notes: tuple[str, ...] = ()  # the assumptions behind its numbers, for the plan
    mode: TransferMode = "map"
    host_bandwidth: float = math.inf
    opening_seconds: float = 0.0
    piece_bytes: int = 0
    w_may_grow: bool = False
    loader_threads: int = LOADER_THREADS
    shares_memory: bool = True

    def chunks(self, weight: WeightSpec) -> int:
        """Number of chunks of a weight: T(w) = ceil(bytes(w) / S)."""
        return -(-weight.nbytes // self.chunk_bytes)


def build_problem(
    program: Program,
    descriptor: DeviceDescriptor,
    *,
    chunk_bytes: int | None,
    m_peak: int,
    mode: TransferMode | None = None,
    model: CapacityModel | None = None,
) -> Problem:
    """The problem of running `program` on a device: one layer for each launch, one weight for each slice that a launch reads.

    `chunk_bytes` (S; None: `chosen_chunk`) and `m_peak` are bytes. `model` predicts how much a layer can stream while it
    computes, in transfer `mode`. By default it is the descriptor's own, in the descriptor's first mode.

    Raises:
        UserError: the descriptor does not say how transfers of that mode slow down kernels.
    """
    from flashmem.planning.capacity.model import (  # the offline half; the rest also plans on the device
        default_model,
        load_capacity,
    )

    model = model or default_model(descriptor, program.memory_path)
    mode = mode or descriptor.modes[program.memory_path][0]
    sizes = {s.name: s.nbytes for s in program.slices}
    known: dict[tuple[object, ...], tuple[float, float, tuple[tuple[float, float], ...]]] = {}
    priced = []
    for launch in program.launches:
        read = sum(sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice")
        key = (launch.kernel, launch.operator_class, launch.macs, launch.bytes, launch.global_size, launch.local_size, read)
        if key not in known:
            capacity = load_capacity(model, launch, read, mode)
            known[key] = capacity, model.seconds(launch, read), slowdown_curve(model, launch, read, mode, descriptor.rates)
        priced.append((launch, *known[key]))
    if chunk_bytes is None:
        chunk_bytes = chosen_chunk([nbytes for launch, nbytes, _, _ in priced if launch.operator_class == "reusable"])
    layers = [
        LayerSpec(launch.name, launch.operator_class, int(nbytes // chunk_bytes), seconds, beside)
        for launch, nbytes, seconds, beside in priced
    ]
    return posed(program, layers, descriptor, mode, chunk_bytes=chunk_bytes, m_peak=m_peak, notes=(model.note,))


def posed(
    program: Program,
    layers: Sequence[LayerSpec],
    descriptor: DeviceDescriptor,
    mode: TransferMode,
    *,
    chunk_bytes: int,
    m_peak: int,
    notes: tuple[str, ...] = (),
) -> Problem:
    """The problem of `program`'s weights and of `layers`, on a device with the rates of `descriptor`."""
    rates = descriptor.rates
    sizes = {part.name: part.nbytes for part in program.slices}
    weights = [WeightSpec(name, sizes[name], first, last) for name, (first, last) in program.uses().items()]
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    host = {"map": rates.copy_bandwidth, "dma": min(rates.cached_bandwidth, rates.copy_bandwidth)}
    return Problem(
        tuple(layers), tuple(weights), chunk_bytes, m_peak, rates.disk_bandwidth, notes, mode,
        host.get(mode, rates.cached_bandwidth), opening, PASSING_BYTES,
        loader_threads=descriptor.loader_threads, shares_memory=descriptor.shares_memory,
    )  # fmt: skip


def staged_within(problem: Problem, limit: int) -> Problem:
    """`problem` with as large a staging memory as a limit of `limit` bytes allows."""
    piece = max(1, min(PASSING_BYTES, limit // _PIECES))
    threads = max(min(LOADER_THREADS, problem.loader_threads), min(problem.loader_threads, limit // (_RINGS * piece)))
    return replace(problem, piece_bytes=piece, loader_threads=threads)


def staged_least(problem: Problem) -> Problem:
    """`problem` with the smallest staging memory that works."""
    return replace(problem, piece_bytes=1, loader_threads=min(LOADER_THREADS, problem.loader_threads))


def with_less_staging(problem: Problem, lack: int) -> Problem | None:
    """`problem` with smaller staging pieces, so that staging needs `lack` bytes less in all.

    If such pieces were too small to be useful, they are as small as possible. None if they already are, or nothing is staged.
    """
    least = staged_least(problem)
    if problem.mode in _UNSTAGED or problem == least:
        return None
    room = (problem.loader_threads * problem.piece_bytes - lack) // least.loader_threads
    piece = min(problem.piece_bytes // _LESS, room)
    return replace(least, piece_bytes=piece) if piece >= _OF_USE else least


_UNSTAGED: Collection[TransferMode] = ("map", "alias")

_LESS = 4
"""The least factor by which pieces shrink when a plan does not fit: reads ahead need memory as well."""

_OF_USE = 1 << 17
"""The smallest useful piece in bytes, because each piece is a driver call.

In pieces of 8 KiB an H200 took 0.53 s for the first answer of ResNet-50, in large ones 0.26 s. Smaller pieces only save the
last bytes of the smallest budget.
"""

_RINGS = 8
"""The staging of all loader threads is at most this part of the limit; the number of threads never falls below two."""

_PIECES = 32
"""A piece in staging is at most this part of the limit, so that staging does not displace weights."""


def chosen_chunk(capacities: Sequence[float]) -> int:
    """Choose the chunk size S for layers that can carry `capacities` bytes, so that the median layer carries at least four.

    It is a power of two between 16 KiB and 1 MiB. Smaller chunks are more than a plan needs.
    """
    carried = [nbytes for nbytes in capacities if nbytes > 0]
    wished = median(carried) / _CHUNKS_CARRIED if carried else _MOST_CHUNK
    return int(2 ** math.floor(math.log2(min(max(wished, _LEAST_CHUNK), _MOST_CHUNK))))


_CHUNKS_CARRIED = 4
_LEAST_CHUNK, _MOST_CHUNK = 1 << 14, 1 << 20


def slowdown_curve(
    model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode, rates: Rates
) -> tuple[tuple[float, float], ...]:
    """The slowdown s_l of `launch` for `LayerSpec.beside`, at up to three times the bytes that the launch reads and writes.

    A model's `loaded_seconds` end when the launch and the loads beside it are done. Where loader threads move bytes, the
    planner's clock counts their time as a separate resource. The curve then holds only the delay of the launch: the mode's
    contention, while the threads work beside it.
    """
    alone = model.seconds(launch, weight_bytes)
    own = max(1, launch.bytes + weight_bytes)
    points = [(0.0, 1.0)]
    for ratio in _RATIOS:
        loaded = model.loaded_seconds(launch, weight_bytes, ratio * own, mode)
        if mode != "interleave":
            taken = rates.contention_of(mode)
            always = alone / (1 - taken) if taken < 1 else math.inf
            loaded = min(loaded, alone + taken * ratio * own / rates.transfer_bandwidth(mode), always)
        points.append((ratio * own, max(points[-1][1], loaded / alone)))
    return tuple(points)


_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 3.0)
"""Ratios of streamed bytes to a launch's own bytes at which s_l is sampled; between them it is linear."""
