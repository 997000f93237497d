"""Build a planning instance from a program and layers with known times, and size its staging. Needs no capacity model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import POOL_ALIGNMENT, TransferMode
from flashmem.program.program import Program, host_bytes, pinned_output_bytes
from flashmem.schedule.instance import Instance, LayerSpec, OwnMemory, WeightSpec
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import LOADER_THREADS, PASSING_BYTES
from flashmem.schedule.residency import host_ring_bytes
from flashmem.target.descriptor import DeviceDescriptor


def pose(
    program: Program,
    layers: Sequence[LayerSpec],
    descriptor: DeviceDescriptor,
    mode: TransferMode,
    *,
    chunk_bytes: int,
    m_peak: int,
    notes: tuple[str, ...] = (),
) -> Instance:
    """Build the planning instance for the weights of `program` and for `layers`, with the rates of `descriptor`."""
    rates = descriptor.rates
    sizes = {part.name: part.nbytes for part in program.slices}
    weights = [WeightSpec(name, sizes[name], first, last) for name, (first, last) in program.uses().items()]
    kernels = {launch.kernel for launch in program.launches}
    opening = rates.session_seconds + rates.kernel_seconds * len(kernels) + rates.layer_seconds * len(program.launches)
    own = None if descriptor.shares_memory else OwnMemory(rates.load_seconds, rates.cached_bandwidth, rates.copy_bandwidth)
    return Instance(
        tuple(layers), tuple(weights), chunk_bytes, m_peak, rates.disk_bandwidth, notes, mode,
        MODES[mode].host_bandwidth(rates), opening, PASSING_BYTES,
        loader_threads=descriptor.loader_threads, shares_memory=descriptor.shares_memory, own=own,
    )  # fmt: skip


def with_host_budget(instance: Instance, program: Program, nbytes: int) -> Instance:
    """`instance` for sessions with a host budget of `nbytes`, of which staging and outputs leave a part for weights.

    Raises:
        UserError: the device shares the host's memory. Or a BudgetError: staging and outputs need more.
    """
    if instance.own is None:
        raise UserError("the device shares its memory with the host, and the budget limits both; leave the host budget out")
    others = host_ring_bytes(program, instance.loader_threads) + host_bytes(program)
    if nbytes < others:
        raise BudgetError(
            f"host budget of {nbytes} bytes is too small: staging and outputs need {others} bytes of host memory; give "
            "so much, or leave it out",
            smallest_bytes=others,
            binding="staging and outputs",
        )
    rounding = POOL_ALIGNMENT * len(instance.weights)  # places are whole pages
    room = max(0, nbytes - others - pinned_output_bytes(program) - rounding)
    return replace(instance, own=replace(instance.own, host_bytes=room))


def staged_within(instance: Instance, limit: int) -> Instance:
    """`instance` with as much staging as a memory limit of `limit` bytes permits; with all where it is in other memory."""
    if instance.own is not None:
        return replace(instance, piece_bytes=PASSING_BYTES)
    piece = max(1, min(PASSING_BYTES, limit // _PIECES))
    threads = max(min(LOADER_THREADS, instance.loader_threads), min(instance.loader_threads, limit // (_RINGS * piece)))
    return replace(instance, piece_bytes=piece, loader_threads=threads)


def staged_least(instance: Instance) -> Instance:
    """`instance` with the least staging that works, if the limit covers it."""
    if instance.own is not None:
        return instance
    return replace(instance, piece_bytes=1, loader_threads=min(LOADER_THREADS, instance.loader_threads))


def with_less_staging(instance: Instance, lack: int) -> Instance | None:
    """`instance` with smaller pieces in its staging: `lack` bytes less in all if the pieces stay large enough to be useful,
    else the least staging. None if it already has the least staging, or uses none.
    """
    least = staged_least(instance)
    if not instance.transfer.copies or instance == least:
        return None
    room = (instance.loader_threads * instance.piece_bytes - lack) // least.loader_threads
    piece = min(instance.piece_bytes // _LESS, room)
    return replace(least, piece_bytes=piece) if piece >= _OF_USE else least


_LESS = 4
"""The least factor by which pieces shrink if a plan does not fit: early reads need room as well."""

_OF_USE = 1 << 17
"""The least useful piece. Each piece is a call of the driver: in pieces of 8 KiB an H200 took 0.53 s for the first answer of
ResNet-50, in large ones 0.26 s. Smaller pieces only save the last bytes of the smallest budget."""

_RINGS = 8
"""The staging of all loader threads together is at most this part (divisor) of the limit. At least two threads remain."""

_PIECES = 32
"""A piece in staging is at most this part (divisor) of the limit, so that staging does not displace weights."""
