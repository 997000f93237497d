"""An instance of overlap-plan generation (docs/planner.md; FlashMem §3.1): what is given, before anything is decided."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.schedule.plan import LOADER_THREADS


@dataclass(frozen=True)
class LayerSpec:
    """Layer l. `capacity` is C_l in chunks; `seconds` its predicted latency with nothing streamed beside it.

    `beside` is s_l as a polyline: (bytes, factor) with both ascending, from (0, 1) on, and on beyond its end at its last slope.
    Empty: nothing that is moved beside the layer slows it down.
    """

    name: str
    operator_class: OperatorClass
    capacity: int
    seconds: float
    beside: tuple[tuple[float, float], ...] = ()

    def loaded_seconds(self, nbytes: float) -> float:
        """t_l * s_l(b_l): the latency with `nbytes` moved beside it."""
        if not nbytes or len(self.beside) < 2:
            return self.seconds
        at = min(bisect_right(self.beside, (nbytes, 0.0), 1), len(self.beside) - 1)
        (low, slow), (high, slower) = self.beside[at - 1], self.beside[at]
        return self.seconds * (slow + (slower - slow) * (nbytes - low) / (high - low))

    def bytes_within(self, seconds: float) -> float:
        """The most bytes of the curve with which `loaded_seconds` is no more than `seconds`; 0 where nothing slows it down."""
        reached = 0.0
        for (low, slow), (high, slower) in pairwise(self.beside):
            if self.seconds * slower > seconds:
                return low + (high - low) * max(0.0, seconds / self.seconds - slow) / (slower - slow)
            reached = high
        return reached


@dataclass(frozen=True)
class WeightSpec:
    """Weight w (a slice counts as one). `first_use` is i_w, `last_use` the layer that frees it; 1-based."""

    name: str
    nbytes: int
    first_use: int
    last_use: int


@dataclass(frozen=True)
class Instance:
    """Layers 1..N, the weights they use, S (`chunk_bytes`) and M_peak (`m_peak`, bytes in flight beside W).

    Resources: the disk brings `load_bandwidth` bytes per second into unified memory, from the moment a session is opened; from
    `opening_seconds` on layers run, and the host hands on what was read at `host_bandwidth` (to where the transfer `mode` takes
    it from). `piece_bytes` of a slice are handed on at a time, by each of `loader_threads`. `shares_memory`: host and
    device do. `w_may_grow`:
    slices too large for M_peak may go to W, also for the first answer: there will be no smaller slices.
    """

    layers: tuple[LayerSpec, ...]
    weights: tuple[WeightSpec, ...]
    chunk_bytes: int
    m_peak: int
    load_bandwidth: float
    notes: tuple[str, ...] = ()  # what its numbers rest on, for the plan
    mode: TransferMode = "map"
    host_bandwidth: float = math.inf
    opening_seconds: float = 0.0
    piece_bytes: int = 0
    w_may_grow: bool = False
    loader_threads: int = LOADER_THREADS
    shares_memory: bool = True

    def chunks(self, weight: WeightSpec) -> int:
        """T(w) = ceil(bytes(w) / S)."""
        return -(-weight.nbytes // self.chunk_bytes)
