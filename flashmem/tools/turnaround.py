"""Metrics of models that share a device (CARIn, section 4.1.2, after Eyerman and Eeckhout, 2008).

T_i is the average latency of model i in seconds, from request to answer: alone (single) or together with the others (multi).
"""

from __future__ import annotations

from collections.abc import Sequence


def normalised_turnaround(single: float, multi: float) -> float:
    """Normalised turnaround time, NTT_i = T_i,multi / T_i,single: the slowdown caused by other models.

    It is 1 if other models cost nothing, and less if loading ahead saves more time than waiting costs.
    """
    return multi / single


def normalised_progress(single: float, multi: float) -> float:
    """Normalised progress, NP_i = T_i,single / T_i,multi = 1 / NTT_i."""
    return single / multi


def system_throughput(progress: Sequence[float]) -> float:
    """System throughput, STP = sum of NP_i; the number of models if none slows another."""
    return sum(progress)


def fairness(progress: Sequence[float]) -> float:
    """Fairness, the minimum over i, j of NP_i / NP_j: 0 if one model makes no progress, 1 if all are equally slow."""
    return min(progress) / max(progress)
