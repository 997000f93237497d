"""The input of a simulation: a machine, and the loads, launches and memory of one session on it, as data.

`describe` derives them from a program, a plan and a descriptor. The runtime's own functions compute the order of loads, their
release times, the needs of each launch, the frees and all allocations. So the simulation matches a session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Literal

from flashmem.base.types import ITEMSIZE, POOL_ALIGNMENT, TransferMode
from flashmem.planning.instance import build_instance
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.program.lanes import lane_kind
from flashmem.program.program import Program, copied_outputs, output_bytes, pinned_output_bytes, scratch_bytes
from flashmem.program.tensors import Port, Slice
from flashmem.runtime.engine.report import HostMemoryUse
from flashmem.runtime.memory.accounts import Category
from flashmem.runtime.streaming.interleaved import CopyStream, LayerMoves, layer_moves, needed_slices
from flashmem.schedule.host_tier import SliceIdentity, identity, planned_there, reloaded, tier_bytes, tier_slices
from flashmem.schedule.loads import Load, Segment, planned_frees, planned_loads, read_while_opening
from flashmem.schedule.modes import MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.plan import LOADER_THREADS, OverlapPlan, PoolLayout
from flashmem.schedule.residency import SPARE_PIECES, Strategy, preload_all, preloaded_layout, streamed_layout
from flashmem.target.descriptor import DeviceDescriptor

Disk = Literal["cold", "cached"]
Piece = tuple[Literal["read", "copy"], int]
"""A step of a load: bytes to read from the page cache, or to copy to the device (or to populate, when mapped)."""


@dataclass(frozen=True)
class Machine:
    """The resources of a machine. Rates in bytes per second; `disk_bandwidth` is None if the whole file is in the page cache.

    A call that announces reads (posix_fadvise) returns when at most `disk_queue_bytes` are left to read; Linux blocks the
    caller until then. With `copy_engine` the device has its own memory, and makes one copy at a time.
    """

    read_bandwidth: float
    copy_bandwidth: float
    disk_bandwidth: float | None = None
    load_seconds: float = 0.0
    disk_queue_bytes: int = 16 << 20
    copy_engine: bool = False
    threads: int = LOADER_THREADS

    @property
    def readers(self) -> int:
        """The number of loads at a time."""
        return self.threads + SPARE_PIECES * self.copy_engine


@dataclass(frozen=True)
class SimulatedLoad:
    """The load of a segment of slice `name`, from byte `first` of it on, released when launch `after` is complete.

    `held` bytes are counted from its start until the slice is freed (mode `map`). Later runs find the slice resident if it is
    in W or has `keep`. A load with `reads_ahead` waits for its release only before it copies. With `in_tier`, later
    runs copy the slice from the host tier, as a whole.
    """

    name: str
    nbytes: int
    pieces: tuple[Piece, ...]
    after: int = 0
    preload: bool = False
    held: int = 0
    first: int = 0
    keep: bool = False
    reads_ahead: bool = False
    in_tier: bool = False

    @property
    def is_read(self) -> bool:
        """Whether it reads the file."""
        return any(resource == "read" for resource, _ in self.pieces)

    @property
    def last_of_file(self) -> int:
        """Index of the last piece that reads the file; it cannot end before the disk has read the bytes."""
        return max((index for index, (resource, _) in enumerate(self.pieces) if resource == "read"), default=0)


@dataclass(frozen=True)
class SimulatedLayer:
    """A launch of `seconds` on the device, including the copies during it, after all of `needs` are loaded."""

    name: str
    seconds: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Allocation:
    """Bytes that a session holds from its opening to its end."""

    category: Category
    nbytes: int


@dataclass(frozen=True)
class Scenario:
    """A session and its first run. Loads are in the order in which threads start them.

    The first `announced` loads are announced to the disk when the session begins. Memory is counted after `context_seconds`,
    and allocated after `kernel_seconds`, including the time for launches. `constants_bytes` are read while opening,
    `gathered_bytes` (table rows) and `input_bytes` before launch 1, `output_bytes` of copied outputs after the last launch.
    `run_seconds` is the host's time for a run beside these.
    `later_layers` are the launches of later runs, if they differ. With `resident_first` all loads belong to the opening
    (strategy preload). `host`: what a host budget counts.
    """

    machine: Machine
    layers: tuple[SimulatedLayer, ...]
    loads: tuple[SimulatedLoad, ...]
    frees: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()
    announced: int = 0
    context_seconds: float = 0.0
    kernel_seconds: float = 0.0
    run_seconds: float = 0.0
    constants_bytes: int = 0
    gathered_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    resident_first: bool = False
    later_layers: tuple[SimulatedLayer, ...] = ()
    host: HostMemoryUse | None = None

    def later(self) -> Scenario:
        """A later run of the same session: W and kept slices are resident, the file is in the page cache, nothing is opened
        again.
        """
        kept = {load.name for load in self.loads if load.preload or load.keep}
        held = sum(load.held for load in self.loads if load.preload or load.keep)
        return replace(
            self,
            machine=replace(self.machine, disk_bandwidth=None),
            layers=tuple(
                replace(layer, needs=tuple(n for n in layer.needs if n not in kept))
                for layer in self.later_layers or self.layers
            ),
            loads=_from_tier([load for load in self.loads if load.name not in kept]),
            allocations=(*self.allocations, Allocation("weights", held)),
            announced=0,
            context_seconds=0.0,
            kernel_seconds=0.0,
            constants_bytes=0,
            resident_first=False,
        )


def _from_tier(loads: Sequence[SimulatedLoad]) -> tuple[SimulatedLoad, ...]:
    """The loads of a later run: one copy for each slice of the host tier."""
    sizes = Counter[str]()
    for load in loads:
        sizes[load.name] += load.nbytes
    return tuple(
        replace(load, nbytes=sizes[load.name], pieces=(("copy", sizes[load.name]),)) if load.in_tier else load
        for load in loads
        if not (load.in_tier and load.first)
    )


def layout_for(
    program: Program, plan: OverlapPlan, mode: TransferMode, strategy: Strategy = "stream", *, shares_memory: bool = True
) -> PoolLayout:
    """The runtime's layout of slices: the plan's layout for `mode`, computed here if the plan has none.

    `shares_memory`: the device does, with the host.
    """
    if strategy == "preload":
        return preloaded_layout(program, mode, plan.loader_threads, shares_memory=shares_memory)
    if mode not in plan.layouts:
        plan = replace(plan, layouts=dict(lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)))
    return streamed_layout(program, plan, mode, shares_memory=shares_memory)


def describe(
    program: Program,
    plan: OverlapPlan,
    descriptor: DeviceDescriptor,
    mode: TransferMode,
    *,
    disk: Disk = "cached",
    strategy: Strategy = "stream",
    lanes: bool = True,
    host_budget: int | None = None,
) -> Scenario:
    """Describe the first run of a session with `plan` on a device, in transfer `mode`.

    `disk` "cold": nothing of the weight file is in the page cache. The seconds of launches are those of `schedule.instance`.
    `lanes` is the argument of `flashmem.Session`; `host_budget` is a limit in bytes (`choose_host_budget`).
    """
    rates = descriptor.rates
    kind = MODES[mode]
    slices = {part.name: part for part in program.slices}
    layout = layout_for(program, plan, mode, strategy, shares_memory=descriptor.shares_memory)
    if strategy == "preload":
        plan = preload_all(plan)
    instance = build_instance(program, descriptor, chunk_bytes=plan.chunk_bytes, m_peak=plan.m_peak, mode=mode)
    moves = layer_moves(plan, slices, lane_kind(program), lanes=lanes) if kind.by_kernels else {}
    kept = {w.name for w in plan.weights if w.keep}

    def layers(planned: OverlapPlan, moves: Mapping[int, LayerMoves]) -> tuple[SimulatedLayer, ...]:
        needs = needed_slices(planned, moves)
        beside = _copied_beside(moves) if kind.by_kernels else _moved_beside(planned)
        own = {layer: _own_launches(moving, descriptor) for layer, moving in moves.items()}
        return tuple(
            SimulatedLayer(spec.name, spec.loaded_seconds(beside.get(layer, 0)) + own.get(layer, 0.0), needs.get(layer, ()))
            for layer, spec in enumerate(instance.layers, start=1)
        )

    loads = planned_loads(plan, slices, layout, mode, preload=True)
    apart = host_budget is not None or not descriptor.shares_memory
    on_host: dict[Category, int] = {
        "outputs": output_bytes(program), "staging": scratch_bytes(program) + layout.ring_bytes
    }  # fmt: skip
    kept_there: tuple[Slice, ...] = ()
    if host_budget is not None:
        left = host_budget - sum(on_host.values()) - pinned_output_bytes(program)
        variant = [(plan, program.slices)]
        kept_there = tier_slices(reloaded(variant), max(0, left), planned_there(variant))
    in_tier = {identity(part) for part in kept_there}
    travel = _Travel(kind, layout, program.page_bytes, in_tier)
    return Scenario(
        Machine(
            read_bandwidth=rates.cached_bandwidth,
            copy_bandwidth=rates.copy_bandwidth,
            disk_bandwidth=rates.disk_bandwidth if disk == "cold" else None,
            load_seconds=rates.load_seconds,
            copy_engine=not descriptor.shares_memory,
            threads=layout.threads,
        ),
        layers=layers(plan, moves),
        loads=tuple(
            SimulatedLoad(
                load.part.name,
                load.segment.nbytes,
                travel.pieces(load),
                load.after,
                load.preload,
                travel.held(load.segment),
                load.segment.first,
                load.part.name in kept,
                travel.reads_ahead,
                identity(load.part) in in_tier,
            )
            for load in loads
        ),
        frees=_names(planned_frees(plan, slices)) if kind.by_pages else {},
        allocations=_allocations(program, layout, apart=apart),
        announced=len(read_while_opening(loads, program, rates)),
        context_seconds=rates.session_seconds,
        run_seconds=rates.run_seconds,
        kernel_seconds=rates.kernel_seconds * _kernel_count(program, moves) + rates.layer_seconds * len(program.launches),
        constants_bytes=program.constants_bytes,
        gathered_bytes=_gathered_bytes(program),
        input_bytes=_port_bytes(program, program.inputs),
        output_bytes=_port_bytes(program, copied_outputs(program)),
        resident_first=strategy == "preload",
        later_layers=(
            layers(plan.later(), layer_moves(plan.later(), slices, lane_kind(program), lanes=lanes) if moves else {})
            if kept
            else ()
        ),
        host=_host_memory(host_budget, on_host, kept_there) if apart else None,
    )


def _host_memory(budget: int | None, others: Mapping[Category, int], kept: Sequence[Slice]) -> HostMemoryUse:
    use: dict[Category, int] = {"weights": sum(map(tier_bytes, kept)), **others}
    return HostMemoryUse(sum(use.values()), budget, use)


def _port_bytes(program: Program, ports: Sequence[Port]) -> int:
    """Bytes that are copied between the host and the tensors of `ports`."""
    sizes = {tensor.name: ITEMSIZE[tensor.dtype] for tensor in program.tensors}
    return sum(sizes[port.tensor] * prod(port.shape) for port in ports if port.tensor is not None)


@dataclass(frozen=True)
class _Travel:
    """The steps and the memory of loads in one transfer mode (runtime/streaming/modes)."""

    kind: TransferKind
    layout: PoolLayout
    page: int  # bytes
    in_tier: Collection[SliceIdentity]

    def pieces(self, load: Load) -> tuple[Piece, ...]:
        part = load.part
        total = load.segment.nbytes
        if self.kind.by_pages:
            return (("copy", total),)
        if not self.kind.copies:
            return (("read", total),)
        through = total if identity(part) in self.in_tier else self._passed_through(load.preload)
        if not through:
            return (("read", total),)
        step = through // part.row_pitch * part.row_pitch if part.is_image else through
        ends = [*range(0, total, step), total]
        return tuple(piece for a, b in pairwise(ends) for piece in (("read", b - a), ("copy", b - a)))

    def _passed_through(self, preload: bool) -> int:
        """Bytes of the thread's staging that a load is copied from; 0 if it is read in place or copied by kernels."""
        layout = self.layout
        if layout.staging and not preload:
            return 0
        return layout.ring_bytes // layout.threads // POOL_ALIGNMENT * POOL_ALIGNMENT

    @property
    def reads_ahead(self) -> bool:
        """Whether a streamed load passes through the thread's own memory, and so is read there before its release."""
        return self.kind.by_engine or bool(self.layout.staging_slots)

    def held(self, segment: Segment) -> int:
        """Bytes of pages to count while they are mapped. In other modes the layout is allocated when the session opens."""
        return -(-segment.nbytes // self.page) * self.page if self.kind.by_pages else 0


def _moved_beside(plan: OverlapPlan) -> Counter[int]:
    """Bytes that the plan copies during each launch, in whole chunks, as the planner counts them."""
    beside = Counter[int]()
    for w in plan.weights:
        for layer, chunks in w.moves:
            beside[layer] += chunks * plan.chunk_bytes * (layer < w.first_use)
    return beside


def _copied_beside(moves: Mapping[int, LayerMoves]) -> dict[int, int]:
    """Bytes that the lanes of each launch's own kernel copy."""
    return {layer: _moved_bytes(moving.interleaved) for layer, moving in moves.items() if moving.interleaved is not None}


def _own_launches(moving: LayerMoves, descriptor: DeviceDescriptor) -> float:
    """Seconds of the copies before a launch that are launches of the copy kernel."""
    rates = descriptor.rates
    own = (*moving.leading, *moving.separate)
    return sum(rates.launch_seconds + _moved_bytes(stream) / rates.copy_bandwidth for stream in own)


def _moved_bytes(stream: CopyStream) -> int:
    return sum(move.nbytes for move in stream.moves)


def _kernel_count(program: Program, moves: Mapping[int, LayerMoves]) -> int:
    """The number of different kernels in the plain and the lane program."""
    plain: set[str] = set()
    lane: set[str] = set()
    for layer, launch in enumerate(program.launches, start=1):
        moving = moves.get(layer)
        (lane if moving is not None and moving.interleaved is not None else plain).add(launch.kernel)
        lane.update(stream.copier for stream in ((*moving.leading, *moving.separate) if moving else ()))
    return len(plain) + len(lane)


def _gathered_bytes(program: Program) -> int:
    """The most bytes that a run reads from tables: one panel for each index, none twice."""
    shapes = {port.name: port.shape for port in program.inputs}
    return sum(min(prod(shapes[g.indices]), -(-g.rows // g.panel)) * g.panel_bytes for g in program.host_embeddings)


def _allocations(program: Program, layout: PoolLayout, *, apart: bool) -> tuple[Allocation, ...]:
    """The allocations in the engine's order, without mapped pages, which change during a run.

    `apart`: the device has memory of its own, and a session counts those in host memory apart.
    """
    on_host = (Allocation("outputs", output_bytes(program)), Allocation("staging", scratch_bytes(program)))
    return (
        Allocation("states", program.states_bytes),
        Allocation("arena", program.arena_bytes),
        Allocation("constants", program.constants_bytes),
        *(() if apart else on_host),
        Allocation("weights", layout.home_bytes),
        Allocation("staging", layout.all_staging_bytes + (not apart) * layout.ring_bytes),
    )


def _names(frees: Mapping[int, Sequence[Slice]]) -> dict[int, tuple[str, ...]]:
    return {layer: tuple(part.name for part in parts) for layer, parts in frees.items()}
