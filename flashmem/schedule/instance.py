"""An instance of overlap-plan generation: the input of the planners (docs/reference/internals/planner.md; FlashMem §3.1)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.schedule.modes import MAP, MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.plan import LOADER_THREADS


@dataclass(frozen=True)
class LayerSpec:
    """Layer l. `capacity` is C_l in chunks; `seconds` is its predicted latency while nothing is streamed.

    `beside` is the slowdown s_l as a polyline of (bytes moved during it, factor), both ascending, from (0, 1). Beyond its end
    the last slope continues. If it is empty, moved bytes do not slow the layer down.
    """

    name: str
    operator_class: OperatorClass
    capacity: int
    seconds: float
    beside: tuple[tuple[float, float], ...] = ()

    def loaded_seconds(self, nbytes: float) -> float:
        """t_l * s_l(b_l): the latency in seconds while `nbytes` bytes are moved during the layer."""
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
class OwnMemory:
    """The way of a load to a device with memory of its own: a thread issues it, host threads read it, one engine copies it.

    Issuing takes `load_seconds`, for one load at a time. Bytes in the page cache are read into pinned memory at
    `read_bandwidth` bytes per second. Bytes in pinned memory are copied at `copy_bandwidth`, one load after the other.
    `host_bytes`: what sessions keep of weights in pinned memory at most; None: not known when planning.
    """

    load_seconds: float
    read_bandwidth: float
    copy_bandwidth: float
    host_bytes: int | None = None


@dataclass(frozen=True)
class Instance:
    """Layers 1..N, the weights they use, S (`chunk_bytes`) and M_peak (`m_peak`, bytes in flight outside W).

    Resources: the disk reads `load_bandwidth` bytes per second into unified memory, from the opening of the session on. Layers
    run from `opening_seconds` on. The host forwards the bytes read at `host_bandwidth` bytes per second, to the source of
    transfer `mode`. Each of `loader_threads` forwards `piece_bytes` of a slice at a time. `shares_memory`: host and device
    share memory; if not, `own` has the steps of loads. `w_may_grow`: slices too large for M_peak may join W, also for the
    first answer, because slices will not get smaller.
    """

    layers: tuple[LayerSpec, ...]
    weights: tuple[WeightSpec, ...]
    chunk_bytes: int
    m_peak: int
    load_bandwidth: float
    notes: tuple[str, ...] = ()  # the assumptions behind its numbers, for the plan
    mode: TransferMode = MAP.name
    host_bandwidth: float = math.inf
    opening_seconds: float = 0.0
    piece_bytes: int = 0
    w_may_grow: bool = False
    loader_threads: int = LOADER_THREADS
    shares_memory: bool = True
    own: OwnMemory | None = None

    @property
    def transfer(self) -> TransferKind:
        """What its transfer mode is."""
        return MODES[self.mode]

    def chunks(self, weight: WeightSpec) -> int:
        """Number of chunks of a weight: T(w) = ceil(bytes(w) / S)."""
        return -(-weight.nbytes // self.chunk_bytes)
