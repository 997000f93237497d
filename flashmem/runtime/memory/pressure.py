"""Memory pressure: the budget of `budget="auto"`, which follows the free memory that Linux or Android reports.

`wanted` is a pure function of a sample and the previous state; `sample` reads /proc and the cgroup of this process.

Available memory is the least of `MemAvailable` and the rest below the memory limit of each enclosing cgroup (file pages count
as free). The memory that flashmem itself holds outside of file pages is added. A share of it stays free (`RESERVE`, more under
pressure), so that other programs need not be killed. Pressure is PSI (`/proc/pressure/memory` or the cgroup's
`memory.pressure`; Linux 4.20, Android 10): the share of the last 10 s in which some task waited for memory. Under pressure the
budget also falls below what is held.

Hysteresis: the budget falls at once. It rises only if it would grow by an eighth, and after `QUIET_SECONDS` without pressure.
So it does not oscillate with the memory that flashmem holds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, started

RESERVE = 0.1
"""The share of available memory that stays free without pressure."""

PRESSED = ((20.0, 0.5), (5.0, 0.35), (1.0, 0.2))
"""(percent of time in which some task waited for memory, the share that stays free from this percentage on)."""

QUIET_SECONDS = 10.0
RISE = 1.125
STEP = 1 << 20
"""Budgets are multiples of this many bytes."""

SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class Sample:
    """The system's memory at `seconds`: `available` bytes in addition to the `held` ones, and PSI's `some avg10` in percent.

    `held` excludes file pages. `available` is None if the system reports nothing.
    """

    seconds: float
    available: int | None
    waited: float
    held: int


@dataclass(frozen=True)
class PressureState:
    """The current budget, and the time since which there was no pressure."""

    budget: int | None
    quiet_since: float


def next_budget(state: PressureState, now: Sample) -> PressureState:
    """The budget that follows from a sample and the previous state."""
    free = next((share for percent, share in PRESSED if now.waited >= percent), RESERVE)
    quiet_since = now.seconds if free > RESERVE else min(state.quiet_since, now.seconds)
    if now.available is None:
        return PressureState(state.budget, quiet_since)
    target = max(STEP, int(now.available * (1 - free) + now.held) // STEP * STEP)
    if free > RESERVE:
        target = min(target, max(STEP, int(now.held * (1 - free / 2)) // STEP * STEP))
    if state.budget is None or target < state.budget:
        return PressureState(target, quiet_since)
    if target >= state.budget * RISE and now.seconds - quiet_since >= QUIET_SECONDS:
        return PressureState(target, quiet_since)
    return PressureState(state.budget, quiet_since)


def sample(seconds: float, held: int, root: Path = Path("/")) -> Sample:
    """Read the system's files below `root`."""
    groups = _groups(root)
    waits = [
        _read_pressure(path) for path in (root / "proc/pressure/memory", *(group / "memory.pressure" for group in groups[:1]))
    ]
    waited = max((waited for waited in waits if waited is not None), default=0.0)
    return Sample(seconds, _available(root, groups), waited, held)


def available(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process could still use; file pages count as free. None if the system reports nothing."""
    return _available(root, _groups(root))


def room_for_files(root: Path = Path("/")) -> int | None:
    """Bytes of memory that files can take in the page cache without those that processes have mapped, such as their libraries.
    None if the system reports nothing.
    """
    return _available(root, _groups(root), mapped=True)


def _available(root: Path, groups: Sequence[Path], *, mapped: bool = False) -> int | None:
    """`mapped`: file pages that are mapped do not count as free."""
    lefts = [_meminfo(root / "proc/meminfo", mapped=mapped), *(_left(group, mapped=mapped) for group in groups)]
    return min((left for left in lefts if left is not None), default=None)


class Follower:
    """A thread that samples every second and reports the resulting budgets."""

    def __init__(
        self, held: Callable[[], int], apply: Callable[[int], object], clock: Callable[[], float], root: Path = Path("/")
    ) -> None:
        self._held = held
        self._apply = apply
        self._clock = clock
        self._root = root
        self._stop = threading.Lock()  # free once it is to end
        self._stop.acquire()
        begun = clock()
        self.state = next_budget(PressureState(None, begun), sample(begun, held(), root))
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises RunError: the system has no more threads."""
        with held_back():
            self._thread = started(self._follow, "flashmem-pressure")

    def _follow(self) -> None:
        while not self._stop.acquire(timeout=SAMPLE_SECONDS):
            before = self.state
            self.state = next_budget(self.state, sample(self._clock(), self._held(), self._root))
            if self.state.budget is not None and self.state.budget != before.budget:
                self._apply(self.state.budget)

    def stop(self) -> None:
        """Stop the thread and, unless this thread calls it, wait for its end."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._stop.release()
            if threading.current_thread() is not thread:
                thread.join()


def _meminfo(path: Path, *, mapped: bool = False) -> int | None:
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _text(path).splitlines() if _KILOBYTES.match(line)}
    left = found.get("MemAvailable")
    return left if left is None or not mapped else max(0, left - found.get("Mapped", 0))


_KILOBYTES = re.compile(r"(MemAvailable|Mapped): +[0-9]+")


def _groups(root: Path) -> list[Path]:
    """The memory cgroup of this process and its visible ancestors, version 2 or 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = top / path.lstrip("/")
        groups = [group for group in (own, *own.parents) if group == top or top in group.parents]
        found = [group for group in groups if _limit_file(group) is not None]
        if found:
            return found
    return []


def _limit_file(group: Path) -> Path | None:
    return next((group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).is_file()), None)


_FILE_PAGES = {"inactive_file": 1, "active_file": 1}
_MAPPED_PAGES = {"mapped_file": -1, "file_mapped": -1}  # in version 1 and 2


def _left(group: Path, *, mapped: bool = False) -> int | None:
    """Bytes left below the limit of a cgroup; None without a limit. File pages, which can be dropped, count as free, but not
    `mapped` ones.
    """
    path = _limit_file(group)
    limit = _text(path).strip() if path is not None else "max"
    if not limit.isdecimal() or int(limit) >= 1 << 60:
        return None
    name = "memory.current" if path is not None and path.name == "memory.max" else "memory.usage_in_bytes"
    used = _text(group / name).strip()
    if not used.isdecimal():
        return None
    cached = 0
    counted = _FILE_PAGES | (_MAPPED_PAGES if mapped else {})
    for line in _text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in counted and value.strip().isdecimal():
            cached += counted[key] * int(value)
    return max(0, int(limit) - max(0, int(used) - max(0, cached)))


def _read_pressure(path: Path) -> float | None:
    """The value `some avg10` of a PSI file."""
    for line in _text(path).splitlines():
        if line.startswith("some "):
            for part in line.split()[1:]:
                key, _, value = part.partition("=")
                if key == "avg10":
                    with suppress(ValueError):
                        return float(value)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
