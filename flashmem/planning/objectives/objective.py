"""The interface of an objective: how a plan is made for it, completed, bounded and compared.

A new objective is a class here, in a module of its name, and a row in `flashmem.schedule.objectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import Effort
from flashmem.schedule.objectives import ObjectiveKind
from flashmem.schedule.plan import OverlapPlan


class Objective(Protocol):
    """An objective. Searches over programs, of other slices or fusion groups, ask it which plan is better and when to stop."""

    kind: ClassVar[ObjectiveKind]

    completes_at_once: ClassVar[bool] = False
    """Whether programs can be compared by completed plans only."""

    serves_later_runs: ClassVar[bool] = True
    """Whether plans use memory that the first run does not need for later runs."""

    needs_capacity: ClassVar[bool] = False
    """Whether a larger C_l improves plans in every transfer mode, even without a limit on memory."""

    grows_w: ClassVar[bool] = False
    """Whether large slices may be in W if M_peak alone is limited and a plan that streams them is far from its bound."""

    patience: ClassVar[int] = 0
    """How many sizes of slices in a row may fail to improve the plan before the search for smaller ones ends."""

    def plan(self, problem: Problem) -> OverlapPlan:
        """The plan by which programs are compared. It keeps to the limits, and its value is that of the objective.

        Raises:
            BudgetError: no plan fits the limits.
            UserError: the limits name an unknown weight.
        """
        ...

    def completed(self, problem: Problem, plan: OverlapPlan, soonest: float) -> OverlapPlan:
        """`plan` with the steps that its value ignores. The first answer may be a little later than `soonest`, in seconds."""
        return plan

    def searched(self, problem: Problem, plan: OverlapPlan, effort: Effort) -> OverlapPlan:
        """`plan` after a search by OR-tools that begins from it: a better one, or the same with a better bound."""
        return plan

    def judged(self, problem: Problem, plan: OverlapPlan) -> OverlapPlan:
        """`plan`, one for the first answer, with the value of this objective."""
        return plan

    def bounded(self, problem: Problem, plan: OverlapPlan) -> OverlapPlan:
        """`plan` with the bound that holds for every plan within the limits."""
        return plan

    def is_better(self, tried: OverlapPlan, best: OverlapPlan, worth: float) -> bool:
        """Whether `tried` is better than `best` by the share `worth`.

        A plan for this objective is better than one for another, which replaces it where no plan for this one fits.
        """
        if tried.objective_kind != best.objective_kind:
            return tried.objective_kind == self.kind.name
        return tried.objective < (1 - worth) * best.objective

    def sizes(self, limit: int | None, least: int, step: int) -> Iterator[int | None]:
        """The sizes of the largest slice to try, from coarse to fine, under a limit of `limit` bytes; None for any size.

        Each is larger than `least` bytes, and larger than the next one by the factor `step`.
        """
        yield None
        while limit is not None and limit > least:
            yield limit
            limit //= step
