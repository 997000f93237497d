"""How long a search may last, and what it did, in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashmem.planning.problem import Problem
from flashmem.schedule.plan import OverlapPlan

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

ENOUGH = 1e-4
"""A gap below which no search begins, and at which one ends."""

NOTICED = 1e-4
"""Seconds that a search could gain at most below which none begins, unless CP-SAT was asked for."""

SECONDS = 10.0
"""The most seconds of a search, if the user gives no other number."""

WORKERS = 2
"""Threads of CP-SAT."""


Report = Callable[[OverlapPlan], None]


def _ignore(plan: OverlapPlan) -> None:
    """Does nothing with a plan."""


@dataclass(frozen=True)
class Effort:
    """A search that began at `begun` (of `time.monotonic`) and may last `seconds`.

    Each of its parts has a share of the solver's work, whatever the others used. So a plan is repeatable where the processor
    does that work in time.
    """

    seconds: float
    begun: float
    report: Report = _ignore

    @classmethod
    def of(cls, problem: Problem, report: Report = _ignore) -> Effort:
        """The search that the limits ask for, which begins now. `report` is called with every better plan."""
        asked = problem.limits.solve_seconds
        return cls(SECONDS if asked is None else asked, time.monotonic(), report)

    @property
    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.seconds - (time.monotonic() - self.begun))

    def solver(self, share: float) -> CpSolver:
        """CP-SAT for a part of the search that has `share` of its work."""
        from flashmem.planning.arithmetic.solver import WORK_OF_A_SECOND, cp_solver

        cp = cp_solver(WORKERS, self.left, share * WORK_OF_A_SECOND * self.seconds)
        cp.parameters.relative_gap_limit = ENOUGH / 10
        return cp

    def told(self, before: OverlapPlan, after: OverlapPlan) -> OverlapPlan:
        """`after`, found from `before`, with a note that says what CP-SAT did, and the seconds it took."""
        took = time.monotonic() - self.begun
        unit = after.kind.unit
        if after.objective < before.objective * (1 - 1e-9):
            what = f"improved the plan from {before.objective:.6g} to {after.objective:.6g}{unit}"
        elif after.bound > before.bound * (1 + 1e-9):
            what = f"raised the bound from {before.bound:.6g} to {after.bound:.6g}{unit}"
        else:
            what = "found neither a better plan nor a better bound"
        note = f"CP-SAT {what}: gap {before.gap:.3%} to {after.gap:.3%}"
        solver = after.solver if after.solver == "linear-program" and after.objective == before.objective else "cp-sat"
        return replace(after, solver=solver, notes=(*after.notes, note), solve_seconds=before.solve_seconds + took)
