"""An instance from a program and a capacity model: what each layer takes, and what it can stream while it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from flashmem.base.types import TransferMode
from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.model import CapacityModel, load_capacity
from flashmem.planning.pose import pose
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance, LayerSpec
from flashmem.target.descriptor import DeviceDescriptor, Rates


def build_instance(
    program: Program,
    descriptor: DeviceDescriptor,
    *,
    chunk_bytes: int | None,
    m_peak: int,
    mode: TransferMode | None = None,
    model: CapacityModel | None = None,
) -> Instance:
    """The problem that `program` poses on a device: one layer a launch, one weight a slice that some launch reads.

    `chunk_bytes` (S; None: `chosen_chunk`) and `m_peak` are bytes. `model` says what a layer can stream while it computes,
    in transfer `mode`; by
    default the descriptor's own, in its first mode.

    Raises:
        UserError: the descriptor does not say how transfers of that mode slow down what computes.
    """
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
    return pose(program, layers, descriptor, mode, chunk_bytes=chunk_bytes, m_peak=m_peak, notes=(model.note,))


def chosen_chunk(capacities: Sequence[float]) -> int:
    """S for layers that can carry `capacities` bytes: a power of two of which the median layer carries four at least.

    Between 16 KiB, below which there are more chunks than a plan needs, and 1 MiB.
    """
    carried = [nbytes for nbytes in capacities if nbytes > 0]
    wished = median(carried) / _CHUNKS_CARRIED if carried else _MOST_CHUNK
    return int(2 ** math.floor(math.log2(min(max(wished, _LEAST_CHUNK), _MOST_CHUNK))))


_CHUNKS_CARRIED = 4
_LEAST_CHUNK, _MOST_CHUNK = 1 << 14, 1 << 20


def slowdown_curve(
    model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode, rates: Rates
) -> tuple[tuple[float, float], ...]:
    """s_l of `launch` as `LayerSpec.beside` has it, at a few amounts of bytes up to three times what it reads and writes.

    A model's `loaded_seconds` end when the launch and the loads beside it are done. Where loader threads move bytes, the clock
    has their time as a resource of its own, and here is only what they take from the launch: the mode's contention, for as long
    as they are at work beside it.
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
"""Bytes beside a launch over its own at which s_l is asked for; between them it is a line."""
