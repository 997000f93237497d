"""The overlap plan as data: the planner writes it, the bundle stores it, and the runtime executes it.

Layers are 1..N, one kernel launch each. A weight here is a slice of the program. The formulation is in
docs/reference/internals/planner.md: release times g_w, moves x_{w,l} with first mover z_w, load capacities C_l, and the memory
that each transfer mode holds (C2). With its checker (`schedule.check`) this is all that the runtime imports of planning, so it
needs the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flashmem.base.json import data_of
from flashmem.base.types import Channel, TransferMode
from flashmem.base.units import format_size
from flashmem.program.tensors import Slice
from flashmem.schedule.modes import MAP, MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.objectives import KINDS, ObjectiveKind

Units = Literal["share", "printed"]
"""Units of the paper's objective. "share": shares of all chunks and of all layers, which do not depend on S. "printed": chunks
and layers, as printed in the paper.
"""

Status = Literal["optimal", "optimal-for-resident-set", "bounded", "heuristic"]
"""The proven quality of a plan.

"optimal": no plan of its problem has a better objective. "optimal-for-resident-set": no plan with its resident set W has one.
"bounded": none is better than `bound`. "heuristic": nothing is proven.
"""

BoundScope = Literal["problem", "resident-set"]
"""The plans that a bound holds for, within the given limits on memory: all of them, or those with the same W."""

Solver = Literal["none", "dynamic-program", "cp-sat", "linear-program"]
"""The last solver that searched for a plan or for a bound.

The dynamic program of the paper's objective, then CP-SAT where that leaves a gap; or the linear programs of a limit on average
memory. Where OR-tools is not installed, as on a phone, only the first.
"""

SolverChoice = Literal["auto", "dp", "cp-sat"]
"""The solvers that a user permits."""

Tier = Literal["dynamic-program", "cp-sat", "soft-threshold", "incremental-preload", "greedy"]
Strategy = Literal["stream", "on-demand", "always-next", "next-operator", "same-op", "resident-first"]
"""The planner ("stream"), or the baseline for comparison (planning/baselines.py), that was asked for."""

Member = Strategy | Literal["large-resident"]
"""The member of the planner's portfolio that made a plan: its own ("stream"), its own with large slices in W, or a baseline."""


RELAXING_TIERS: frozenset[Tier] = frozenset({"soft-threshold", "incremental-preload", "greedy"})
"""Tiers of C4 that may raise the load capacity C_l of a layer."""


class PlanViolation(ValueError):  # noqa: N818 - a finding, named as such in the design
    """A plan violates `constraint`: one of C0-C3, "problem" (not a plan of this problem), "objective" or "layout"."""

    def __init__(self, constraint: str, message: str) -> None:
        super().__init__(constraint, message)  # pickle calls the class again with these arguments
        self.constraint = constraint

    def __str__(self) -> str:
        return ": ".join(self.args)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """The plan's decisions for weight w.

    A preloaded weight (w in W) has no `moves`; its place is reserved from before layer 1 to the end of the session. Weights are
    read from disk from their release time `read_layer` (g_w) on: the loader may start once layer g_w - 1 is done. A weight of
    W uses none of the bytes in flight, so its release time only determines which others are read before it; 0: none.
    `moves` holds (layer, chunks) with chunks > 0, ascending: x_{w,l}; the first of these layers is z_w. It is freed when layer
    `last_use` is done, unless `keep` is set: then it stays resident for later runs. A move at layer `first_use` itself
    (strategy "on-demand" only) is made before that layer computes, with nothing beside it. `pinned`: later runs copy it from
    the host tier, in the host budget that the plan was made for.
    """

    name: str
    nbytes: int
    chunks: int
    first_use: int
    last_use: int
    preload: bool
    read_layer: int = 0
    moves: tuple[tuple[int, int], ...] = ()
    keep: bool = False
    pinned: bool = False

    @property
    def first_mover(self) -> int:
        """z_w: the first layer that moves a part of the weight; for a weight of W, which never moves, the first to use it."""
        return self.moves[0][0] if self.moves else self.first_use

    @property
    def last_mover(self) -> int:
        """The last layer that moves a part of the weight; for a weight of W i_w."""
        return self.moves[-1][0] if self.moves else self.first_use

    def home_life(self, first: int, layers: int) -> tuple[int, int]:
        """First and last of `layers` layers during which its place is occupied, if it is filled from layer `first` on.

        0 means before layer 1. A weight kept for later runs has its own place, which nothing else may use before it either.
        """
        return (0, layers) if self.preload or self.keep else (first, self.last_use)


@dataclass(frozen=True, slots=True)
class TextureSlot:
    """A texture that several slices occupy in turn; large enough in both directions for each of them."""

    width: int
    height: int
    channel: Channel
    nbytes: int


PASSING_BYTES = 4 << 20
"""Bytes of a slice that pass through host memory at once on their way to device memory: large reads keep a disk busy."""


LOADER_THREADS = 2
"""Default number of threads that load weights; layouts give each a part of the ring."""


def passing_bytes(part: Slice, piece: int = PASSING_BYTES) -> int:
    """Bytes of the ring that `part` passes through: the whole slice, or pieces of `piece` bytes, at least an image row."""
    return min(part.file_bytes, max(piece, part.row_pitch))


@dataclass(frozen=True)
class PoolLayout:
    """Places of streamed and preloaded slices in one transfer mode, decided before the first layer runs.

    `offsets`: slices placed in the one pool buffer of `pool_bytes` (buffer path; texture views in mode `alias`).

    `slots` and `slot_of`: textures, for modes that move into them (`dma`, `interleave` on the texture path).

    Staging holds streamed slices until kernels move them home (`interleave`). Where host and device share memory it is one
    buffer of `staging_bytes`; `staging` has the offset of each slice, and loads read into it. Elsewhere each of `staging_slots`
    is one buffer, of so many bytes, and `staging_slot_of` names the slot that a slice occupies in its turn.

    `ring_bytes`: host memory, in equal parts for the loader threads. Loads pass through it in pieces of at most `piece_bytes`,
    or rows of an image. In `dma` these are all loads. In `interleave` they are those of W, and all loads if the layout has
    staging slots.

    `threads`: the number of loader threads. `segment_bytes`: about the most bytes of a segment, 0 for `PASSING_BYTES`.

    Mode `map` allocates nothing: `mapped_peak_bytes` is the most that is resident at once. `resident_bytes` of the total belong
    to W; M_peak limits the rest.
    """

    pool_bytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    slots: tuple[TextureSlot, ...] = ()
    slot_of: dict[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    staging: dict[str, int] = field(default_factory=dict)
    staging_slots: tuple[int, ...] = ()
    staging_slot_of: dict[str, int] = field(default_factory=dict)
    mapped_peak_bytes: int = 0
    piece_bytes: int = PASSING_BYTES
    resident_bytes: int = 0
    ring_bytes: int = 0
    threads: int = LOADER_THREADS
    segment_bytes: int = 0

    def larger_than(self, most: int) -> tuple[str, int] | None:
        """The first allocation above `most` bytes: what takes it, for a message, and its bytes."""
        allocations = (
            ("resident and streamed weights take", self.pool_bytes),
            ("staged weights take", max(self.staging_bytes, *self.staging_slots, 0)),
            ("the staging ring needs", self.ring_bytes),
            *(("a texture needs", slot.nbytes) for slot in self.slots),
        )
        return next((found for found in allocations if found[1] > most), None)

    @property
    def home_bytes(self) -> int:
        """Bytes of the pool and of textures."""
        return self.pool_bytes + sum(slot.nbytes for slot in self.slots)

    @property
    def all_staging_bytes(self) -> int:
        """Bytes of staging of either kind."""
        return self.staging_bytes + sum(self.staging_slots)

    @property
    def total_bytes(self) -> int:
        """All bytes of the layout."""
        return self.home_bytes + self.all_staging_bytes + self.ring_bytes + self.mapped_peak_bytes

    def budgeted_bytes(self, *, shares_memory: bool) -> int:
        """Bytes within a session's budget: all, or where host and device do not share their memory, those on the device."""
        return self.total_bytes - self.ring_bytes * (not shares_memory)

    def in_flight_bytes(self, *, shares_memory: bool) -> int:
        """Bytes outside W, which M_peak limits, as `budgeted_bytes` counts them."""
        return self.budgeted_bytes(shares_memory=shares_memory) - self.resident_bytes


@dataclass(frozen=True)
class OverlapPlan:
    """An overlap plan: its decisions, and bounds on their quality.

    `capacities` are the problem's C_l in chunks. They limit plans for the paper's objective, and all plans where kernels move
    the bytes; `relaxed` has (layer, chunks) where a tier let a layer move more. Plans for objectives in seconds count the cost
    of moves in any mode, so that the bound of one holds with and without C3.

    M_peak holds in transfer `mode`; large slices pass through staging in pieces of `piece_bytes`. `objective` is the value of
    `objective_kind`. `bound` is proven for the plans of `bound_scope`, within the given limits: lambda, and `bound_within`
    bytes in flight, None for any. `gap` = (objective - bound) / max(|objective|, 1e-9). `expected_slowdown` is predicted
    latency over the latency with no memory limit, minus 1. `m_peak_given`: M_peak as the user gave it; it does not limit W.
    `average_within`: the bytes of pages that lambda permits on average beside W, in mode `map`.
    """

    objective_kind: str
    chunk_bytes: int
    m_peak: int
    capacities: tuple[int, ...]
    weights: tuple[PlannedWeight, ...]
    objective: float
    bound: float
    bound_scope: BoundScope
    tier: Tier
    solve_seconds: float
    lambda_: float = 0.9
    expected_slowdown: float = 0.0
    notes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()  # weights that the caller requested in W
    layouts: dict[str, PoolLayout] = field(default_factory=dict)  # by transfer mode
    strategy: Strategy = "stream"
    member: Member = "stream"
    mode: TransferMode = MAP.name
    relaxed: tuple[tuple[int, int], ...] = ()
    piece_bytes: int = PASSING_BYTES
    units: Units = "printed"
    loader_threads: int = LOADER_THREADS
    shares_memory: bool = True  # host and device, of the plan's device
    bound_within: int | None = None
    m_peak_given: int | None = None
    average_within: int | None = None
    solver: Solver = "none"

    @property
    def kind(self) -> ObjectiveKind:
        """The objective."""
        return KINDS[self.objective_kind]

    @property
    def transfer(self) -> TransferKind:
        """What its transfer mode is."""
        return MODES[self.mode]

    @property
    def prices(self) -> tuple[float, float]:
        """The paper's prices: of a chunk in W, and of a layer between z_w and i_w."""
        if self.units == "printed":
            return self.lambda_, 1 - self.lambda_
        chunks = sum(w.chunks for w in self.weights)
        return self.lambda_ / max(1, chunks), (1 - self.lambda_) / max(1, len(self.weights) * len(self.capacities))

    @property
    def status(self) -> Status:
        """The proven quality. A plan for the paper's objective that relaxes a C_l is not one of its problem, for any bound."""
        if (self.relaxed and not self.kind.in_seconds) or self.bound <= 0 < self.objective:
            return "heuristic"
        if self.objective - self.bound > 1e-9 * abs(self.objective):
            return "bounded"
        return "optimal" if self.bound_scope == "problem" else "optimal-for-resident-set"

    @property
    def proof(self) -> str:
        """The status and the objective of the plan as a readable text."""
        proven = f", gap {self.gap:.2%}" if not self.status.startswith("optimal") and self.bound > 0 else ""
        beyond = f", with {format_size(self.resident_bytes)} in W, beyond M_peak" if self.passes_m_peak else ""
        return f"{self.status} for {self.kind.what}{proven}{beyond}"

    @property
    def gap(self) -> float:
        """The largest possible distance of the objective from the best one, as a fraction."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-9)

    @property
    def kept_capacities(self) -> tuple[int, ...]:
        """The C_l that the plan respects, with relaxed ones in place of the problem's."""
        raised = dict(self.relaxed)
        return tuple(raised.get(layer, chunks) for layer, chunks in enumerate(self.capacities, start=1))

    @property
    def resident_bytes(self) -> int:
        """Bytes of W."""
        return sum(w.nbytes for w in self.weights if w.preload)

    @property
    def passes_m_peak(self) -> bool:
        """Whether W alone has more bytes than the M_peak that the user gave."""
        return self.m_peak_given is not None and self.resident_bytes > self.m_peak_given

    @property
    def preload_ratio(self) -> float:
        """Bytes of W over bytes of all weights."""
        total = sum(w.nbytes for w in self.weights)
        return self.resident_bytes / total if total else 0.0

    @property
    def distance_ratio(self) -> float:
        """The distance term of the paper's objective, layers between z_w and i_w, as a share of N for every weight."""
        layers = sum(w.first_use - w.moves[0][0] for w in self.weights if w.moves and not w.preload)
        return layers / max(1, len(self.weights) * len(self.capacities))

    def later(self) -> OverlapPlan:
        """The plan of later runs: kept slices are resident, like W."""
        if not any(w.keep for w in self.weights):
            return self
        weights = tuple(replace(w, preload=True, read_layer=0, moves=(), keep=False) if w.keep else w for w in self.weights)
        return replace(self, weights=weights)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        made: dict[str, Any] = data_of(self)
        return made

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OverlapPlan:
        """The plan that `to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""
        if data["objective_kind"] not in KINDS:
            raise ValueError(f"no objective is named {data['objective_kind']!r}")
        weights = tuple(
            PlannedWeight(**{**row, "moves": tuple((int(layer), int(n)) for layer, n in row["moves"])})
            for row in data["weights"]
        )
        layouts = {
            mode: PoolLayout(
                **{
                    **row,
                    "slots": tuple(TextureSlot(**slot) for slot in row["slots"]),
                    "staging_slots": tuple(row["staging_slots"]),
                }
            )
            for mode, row in data["layouts"].items()
        }
        return cls(
            **{
                **data,
                "weights": weights,
                "layouts": layouts,
                "capacities": tuple(data["capacities"]),
                "notes": tuple(data["notes"]),
                "asked": tuple(data["asked"]),
                "relaxed": tuple((layer, chunks) for layer, chunks in data["relaxed"]),
            }
        )
