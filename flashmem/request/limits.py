"""What a user asks of a plan: limits, and the options of the planner."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from flashmem.base.errors import UserError
from flashmem.request.description import Converted, OptionSet, choice, option
from flashmem.request.kinds import Flag, Numeric, Several, Size
from flashmem.schedule.objectives import AUTO, FIRST, KINDS
from flashmem.schedule.plan import SolverChoice, Strategy, Units

Bytes = Converted[int | str | None, int | None]
"""A field that is given as a size in words or in bytes, and kept in bytes."""

MEMORY = "Memory"
PLAN = "Plan"
CLASSES = "Classes of launches"
"""Headings in help."""


class Limits(OptionSet):
    """Limits and options of a plan.

    Adaptive unfusion (`flashmem.compiler.adaptive.unfusion`) ranks layers by lambda |W_new| + `mu` times the loading distance.
    It splits a layer if C_l grows by at least the share `alpha`. The paper gives neither value: `mu` is the weight of distance
    in its objective at lambda 0.9, and `alpha` requires a growth of one tenth.
    """

    budget: Bytes = option(
        "Limit on all memory, on a GPU with memory of its own on that; for instance 256MB.",
        default=None,
        kind=Size(),
        doc="most bytes that flashmem may hold: on a device with memory of its own there, else in all; None for no limit. That "
        "of a bundle is the default of its sessions.",
        scope="both",
        group=MEMORY,
    )
    host_budget: Bytes = option(
        "Host budget of sessions, to choose what stays on a GPU and what on the host together.",
        default=None,
        kind=Size(),
        doc="the host budget that sessions will have, for a device with memory of its own: what stays there and in pinned host "
        "memory is then chosen together.",
        group=MEMORY,
    )
    m_peak: Bytes = option(
        "Limit on weights in flight only, as in the paper.",
        default=None,
        kind=Size(),
        doc="most bytes in flight in addition to W (FlashMem §3.1), for planning with the paper's parameters.",
        what="M_peak",
        group=MEMORY,
    )
    lambda_: float | None = option(
        "Latency (0) against memory (1).",
        default=None,
        kind=Numeric("N", float, 0, 1, "0.9 favours memory, small values favour early loading"),
        doc="weighs latency (0) against memory (1); in the paper's objective, loading distance against W. The default is 0, or "
        'the paper\'s 0.9 for objective "paper".',
        shown="0; paper: 0.9",
        group=PLAN,
    )
    chunk: Bytes = option(
        "Unit of transfer (S).",
        default=None,
        kind=Size(auto=None),
        doc="S, the unit of transfer; by default at most a quarter of what the median launch can carry.",
        shown="auto",
        group=PLAN,
    )
    preload: Converted[Sequence[str], tuple[str, ...]] = option(
        "A weight to keep resident; repeatable.",
        default=(),
        kind=Several("WEIGHT"),
        doc="weights that must be resident from the start.",
        group=PLAN,
    )
    preload_ratio: float | None = option(
        "Least share of the weights' bytes to keep resident, from 0 to 1.",
        default=None,
        kind=Numeric("N", float, 0, 1, "1 keeps all weights resident"),
        doc="the share of the bytes of all weights that must be resident at least, spread evenly over the run: to "
        "compare plans by what they preload (FlashMem, Figure 8).",
        shown="as the plan needs",
        group=PLAN,
    )
    objective: str = option(
        "The first answer, later runs, or the paper's weighted sum.",
        default=AUTO,
        kind=choice((AUTO, KINDS)),
        doc='"first" answer (the default), "steady" (later runs; the default with states), or "paper".',
        shown="first; steady with states",
        group=PLAN,
    )
    strategy: Strategy = option(
        "When weights are loaded; all but stream are baselines.",
        default="stream",
        kind=choice(Strategy),
        doc='"stream" plans; the others are the simpler ones of `planning.baselines`, for comparison.',
        group=PLAN,
    )
    unfusion: bool = option(
        "Split fusion groups if the plan gains.",
        default=True,
        kind=Flag(no=""),
        doc="split fusion groups where that improves the plan (FlashMem §4.3).",
        group=PLAN,
    )
    mu: float = option(
        "Weight of distance in ranking splits.",
        default=0.1,
        kind=Numeric("N", float, 0, hint="leave it out for 0.1"),
        doc="weight of loading distance in the ranking of fusion groups for a split.",
        group=PLAN,
    )
    alpha: float = option(
        "Least gain in capacity for a split.",
        default=0.1,
        kind=Numeric("N", float, 0, hint="leave it out for 0.1"),
        doc="the least gain in load capacity, as a fraction, for which a fusion group is split.",
        group=PLAN,
    )
    units: Units = option(
        "The paper's sum in shares of all chunks and layers, or in chunks and layers.",
        default="share",
        kind=choice(Units),
        doc='of the paper\'s objective: "share" of all chunks and all launches, or chunks and launches as "printed".',
        group=PLAN,
    )

    solver: SolverChoice = option(
        "Which solver may search where a plan has a gap.",
        default="auto",
        kind=choice(SolverChoice),
        doc='"dp": the planner alone, without OR-tools. "auto": then CP-SAT, where a plan has a gap and OR-tools is installed '
        "(a phone has none): `plan` waits for it, `compile` lets it search while weights are packed, and waits 2 s more. "
        '"cp-sat": the same however small the gap, and `compile` waits too.',
        group=PLAN,
    )
    solve_seconds: float | None = option(
        "Limit on the search by a solver.",
        default=None,
        kind=Numeric("SECONDS", float, 0, hint="leave it out for the default"),
        doc="the most seconds of the search where a plan has a gap, 10 by default; 0 for none. Of each search for the paper's "
        "objective, of which there may be several, by default 5.",
        shown="10; paper: 5",
        group=PLAN,
    )

    hierarchical_slowdown: float = option(
        "Slowdown by streaming that hierarchical launches tolerate.",
        default=0.0,
        kind=Numeric("N", float, 0, hint="leave it out for 0"),
        doc="the slowdown by bytes streamed during them that hierarchical launches tolerate, as a fraction (FlashMem §4.2).",
        group=CLASSES,
    )
    reusable_slowdown: float = option(
        "The same of reusable launches.",
        default=0.2,
        kind=Numeric("N", float, 0, hint="leave it out for 0.2"),
        doc="the same of reusable launches.",
        group=CLASSES,
    )
    elemental_slowdown: float = option(
        "The same of elemental launches.",
        default=3.0,
        kind=Numeric("N", float, 0, hint="leave it out for 3"),
        doc="the same of elemental launches.",
        group=CLASSES,
    )
    least_gain: float = option(
        "Gain below which a launch is hierarchical.",
        default=1.0,
        kind=Numeric("N", float, 0, hint="leave it out for 1"),
        doc="where a model predicts classes: bytes that slow a launch down by a fifth, over those that the mode moves in that "
        "time alone, below which the launch is hierarchical.",
        group=CLASSES,
    )
    high_gain: float = option(
        "Gain from which on it is reusable; elemental in between.",
        default=2.0,
        kind=Numeric("N", float, 0, hint="leave it out for 2"),
        doc="the same gain from which on the launch is reusable; in between it is elemental.",
        group=CLASSES,
    )

    def check(self) -> None:
        """Raise UserError for two limits of which one gives the other."""
        if self.budget is not None and self.m_peak is not None:
            raise UserError("budget and M_peak cannot both be given: M_peak is derived from the budget; leave one out")
        if self.solver == "cp-sat" and importlib.util.find_spec("ortools") is None:
            raise UserError("solver cp-sat needs ortools; install flashmem with its `compile` extra, or give auto")

    @property
    def resolved_objective(self) -> str:
        """The objective that was named; "auto" resolves to a concrete one."""
        return FIRST.name if self.objective == AUTO else self.objective

    @property
    def resolved_lambda(self) -> float:
        """The given lambda, or the default of the objective."""
        return KINDS[self.resolved_objective].lambda_ if self.lambda_ is None else self.lambda_
