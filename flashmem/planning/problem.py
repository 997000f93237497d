"""The overlap-plan-generation problem (DESIGN §4; FlashMem §3.1): what is given, before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.capacity.model import CapacityModel, default_model, load_capacity
from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.program import OperatorClass, Program


@dataclass(frozen=True)
class LayerSpec:
    """Layer l. `capacity` is C_l in chunks; `seconds` its predicted latency with nothing streamed beside it."""

    name: str
    operator_class: OperatorClass
    capacity: int
    seconds: float


@dataclass(frozen=True)
class WeightSpec:
    """Weight w (a slice counts as one). `first_use` is i_w, `last_use` the layer that frees it; 1-based."""

    name: str
    nbytes: int
    first_use: int
    last_use: int


@dataclass(frozen=True)
class Problem:
    """Layers 1..N, the weights they use, S (`chunk_bytes`) and M_peak (`m_peak`, bytes in flight beside W)."""

    layers: tuple[LayerSpec, ...]
    weights: tuple[WeightSpec, ...]
    chunk_bytes: int
    m_peak: int
    load_bandwidth: float  # bytes per second, disk to resident: the clock of the latency objective
    notes: tuple[str, ...] = ()  # what its numbers rest on, for the plan

    def chunks(self, weight: WeightSpec) -> int:
        """T(w) = ceil(bytes(w) / S)."""
        return -(-weight.nbytes // self.chunk_bytes)


def build_problem(
    program: Program,
    descriptor: DeviceDescriptor,
    *,
    chunk_bytes: int,
    m_peak: int,
    mode: TransferMode | None = None,
    model: CapacityModel | None = None,
) -> Problem:
    """The problem that `program` poses on a device: one layer a launch, one weight a slice that some launch reads.

    `chunk_bytes` (S) and `m_peak` are bytes. Loads run at the slower of the device's disk and copy rates. `model` says what a
    layer can stream while it computes, in transfer `mode`; by default the descriptor's own, in its first mode.
    """
    model = model or default_model(descriptor, program.memory_path)
    mode = mode or descriptor.modes[program.memory_path][0]
    sizes = {s.name: s.nbytes for s in program.slices}
    layers = []
    for launch in program.launches:
        read = sum(sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice")
        capacity = load_capacity(model, launch, read, chunk_bytes, mode)
        layers.append(LayerSpec(launch.name, launch.operator_class, capacity, model.seconds(launch, read)))
    weights = [WeightSpec(name, sizes[name], first, last) for name, (first, last) in program.uses().items()]
    bandwidth = min(descriptor.rates.disk_bandwidth, descriptor.rates.copy_bandwidth)
    return Problem(tuple(layers), tuple(weights), chunk_bytes, m_peak, bandwidth, (model.note,))
