"""The overlap plan: plain data, written by the planner, stored in the bundle, played by the runtime.

Layers are 1..N, one kernel launch each. A weight here is a slice of the program. This is the one planning module the
runtime imports, so it needs the standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Objective = Literal["paper", "latency"]
Status = Literal["OPTIMAL", "FEASIBLE"]
Tier = Literal["cp-sat", "soft-threshold", "incremental-preload", "greedy"]


class PlanViolation(ValueError):
    """A plan that breaks one of C0-C3 (`constraint`)."""

    def __init__(self, constraint: str, message: str) -> None:
        super().__init__(f"{constraint}: {message}")
        self.constraint = constraint


@dataclass(frozen=True)
class PlannedWeight:
    """What the plan decided for weight w.

    A preloaded weight (w in W) has `load_layer` 0 and no `moves`; it is resident before layer 1 and to the end of the
    session. Any other is loaded from disk from layer `load_layer` (z_w) on: the loader may start once layer z_w - 1 is done.
    `moves` holds (layer, chunks) with chunks > 0, ascending: x_{w,l}. It is freed when layer `last_use` is done.
    """

    name: str
    nbytes: int
    chunks: int
    first_use: int
    last_use: int
    preload: bool
    load_layer: int = 0
    moves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TextureSlot:
    """A texture that several slices take turns in; large enough, in both directions, for each of them."""

    width: int
    height: int
    channel: Literal["float", "half"]
    nbytes: int


@dataclass(frozen=True)
class PoolLayout:
    """Where streamed and preloaded slices live in one transfer mode, settled before the first layer runs.

    `offsets`: slices placed in the one pool buffer of `pool_bytes` (buffer path; texture views in mode `alias`).
    `slots` and `slot_of`: textures, for modes that move into them (`dma`, `interleave` on the texture path).
    `staging`: place of each slice in the staging buffer of `staging_bytes` (`interleave`); in mode `dma` staging is a ring
    of equal parts, one for each loader thread, and `staging` is empty. In mode `map` nothing is allocated:
    `mapped_peak_bytes` is the most that is resident at once.
    """

    pool_bytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    slots: tuple[TextureSlot, ...] = ()
    slot_of: dict[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    staging: dict[str, int] = field(default_factory=dict)
    mapped_peak_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.pool_bytes + sum(slot.nbytes for slot in self.slots) + self.staging_bytes + self.mapped_peak_bytes


@dataclass(frozen=True)
class OverlapPlan:
    """Decisions, and how good they are known to be.

    `capacities` are the C_l the plan keeps (after relaxation, if the tier relaxed them). `objective` is the value of
    `objective_kind`; `bound` is proven, and `gap` = (objective - bound) / max(|objective|, 1). `expected_slowdown` is
    predicted latency over the latency with no memory limit, minus 1.
    """

    objective_kind: Objective
    chunk_bytes: int
    m_peak: int
    capacities: tuple[int, ...]
    weights: tuple[PlannedWeight, ...]
    status: Status
    objective: float
    bound: float
    tier: Tier
    solve_seconds: float
    lambda_: float = 0.9
    expected_slowdown: float = 0.0
    notes: tuple[str, ...] = ()
    layouts: dict[str, PoolLayout] = field(default_factory=dict)  # by transfer mode

    @property
    def gap(self) -> float:
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1.0)

    @property
    def preload_ratio(self) -> float:
        """Bytes of W over bytes of all weights."""
        total = sum(w.nbytes for w in self.weights)
        return sum(w.nbytes for w in self.weights if w.preload) / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OverlapPlan:
        """The plan that `to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""
        weights = tuple(
            PlannedWeight(**{**row, "moves": tuple((int(layer), int(n)) for layer, n in row["moves"])}) for row in data["weights"]
        )
        layouts = {
            mode: PoolLayout(**{**row, "slots": tuple(TextureSlot(**slot) for slot in row["slots"])})
            for mode, row in data["layouts"].items()
        }
        return cls(
            **{
                **data,
                "weights": weights,
                "layouts": layouts,
                "capacities": tuple(data["capacities"]),
                "notes": tuple(data["notes"]),
            }
        )
