"""`flashmem plan`: the overlap plan as a person reads it, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmem.bundle import Bundle
from flashmem.commands.compiling import CompileOptions, bundle_of
from flashmem.console import emit_json, print_facts, print_table
from flashmem.planning.plan import OverlapPlan
from flashmem.program import Program
from flashmem.units import format_size

_NAMES_SHOWN = 2


@dataclass(frozen=True)
class LayerRow:
    """What happens while layer ℓ computes. `in_flight_bytes` is what C2 limits: streamed weights, staged or resident."""

    layer: int
    name: str
    operator_class: str
    capacity_chunks: int
    moved_chunks: int
    in_flight_bytes: int
    loads: tuple[str, ...]  # weights whose loading may begin here (z_w)
    frees: tuple[str, ...]  # weights used here for the last time


def show_plan(model: Path, options: CompileOptions, *, as_json: bool) -> None:
    """Prints the plan of a bundle. Opening a bundle checks its plan against C0-C3, so what is shown has been checked."""
    bundle = Bundle.open(bundle_of(model, options))
    rows = layer_rows(bundle.plan, bundle.program)
    if as_json:
        emit_json(_as_json(bundle, rows))
    else:
        _print(bundle, rows)


def summary(plan: OverlapPlan) -> dict[str, Any]:
    """The object under the key `plan`: how good the plan is known to be. A bundle that was opened has been checked."""
    return {
        "status": plan.status,
        "objective": plan.objective,
        "objective_kind": plan.objective_kind,
        "bound": plan.bound,
        "gap": plan.gap,
        "tier": plan.tier,
        "preload_ratio": plan.preload_ratio,
        "expected_slowdown": plan.expected_slowdown,
        "solve_seconds": plan.solve_seconds,
        "checked": True,
    }


def layer_rows(plan: OverlapPlan, program: Program) -> list[LayerRow]:
    """One row for each layer. A chunk is in flight from the layer that moves it until the last use of its weight."""
    streamed = [weight for weight in plan.weights if not weight.preload]
    rows = []
    for layer, launch in enumerate(program.launches, start=1):
        held = 0
        for weight in streamed:
            if layer <= weight.last_use:
                held += min(weight.nbytes, plan.chunk_bytes * sum(chunks for moved, chunks in weight.moves if moved <= layer))
        rows.append(
            LayerRow(
                layer,
                launch.name,
                launch.operator_class,
                plan.capacities[layer - 1],
                sum(chunks for weight in streamed for moved, chunks in weight.moves if moved == layer),
                held,
                tuple(weight.name for weight in streamed if weight.load_layer == layer),
                tuple(weight.name for weight in streamed if weight.last_use == layer),
            )
        )
    return rows


def _as_json(bundle: Bundle, rows: list[LayerRow]) -> dict[str, Any]:
    plan = bundle.plan
    return {
        "device": bundle.descriptor.name,
        "memory_path": bundle.program.memory_path,
        "plan": {
            **summary(plan),
            "lambda": plan.lambda_,
            "chunk_bytes": plan.chunk_bytes,
            "m_peak_bytes": plan.m_peak,
            "notes": list(plan.notes),
        },
        "layout_bytes": {mode: layout.total_bytes for mode, layout in plan.layouts.items()},
        "layers": [asdict(row) for row in rows],
        "weights": [asdict(weight) for weight in plan.weights],
    }


def _print(bundle: Bundle, rows: list[LayerRow]) -> None:
    plan = bundle.plan
    total = sum(weight.nbytes for weight in plan.weights)
    preloaded = sum(weight.nbytes for weight in plan.weights if weight.preload)
    most = max((row.in_flight_bytes for row in rows), default=0)
    quality = f"objective {plan.objective:.6g} ({plan.objective_kind}), bound {plan.bound:.6g}, gap {plan.gap:.2%}"
    facts = {
        "bundle": f"{bundle.path}, for {bundle.descriptor.name} on the {bundle.program.memory_path} path",
        "plan": f"{plan.status}, {quality}",
        "made by": f"{plan.tier} in {plan.solve_seconds:.2f} s; C0-C3 checked",
        "weights": f"{format_size(total)} in {len(plan.weights)} slices, {format_size(preloaded)} of them preloaded",
        "in flight": f"{format_size(most)} at most, M_peak {format_size(plan.m_peak)}",
        "memory": ", ".join(f"{mode} {format_size(layout.total_bytes)}" for mode, layout in plan.layouts.items()),
    }
    if plan.expected_slowdown > 0:
        facts["slowdown"] = f"{plan.expected_slowdown:.0%} expected over running with no memory limit"
    print_facts(facts)
    for note in plan.notes:
        print_facts({"note": note})
    print_table(
        ("layer", "operator", "class", "C_ℓ", "moved", "in flight", "starts loading"),
        (
            (
                r.layer,
                r.name,
                r.operator_class,
                r.capacity_chunks,
                r.moved_chunks,
                format_size(r.in_flight_bytes),
                _shortened(r.loads),
            )
            for r in rows
        ),
    )


def _shortened(names: Sequence[str]) -> str:
    """The first few of `names`; `--json` has them all."""
    left = len(names) - _NAMES_SHOWN
    return " ".join(names[:_NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")
