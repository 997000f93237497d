"""Quality of predictions of the paper's tables, compared with rivals that use no simulator.

Rivals use only the bytes of the weights and the multiply-adds:

- order of latency: the order of the weights' bytes;
- latency: a constant for the opening plus the bytes at one rate, fitted to the same rows as the rates, in the same way;
- average memory: one share of the weights' bytes for all rows, fitted to the same rows;
- execution: one rate of multiply-adds, fitted to all evaluated rows, an advantage that the prediction does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.paper.rates_fit import fitted

Pairs = Sequence[tuple[float, float]]
"""The predicted and the published value of each row."""

MEMORY_BAR, ERROR_BAR, RANK_BAR = 1.2, 1.5, 0.9


@dataclass(frozen=True)
class Judged:
    """A row: predicted and published milliseconds and average MB, computing time, weights in MB and multiply-adds in 10^9."""

    model: str
    fitted: bool
    ms: float
    published_ms: float
    mb: float
    published_mb: float
    computing_ms: float
    executed_ms: float | None
    weights_mb: float
    gmacs: float


def off_by(values: Pairs) -> float:
    """The geometric mean of the factors between predicted and published values."""
    return geometric_mean(math.exp(abs(math.log(ours / theirs))) for ours, theirs in values)


def rank_correlation(values: Pairs) -> float:
    """Spearman's rank correlation, for values without ties."""
    ranks = [{value: rank for rank, value in enumerate(sorted(column))} for column in zip(*values, strict=True)]
    distance = sum((ranks[0][a] - ranks[1][b]) ** 2 for a, b in values)
    return 1 - 6 * distance / (len(values) * (len(values) ** 2 - 1))


def within(values: Iterable[tuple[float, float]], factor: float) -> int:
    """How many predictions are at most `factor` times too large or too small."""
    return sum(1 / factor <= ours / theirs <= factor for ours, theirs in values)


def line_by_bytes(rows: Sequence[Judged], opening_ms: float, ms_per_mb: float) -> Callable[[float], float]:
    """Milliseconds as a + b * MB of weights, fitted to `rows` like the rates (`rates_fit`), from the two assumed values."""
    factors = fitted(
        ("a", "b"),
        lambda tried: [opening_ms * tried["a"] + ms_per_mb * tried["b"] * row.weights_mb for row in rows],
        [row.published_ms for row in rows],
    )
    a, b = opening_ms * factors["a"], ms_per_mb * factors["b"]
    return lambda weights_mb: a + b * weights_mb


def verdict(rows: Sequence[Judged], *, opening_ms: float, ms_per_mb: float) -> list[str]:
    """A sentence for each claim: latency over the rows that were not fitted, the others over all rows.

    `opening_ms` and `ms_per_mb` are the assumed values for opening a session and for the disk before the fit.
    """
    return [*_latency(rows, opening_ms, ms_per_mb), _memory(rows), *_execution(rows)]


def _latency(rows: Sequence[Judged], opening_ms: float, ms_per_mb: float) -> list[str]:
    known, held = [row for row in rows if row.fitted], [row for row in rows if not row.fitted]
    if len(held) < 2:
        return []
    values = [(row.ms, row.published_ms) for row in held]
    rank, error = rank_correlation(values), off_by(values)
    ratio = geometric_mean(ours / theirs for ours, theirs in values)
    by_bytes = rank_correlation([(row.weights_mb, row.published_ms) for row in held])
    lines = [
        f"order of latency, {len(held)} rows not fitted: Spearman {rank:.2f} (bar {RANK_BAR}: {_met(rank >= RANK_BAR)}); "
        f"weight bytes alone {by_bytes:.2f}",
        f"latency of the same rows: off by {error:.2f} times (bar {ERROR_BAR}: {_met(error <= ERROR_BAR)}), "
        f"predicted / published {ratio:.2f}",
    ]
    if len(known) > 1:
        line = line_by_bytes(known, opening_ms, ms_per_mb)
        rival = off_by([(line(row.weights_mb), row.published_ms) for row in held])
        lines[-1] += (
            f"; {line(0):.0f} ms and {line(1) - line(0):.2f} ms a MB of weights, fitted to {len(known)} rows: {rival:.2f} times"
        )
    return lines


def _memory(rows: Sequence[Judged]) -> str:
    values = {row.model: (row.mb, row.published_mb) for row in rows}
    inside = within(values.values(), MEMORY_BAR)
    over = [f"{name} {ours / theirs:.2f}" for name, (ours, theirs) in values.items() if ours > MEMORY_BAR * theirs]
    under = [f"{name} {ours / theirs:.2f}" for name, (ours, theirs) in values.items() if ours * MEMORY_BAR < theirs]
    said = f"average memory at most {MEMORY_BAR} times too large or too small: {inside} of {len(values)}"
    said += f"; above: {', '.join(over) or 'none'}; below: {', '.join(under) or 'none'}"
    if known := [row for row in rows if row.fitted]:
        share = geometric_mean(row.published_mb / row.weights_mb for row in known)
        rival = within([(share * row.weights_mb, row.published_mb) for row in rows], MEMORY_BAR)
        said += f"; {share:.2f} of the weight bytes, fitted to the fitted rows: {rival} of {len(values)}"
    return said


def _execution(rows: Sequence[Judged]) -> list[str]:
    known = [(row.computing_ms, row.executed_ms, row.gmacs) for row in rows if row.executed_ms]
    if not known:
        return []
    rate = geometric_mean(executed / gmacs for _, executed, gmacs in known)
    ours = off_by([(computing, executed) for computing, executed, _ in known])
    ratio = geometric_mean(computing / executed for computing, executed, _ in known)
    rival = off_by([(rate * gmacs, executed) for _, executed, gmacs in known])
    return [
        f"computing, {len(known)} rows of SmartMem's execution: off by {ours:.2f} times, predicted / published {ratio:.2f}; "
        f"one rate of multiply-adds, fitted to these rows: {rival:.2f} times"
    ]


def _met(holds: bool) -> str:
    return "met" if holds else "missed"
