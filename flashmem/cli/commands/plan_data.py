"""What `flashmem plan` shows of a plan, as data: the rows of its launches, the reasons for W, the JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from flashmem.cli.commands.plan_steady import steady_rows
from flashmem.cli.commands.plan_summary import summary
from flashmem.planning.why import Reason, in_flight_bytes, moved_chunks, reasons
from flashmem.program.program import Program, raw_bytes
from flashmem.schedule.instance import LayerSpec
from flashmem.schedule.plan import OverlapPlan

if TYPE_CHECKING:
    from flashmem.tools.smallest_budget import SmallestBudget

_LAYERS_IN_JSON = 5000
"""The most launches for which the JSON lists launches and slices without --all; a larger list would have 100 MB."""


@dataclass(frozen=True)
class Shown:
    """A checked plan and its origin."""

    title: str
    device: str
    program: Program
    plan: OverlapPlan
    layers: tuple[LayerSpec, ...]  # of the planning problem
    seconds: dict[str, float] = field(default_factory=dict)
    smallest: SmallestBudget | None = None  # for a model; None for a bundle


@dataclass(frozen=True)
class LayerRow:
    """The row of launch ℓ. `in_flight_bytes` is the amount that C2 limits: streamed weights, staged or resident.

    `capacity_chunks` is C_ℓ of the problem, `allowed_chunks` the plan's limit (higher where a tier relaxed it).
    """

    layer: int
    name: str
    operators: tuple[str, ...]  # the fused ONNX nodes
    operator_class: str
    table_5: str  # the class by the operator's type
    curve: tuple[tuple[float, float], ...]  # (bytes moved during it, factor of its latency)
    capacity_chunks: int
    allowed_chunks: int
    moved_chunks: int
    in_flight_bytes: int
    loads: tuple[str, ...]  # weights released here: g_w is this layer
    frees: tuple[str, ...]  # weights freed after it


@dataclass(frozen=True)
class Because:
    """The reason for slices of one weight in W, grouped by kind of reason; `text` is that of the first slice."""

    weight: str
    kind: str
    slices: int
    of: int  # all slices of the weight
    nbytes: int
    text: str


def layer_rows(plan: OverlapPlan, program: Program, specs: Sequence[LayerSpec]) -> list[LayerRow]:
    """One row for each launch. A slice is in flight from its release time to its last use, or to the end if it is kept."""
    loads: dict[int, list[str]] = {}
    frees: dict[int, list[str]] = {}
    for w in plan.weights:
        if not w.preload:
            loads.setdefault(w.read_layer, []).append(w.name)
        if not (w.preload or w.keep):
            frees.setdefault(w.last_use, []).append(w.name)
    columns = zip(
        program.launches, specs, plan.capacities, plan.kept_capacities, moved_chunks(plan), in_flight_bytes(plan), strict=True
    )
    return [
        LayerRow(
            layer, launch.name, launch.operators, spec.operator_class, launch.operator_class, spec.beside,
            capacity, allowed, moved, held,
            tuple(loads.get(layer, ())), tuple(frees.get(layer, ())),
        )
        for layer, (launch, spec, capacity, allowed, moved, held) in enumerate(columns, start=1)
    ]  # fmt: skip


def why(plan: OverlapPlan, program: Program) -> list[Because]:
    """The reasons for the weights in W, by weight and kind of reason, in order of first use."""
    weight_of = {part.name: part.weight for part in program.slices}
    sizes = {w.name: w.nbytes for w in plan.weights}
    slices_of: dict[str, int] = {}
    for w in plan.weights:
        slices_of[weight_of[w.name]] = slices_of.get(weight_of[w.name], 0) + 1
    grouped: dict[tuple[str, str], list[Reason]] = {}
    for reason in reasons(plan):
        grouped.setdefault((weight_of[reason.name], reason.kind), []).append(reason)
    return [
        Because(weight, kind, len(each), slices_of[weight], sum(sizes[reason.name] for reason in each), each[0].text)
        for (weight, kind), each in grouped.items()
    ]


def several_launches(program: Program) -> dict[str, int]:
    """Weights with a separate launch for each slice, and the number of slices: too large for a launch, or for the limits."""
    weight_of = {part.name: part.weight for part in program.slices}
    launches = Counter[tuple[str, tuple[str, ...]]]()
    for launch in program.launches:
        read = {weight_of[str(arg.value)] for arg in launch.args if arg.kind == "slice"}
        launches.update((weight, launch.operators) for weight in read)
    return {weight: count for (weight, _), count in launches.items() if count > 1}


def plan_object(shown: Shown, show_all: bool) -> dict[str, Any]:
    """The JSON object of a plan; with `show_all` it lists launches and slices however many there are."""
    plan = shown.plan
    order = shown.program.order
    rows = layer_rows(plan, shown.program, shown.layers)
    because = why(plan, shown.program)
    data = {
        "model": shown.title,
        "device": shown.device,
        "memory_path": shown.program.memory_path,
        "kernels": _kernels(shown.program),
        "plan": {
            **summary(plan, shown.program),
            "lambda": plan.lambda_,
            "chunk_bytes": plan.chunk_bytes,
            "m_peak_bytes": plan.m_peak,
            "mode": plan.mode,
            "units": plan.units,
            "kept_bytes": sum(w.nbytes for w in plan.weights if w.keep),
            "relaxed_layers": len(plan.relaxed),
            "notes": list(plan.notes),
            "layers": len(rows),
            "slices": len(plan.weights),
            "activations": {"arena_bytes": shown.program.arena_bytes, "live_bytes": shown.program.live_bytes},
            "in_several_launches": several_launches(shown.program),
            "weights_bytes": sum(w.nbytes for w in plan.weights),
            "raw_bytes": raw_bytes(shown.program),
            "padded_bytes": shown.program.weights_bytes,
            "most_in_flight_bytes": max((row.in_flight_bytes for row in rows), default=0),
        },
        "order": {**asdict(order), "gap": order.gap} if order else None,
        "layout_bytes": {mode: layout.total_bytes for mode, layout in plan.layouts.items()},
        "why": [asdict(each) for each in because],
        "steady": [asdict(row) for row in steady_rows(shown.program, plan)],
    }
    if shown.smallest:
        data["smallest_budget_bytes"] = asdict(shown.smallest)
    if shown.seconds:
        data["seconds"] = shown.seconds
    if show_all or len(rows) <= _LAYERS_IN_JSON:
        data["layers"] = [asdict(row) for row in rows]
        data["weights"] = [asdict(weight) for weight in plan.weights]
    return data


def _kernels(program: Program) -> dict[str, int]:
    """The number of different kernels from each template."""
    names = sorted({launch.kernel for launch in program.launches})
    return dict(Counter(name.rsplit("_", 1)[0] for name in names))
