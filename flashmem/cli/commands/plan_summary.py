"""The summary of a plan for `plan`, `run` and `simulate`. A separate module, because a phone does not plan."""

from __future__ import annotations

from typing import Any

from flashmem.bundle.validation import plan_holds
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


def summary(plan: OverlapPlan, program: Program) -> dict[str, Any]:
    """The JSON object `plan`: the proven quality of the plan, and the checker's result."""
    return {
        "status": plan.status,
        "objective": plan.objective,
        "objective_kind": plan.objective_kind,
        "bound": plan.bound,
        "bound_scope": plan.bound_scope,
        "bound_within_bytes": plan.bound_within,
        "gap": plan.gap,
        "tier": plan.tier,
        "member": plan.member,
        "solver": plan.solver,
        "preload_ratio": plan.preload_ratio,
        "resident_bytes": plan.resident_bytes,
        "passes_m_peak": plan.passes_m_peak,
        "distance_ratio": plan.distance_ratio,
        "expected_slowdown": plan.expected_slowdown,
        "solve_seconds": plan.solve_seconds,
        "checked": plan_holds(program, plan),
    }
