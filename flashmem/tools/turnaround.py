"""How several models get on beside each other: the three metrics of CARIn, section 4.1.2 (after Eyerman and Eeckhout, 2008).

T_i is the average latency of model i, from its request to its answer: alone (single) or among the others (multi), in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence


def normalised_turnaround(single: float, multi: float) -> float:
    """NTT_i = T_i,multi / T_i,single: how much slower it seems beside the others.

    It is 1 where they cost nothing, and less where loading ahead gains more than waiting costs.
    """
    return multi / single


def normalised_progress(single: float, multi: float) -> float:
    """NP_i = T_i,single / T_i,multi = 1 / NTT_i."""
    return single / multi


def system_throughput(progress: Sequence[float]) -> float:
    """STP = sum of NP_i: how many models' worth of work is done at once; the number of models where others cost nothing."""
    return sum(progress)


def fairness(progress: Sequence[float]) -> float:
    """min over i, j of NP_i / NP_j: from 0, where one gets nowhere, to 1, where all are equally slow."""
    return min(progress) / max(progress)
