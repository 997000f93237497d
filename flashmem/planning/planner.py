"""From a program and the user's limits to a plan: which objective, which M_peak, and what a budget has to cover.

*Budget* is the most that flashmem holds at any moment on the device and in host staging: preloaded and in-flight weights with
their padding, staging, activations, constants, and arrays that outputs are copied to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.clock import Timing
from flashmem.planning.arithmetic.measure import Measure
from flashmem.planning.arithmetic.release_times import held_bytes, settled
from flashmem.planning.baselines import Baseline, fastest, fastest_within, operators_of
from flashmem.planning.budget import roomiest, with_staging_that_fits
from flashmem.planning.instance import build_instance
from flashmem.planning.latency.first_answer import first_plan, judged, smallest_m_peak
from flashmem.planning.latency.later_runs import by_later_runs, later_seconds, leanest, with_kept
from flashmem.planning.limits import Limits
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.pose import staged_within
from flashmem.program.program import Program, fixed_bytes
from flashmem.schedule.check import check
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import BoundScope, OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


def planning_instance(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> Instance:
    """The problem that `make_plan` solves; without an M_peak, all weights may be in flight."""
    total = sum(part.nbytes for part in program.slices)
    m_peak = limits.m_peak or max(2 * total, 1)  # of which one mode holds every byte twice
    instance = build_instance(program, descriptor, chunk_bytes=limits.chunk, m_peak=m_peak, mode=mode)
    limit = limits.m_peak or limits.budget
    return instance if limit is None else staged_within(instance, limit)


def make_plan(program: Program, descriptor: DeviceDescriptor, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """The plan of `program` within `limits`, for transfer `mode`, without its layouts.

    Raises:
        BudgetError: nothing fits; it names the smallest budget (or M_peak) that works, and what binds it.
        UserError: an unknown name to preload.
    """
    instance = planning_instance(program, descriptor, mode, limits)
    return plan_instance(replace(instance, w_may_grow=True), program, mode, limits)


def plan_instance(
    instance: Instance, program: Program, mode: TransferMode, limits: Limits, *, complete: bool = True
) -> OverlapPlan:
    """The plan of `instance`, which is `program`'s, as `make_plan` makes it. It has passed `schedule.check`.

    Not `complete`: what neither "first" nor "paper" asks is left to `completed`.
    """
    limit = limits.m_peak or limits.budget
    instance, plan = with_staging_that_fits(instance, limit, lambda staged: _plan(staged, program, mode, limits))
    if complete or limits.resolved_objective == "steady":
        return completed(instance, plan, program, mode, limits)
    return _sealed(instance, plan, program, mode, limits)


def completed(instance: Instance, plan: OverlapPlan, program: Program, mode: TransferMode, limits: Limits) -> OverlapPlan:
    """A plan for the first answer with what stays for later runs, or the paper's with its reads running ahead. It has passed
    `schedule.check`.
    """
    objective, budget = limits.resolved_objective, limits.budget
    instance = replace(instance, piece_bytes=plan.piece_bytes, loader_threads=plan.loader_threads)
    limit = limits.m_peak if budget is None else budget
    measure = _in_flight(program, mode) if budget is None else _in_all(program, mode)
    if plan.objective_kind == "paper":
        with _where_the_compiler_is():
            from flashmem.planning.paper_limits import reading_ahead
        plan = reading_ahead(instance, plan, program, limit, measure)
    elif limits.strategy == "stream" and objective != "paper":
        proven = 0.0
        if objective == "first":
            plan, proven = _searched(instance, plan, program, limits, measure)
        if objective == "steady" or limits.m_peak is None:
            plan = _for_later_runs(instance, plan, program, limits, measure)
        return _sealed(instance, plan, program, mode, limits, proven)
    return _sealed(instance, plan, program, mode, limits)


def _roomiest(instance: Instance, plan: OverlapPlan, program: Program, limits: Limits) -> Instance:
    """`instance` with the most bytes in flight that any plan of the same W can have within the user's limits."""
    if limits.m_peak is not None:
        return replace(instance, m_peak=max(limits.m_peak, plan.m_peak))
    return roomiest(instance, plan, None if limits.budget is None else limits.budget - fixed_bytes(program))


def _searched(
    instance: Instance, plan: OverlapPlan, program: Program, limits: Limits, measure: Measure
) -> tuple[OverlapPlan, float]:
    """`plan` for the first answer as CP-SAT makes it better, if that is installed and what is not proven is worth a search; and
    the bound that CP-SAT proves for this W within the user's limits (0: none).

    It holds no more at once than `plan` does, and `measure` of it is within the limits.
    """
    roomy = _roomiest(instance, plan, program, limits)
    if limits.resolved_lambda:
        roomy = replace(instance, m_peak=roomy.m_peak if plan.bound_within is None else plan.bound_within)
    plan = judged(roomy, plan)
    unproven = plan.objective - plan.bound
    large = len(plan.weights) > _SEARCHED_BY_CP_SAT
    if plan.objective_kind != "first" or large or unproven <= max(_WORTH_SECONDS, _WORTH_SHARE * plan.objective):
        return plan, 0.0
    try:
        from flashmem.planning.latency.cp_sat import improve
    except ModuleNotFoundError:
        return plan, 0.0
    preload = frozenset(w.name for w in plan.weights if w.preload)
    moves = {w.name: w.moves for w in plan.weights if not w.preload}
    releases = {w.name: w.read_layer for w in plan.weights}
    held = int(held_bytes(instance, releases, moves).max(initial=0))
    enough = plan.bound * (1 + 1e-9)
    found = improve(instance, releases, moves, held, roomy.m_peak, seconds=_SEARCH_SECONDS, enough=enough)
    better, clock = settled(Timing(instance, moves), preload, found.releases)
    note = f"searched by CP-SAT for {_SEARCH_SECONDS:.0f} s at the most"
    if found.bound > plan.bound:
        note += ", which proved the bound"
    if clock.seconds < plan.objective:
        trial = replace(plan, weights=tuple(replace(w, read_layer=better[w.name]) for w in plan.weights))
        limit = limits.m_peak if limits.budget is None else limits.budget
        if limit is None or measure(trial) <= limit:
            note += f"; first answer {plan.objective:.6g} s before"
            plan = replace(trial, objective=clock.seconds)
    return judged(roomy, replace(plan, notes=(*plan.notes, note)), found.bound), found.bound


_SEARCH_SECONDS = 4.0
"""Of CP-SAT, for one plan."""

_SEARCHED_BY_CP_SAT = 2000
"""Weights of the largest plan that CP-SAT searches: the clock is played for each neighbourhood."""

_WORTH_SECONDS, _WORTH_SHARE = 1e-3, 2e-3
"""What must be unproven of a first answer to be searched: seconds, and a share."""


def _sealed(
    instance: Instance, plan: OverlapPlan, program: Program, mode: TransferMode, limits: Limits, proven: float = 0.0
) -> OverlapPlan:
    """`plan`, checked, with the M_peak that it keeps (the one that was asked for, or what its layout takes), and with a bound
    within the limits that were given, however little of them it was made in. `proven`: as `judged` has it.
    """
    if plan.objective_kind == "first" and not limits.resolved_lambda:  # else the bound is for what lambda leaves
        plan = judged(_roomiest(instance, plan, program, limits), plan, proven)
    in_flight = _in_flight(program, mode)(plan)
    plan = replace(plan, m_peak=max(in_flight, limits.m_peak or plan.m_peak))
    check(plan, replace(instance, m_peak=plan.m_peak))
    return plan


def _in_all(program: Program, mode: TransferMode) -> Measure:
    """All bytes that a session holds."""
    fixed = fixed_bytes(program)
    return lambda plan: fixed + lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode].total_bytes


def _in_flight(program: Program, mode: TransferMode) -> Measure:
    """Those that M_peak limits."""
    return lambda plan: lay_out_pools(program.slices, plan, [mode], page_bytes=program.page_bytes)[mode].in_flight_bytes


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
    """Around imports of the paper's objective, which `flashmem-runtime` has not got. Raises UserError there."""
    try:
        yield
    except ImportError as error:
        what = "the bundle is planned by the paper's objective, which is not installed here"
        raise UserError(f"{what}; plan it where the compiler is, or compile the model without --objective") from error


def _first_plan(
    instance: Instance, program: Program, limits: Limits, preload: frozenset[str], limit: int | None, measure: Measure
) -> OverlapPlan:
    """The plan that answers first. Where M_peak alone is limited, slices too large for it go to W.

    Raises:
        BudgetError: nothing fits.
    """
    operators, lambda_ = operators_of(program), limits.resolved_lambda
    if limit is None:
        return fastest(instance, operators, preload, lambda_)
    if limits.m_peak is None:
        return fastest_within(instance, operators, limit, measure, preload, lambda_)
    refused: BudgetError | None = None
    streamed: OverlapPlan | None = None  # with nothing of W that could be streamed
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
"""A share of the first answer: where so much is unproven, large slices are tried in W, and stay there if it gains as much."""

_TOO_LARGE = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Of M_peak, the parts above which slices are put into W, should it be too small to stream everything."""


def _for_later_runs(instance: Instance, plan: OverlapPlan, program: Program, limits: Limits, measure: Measure) -> OverlapPlan:
    """`plan` with weights kept for later runs; for "steady", the plan whose later runs are the fastest."""
    objective, limit = limits.resolved_objective, limits.m_peak if limits.budget is None else limits.budget
    if limit is None:
        plan = with_kept(instance, plan, None, measure)
    else:
        chosen = frozenset(w.name for w in plan.weights if w.preload)
        least = smallest_m_peak(instance, chosen)[0]
        within = replace(instance, m_peak=plan.m_peak)

        def make(m_peak: int) -> OverlapPlan:
            return replace(first_plan(replace(within, m_peak=m_peak), chosen), asked=plan.asked)

        rooms = [plan]
        if len(plan.weights) <= _SEARCHED and plan.m_peak > least:
            rooms.append(leanest(plan, least, make, lambda each: each.objective))
            if objective == "steady":
                rooms += [make(least + (plan.m_peak - least) * part // 8) for part in (0, 1, 2, 4)]
        kept = [with_kept(instance, each, limit, measure) for each in rooms if measure(each) <= limit]
        plan = min(kept, key=lambda each: by_later_runs(instance, each))
    if objective == "first":
        return plan
    seconds = later_seconds(instance, plan)
    note = f"a later run is predicted to take {seconds:.4g} s, the first answer {plan.objective:.4g} s"
    bound, scope = _steady_bound(instance, plan, limits, fixed_bytes(program))
    if seconds - bound <= 1e-9 * seconds:
        bound = seconds
    return replace(plan, objective_kind="steady", objective=seconds, bound=bound, bound_scope=scope, notes=(*plan.notes, note))


def _steady_bound(instance: Instance, plan: OverlapPlan, limits: Limits, fixed: int) -> tuple[float, BoundScope]:
    """What no later run beats, in seconds: all layers one after the other, and reading what memory cannot keep.

    A budget limits all that stays, so it holds for every W; M_peak does not limit W, so it holds for this one.
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
"""Plans of more weights are kept as they are: a search would take as long as planning it several times."""


def _slices_of(program: Program, names: tuple[str, ...]) -> frozenset[str]:
    """Slices named by themselves or by their weight.

    Raises:
        UserError: a name that is neither's.
    """
    chosen: set[str] = set()
    for name in names:
        meant = {part.name for part in program.slices if name in (part.name, part.weight)}
        if not meant:
            raise UserError(f"weight {name!r} cannot be preloaded: the model has no weight of that name; correct the name")
        chosen |= meant
    return frozenset(chosen)


def _baseline(instance: Instance, program: Program, limits: Limits, preload: frozenset[str], measure: Measure) -> OverlapPlan:
    """The plan of a strategy that others use."""
    baseline = Baseline(limits.strategy, operators_of(program), preload, limits.resolved_lambda)
    if limits.budget is not None:
        return baseline.within(instance, limits.budget, measure)
    if limits.strategy == "resident-first":
        raise UserError("strategy resident-first fills a budget; name one with --budget")
    return baseline.plan(instance)
