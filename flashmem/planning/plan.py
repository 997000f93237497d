"""The overlap plan: plain data, written by the planner, stored in the bundle, played by the runtime.

Layers are 1..N, one kernel launch each. A weight here is a slice of the program. docs/planner.md has the formulation: read
gates
g_w, moves x_{w,l} with first mover z_w, load capacities C_l, and the memory that each transfer mode holds (C2). This is the one
planning module the runtime imports, so it needs the standard library only.

`OverlapPlan.check` verifies a plan by plain arithmetic. It shares no code with the planners, so that a mistake in one is
caught by the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from flashmem.program import Channel, Slice

if TYPE_CHECKING:
    from flashmem.planning.problem import Problem

Objective = Literal["first", "steady", "paper"]
"""What is minimised: the first answer, later runs within the same memory, or the paper's weighted sum."""

Units = Literal["share", "printed"]
"""Of the paper's objective: shares of all chunks and of all layers, which do not depend on S, or chunks and layers as
printed."""

Mode = Literal["map", "alias", "dma", "interleave"]
"""How weights travel; `flashmem.device.TransferMode` by another name, so that this module needs no other."""

Status = Literal["OPTIMAL", "FEASIBLE"]
Tier = Literal["dynamic-program", "cp-sat", "soft-threshold", "incremental-preload", "greedy"]
Strategy = Literal["stream", "on-demand", "always-next", "next-operator", "same-op", "resident-first"]
"""Who decided: "stream" is the planner, the others are baselines to compare it with (planning/baselines.py)."""


RELAXING_TIERS: frozenset[Tier] = frozenset({"soft-threshold", "incremental-preload", "greedy"})
"""Tiers of C4 that may raise the load capacity C_l of a layer."""


class PlanViolation(ValueError):  # noqa: N818 - a finding, named as such in the design
    """A plan that breaks `constraint`: one of C0-C3, "problem" (not a plan of this problem), "objective" or "layout"."""

    def __init__(self, constraint: str, message: str) -> None:
        super().__init__(f"{constraint}: {message}")
        self.constraint = constraint


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """What the plan decided for weight w.

    A preloaded weight (w in W) has `read_layer` 0 and no `moves`; it is resident before layer 1 and to the end of the
    session. Any other is read from disk behind its read gate `read_layer` (g_w): the loader may start once layer g_w - 1 is
    done.
    `moves` holds (layer, chunks) with chunks > 0, ascending: x_{w,l}; the first of these layers is z_w. It is freed when layer
    `last_use` is done, unless it is to `keep`: then it stays for later runs, which find it resident. A move at layer
    `first_use`
    itself (strategy "on-demand" only) is made before that layer computes, with nothing beside it.
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

    @property
    def first_mover(self) -> int:
        """z_w: the first layer that moves a part of it; 0 for a weight of W."""
        return self.moves[0][0] if self.moves else self.read_layer

    @property
    def last_mover(self) -> int:
        """The last layer that moves a part of it; 0 for a weight of W."""
        return self.moves[-1][0] if self.moves else self.read_layer

    def home_life(self, first: int, layers: int) -> tuple[int, int]:
        """First and last of `layers` layers at which its place is taken, if it is filled from `first` on; 0: before layer 1.

        What is kept for later runs has a place of its own, which nothing may use before it either.
        """
        return (0, layers) if self.preload or self.keep else (first, self.last_use)


@dataclass(frozen=True, slots=True)
class TextureSlot:
    """A texture that several slices take turns in; large enough, in both directions, for each of them."""

    width: int
    height: int
    channel: Channel
    nbytes: int


PASSING_BYTES = 4 << 20
"""Bytes of a slice that wait in staging at once on their way to where kernels read them: large reads keep a disk busy."""


LOADER_THREADS = 2
"""Threads that load weights; layouts give each a part of staging."""


def passing_bytes(part: Slice, piece: int = PASSING_BYTES) -> int:
    """Bytes of staging that `part` passes through: all of it, or pieces of `piece` bytes, of an image a row at least."""
    return min(part.file_bytes, max(piece, part.row_pitch))


@dataclass(frozen=True)
class PoolLayout:
    """Where streamed and preloaded slices live in one transfer mode, decided before the first layer runs.

    `offsets`: slices placed in the one pool buffer of `pool_bytes` (buffer path; texture views in mode `alias`).
    `slots` and `slot_of`: textures, for modes that move into them (`dma`, `interleave` on the texture path).
    `staging`: place of each slice in the staging buffer of `staging_bytes` (`interleave`); in mode `dma` staging is a ring
    of equal parts, one for each loader thread, and `staging` is empty. What is larger than `piece_bytes` passes through a
    part in pieces, as W does through its place in `interleave`. In mode `map` nothing is allocated: `mapped_peak_bytes` is the
    most that is resident at once. `resident_bytes` of all this are the places of W; M_peak limits the rest.
    `entrance_bytes`: what each thread has of the place in staging that W passes through (`interleave`).
    """

    pool_bytes: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    slots: tuple[TextureSlot, ...] = ()
    slot_of: dict[str, int] = field(default_factory=dict)
    staging_bytes: int = 0
    staging: dict[str, int] = field(default_factory=dict)
    mapped_peak_bytes: int = 0
    piece_bytes: int = PASSING_BYTES
    resident_bytes: int = 0
    entrance_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Everything the layout takes, in bytes."""
        return self.pool_bytes + sum(slot.nbytes for slot in self.slots) + self.staging_bytes + self.mapped_peak_bytes

    @property
    def in_flight_bytes(self) -> int:
        """What it takes beside W: the bytes that M_peak limits."""
        return self.total_bytes - self.resident_bytes


@dataclass(frozen=True)
class OverlapPlan:
    """Decisions, and how good they are known to be.

    `capacities` are the problem's C_l in chunks; `relaxed` has (layer, chunks) where a tier let a layer move more than that.
    M_peak holds in transfer `mode`; large slices pass through staging in pieces of `piece_bytes`. `objective` is the value
    of `objective_kind`; `bound` is proven, and `gap` = (objective -
    bound) / max(|objective|, 1e-9). `expected_slowdown` is predicted latency over the latency with no memory limit, minus 1.
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
    asked: tuple[str, ...] = ()  # weights that the caller wanted in W
    layouts: dict[str, PoolLayout] = field(default_factory=dict)  # by transfer mode
    strategy: Strategy = "stream"
    mode: Mode = "map"
    relaxed: tuple[tuple[int, int], ...] = ()
    piece_bytes: int = PASSING_BYTES
    units: Units = "printed"

    @property
    def prices(self) -> tuple[float, float]:
        """What the paper's objective charges for a chunk in W, and for a layer between z_w and i_w."""
        if self.units == "printed":
            return self.lambda_, 1 - self.lambda_
        chunks = sum(w.chunks for w in self.weights)
        return self.lambda_ / max(1, chunks), (1 - self.lambda_) / max(1, len(self.weights) * len(self.capacities))

    @property
    def gap(self) -> float:
        """How far the objective may be from the best one, as a fraction."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1e-9)

    @property
    def kept_capacities(self) -> tuple[int, ...]:
        """The C_l that the plan keeps to, those that were relaxed among them."""
        raised = dict(self.relaxed)
        return tuple(raised.get(layer, chunks) for layer, chunks in enumerate(self.capacities, start=1))

    @property
    def preload_ratio(self) -> float:
        """Bytes of W over bytes of all weights."""
        total = sum(w.nbytes for w in self.weights)
        return sum(w.nbytes for w in self.weights if w.preload) / total if total else 0.0

    @property
    def distance_ratio(self) -> float:
        """What the paper's objective counts as distance, the layers between z_w and i_w, as a share of N for every weight."""
        layers = sum(w.first_use - w.moves[0][0] for w in self.weights if w.moves and not w.preload)
        return layers / max(1, len(self.weights) * len(self.capacities))

    def later(self) -> OverlapPlan:
        """The plan of later runs: what is to keep is resident, as W is."""
        if not any(w.keep for w in self.weights):
            return self
        weights = tuple(replace(w, preload=True, read_layer=0, moves=(), keep=False) if w.keep else w for w in self.weights)
        return replace(self, weights=weights)

    def check(self, problem: Problem, slices: Sequence[Slice] = ()) -> None:
        """Verify the plan against `problem`: C0-C3 (DESIGN section 4; FlashMem section 3), the paper's objective, the layouts.

        With `slices` (the program's) the texture slots are also checked to be large enough for what they hold. Only the
        strategy "on-demand" may load and move at layer i_w itself, which then waits for it.

        Raises:
            PlanViolation: the first thing found wrong.
        """
        self._check_weights(problem)
        for w in self.weights:
            _check_moves(w, w.first_use if self.strategy == "on-demand" else w.first_use - 1)
        self._check_memory(problem)
        self._check_capacities(problem)
        self._check_objective()
        dims = {s.name: s for s in slices}
        for mode, layout in self.layouts.items():
            _check_layout(mode, layout, self.weights, len(self.capacities), dims)

    def _check_weights(self, problem: Problem) -> None:
        """Every weight of the problem once, as the problem describes it."""
        if (self.chunk_bytes, self.m_peak, self.mode) != (problem.chunk_bytes, problem.m_peak, problem.mode):
            raise PlanViolation("problem", "the plan was made for another chunk size, another M_peak or another transfer mode")
        planned = {w.name: w for w in self.weights}
        if len(planned) != len(self.weights) or planned.keys() != {w.name for w in problem.weights}:
            raise PlanViolation("problem", "the plan does not hold each weight of the problem once")
        for spec in problem.weights:
            w = planned[spec.name]
            chunks = -(-spec.nbytes // problem.chunk_bytes)
            if (w.nbytes, w.chunks, w.first_use, w.last_use) != (spec.nbytes, chunks, spec.first_use, spec.last_use):
                raise PlanViolation("problem", f"weight {w.name} differs from the problem's in size or use")
            if not 1 <= w.first_use <= w.last_use <= len(problem.layers):
                raise PlanViolation("problem", f"weight {w.name} is used outside layers 1 to {len(problem.layers)}")

    def _check_memory(self, problem: Problem) -> None:
        """C2: what the runtime holds beside W in the plan's mode, at every layer, and what the layout of that mode takes."""
        layers = len(problem.layers)
        change = [0] * (layers + 2)
        for w in self.weights:
            if w.preload:
                continue
            home, last = w.read_layer, layers if w.keep else w.last_use
            if self.mode == "interleave":  # in staging from its gate to its last move, at home from its first
                change[w.read_layer] += w.nbytes
                change[w.moves[-1][0] + 1] -= w.nbytes
                home = w.moves[0][0]
            change[1 if w.keep else home] += w.nbytes
            change[last + 1] -= w.nbytes
        held = 0
        for layer in range(1, layers + 1):
            held += change[layer]
            if held > self.m_peak:
                raise PlanViolation("C2", f"{held} bytes in flight at layer {layer}, M_peak is {self.m_peak}")
        layout = self.layouts.get(self.mode)
        if layout is not None and layout.in_flight_bytes > self.m_peak:
            raise PlanViolation("C2", f"the layout takes {layout.in_flight_bytes} bytes beside W, M_peak is {self.m_peak}")

    def _check_capacities(self, problem: Problem) -> None:
        """C3, and capacities that only a relaxing tier may have raised."""
        if len(self.capacities) != len(problem.layers):
            raise PlanViolation("C3", f"{len(self.capacities)} capacities for {len(problem.layers)} layers")
        for layer, (stated, spec) in enumerate(zip(self.capacities, problem.layers, strict=True), start=1):
            if stated != spec.capacity:
                raise PlanViolation("C3", f"layer {layer} has capacity {stated}, the problem says {spec.capacity}")
        allowed = list(self.capacities)
        for layer, chunks in self.relaxed:
            if self.tier not in RELAXING_TIERS:
                raise PlanViolation("C3", f"tier {self.tier} has relaxed layer {layer}")
            if not 1 <= layer <= len(allowed) or chunks <= allowed[layer - 1]:
                raise PlanViolation("C3", f"layer {layer} is not relaxed by {chunks} chunks")
            allowed[layer - 1] = chunks
        moved = [0] * len(self.capacities)
        for w in self.weights:
            for layer, chunks in w.moves:
                moved[layer - 1] += chunks
        for layer, (chunks, capacity) in enumerate(zip(moved, allowed, strict=True), start=1):
            if chunks > capacity:
                raise PlanViolation("C3", f"layer {layer} moves {chunks} chunks, its capacity is {capacity}")

    def _check_objective(self) -> None:
        """The paper's objective is recomputed; of the latency's, only that its claims agree with each other."""
        tolerance = 1e-6 * abs(self.objective) + 1e-12
        if self.objective_kind == "paper":
            preloaded = sum(w.chunks for w in self.weights if w.preload)
            distance = sum(w.first_use - w.moves[0][0] for w in self.weights if not w.preload)
            value = self.lambda_ * preloaded + (1 - self.lambda_) * distance
            if self.units == "share":
                everything, layers = sum(w.chunks for w in self.weights), len(self.weights) * len(self.capacities)
                value = self.lambda_ * preloaded / max(1, everything) + (1 - self.lambda_) * distance / max(1, layers)
            if abs(value - self.objective) > tolerance:
                raise PlanViolation("objective", f"the objective is not {self.objective}")
        if self.bound > self.objective + tolerance:
            raise PlanViolation("objective", f"bound {self.bound} above objective {self.objective}")
        if self.status == "OPTIMAL" and self.objective - self.bound > tolerance:
            raise PlanViolation("objective", "called OPTIMAL with a gap")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OverlapPlan:
        """The plan that `to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""
        weights = tuple(
            PlannedWeight(**{**row, "moves": tuple((int(layer), int(n)) for layer, n in row["moves"])})
            for row in data["weights"]
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
                "asked": tuple(data["asked"]),
                "relaxed": tuple((layer, chunks) for layer, chunks in data["relaxed"]),
            }
        )


def _check_moves(w: PlannedWeight, latest: int) -> None:
    """C0 and C1 of one weight, which is read and moved at layer `latest` or before."""
    if w.preload:
        if w.read_layer != 0 or w.moves:
            raise PlanViolation("C0", f"preloaded weight {w.name} is streamed as well")
        return
    layers = [layer for layer, _ in w.moves]
    if any(chunks < 1 for _, chunks in w.moves) or layers != sorted(set(layers)):
        raise PlanViolation("C0", f"the moves of weight {w.name} are not ascending layers with one or more chunks")
    if sum(chunks for _, chunks in w.moves) != w.chunks:
        raise PlanViolation("C0", f"weight {w.name} moves {sum(n for _, n in w.moves)} chunks of {w.chunks}")
    if layers and (layers[0] < 1 or layers[-1] > latest):
        raise PlanViolation("C0", f"weight {w.name} moves outside layers 1 to {latest}")
    if not layers or not 1 <= w.read_layer <= layers[0]:
        raise PlanViolation("C1", f"weight {w.name} is read at layer {w.read_layer}, after it is moved, or before layer 1")


@dataclass(frozen=True)
class _Placed:
    """Bytes [offset, end) taken during layers first..last."""

    name: str
    offset: int
    end: int
    first: int
    last: int


def _check_layout(
    mode: str, layout: PoolLayout, weights: tuple[PlannedWeight, ...], layers: int, dims: dict[str, Slice]
) -> None:
    """Each slice has the places its mode needs, and no two slices share one while both are alive."""

    def lives(w: PlannedWeight) -> tuple[int, int]:
        if w.preload:
            return 0, layers
        if w.keep:  # later runs find it there from the start
            return 0, layers
        return w.moves[0][0] if mode == "interleave" else w.read_layer, w.last_use

    if mode == "map":
        changes = [0] * (layers + 2)
        for w in weights:
            first, last = lives(w)
            changes[first] += w.nbytes
            changes[last + 1] -= w.nbytes
        if max(accumulate(changes)) > layout.mapped_peak_bytes:
            raise PlanViolation("layout", "map: more is resident at once than the layout says")
        return

    for w in weights:
        if (w.name in layout.offsets) == (w.name in layout.slot_of):
            raise PlanViolation("layout", f"{mode}: slice {w.name} must be in the pool or in a texture slot")
        if mode == "interleave" and w.name not in layout.staging:
            raise PlanViolation("layout", f"{mode}: slice {w.name} has no place in staging")
    piece = layout.piece_bytes
    passing = {w.name: passing_bytes(dims[w.name], piece) if w.name in dims else min(w.nbytes, piece) for w in weights}
    if mode == "dma" and layout.staging_bytes < max(passing.values(), default=0):
        raise PlanViolation("layout", "dma: a piece of the largest slice does not fit the staging ring")

    pool = [_Placed(w.name, layout.offsets[w.name], layout.offsets[w.name] + w.nbytes, *lives(w))
            for w in weights if w.name in layout.offsets]  # fmt: skip
    _check_disjoint(f"{mode} pool", pool, layout.pool_bytes)

    _check_slots(mode, layout, [(w, *lives(w)) for w in weights if w.name in layout.slot_of], dims)

    if layout.staging:
        # W passes through one place, its entrance, which is taken all the time.
        staged = [_Placed(w.name, layout.staging[w.name], layout.staging[w.name] + w.nbytes, w.read_layer, w.moves[-1][0])
                  for w in weights if not w.preload]  # fmt: skip
        preloaded = [w for w in weights if w.preload]
        if preloaded:
            start = min(layout.staging[w.name] for w in preloaded)
            end = max(layout.staging[w.name] for w in preloaded) + LOADER_THREADS * layout.entrance_bytes
            if layout.entrance_bytes < max(passing[w.name] for w in preloaded):
                raise PlanViolation("layout", f"{mode}: a piece of a slice of W does not fit its entrance")
            staged.append(_Placed("of W", start, end, 0, layers))
        _check_disjoint(f"{mode} staging", staged, layout.staging_bytes)


def _check_slots(mode: str, layout: PoolLayout, held: list[tuple[PlannedWeight, int, int]], dims: dict[str, Slice]) -> None:
    """Texture slots: one slice at a time, and each slice fits."""
    turns: dict[int, list[tuple[int, int, str]]] = {}
    for w, first, last in held:
        number = layout.slot_of[w.name]
        if not 0 <= number < len(layout.slots):
            raise PlanViolation("layout", f"{mode}: slice {w.name} names texture slot {number} of {len(layout.slots)}")
        turns.setdefault(number, []).append((first, last, w.name))
        slot, part = layout.slots[number], dims.get(w.name)
        if part and (part.width > slot.width or part.height > slot.height or part.channel != slot.channel):
            raise PlanViolation("layout", f"{mode}: slice {w.name} does not fit its texture slot")
    for taken in turns.values():
        taken.sort()
        for (_, last, name), (first, _, other) in pairwise(taken):
            if first <= last:
                raise PlanViolation("layout", f"{mode}: slices {name} and {other} share a texture slot at layer {first}")


def _check_disjoint(where: str, places: Iterable[_Placed], size: int) -> None:
    """Sweep over the layers; the places alive at once are kept sorted by offset, so a new one has two neighbours to fear."""
    events = sorted(
        [(p.first, 1, p) for p in places] + [(p.last + 1, 0, p) for p in places], key=lambda e: (e[0], e[1], e[2].offset)
    )
    alive: list[tuple[int, int, str]] = []
    for _, opens, p in events:
        if p.offset < 0 or p.end > size:
            raise PlanViolation("layout", f"{where}: slice {p.name} lies outside its {size} bytes")
        entry = (p.offset, p.end, p.name)
        at = bisect_left(alive, entry)
        if not opens:
            del alive[at]
            continue
        for neighbour in alive[max(0, at - 1) : at + 1]:
            if neighbour[0] < p.end and p.offset < neighbour[1]:
                raise PlanViolation("layout", f"{where}: slices {neighbour[2]} and {p.name} overlap")
        alive.insert(at, entry)
