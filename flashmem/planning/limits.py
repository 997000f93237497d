"""The user's limits and options for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from flashmem.base.errors import UserError
from flashmem.base.units import parse_size
from flashmem.schedule.objectives import AUTO, FIRST, KINDS
from flashmem.schedule.plan import Strategy, Units


@dataclass(frozen=True)
class Limits:
    """Limits and options of a plan; sizes are in bytes. `objective`: a name of `KINDS`; "auto" means the first answer.

    `lambda_` weighs latency (0) against memory (1). None means the default of the objective: 0, the fastest plan, or the
    paper's 0.9 for its objective.

    `chunk` is S. None means the largest size that gives the median reusable layer at least four chunks. `units`: the units of
    the paper's objective. `host_budget`: that of sessions on a device with memory of its own. `strategy`: "stream" selects the
    planner; any other value selects a baseline for comparison.

    Adaptive unfusion (`flashmem.compiler.adaptive.unfusion`) ranks layers by lambda |W_new| + `mu` times the loading distance.
    It splits a layer if C_l grows by at least the share `alpha`. The paper gives neither value: `mu` is the weight of distance
    in its objective at lambda 0.9, and `alpha` requires a growth of one tenth.

    Raises:
        UserError: a number out of its range, an unknown word, or both a budget and an M_peak.
    """

    budget: int | None = None
    m_peak: int | None = None
    chunk: int | None = None
    lambda_: float | None = None
    objective: str = AUTO
    preload: tuple[str, ...] = ()
    strategy: Strategy = "stream"
    unfusion: bool = True
    mu: float = 0.1
    alpha: float = 0.1
    units: Units = "share"
    host_budget: int | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.m_peak is not None:
            raise UserError("budget and M_peak cannot both be given: M_peak is derived from the budget; leave one out")
        if self.lambda_ is not None and not 0 <= self.lambda_ <= 1:
            raise UserError(
                f"lambda {self.lambda_} is not between 0 and 1; 0.9 favours memory, small values favour early loading"
            )
        for name, value in (("mu", self.mu), ("alpha", self.alpha)):
            if not value >= 0:
                raise UserError(f"{name} {value} is not a number of 0 or more; leave it out for 0.1")
        if self.objective not in (AUTO, *KINDS):
            raise UserError(f"objective {self.objective!r} is unknown; name one of: {', '.join((AUTO, *KINDS))}")
        if self.units not in get_args(Units):
            raise UserError(f"units {self.units!r} are unknown; name one of: {', '.join(get_args(Units))}")
        if self.strategy not in get_args(Strategy):
            raise UserError(f"strategy {self.strategy!r} is unknown; name one of: {', '.join(get_args(Strategy))}")

    @property
    def resolved_objective(self) -> str:
        """The objective that was named; "auto" resolves to a concrete one."""
        return FIRST.name if self.objective == AUTO else self.objective

    @property
    def resolved_lambda(self) -> float:
        """The given lambda, or the default of the objective."""
        return KINDS[self.resolved_objective].lambda_ if self.lambda_ is None else self.lambda_


def read_limits(
    *,
    budget: int | str | None = None,
    m_peak: int | str | None = None,
    chunk: int | str | None = Limits.chunk,
    lambda_: float | None = Limits.lambda_,
    objective: str = Limits.objective,
    preload: Sequence[str] = Limits.preload,
    strategy: Strategy = Limits.strategy,
    unfusion: bool = Limits.unfusion,
    mu: float = Limits.mu,
    alpha: float = Limits.alpha,
    units: Units = Limits.units,
    host_budget: int | str | None = None,
) -> Limits:
    """Limits from sizes in text form, for instance "256MB".

    Raises:
        UserError: a text that is not a size, or values that `Limits` refuses.
    """
    return Limits(
        budget=None if budget is None else parse_size(budget, what="budget"),
        m_peak=None if m_peak is None else parse_size(m_peak, what="M_peak"),
        chunk=None if chunk in (None, "auto") else parse_size(chunk, what="chunk"),
        lambda_=lambda_,
        objective=objective,
        preload=tuple(preload),
        strategy=strategy,
        unfusion=unfusion,
        mu=mu,
        alpha=alpha,
        units=units,
        host_budget=None if host_budget is None else parse_size(host_budget, what="host budget"),
    )
