"""The overlap-plan-generation problem (DESIGN §4; FlashMem §3.1): what is given, before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.program import OperatorClass


@dataclass(frozen=True)
class LayerSpec:
    """Layer ℓ. `capacity` is C_ℓ in chunks; `seconds` its predicted latency with nothing streamed beside it."""

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

    def chunks(self, weight: WeightSpec) -> int:
        """T(w) = ceil(bytes(w) / S)."""
        return -(-weight.nbytes // self.chunk_bytes)
