"""The overlap plan: plain data, written by the planner, stored in the bundle, played by the runtime.

Layers are 1..N, one kernel launch each. A weight here is a slice of the program. This is the one planning module the
runtime imports, so it needs the standard library only.

`OverlapPlan.check` verifies a plan by plain arithmetic. It shares no code with the planners, so that a mistake in one is
caught by the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from flashmem.program import Channel, Slice

if TYPE_CHECKING:
    from flashmem.planning.problem import Problem

Objective = Literal["paper", "latency"]
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

    A preloaded weight (w in W) has `load_layer` 0 and no `moves`; it is resident before layer 1 and to the end of the
    session. Any other is loaded from disk from layer `load_layer` (z_w) on: the loader may start once layer z_w - 1 is done.
    `moves` holds (layer, chunks) with chunks > 0, ascending: x_{w,l}. It is freed when layer `last_use` is done. A move at
    layer `first_use` itself (strategy "on-demand" only) is made before that layer computes, with nothing beside it.
    """

    name: str
    nbytes: int
    chunks: int
    first_use: int
    last_use: int
    preload: bool
    load_layer: int = 0
    moves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextureSlot:
    """A texture that several slices take turns in; large enough, in both directions, for each of them."""

    width: int
    height: int
    channel: Channel
    nbytes: int


PASSING_BYTES = 4 << 20
"""Bytes of a slice that wait in staging at once on their way to where kernels read them: large reads keep a disk busy."""


def passing_bytes(part: Slice) -> int:
    """Bytes of staging that `part` passes through: all of it, or several of its pieces, of an image a row at least."""
    return min(part.file_bytes, max(PASSING_BYTES, part.row_pitch))


@dataclass(frozen=True)
class PoolLayout:
    """Where streamed and preloaded slices live in one transfer mode, decided before the first layer runs.

    `offsets`: slices placed in the one pool buffer of `pool_bytes` (buffer path; texture views in mode `alias`).
    `slots` and `slot_of`: textures, for modes that move into them (`dma`, `interleave` on the texture path).
    `staging`: place of each slice in the staging buffer of `staging_bytes` (`interleave`); in mode `dma` staging is a ring
    of equal parts, one for each loader thread, and `staging` is empty. What is larger than `passing_bytes` passes through a
    part in pieces, as W does through its place in `interleave`. In mode `map` nothing is allocated: `mapped_peak_bytes` is the
    most that is resident at once.
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
        """Everything the layout takes, in bytes."""
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
    asked: tuple[str, ...] = ()  # weights that the caller wanted in W
    layouts: dict[str, PoolLayout] = field(default_factory=dict)  # by transfer mode
    strategy: Strategy = "stream"

    @property
    def gap(self) -> float:
        """How far the objective may be from the best one, as a fraction."""
        return max(0.0, self.objective - self.bound) / max(abs(self.objective), 1.0)

    @property
    def preload_ratio(self) -> float:
        """Bytes of W over bytes of all weights."""
        total = sum(w.nbytes for w in self.weights)
        return sum(w.nbytes for w in self.weights if w.preload) / total if total else 0.0

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
        if (self.chunk_bytes, self.m_peak) != (problem.chunk_bytes, problem.m_peak):
            raise PlanViolation("problem", "the plan was made for another chunk size or another M_peak")
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
        """C2: a chunk counts from the layer that moves it to the last use of its weight; never more than the weight itself."""
        layers = len(problem.layers)
        change = [0] * (layers + 2)
        for w in self.weights:
            if w.preload:
                continue
            counted = moved = 0
            for layer, chunks in w.moves:
                moved += chunks
                now = min(w.nbytes, moved * self.chunk_bytes)
                change[layer] += now - counted
                counted = now
            change[w.last_use + 1] -= counted
        resident = 0
        for layer in range(1, layers + 1):
            resident += change[layer]
            if resident > self.m_peak:
                raise PlanViolation("C2", f"{resident} bytes in flight at layer {layer}, M_peak is {self.m_peak}")

    def _check_capacities(self, problem: Problem) -> None:
        """C3, and capacities that only a relaxing tier may have raised."""
        if len(self.capacities) != len(problem.layers):
            raise PlanViolation("C3", f"{len(self.capacities)} capacities for {len(problem.layers)} layers")
        for layer, (kept, spec) in enumerate(zip(self.capacities, problem.layers, strict=True), start=1):
            if kept < spec.capacity or (kept > spec.capacity and self.tier not in RELAXING_TIERS):
                raise PlanViolation("C3", f"layer {layer} has capacity {kept}, the problem says {spec.capacity}")
        moved = [0] * len(self.capacities)
        for w in self.weights:
            for layer, chunks in w.moves:
                moved[layer - 1] += chunks
        for layer, (chunks, capacity) in enumerate(zip(moved, self.capacities, strict=True), start=1):
            if chunks > capacity:
                raise PlanViolation("C3", f"layer {layer} moves {chunks} chunks, its capacity is {capacity}")

    def _check_objective(self) -> None:
        """The paper's objective is recomputed; of the latency's, only that its claims agree with each other."""
        tolerance = 1e-6 * max(1.0, abs(self.objective))
        if self.objective_kind == "paper":
            preloaded = sum(w.chunks for w in self.weights if w.preload)
            distance = sum(w.first_use - w.load_layer for w in self.weights if not w.preload)
            if abs(self.lambda_ * preloaded + (1 - self.lambda_) * distance - self.objective) > tolerance:
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
                "asked": tuple(data.get("asked", ())),
            }
        )


def _check_moves(w: PlannedWeight, latest: int) -> None:
    """C0 and C1 of one weight, which is loaded and moved at layer `latest` or before."""
    if w.preload:
        if w.load_layer != 0 or w.moves:
            raise PlanViolation("C0", f"preloaded weight {w.name} is streamed as well")
        return
    layers = [layer for layer, _ in w.moves]
    if any(chunks < 1 for _, chunks in w.moves) or layers != sorted(set(layers)):
        raise PlanViolation("C0", f"the moves of weight {w.name} are not ascending layers with one or more chunks")
    if sum(chunks for _, chunks in w.moves) != w.chunks:
        raise PlanViolation("C0", f"weight {w.name} moves {sum(n for _, n in w.moves)} chunks of {w.chunks}")
    if layers and (layers[0] < 1 or layers[-1] > latest):
        raise PlanViolation("C0", f"weight {w.name} moves outside layers 1 to {latest}")
    if not 1 <= w.load_layer <= latest or (layers and w.load_layer > layers[0]):
        raise PlanViolation(
            "C1", f"weight {w.name} is loaded at layer {w.load_layer}, after it is moved or used, or before layer 1"
        )


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
        first = w.moves[0][0] if mode == "interleave" and w.moves else w.load_layer
        return first, w.last_use

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
    passing = {w.name: passing_bytes(dims[w.name]) if w.name in dims else min(w.nbytes, PASSING_BYTES) for w in weights}
    if mode == "dma" and layout.staging_bytes < max(passing.values(), default=0):
        raise PlanViolation("layout", "dma: a piece of the largest slice does not fit the staging ring")

    pool = [_Placed(w.name, layout.offsets[w.name], layout.offsets[w.name] + w.nbytes, *lives(w))
            for w in weights if w.name in layout.offsets]  # fmt: skip
    _check_disjoint(f"{mode} pool", pool, layout.pool_bytes)

    _check_slots(mode, layout, [(w, *lives(w)) for w in weights if w.name in layout.slot_of], dims)

    if layout.staging:
        # Preloaded slices pass through staging one after the other before layer 1, while the first streamed ones may come in.
        streamed = [_Placed(w.name, layout.staging[w.name], layout.staging[w.name] + w.nbytes, w.load_layer, w.moves[-1][0])
                    for w in weights if not w.preload and w.moves]  # fmt: skip
        _check_disjoint(f"{mode} staging", streamed, layout.staging_bytes)
        at_start = [p for p in streamed if p.first <= 1]
        for w in weights:
            if w.preload:
                place = _Placed(w.name, layout.staging[w.name], layout.staging[w.name] + passing[w.name], 0, 1)
                _check_disjoint(f"{mode} staging", [place], layout.staging_bytes)
                clash = next((p for p in at_start if p.offset < place.end and place.offset < p.end), None)
                if clash is not None:
                    raise PlanViolation("layout", f"{mode} staging: slices {w.name} and {clash.name} overlap")


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
