"""Big and little CPU cores: find the little ones, and run warm-up threads there."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_RATINGS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
"""Files that rate a core's speed, the best first: the scheduler's capacity (arm, arm64), or the highest frequency in kHz."""

_LITTLE = 0.7
"""Cores rated below this share of the fastest one are little: on phones they have 0.2 to 0.6, and equal cores differ less."""


def little_cores(folder: Path | None = None) -> frozenset[int]:
    """The little cores among those that this thread may run on; empty if all are alike or the system does not rate them.

    `folder`: replaces /sys/devices/system/cpu.
    """
    folder = folder or _CPUS
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    allowed = os.sched_getaffinity(0)
    for rating in _RATINGS:
        rated = _rated(folder, rating, allowed)
        if rated:
            return frozenset(core for core, value in rated.items() if value < _LITTLE * max(rated.values()))
    return frozenset()


def _rated(folder: Path, rating: str, cores: Collection[int]) -> Mapping[int, int]:
    """The rating of each core; empty unless all cores have one."""
    found: dict[int, int] = {}
    for core in cores:
        try:
            found[core] = int((folder / f"cpu{core}" / rating).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return {}
    return found


def prefer_little() -> None:
    """Restrict this thread, and the processes that it starts, to little cores, if the machine has any."""
    cores = little_cores()
    if cores:
        with suppress(OSError):  # the system may forbid it
            os.sched_setaffinity(0, cores)
