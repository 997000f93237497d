"""Make a plan from a program and the user's limits: choose the objective and M_peak, and keep the budget.

*Budget* is the most memory that flashmem uses at any moment. It includes preloaded and in-flight weights with their padding,
staging, activations, constants, and arrays that outputs are copied to. On a device with memory of its own it is that memory.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.assemble import with_relaxed
from flashmem.planning.budget import with_staging_that_fits
from flashmem.planning.capacity.classes import Thresholds
from flashmem.planning.instance import build_instance
from flashmem.planning.latency.tiers import with_pinned
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.portfolio import strategy_plan
from flashmem.planning.pose import staged_within, with_host_budget
from flashmem.planning.problem import Problem
from flashmem.planning.search.effort import ENOUGH, NOTICED, Effort, Report
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


def planning_instance(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> Instance:
    """The planning problem that `make_plan` solves. Without an M_peak, all weights may be in flight.

    Raises:
        UserError: a host budget that is too small, or for a device that shares the host's memory.
    """
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(2 * total, 1)  # one mode keeps every byte twice
    instance = build_instance(
        program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode, thresholds=thresholds_of(limits)
    )
    if limits.host_budget is not None:
        instance = with_host_budget(instance, program, limits.host_budget)
    limit = limits.m_peak or limits.budget
    return instance if limit is None else staged_within(instance, limit)


def thresholds_of(limits: Limits) -> Thresholds:
    """The thresholds of classes that were asked for."""
    return Thresholds(
        limits.hierarchical_slowdown, limits.reusable_slowdown, limits.elemental_slowdown, limits.least_gain, limits.high_gain
    )


def make_plan(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `program` within `limits`, for transfer `mode`, without its layouts.

    Raises:
        BudgetError: no plan fits; the error names the smallest budget (or M_peak) that works, and what requires it.
        UserError: an unknown name to preload.
    """
    instance = planning_instance(program, descriptor, mode, limits)
    return plan_instance(replace(instance, w_may_grow=True), program, mode, limits)


def plan_instance(
    instance: Instance, program: Program, mode: TransferMode, limits: Limits, *, complete: bool = True
) -> OverlapPlan:
    """The plan that `make_plan` makes of `instance`, the planning problem of `program`. It has passed `schedule.check`.

    Without `complete`, steps by which programs are not compared are left to `completed`, if the objective has any.
    """
    problem = Problem(instance, program, mode, limits)
    objective = objective_of(limits.resolved_objective)

    def make(staged: Instance) -> OverlapPlan:
        posed = problem.of(staged)
        return objective.plan(posed) if limits.strategy == "stream" else strategy_plan(posed)

    instance, plan = with_staging_that_fits(instance, problem.limit, make)
    if complete or objective.completes_at_once:
        return completed(instance, plan, program, mode, limits)
    return seal(problem.of(instance), plan)


def completed(
    instance: Instance,
    plan: OverlapPlan,
    program: Program,
    mode: TransferMode,
    limits: Limits,
    *,
    soonest: float | None = None,
) -> OverlapPlan:
    """Complete a plan by the steps that its objective leaves open. The result has passed `schedule.check`.

    `soonest`: the first answer, in seconds, that memory for later runs may delay a little; by default that of `plan`.
    """
    problem = Problem(instance, program, mode, limits).staged_as(plan)
    if limits.strategy == "stream":
        objective = objective_of(limits.resolved_objective)
        plan = objective.completed(problem, plan, plan.objective if soonest is None else soonest)
    return seal(problem, plan)


def searched(
    program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, limits: Limits, report: Report = lambda better: None
) -> OverlapPlan:
    """A completed plan of `program` after the search that the limits permit; see `search_gap`."""
    if not may_search(plan, limits):
        return plan
    instance = planning_instance(program, descriptor, plan.mode, limits.replace(chunk=plan.chunk_bytes))
    return search_gap(Problem(instance, program, plan.mode, limits), plan, report)


def search_gap(problem: Problem, plan: OverlapPlan, report: Report = lambda better: None) -> OverlapPlan:
    """A completed plan after the search of its objective, where it has a gap. The result has passed `schedule.check`.

    The search begins from `plan`, which is returned with a note where nothing better was found. `report` is called with each
    better plan on the way.
    """
    if not may_search(plan, problem.limits):
        return plan
    if find_spec("ortools") is None:
        return replace(plan, notes=(*plan.notes, "OR-tools is not installed: nothing searched the gap"))
    problem = problem.staged_as(plan)

    def sealed(found: OverlapPlan) -> OverlapPlan:
        made = seal(problem, found)
        if found.bound > made.bound:
            made = replace(made, bound=found.bound, bound_scope=found.bound_scope, bound_within=found.bound_within)
        return effort.told(plan, made)

    effort = Effort.of(problem, lambda found: report(sealed(found)))
    return sealed(objective_of(plan.objective_kind).searched(problem, plan, effort))


def may_search(plan: OverlapPlan, limits: Limits) -> bool:
    """Whether `searched` begins a search."""
    if limits.solver == "dp" or limits.strategy != "stream" or limits.solve_seconds == 0 or plan.gap <= ENOUGH:
        return False
    return limits.solver == "cp-sat" or not plan.kind.in_seconds or plan.objective - plan.bound > NOTICED


def seal(problem: Problem, plan: OverlapPlan) -> OverlapPlan:
    """Check `plan` and set its M_peak (the limit that the user gave, or the bytes of its layout). Its bound holds for the given
    limits, even if the plan was made with less memory.
    """
    plan = objective_of(plan.objective_kind).bounded(problem, plan)
    plan = with_relaxed(with_pinned(problem.instance, plan))
    given = problem.limits.m_peak
    plan = replace(plan, m_peak=max(problem.in_flight(plan), given or plan.m_peak), m_peak_given=given)
    check(plan, replace(problem.instance, m_peak=plan.m_peak))
    return plan
