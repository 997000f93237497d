"""Big and little cores, where a system has both: warm-up runs on little ones."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_RATINGS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
"""What says how fast a core is, the best first: the scheduler's own measure (arm, arm64), or its highest frequency in kHz."""

_LITTLE = 0.7
"""Cores below this share of the fastest one are little: a phone's are at 0.2 to 0.6, and cores of one kind differ by less."""


def little_cores(folder: Path | None = None) -> frozenset[int]:
    """The little ones among the cores that this thread may run on; none where all are alike, or nobody says.

    `folder`: what /sys/devices/system/cpu is elsewhere.
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
    """What each core is rated; nothing unless all are."""
    found: dict[int, int] = {}
    for core in cores:
        try:
            found[core] = int((folder / f"cpu{core}" / rating).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return {}
    return found


def prefer_little() -> None:
    """Have this thread, and the processes that it starts, run on little cores alone, if there are any."""
    cores = little_cores()
    if cores:
        with suppress(OSError):  # a system that does not let it
            os.sched_setaffinity(0, cores)
