"""RASS (CARIn, section 4.3): decisions sorted by optimality, the few designs to keep, and when to use which.

x is a decision, f_i(x) its i-th objective with weight w_i, X the decisions that keep all constraints. Over X: σ_i² is the
variance of f_i, and the utopia point u has the best value of each objective. Then

    d(x) = sqrt(Σ_i w_i · (f_i(x) − u_i)² / σ_i²)          weighted Mahalanobis distance (objectives taken as uncorrelated)
    D    = sqrt(Σ_i w_i · (max f_i − min f_i)² / σ_i²)      the largest there can be
    optimality(x) = D / d(x)                                from 1, worst in everything, to infinity at the utopia point

An objective that is the same for all of X says nothing about which to take, and is left out.

Designs are kept for sets of processors that decisions use, those with the best optimality first. A set that contains one kept
before is not viable for switching: it has trouble whenever that one has, so that no rule could ever name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.runtime.application.designs import SwitchingRule

MOST_SETS = 3
"""Sets of processors that designs are kept for (section 4.3.4)."""

SAME = 1e-9
"""Values of an objective that differ by less than this share are the same: they come from sums in different orders."""

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Solution:
    """`designs`: rows of the decisions, each once, with what it is kept for (`roles`); `sets` of processors, in the order in
    which the rules name them; `optimality` of every decision, NaN where a constraint is broken.
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
    told = np.ptp(costs, axis=0) > SAME * np.abs(costs).max(axis=0)
    scale = np.asarray(weights, np.float64)[told] / variance[told]
    best, worst = costs.min(axis=0)[told], costs.max(axis=0)[told]
    distance = np.sqrt((scale * (costs[:, told] - best) ** 2).sum(axis=1))
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
    """The designs and the policy; None if no decision keeps all constraints.

    Args:
        values: objectives [decisions, objectives], of which those in `maximise` are the better the higher.
        weights: of each objective.
        allowed: whether each decision keeps all constraints.
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
    share = _normalised(memory, kept) + _normalised(workload, kept)
    both = min((small, light), key=lambda row: (share[row], ranked.index(row)))
    named = [(row, f"best on {' and '.join(each)}") for each, row in best.items()]
    named += [(small, "least memory"), (light, "lightest"), (both, "light and small")]
    designs = tuple(dict.fromkeys(row for row, _ in named))
    roles = tuple(tuple(role for row, role in named if row == design) for design in designs)
    policy = _policy(len(best), [designs.index(row) for row, _ in named])
    return Solution(designs, roles, tuple(best), policy, scores)


def _viable(ranked: Sequence[int], mappings: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """The sets of processors to switch between, and the best row on each."""
    best: dict[tuple[str, ...], int] = {}
    for row in ranked:
        if len(best) < MOST_SETS and not any(set(known) <= set(mappings[row]) for known in best):
            best[tuple(dict.fromkeys(mappings[row]))] = row
    return best


def _normalised(values: Rows, kept: NDArray[Any]) -> Rows:
    """Each value between the least (0) and the most (1) of those kept."""
    low, high = values[kept].min(), values[kept].max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _policy(sets: int, chosen: Sequence[int]) -> tuple[SwitchingRule, ...]:
    """The shape of CARIn's Tables 7 and 8; the first rule that holds is meant."""
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
