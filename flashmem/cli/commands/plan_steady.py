"""Steady launches in `flashmem plan`: which launches they replace in later runs, and why."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


@dataclass(frozen=True)
class SteadyRow:
    """A launch of later runs in place of launches `first` to `last`. `resident`: whether the plan keeps the slices it needs."""

    first: int
    last: int
    name: str
    kernel: str
    instead_of: str  # the kernel of the first run
    why: str
    resident: bool


def steady_rows(program: Program, plan: OverlapPlan) -> list[SteadyRow]:
    """One row for each steady launch of the bundle."""
    staying = {w.name for w in plan.weights if w.preload or w.keep}
    rows = []
    for each in program.steady:
        cold = program.launches[each.first - 1 : each.last]
        read = {str(arg.value) for launch in cold for arg in launch.args if arg.kind == "slice"}
        reasons = []
        if len(cold) > 1:
            reasons.append(f"one launch instead of {len(cold)}, of contiguous slices")
        if each.launch.kernel != cold[0].kernel:
            reasons.append(f"{_tile(each.launch)} runs sooner than {_tile(cold[0])}, over the same packed weights")
        resident = len(cold) == 1 or read <= staying
        if not resident:
            reasons.append("not under this plan, which does not keep them")
        rows.append(
            SteadyRow(each.first, each.last, each.launch.name, each.launch.kernel, cold[0].kernel, "; ".join(reasons), resident)
        )
    return rows


def steady_text(rows: list[SteadyRow]) -> dict[str, str]:
    """A summary of the rows; empty if there are none."""
    if not rows:
        return {}
    shown = [row for row in rows if row.resident]
    joined = [row for row in shown if row.last > row.first]
    others = sum(row.kernel != row.instead_of for row in shown)
    launches = sum(row.last - row.first + 1 for row in joined)
    if not shown:
        return {"steady kernels": "none under this plan"}
    return {"steady kernels": f"later runs have {others} other kernels, and {len(joined)} launches instead of {launches}"}


def _tile(launch: Launch) -> str:
    """A kernel config in the descriptor's terms: outputs of a work-item, work-items of a group, parts of the depth."""
    shape = launch.shape
    group = launch.local_size or ()
    parts = f" in {shape.slice_k} parts" if shape.slice_k > 1 else ""
    return f"{shape.tile_rows} x {shape.tile_columns} by {'x'.join(map(str, group))}{parts}"
