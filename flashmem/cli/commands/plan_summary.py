"""What `plan`, `run` and `simulate` say of a plan in one object. Apart from `plan`, because a phone runs and does not plan."""

from __future__ import annotations

from typing import Any

from flashmem.bundle.validation import plan_holds
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan


def summary(plan: OverlapPlan, program: Program) -> dict[str, Any]:
    """The object under the key `plan`: how good the plan is known to be, and what the checker says of it now."""
    return {
        "status": plan.status,
        "objective": plan.objective,
        "objective_kind": plan.objective_kind,
        "bound": plan.bound,
        "bound_scope": plan.bound_scope,
        "bound_within_bytes": plan.bound_within,
        "gap": plan.gap,
        "tier": plan.tier,
        "preload_ratio": plan.preload_ratio,
        "distance_ratio": plan.distance_ratio,
        "expected_slowdown": plan.expected_slowdown,
        "solve_seconds": plan.solve_seconds,
        "checked": plan_holds(program, plan),
    }
