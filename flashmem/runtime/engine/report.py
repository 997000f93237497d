"""Report of a run: latency, memory, and when loads and layers ran."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flashmem.runtime.memory.accounts import Account, Category
from flashmem.schedule.loads import TimedInterval


@dataclass(frozen=True)
class Latency:
    """Seconds. `integrated` is from the creation of the session to outputs in host memory.

    For the first run it is `init` (making the session) plus `exec`; a later run makes nothing, so its `init` is 0.
    """

    integrated: float
    init: float
    exec: float


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that the session held, as its ledger counted them; the process and the page cache apart.

    `peak_bytes` and `average_bytes` (over time) are of the run, for the first run since the session's creation; `by_category`
    is what made up the peak. `process_peak_rss_bytes` is the whole process since its start, drivers included, and
    `process_start_rss_bytes` what it held when the device's context was there and nothing else of the session; None where the
    system does not say. `over_time`: (seconds, bytes from then on); `changes`: (seconds, category, its bytes from then on).
    """

    peak_bytes: int
    average_bytes: float
    budget_bytes: int | None
    by_category: dict[Category, int]
    process_peak_rss_bytes: int | None
    over_time: tuple[tuple[float, int], ...]
    process_start_rss_bytes: int | None = None
    changes: tuple[tuple[float, Category, int], ...] = ()

    @classmethod
    def of(cls, account: Account, until: float, budget: int | None, start_rss: int | None) -> Self:
        """What `account` counted since its history began, `until` as `time.perf_counter()` gives it."""
        return cls(
            account.peak,
            account.average(until),
            budget,
            dict(account.peak_by_category),
            process_peak_rss(),
            tuple(account.history),
            start_rss,
            tuple(account.changes),
        )


@dataclass(frozen=True)
class RunReport:
    """One run. `layers` is filled when the session traces; times are seconds of `time.perf_counter()`.

    `loads` may have begun before the run did. `steady`: it had the kernels of later runs.
    """

    latency: Latency
    memory: MemoryUse
    loads: tuple[TimedInterval, ...]
    layers: tuple[TimedInterval, ...]
    steady: bool = False


def process_peak_rss() -> int | None:
    """The most memory that this process has had resident, in bytes; None where /proc does not say."""
    return _resident("VmHWM")


def process_rss() -> int | None:
    """The memory of this process that is resident now, in bytes; None where /proc does not say."""
    return _resident("VmRSS")


def _resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)
