"""`flashmem plan`: the work, loads and memory of each launch, and the reason for each weight in W."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashmem.base.extras import offline_half
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.bundle.shape_variants import list_text, port_shapes, stored_again
from flashmem.cli.commands.compiling import open_bundle
from flashmem.cli.commands.plan_steady import steady_rows, steady_text
from flashmem.cli.commands.plan_summary import summary
from flashmem.cli.commands.plan_zoo import plan_architecture
from flashmem.cli.output.console import emit_json, print_facts, print_table
from flashmem.planning.instance import build_instance
from flashmem.planning.planner import thresholds_of
from flashmem.planning.why import Reason, in_flight_bytes, moved_chunks, reasons
from flashmem.program.program import Program, raw_bytes
from flashmem.request.request import BundleRequest
from flashmem.schedule.instance import LayerSpec
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.zoo.names import architecture

if TYPE_CHECKING:
    from flashmem.tools.smallest_budget import SmallestBudget

_NAMES_SHOWN = 2
_ROWS_SHOWN = 60
"""Rows of a table without --all."""

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


def show_plan(model: Path, options: BundleRequest, *, as_json: bool, show_all: bool = False) -> None:
    """Print the plan of a bundle, of a model, or of a known architecture (`zoo:NAME`); it is checked against C0-C3."""
    name = architecture(model)
    if name is not None:
        zoo = plan_architecture(name, options)
        layers = _layers(zoo.program, zoo.plan, zoo.descriptor, options)
        shown = Shown(zoo.name, zoo.descriptor.name, zoo.program, zoo.plan, layers, zoo.seconds)
    else:
        bundle = open_bundle(model, options, chosen_again=False)
        smallest = _smallest(model, options) if model.suffix == ".onnx" else []
        which = [bundle.index] if is_bundle(model) and any(options.shapes) else range(len(bundle.variants))
        if len(bundle.variants) > 1:
            _show_variants([bundle.variant(index) for index in which], options, smallest, as_json, show_all)
            return
        shown = _shown(bundle, options, smallest[0] if smallest else None)
    if as_json:
        emit_json(_as_json(shown, show_all))
    else:
        _print(shown, show_all)


def _shown(bundle: Bundle, options: BundleRequest, smallest: SmallestBudget | None) -> Shown:
    layers = _layers(bundle.program, bundle.plan, bundle.descriptor, options)
    return Shown(str(bundle.path), bundle.descriptor.name, bundle.program, bundle.plan, layers, smallest=smallest)


def _layers(program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, options: BundleRequest) -> tuple[LayerSpec, ...]:
    """The class and the curve of each launch in the problem that `plan` answers."""
    instance = build_instance(
        program, descriptor, chunk_bytes=plan.chunk_bytes, m_peak=plan.m_peak, mode=plan.mode, thresholds=thresholds_of(options)
    )
    return instance.layers


def _show_variants(
    variants: Sequence[Bundle], options: BundleRequest, smallest: Sequence[SmallestBudget], as_json: bool, show_all: bool
) -> None:
    """Print the plans of the shape variants of one bundle, and the size of their weights together."""
    programs = [each.program for each in variants[0].variants]
    again = stored_again(programs)
    shown = [_shown(each, options, smallest[each.index] if smallest else None) for each in variants]
    if as_json:
        plans = [
            {"shapes": port_shapes(each.program.inputs), **_as_json(one, show_all)}
            for each, one in zip(variants, shown, strict=True)
        ]
        emit_json({"model": shown[0].title, "stored_again_bytes": again, "variants": plans})
        return
    more = f", {format_size(sum(again.values()))} of them in more than one form: {_shortened(list(again))}" if again else ""
    weights = f"{format_size(programs[0].weights_bytes)} for all{more}"
    print_facts({"variants": list_text([program.inputs for program in programs]), "weight file": weights})
    for each, one in zip(variants, shown, strict=True):
        print()
        print_facts({"shapes": list_text([each.program.inputs])})
        _print(one, show_all)


def _smallest(model: Path, options: BundleRequest) -> list[SmallestBudget]:
    """The smallest budget of each shape variant alone."""
    with offline_half("planning"):
        from flashmem.compiler.stages.reading import read_graph
        from flashmem.options import resolve
        from flashmem.tools.smallest_budget import smallest_budget
    found = []
    first = resolve(options)
    for shapes in options.shapes:
        resolved = replace(first, shapes=shapes)
        found.append(smallest_budget(read_graph(model, resolved), resolved))
    return found


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


def _kept(plan: OverlapPlan) -> dict[str, str]:
    kept = [w.nbytes for w in plan.weights if w.keep]
    return {"later runs": f"start with {format_size(sum(kept))} more resident, in {len(kept)} slices"} if kept else {}


def _launches(program: Program) -> dict[str, str]:
    several = several_launches(program)
    if not several:
        return {}
    named = _shortened([f"{weight} {count}" for weight, count in several.items()])
    return {"launches": f"{len(program.launches)}; more than one for {len(several)} weights: {named}"}


def _file(program: Program) -> str:
    raw = raw_bytes(program)
    padded = program.weights_bytes
    return f"{format_size(padded)}, {format_size(raw)} without padding ({padded / raw - 1:.2%})"


def _order(program: Program) -> dict[str, str]:
    order = program.order
    if order is None:
        return {}
    given, peak, bound = (format_size(nbytes) for nbytes in (order.given_bytes, order.peak_bytes, order.bound_bytes))
    change = "the model's" if order.method == "as given" else f"by {order.method}, down from {given}"
    return {"order": f"{change}: activations of {peak} at most, bound {bound}, gap {order.gap:.2%}"}


def _activations(program: Program) -> str:
    """The size of the arena, and the peak bytes needed by any launch, a lower bound for every layout."""
    return f"{format_size(program.arena_bytes)}, of which {format_size(program.live_bytes)} are needed at once"


def _smallest_text(smallest: SmallestBudget | None) -> dict[str, str]:
    if smallest is None:
        return {}
    works, patches, order = map(format_size, (smallest.nbytes, smallest.without_patches, smallest.in_model_order))
    return {"smallest budget": f"{works}; without patches {patches}, with launches in the model's order too {order}"}


def _as_json(shown: Shown, show_all: bool) -> dict[str, Any]:
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


def _print(shown: Shown, show_all: bool) -> None:
    plan = shown.plan
    rows = layer_rows(plan, shown.program, shown.layers)
    because = why(plan, shown.program)
    total = sum(weight.nbytes for weight in plan.weights)
    preloaded = sum(weight.nbytes for weight in plan.weights if weight.preload)
    most = max((row.in_flight_bytes for row in rows), default=0)
    scope = "every resident set" if plan.bound_scope == "problem" else "this resident set"
    if plan.bound_within is not None:
        scope += f" with at most {format_size(plan.bound_within)} in flight"
    unit = plan.kind.unit
    value = f"{plan.objective:.6g}{unit}, bound {plan.bound:.6g}{unit} for {scope}"
    facts = {
        "model": f"{shown.title}, for {shown.device} on the {shown.program.memory_path} path",
        "plan": plan.proof,
        "objective": value,
        "made by": f"{_maker(plan)} in {plan.solve_seconds:.2f} s, solver {plan.solver}; C0-C3 checked",
        "kernels": f"{len({launch.kernel for launch in shown.program.launches})} different ones in {len(rows)} launches",
        "weights": f"{format_size(total)} in {len(plan.weights)} slices, {format_size(preloaded)} of them preloaded "
        f"({plan.preload_ratio:.1%} of the bytes)",
        "distance": f"moves begin {plan.distance_ratio:.2%} of the {len(rows)} layers before use, on average over all slices",
        "weight file": _file(shown.program),
        **_order(shown.program),
        **_launches(shown.program),
        "in flight": f"{format_size(most)} at most, M_peak {format_size(plan.m_peak)} in mode {plan.mode}",
        **_kept(plan),
        **steady_text(steady := steady_rows(shown.program, plan)),
        "activations": _activations(shown.program),
        **_smallest_text(shown.smallest),
    }
    if plan.layouts:
        facts["memory"] = ", ".join(f"{mode} {format_size(layout.total_bytes)}" for mode, layout in plan.layouts.items())
    if shown.seconds:
        steps = ", ".join(f"{step.replace('_', ' ')} {seconds:.2f}" for step, seconds in shown.seconds.items())
        facts["seconds"] = f"from the graph to the checked plan: {steps}"
    if plan.expected_slowdown > 0:
        facts["slowdown"] = f"{plan.expected_slowdown:.0%} expected over running with no memory limit"
    print_facts(facts)
    for note in plan.notes:
        print_facts({"note": note})
    print()
    headers = (
        "layer",
        "computes",
        "class",
        "C_ℓ",
        *(("slowdown by bytes",) if show_all else ()),
        "moved",
        "in flight",
        "releases",
    )
    grouped = not show_all and len(rows) > _ROWS_SHOWN
    _print_shortened(headers, _layer_cells(rows, grouped=grouped, curves=show_all), show_all)
    if because:
        print("\nwhy they are preloaded")
        cells = [(each.weight, f"{each.slices} of {each.of}", format_size(each.nbytes), _for_many(each)) for each in because]
        _print_shortened(("weight", "slices", "bytes", "why"), cells, show_all)
    if steady:
        print("\nreplaced launches of later runs")
        decisions = [(f"{row.first}-{row.last}" if row.last > row.first else row.first, row.name, row.why) for row in steady]
        _print_shortened(("layer", "computes", "why"), decisions, show_all)


def _maker(plan: OverlapPlan) -> str:
    """The tier that solved the plan, and the member of the portfolio if it is not the planner itself."""
    return plan.tier if plan.member in ("stream", plan.strategy) else f"{plan.tier} of member {plan.member}"


def _layer_cells(rows: list[LayerRow], *, grouped: bool, curves: bool) -> list[tuple[object, ...]]:
    """Table cells, with `curves` also s_l. With `grouped`, the launches of one operator (one for each slice of its weight)
    share a row.
    """
    cells: list[tuple[object, ...]] = []
    for _, run in groupby(rows, key=lambda row: (row.operators, row.operator_class) if grouped else row.layer):
        group = list(run)
        first = group[0]
        last = group[-1]
        launches = f" in {len(group)} launches" if len(group) > 1 else ""
        name = re.sub(r"\[\d+\]$", "", first.name) if len(group) > 1 else first.name
        tail = [operator for operator in first.operators if operator != name]
        cells.append(
            (
                first.layer if first is last else f"{first.layer}-{last.layer}",
                name + (f" + {_shortened(tail)}" if tail else "") + launches,
                first.operator_class + (f" (Table 5: {first.table_5})" if first.table_5 != first.operator_class else ""),
                sum(row.capacity_chunks for row in group),
                *((_curve(first),) if curves else ()),
                sum(row.moved_chunks for row in group),
                format_size(max(row.in_flight_bytes for row in group)),
                _shortened([weight for row in group for weight in row.loads]),
            )
        )
    return cells


def _curve(row: LayerRow) -> str:
    """A few points of the curve: the slowdown with these bytes moved during the launch."""
    shown = row.curve[1::2]
    return ", ".join(f"{format_size(round(nbytes))} {factor - 1:.0%}" for nbytes, factor in shown)


def _for_many(because: Because) -> str:
    return because.text if because.slices == 1 else f"first: {because.text}"


def _print_shortened(headers: Sequence[str], cells: Sequence[Sequence[object]], show_all: bool) -> None:
    """Print the table, or only its first and last rows."""
    if show_all or len(cells) <= _ROWS_SHOWN:
        print_table(headers, cells)
        return
    tail = _ROWS_SHOWN // 6
    dots = ["…"] * len(headers)
    dots[1] = f"{len(cells) - _ROWS_SHOWN} more rows; --all shows everything"
    shortened: Iterable[Sequence[object]] = [*cells[: _ROWS_SHOWN - tail], dots, *cells[-tail:]]
    print_table(headers, shortened)


def _shortened(names: Sequence[str]) -> str:
    """The first few of `names`; `--json` has all."""
    left = len(names) - _NAMES_SHOWN
    return " ".join(names[:_NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")
