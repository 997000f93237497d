"""RASS (CARIn, section 4.3): ranks decisions by optimality, selects a few designs, and derives the policy to switch between
them.

x is a decision, f_i(x) its i-th objective with weight w_i, X the decisions that satisfy all constraints. Over X, σ_i² is the
variance of f_i, and the utopia point u has the best value of each objective. Then

    d(x) = sqrt(Σ_i w_i · (f_i(x) − u_i)² / σ_i²)          weighted Mahalanobis distance (objectives taken as uncorrelated)
    D    = sqrt(Σ_i w_i · (max f_i − min f_i)² / σ_i²)      the largest possible distance
    optimality(x) = D / d(x)                                from 1, worst in everything, to infinity at the utopia point

An objective with one value for all of X does not distinguish decisions, and is ignored.

A design is selected for each set of processors that decisions use, in the order of the best optimality. A set that contains an
earlier one is not viable. It is in trouble whenever the earlier one is, so that no rule could ever select it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.runtime.application.designs import SwitchingRule

MOST_SETS = 3
"""The most sets of processors with a design (section 4.3.4)."""

SAME = 1e-9
"""Relative difference below which values of an objective are equal: they are sums in different orders."""

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """The selected designs and the policy.

    `designs` are rows of the decisions, each once, with its `roles`. `sets` of processors are in the order of the rules'
    entries. `optimality` has every decision, NaN where a constraint is violated.
    """

    designs: tuple[int, ...]
    roles: tuple[tuple[str, ...], ...]
    sets: tuple[tuple[str, ...], ...]
    policy: tuple[SwitchingRule, ...]
    optimality: Rows


def optimality(values: Rows, maximise: Sequence[bool], weights: Sequence[float]) -> Rows:
    """D / d(x) of each row of `values` [decisions, objectives]; infinity at the utopia point."""
    signs = np.where(np.asarray(maximise), -1.0, 1.0)
    costs = values * signs
    variance = costs.var(axis=0)
    varying = np.ptp(costs, axis=0) > SAME * np.abs(costs).max(axis=0)
    scale = np.asarray(weights, np.float64)[varying] / variance[varying]
    best = costs.min(axis=0)[varying]
    worst = costs.max(axis=0)[varying]
    distance = np.sqrt((scale * (costs[:, varying] - best) ** 2).sum(axis=1))
    largest = float(np.sqrt((scale * (worst - best) ** 2).sum()))
    with np.errstate(divide="ignore"):
        return np.where(distance > 0, largest / np.where(distance > 0, distance, 1.0), np.inf)


def solve(
    values: Rows,
    maximise: Sequence[bool],
    weights: Sequence[float],
    allowed: NDArray[np.bool_],
    mappings: Sequence[tuple[str, ...]],
    memory: Rows,
    workload: Rows,
) -> Solution | None:
    """The designs and the policy; None if no decision satisfies all constraints.

    Args:
        values: objectives [decisions, objectives]; those in `maximise` are better when higher.
        weights: of each objective.
        allowed: whether each decision satisfies all constraints.
        mappings: the processors of each decision's tasks.
        memory: bytes of each decision, all tasks together.
        workload: multiply-adds of each, all tasks together.
    """
    kept = np.flatnonzero(allowed)
    if not len(kept):
        return None
    scores = np.full(len(values), np.nan)
    scores[kept] = optimality(values[kept], maximise, weights)
    ranked = sorted(kept.tolist(), key=lambda row: (-scores[row], memory[row], row))
    best = _viable(ranked, mappings)
    small = min(ranked, key=lambda row: (memory[row], ranked.index(row)))
    light = min(ranked, key=lambda row: (workload[row], ranked.index(row)))
    share = _normalize(memory, kept) + _normalize(workload, kept)
    both = min((small, light), key=lambda row: (share[row], ranked.index(row)))
    named = [(row, f"best on {' and '.join(each)}") for each, row in best.items()]
    named += [(small, "least memory"), (light, "lightest"), (both, "light and small")]
    designs = tuple(dict.fromkeys(row for row, _ in named))
    roles = tuple(tuple(role for row, role in named if row == design) for design in designs)
    policy = _policy(len(best), [designs.index(row) for row, _ in named])
    return Solution(designs, roles, tuple(best), policy, scores)


def _viable(ranked: Sequence[int], mappings: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """The sets of processors to switch between, with the best row for each."""
    best: dict[tuple[str, ...], int] = {}
    for row in ranked:
        if len(best) < MOST_SETS and not any(set(known) <= set(mappings[row]) for known in best):
            best[tuple(dict.fromkeys(mappings[row]))] = row
    return best


def _normalize(values: Rows, kept: NDArray[Any]) -> Rows:
    """Values scaled so that the smallest of the kept rows is 0 and the largest 1."""
    low = values[kept].min()
    high = values[kept].max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _policy(sets: int, chosen: Sequence[int]) -> tuple[SwitchingRule, ...]:
    """The policy in the form of CARIn's Tables 7 and 8; the first matching rule applies."""
    *best, small, light, both = chosen
    rules = [
        SwitchingRule((True,) * number + (False,) + (None,) * (sets - number - 1), False, best[number])
        for number in range(sets)
    ]
    rules += [
        SwitchingRule((True,) * sets, False, light),
        SwitchingRule((True,) * sets, True, both),
        SwitchingRule((None,) * sets, True, small),
    ]
    return tuple(rules)
