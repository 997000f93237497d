"""Make a plan from a program and the user's limits: choose the objective and M_peak, and keep the budget.

*Budget* is the most memory that flashmem uses at any moment. It includes preloaded and in-flight weights with their padding,
staging, activations, constants, and arrays that outputs are copied to. On a device with memory of its own it is that memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.baselines import Baseline, fastest, fastest_within, operators_of
from flashmem.planning.budget import roomiest, with_staging_that_fits
from flashmem.planning.instance import build_instance
from flashmem.planning.latency.first_answer import first_plan, forced_preload, judged, smallest_m_peak
from flashmem.planning.latency.later_runs import (
    by_cache_and_disk,
    by_later_runs,
    ladder,
    later_seconds,
    leanest,
    serving_later_runs,
    with_kept,
)
from flashmem.planning.latency.tiers import with_pinned
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.pose import staged_within, with_host_budget
from flashmem.planning.variants import VariantProblem, plan_together
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.limits import Limits
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import BoundScope, OverlapPlan
from flashmem.schedule.residency import session_bytes
from flashmem.target.descriptor import DeviceDescriptor


def planning_instance(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> Instance:
    """The planning problem that `make_plan` solves. Without an M_peak, all weights may be in flight.

    Raises:
        UserError: a host budget that is too small, or for a device that shares the host's memory.
    """
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(2 * total, 1)  # one mode keeps every byte twice
    instance = build_instance(program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode)
    if limits.host_budget is not None:
        instance = with_host_budget(instance, program, limits.host_budget)
    limit = limits.m_peak or limits.budget
    return instance if limit is None else staged_within(instance, limit)


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

    The steps that objectives "first" and "paper" do not require are left to `completed`.
    """
    limit = limits.m_peak or limits.budget
    instance, plan = with_staging_that_fits(instance, limit, lambda staged: _plan(staged, program, mode, limits))
    if complete or limits.resolved_objective == "steady":
        return completed(instance, plan, program, mode, limits)
    return _sealed(instance, plan, program, mode, limits)


def completed(
    instance: Instance,
    plan: OverlapPlan,
    program: Program,
    mode: TransferMode,
    limits: Limits,
    *,
    soonest: float | None = None,
) -> OverlapPlan:
    """Complete a plan: "first" gets weights that stay for later runs, "paper" gets early reads. The result has passed
    `schedule.check`.

    `soonest`: the first answer, in seconds, that memory for later runs may delay a little; by default that of `plan`.
    """
    objective, budget = limits.resolved_objective, limits.budget
    instance = replace(instance, piece_bytes=plan.piece_bytes, loader_threads=plan.loader_threads)
    limit = limits.m_peak if budget is None else budget
    measure = _in_flight(program, mode) if budget is None else _in_all(program, mode)
    if plan.objective_kind == "paper":
        with _where_the_compiler_is():
            from flashmem.planning.paper_limits import reading_ahead
        plan = reading_ahead(instance, plan, program, limit, measure)
    elif limits.strategy == "stream" and (objective == "steady" or (objective == "first" and limits.m_peak is None)):
        plan = _for_later_runs(instance, plan, program, limits, measure, plan.objective if soonest is None else soonest)
    return _sealed(instance, plan, program, mode, limits)


def planned_together(
    variants: Sequence[tuple[Program, OverlapPlan]], descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits
) -> list[OverlapPlan]:
    """The checked plans of shape variants of one bundle that keep the same weights, if they can (`planning.variants`).

    Their own plans otherwise, and for first answers where memory is shared.
    `variants`: each program, and the plan that it has alone.
    """
    objective, plans = limits.resolved_objective, [plan for _, plan in variants]
    together = not descriptor.shares_memory or objective == "steady"
    if not together or limits.budget is None or limits.strategy != "stream" or objective == "paper":
        return plans
    threads, piece = min(plan.loader_threads for plan in plans), min(plan.piece_bytes for plan in plans)
    problems = []
    for program, plan in variants:
        instance = planning_instance(program, descriptor, mode, limits.replace(chunk=plan.chunk_bytes))
        instance = replace(instance, piece_bytes=piece, loader_threads=threads)
        problems.append(VariantProblem(instance, plan, _in_all(program, mode)))
    made = plan_together(problems, limits.budget, objective)
    if made is None:
        return plans
    sealed = []
    for problem, (program, own), plan in zip(problems, variants, made, strict=True):
        judged_by = _as_steady(problem.instance, plan, program, limits) if objective == "steady" else plan
        noted = replace(judged_by, notes=(*judged_by.notes, *(note for note in own.notes if note not in judged_by.notes)))
        sealed.append(_sealed(problem.instance, noted, program, mode, limits))
    return sealed


def _roomiest(instance: Instance, plan: OverlapPlan, program: Program, limits: Limits) -> Instance:
    """`instance` with the largest M_peak that any plan with the same W can have within the user's limits."""
    if limits.m_peak is not None:
        return replace(instance, m_peak=max(limits.m_peak, plan.m_peak))
    return roomiest(instance, plan, None if limits.budget is None else limits.budget - _fixed(program, instance))


def _sealed(instance: Instance, plan: OverlapPlan, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """Check `plan` and set its M_peak (the limit that the user gave, or the bytes of its layout). Its bound holds for the given
    limits, even if the plan was made with less memory.
    """
    if plan.objective_kind == "first" and not limits.resolved_lambda:  # otherwise the bound is for the memory lambda leaves
        plan = judged(_roomiest(instance, plan, program, limits), plan)
    plan = with_pinned(instance, plan)
    in_flight = _in_flight(program, mode)(plan)
    plan = replace(plan, m_peak=max(in_flight, limits.m_peak or plan.m_peak))
    check(plan, replace(instance, m_peak=plan.m_peak))
    return plan


def _in_all(program: Program, mode: TransferMode) -> Measure:
    """Measure all bytes that a session's budget limits."""

    def measure(plan: OverlapPlan) -> int:
        layout = lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode]
        return session_bytes(program, layout, shares_memory=plan.shares_memory)

    return measure


def _fixed(program: Program, instance: Instance) -> int:
    return fixed_bytes(program, shares_memory=instance.shares_memory)


def _in_flight(program: Program, mode: TransferMode) -> Measure:
    """Measure the bytes that M_peak limits."""

    def measure(plan: OverlapPlan) -> int:
        layout = lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode]
        return layout.in_flight_bytes(shares_memory=plan.shares_memory)

    return measure


def _plan(instance: Instance, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    preload = _slices_of(program, limits.preload)
    in_all, in_flight = _in_all(program, mode), _in_flight(program, mode)
    if limits.strategy != "stream":
        return _baseline(instance, program, limits, preload, in_all)
    if limits.resolved_objective != "paper":
        measure = in_flight if limits.m_peak is not None else in_all
        limit = limits.m_peak if limits.m_peak is not None else limits.budget
        return _first_plan(instance, program, limits, preload, limit, measure)
    with _where_the_compiler_is():
        from flashmem.planning.paper_limits import paper_plan_inside, paper_plan_within
    if limits.budget is not None:
        return paper_plan_within(instance, program, limits, preload, in_all)
    limited = limits.m_peak is not None
    return paper_plan_inside(instance, preload, limits.resolved_lambda, limits.units, in_flight, limited=limited)


@contextmanager
def _where_the_compiler_is() -> Iterator[None]:
    """Context for imports of the paper's objective, which `flashmem-runtime` does not include. Raises UserError there."""
    try:
        yield
    except ImportError as error:
        what = "the bundle is planned by the paper's objective, which is not installed here"
        raise UserError(f"{what}; plan it where the compiler is, or compile the model without --objective") from error


def _first_plan(
    instance: Instance, program: Program, limits: Limits, preload: frozenset[str], limit: int | None, measure: Measure
) -> OverlapPlan:
    """The plan with the earliest first answer. If only M_peak is limited, slices too large for it are preloaded.

    Raises:
        BudgetError: no plan fits.
    """
    operators, lambda_ = operators_of(program), limits.resolved_lambda
    if limit is None:
        return fastest(instance, operators, preload, lambda_)
    if limits.m_peak is None:
        return fastest_within(instance, operators, limit, measure, preload, lambda_, fixed=_fixed(program, instance))
    refused: BudgetError | None = None
    streamed: OverlapPlan | None = None  # the plan that streams every slice that can be streamed
    for part in (1, *(_TOO_LARGE if instance.w_may_grow else ())):
        large = frozenset(w.name for w in instance.weights if part > 1 and w.nbytes > limit // part)
        if part > 1 and not large:
            continue
        try:
            plan = fastest_within(instance, operators, limit, measure, preload | large, lambda_, counts_w=False)
        except BudgetError as error:
            refused = refused or error
            continue
        if not large:
            if plan.gap <= _WORTH_W:
                return plan
            streamed = plan
            continue
        if streamed is not None and plan.objective >= streamed.objective * (1 - _WORTH_W):
            return streamed
        note = f"slices of more than M_peak / {part} are in W: streaming them takes more than M_peak, or much longer"
        return replace(plan, asked=tuple(sorted(preload)), tier="incremental-preload", notes=(*plan.notes, note))
    if streamed is not None:
        return streamed
    assert refused is not None
    raise refused


_WORTH_W = 0.02
"""A share of the first answer. If at least so much is unproven, try large slices in W; keep them there for an equal gain."""

_TOO_LARGE = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""If M_peak is too small to stream everything, preload slices larger than M_peak divided by one of these numbers."""


def _for_later_runs(
    instance: Instance, plan: OverlapPlan, program: Program, limits: Limits, measure: Measure, soonest: float
) -> OverlapPlan:
    """`plan` with weights kept for later runs. For "steady", the plan with the fastest later runs.

    For "first" on a device with memory of its own, that too, with a first answer at most `OWN_WORTH` after `soonest`.
    """
    objective, limit = limits.resolved_objective, limits.m_peak if limits.budget is None else limits.budget
    if limit is None:
        plan = with_kept(instance, plan, None, measure)
    else:
        own = instance.own is not None
        # W of a baseline is as good as kept weights, and here kept ones are chosen.
        chosen = forced_preload(instance, plan.asked) if own else frozenset(w.name for w in plan.weights if w.preload)
        least = smallest_m_peak(instance, chosen)[0]
        within = replace(instance, m_peak=plan.m_peak)

        def make(m_peak: int) -> OverlapPlan:
            return replace(first_plan(replace(within, m_peak=m_peak), chosen, quick=own), asked=plan.asked)

        rooms = [plan]
        if len(plan.weights) <= _SEARCHED and plan.m_peak > least:
            if not own:
                rooms.append(leanest(plan, least, make, lambda each: each.objective))
            if own or objective == "steady":
                rooms += ladder(instance, plan, least, make)
        if own and objective == "first":
            plan = serving_later_runs(instance, rooms, limit, measure, soonest)
        else:
            kept = [with_kept(instance, each, limit, measure) for each in rooms if measure(each) <= limit]
            order = by_later_runs if objective == "first" else by_cache_and_disk
            plan = min(kept, key=lambda each: order(instance, each))
    return plan if objective == "first" else _as_steady(instance, plan, program, limits)


def _as_steady(instance: Instance, plan: OverlapPlan, program: Program, limits: Limits) -> OverlapPlan:
    """`plan`, judged by its later runs."""
    seconds = later_seconds(instance, plan)
    note = f"a later run is predicted to take {seconds:.4g} s, the first answer {plan.objective:.4g} s"
    bound, scope = _steady_bound(instance, plan, limits, _fixed(program, instance))
    if seconds - bound <= 1e-9 * seconds:
        bound = seconds
    return replace(plan, objective_kind="steady", objective=seconds, bound=bound, bound_scope=scope, notes=(*plan.notes, note))


def _steady_bound(instance: Instance, plan: OverlapPlan, limits: Limits, fixed: int) -> tuple[float, BoundScope]:
    """A lower bound of a later run, in seconds: the sum of all layers, or the time to read what memory cannot keep.

    A budget limits all kept weights, so that bound holds for every W. M_peak does not limit W, so that bound holds for this W.
    """
    compute = sum(layer.seconds for layer in instance.layers)
    if limits.budget is not None:
        read = sum(w.nbytes for w in instance.weights) - (limits.budget - fixed)
    elif limits.m_peak is not None:
        read = sum(w.nbytes for w in plan.weights if not w.preload) - limits.m_peak
    else:
        read = 0
    bound = max(compute, read / instance.host_bandwidth)
    return bound, "problem" if limits.m_peak is None or bound == compute else "resident-set"


_SEARCHED = 20_000
"""Plans of more weights are not searched: a search would cost as much time as several plans."""


def _slices_of(program: Program, names: tuple[str, ...]) -> frozenset[str]:
    """The slices with the given names; a name is that of a slice or of a weight.

    Raises:
        UserError: no slice or weight has that name.
    """
    chosen: set[str] = set()
    for name in names:
        meant = {part.name for part in program.slices if name in (part.name, part.weight)}
        if not meant:
            raise UserError(f"weight {name!r} cannot be preloaded: the model has no weight of that name; correct the name")
        chosen |= meant
    return frozenset(chosen)


def _baseline(instance: Instance, program: Program, limits: Limits, preload: frozenset[str], measure: Measure) -> OverlapPlan:
    """The plan of a baseline strategy."""
    baseline = Baseline(limits.strategy, operators_of(program), preload, limits.resolved_lambda, _fixed(program, instance))
    if limits.budget is not None:
        return baseline.within(instance, limits.budget, measure)
    if limits.strategy == "resident-first":
        raise UserError("strategy resident-first fills a budget; name one with --budget")
    return baseline.plan(instance)
