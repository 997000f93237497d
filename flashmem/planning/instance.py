"""Build a planning instance from a program and a capacity model: the latency and the load capacity of each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.classes import DEFAULT, Thresholds, class_of, load_capacity
from flashmem.planning.capacity.model import CapacityModel
from flashmem.planning.pose import pose
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance, LayerSpec
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor, Rates


def build_instance(
    program: Program,
    descriptor: DeviceDescriptor,
    *,
    chunk_bytes: int | None,
    m_peak: int,
    mode: TransferMode | None = None,
    model: CapacityModel | None = None,
    thresholds: Thresholds = DEFAULT,
) -> Instance:
    """The planning problem of `program` on a device: one layer for each launch, one weight for each slice that a launch reads.

    `chunk_bytes` (S; None: `chosen_chunk`) and `m_peak` are bytes. `model` predicts how many bytes a layer can stream while it
    computes, in transfer `mode`. The defaults are the descriptor's own model and its first mode. C_l is what the class of a
    layer tolerates by `thresholds`; the class is that of the predicted response where the model tells it, else that of Table 5.

    Raises:
        UserError: the descriptor has no slowdowns of kernels for that transfer mode.
    """
    model = model or default_model(descriptor, program.memory_path)
    mode = mode or descriptor.modes[program.memory_path][0]
    sizes = {s.name: s.nbytes for s in program.slices}
    reads = [sum(sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice") for launch in program.launches]
    model.prepare(zip(program.launches, reads, strict=True), mode)
    known: dict[tuple[object, ...], _Priced] = {}
    priced: list[_Priced] = []
    for launch, read in zip(program.launches, reads, strict=True):
        key = (launch.kernel, launch.operator_class, launch.macs, launch.bytes, launch.global_size, launch.local_size, read)
        if key not in known:
            kind = class_of(model, launch, read, mode, descriptor.rates, thresholds)
            capacity = load_capacity(model, launch, read, mode, kind, thresholds)
            beside = slowdown_curve(model, launch, read, mode, descriptor.rates)
            known[key] = _Priced(kind, capacity, model.seconds(launch, read), beside)
        priced.append(known[key])
    if chunk_bytes is None:
        chunk_bytes = chosen_chunk([each.capacity for each in priced if each.kind == "reusable"])
    layers = [
        LayerSpec(launch.name, each.kind, int(each.capacity // chunk_bytes), each.seconds, each.beside)
        for launch, each in zip(program.launches, priced, strict=True)
    ]
    notes = (model.note, *_classes_note(program.launches, layers))
    return pose(program, layers, descriptor, mode, chunk_bytes=chunk_bytes, m_peak=m_peak, notes=notes)


@dataclass(frozen=True)
class _Priced:
    """What the model says of a launch: its class, C_l in bytes, latency alone, and s_l."""

    kind: OperatorClass
    capacity: float
    seconds: float
    beside: tuple[tuple[float, float], ...]


def _classes_note(launches: Sequence[Launch], layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Says where the predicted classes are not those of Table 5, if they differ."""
    differing = Counter(
        f"{launch.operator_class} to {layer.operator_class}"
        for launch, layer in zip(launches, layers, strict=True)
        if launch.operator_class != layer.operator_class
    )
    if not differing:
        return ()
    said = ", ".join(f"{count} from {change}" for change, count in sorted(differing.items()))
    what = f"by the predicted response, {sum(differing.values())} of {len(layers)} launches have another class than in Table 5"
    return (f"{what}: {said}",)


def chosen_chunk(capacities: Sequence[float]) -> int:
    """The chunk size S for layers with `capacities` bytes: a power of two, at most a quarter of the median capacity.

    It is between 16 KiB, below which the number of chunks only slows planning down, and 1 MiB.
    """
    carried = [nbytes for nbytes in capacities if nbytes > 0]
    wished = median(carried) / _CHUNKS_CARRIED if carried else _MOST_CHUNK
    return int(2 ** math.floor(math.log2(min(max(wished, _LEAST_CHUNK), _MOST_CHUNK))))


_CHUNKS_CARRIED = 4
_LEAST_CHUNK = 1 << 14
_MOST_CHUNK = 1 << 20


def slowdown_curve(
    model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode, rates: Rates
) -> tuple[tuple[float, float], ...]:
    """s_l of `launch` in the form of `LayerSpec.beside`, at several amounts of bytes up to three times those it accesses.

    A model's `loaded_seconds` end when both the launch and the loads during it are done. If loader threads move the bytes, the
    clock models their time as a separate resource. Then s_l includes only the time that they cost the launch: the mode's
    contention, while they work during the launch.
    """
    alone = model.seconds(launch, weight_bytes)
    own = max(1, launch.bytes + weight_bytes)
    points = [(0.0, 1.0)]
    for ratio in _RATIOS:
        loaded = model.loaded_seconds(launch, weight_bytes, ratio * own, mode)
        if not MODES[mode].by_kernels:
            taken = rates.contention_of(mode)
            always = alone / (1 - taken) if taken < 1 else math.inf
            loaded = min(loaded, alone + taken * ratio * own / MODES[mode].last_bandwidth(rates), always)
        points.append((ratio * own, max(points[-1][1], loaded / alone)))
    return tuple(points)


_RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0, 3.0)
"""Bytes beside a launch over its own bytes, at which s_l is sampled; s_l is linear between samples."""
