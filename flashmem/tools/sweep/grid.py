"""The grid of a sweep: its points, and the columns of a row in the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Literal, TypeVar

from flashmem.base.errors import UserError
from flashmem.base.units import parse_size
from flashmem.request.limits import Limits

Cell = str | int | float | None
Row = Mapping[str, Cell]
Source = Literal["simulated", "measured"]


@dataclass(frozen=True)
class Point:
    """The parameters of one run, which are the key of a row. One of `m_peak_bytes` and `budget_bytes` is None."""

    model: str
    shape: str  # NAME=1x128 and so on, sorted, separated by spaces
    device: str
    precision: str
    m_peak_bytes: int | None
    budget_bytes: int | None
    lambda_: float
    mu: float
    chunk_bytes: int
    objective_asked: str
    mode: str
    settings: str  # NAME=VALUE and so on, of further options
    disk: str
    source: Source

    def cells(self) -> dict[str, Cell]:
        """The key columns."""
        return {column: getattr(self, name) for name, column in zip(_FIELDS, KEY, strict=True)}


_FIELDS = tuple(field.name for field in fields(Point))
KEY = tuple(name.rstrip("_") for name in _FIELDS)
"""Columns that identify a point."""

RESULTS = (
    "status", "passes_m_peak", "tier", "member", "objective_kind", "objective", "bound", "bound_scope", "gap", "preload_ratio",
    "integrated_ms", "init_ms", "exec_ms", "warm_ms", "average_bytes", "peak_bytes", "smallest_bytes", "solve_seconds",
)  # fmt: skip
"""Columns with the results.

`status` is about `objective_kind`; `passes_m_peak` is 1 if W alone has more bytes than M_peak, which does not limit it. An
infeasible point has `status` infeasible and the smallest limit that works. `objective` and `bound` are seconds, or the weighted
sum of the paper's objective. `exec_ms` is the first run without its opening, `warm_ms` a later run with W resident.
"""

COLUMNS = (*KEY, *RESULTS)


@dataclass(frozen=True)
class Grid:
    """The axes of a sweep. `m_peaks` and `budgets` are limits in bytes; each is a separate point."""

    models: Sequence[str]
    devices: Sequence[str]
    precisions: Sequence[str]
    m_peaks: Sequence[int]
    budgets: Sequence[int]
    lambdas: Sequence[float] | None  # None: the default of each objective
    mus: Sequence[float]
    shape: str
    chunk_bytes: int
    objectives: Sequence[str]
    modes: Sequence[str]
    settings: Sequence[str]
    disk: str
    source: Source

    def points(self) -> list[Point]:
        """Every combination once; those of one model, device, precision and mode are adjacent."""
        limits = [(m_peak, None) for m_peak in self.m_peaks] + [(None, budget) for budget in self.budgets]
        aims = [(objective, lambda_) for objective in self.objectives for lambda_ in self._lambdas_of(objective)]
        axes = product(self.models, self.devices, self.precisions, self.modes, limits, aims, self.mus, self.settings)
        points = (
            Point(
                model, self.shape, device, precision, m_peak, budget, lambda_, mu,
                self.chunk_bytes, objective, mode, settings, self.disk, self.source,
            )
            for model, device, precision, mode, (m_peak, budget), (objective, lambda_), mu, settings in axes
        )  # fmt: skip
        return list(dict.fromkeys(points))

    def _lambdas_of(self, objective: str) -> Sequence[float]:
        return [Limits(objective=objective).resolved_lambda] if self.lambdas is None else self.lambdas


Item = TypeVar("Item")


def split_list(text: str, flag: str, read: Callable[[str], Item]) -> list[Item]:
    """Split a comma-separated option and parse each item with `read`.

    Raises:
        UserError: the list is empty; UserErrors of `read` are passed on.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{flag} {text!r} has an empty item; write values separated by commas")
    return [read(item) for item in items]


def sizes(text: str | None, flag: str) -> list[int]:
    """Parse a comma-separated list of sizes, in bytes; empty for None."""
    return [] if text is None else split_list(text, flag, lambda item: parse_size(item, what=flag))


def numbers(text: str, flag: str, *, low: float, high: float) -> list[float]:
    """Parse a comma-separated list of numbers from `low` to `high`."""

    def read(item: str) -> float:
        try:
            value = float(item)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            most = f"from {low:g} to {high:g}" if high < float("inf") else f"of {low:g} or more"
            raise UserError(f"{flag} {item!r} is not a number {most}")
        return value

    return split_list(text, flag, read)


def words(text: str, flag: str, known: Iterable[str] = ()) -> list[str]:
    """Parse a comma-separated list of words, each one of `known` if that is given."""
    allowed = tuple(known)

    def read(item: str) -> str:
        if allowed and item not in allowed:
            raise UserError(f"{flag} {item!r} is unknown; name one of: {', '.join(allowed)}")
        return item

    return split_list(text, flag, read)
