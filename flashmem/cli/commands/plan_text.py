"""What `flashmem plan` prints of a plan: facts, notes, and tables of its launches and of the reasons for W."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from flashmem.base.units import format_size
from flashmem.cli.commands.plan_data import Because, LayerRow, Shown, layer_rows, several_launches, why
from flashmem.cli.commands.plan_steady import steady_rows, steady_text
from flashmem.cli.output.console import print_facts, print_table
from flashmem.program.program import Program, raw_bytes
from flashmem.schedule.plan import OverlapPlan

if TYPE_CHECKING:
    from flashmem.tools.smallest_budget import SmallestBudget

_NAMES_SHOWN = 2
_ROWS_SHOWN = 60
"""Rows of a table without --all."""


def _kept(plan: OverlapPlan) -> dict[str, str]:
    kept = [w.nbytes for w in plan.weights if w.keep]
    return {"later runs": f"start with {format_size(sum(kept))} more resident, in {len(kept)} slices"} if kept else {}


def _launches(program: Program) -> dict[str, str]:
    several = several_launches(program)
    if not several:
        return {}
    named = shorten([f"{weight} {count}" for weight, count in several.items()])
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


def print_plan(shown: Shown, show_all: bool) -> None:
    """Print facts, notes and tables; with `show_all` every row."""
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
                name + (f" + {shorten(tail)}" if tail else "") + launches,
                first.operator_class + (f" (Table 5: {first.table_5})" if first.table_5 != first.operator_class else ""),
                sum(row.capacity_chunks for row in group),
                *((_curve(first),) if curves else ()),
                sum(row.moved_chunks for row in group),
                format_size(max(row.in_flight_bytes for row in group)),
                shorten([weight for row in group for weight in row.loads]),
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


def shorten(names: Sequence[str]) -> str:
    """The first few of `names`; `--json` has all."""
    left = len(names) - _NAMES_SHOWN
    return " ".join(names[:_NAMES_SHOWN]) + (f" and {left} more" if left > 0 else "")
