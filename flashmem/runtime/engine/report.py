"""Report of a run: latency, memory, and the times of loads and launches."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flashmem.runtime.memory.accounts import Account, Category
from flashmem.schedule.loads import TimedInterval


@dataclass(frozen=True)
class Latency:
    """Latency of a run in seconds. `integrated` is from the creation of the session to outputs in host memory.

    For the first run it is `init` (creation of the session) plus `exec`. Later runs create nothing: their `init` is 0.
    """

    integrated: float
    init: float
    exec: float


@dataclass(frozen=True)
class HostMemoryUse:
    """Host memory of a session on a device with memory of its own, in bytes: the host tier, staging, and copied outputs.

    `by_category` splits the peak of the run. `budget_bytes`: the host budget, if there is one.
    """

    peak_bytes: int
    budget_bytes: int | None
    by_category: dict[Category, int]

    @classmethod
    def of(cls, account: Account) -> Self:
        """The use that `account` counted since the begin of its history."""
        return cls(account.peak, account.shared.limit, dict(account.peak_by_category))


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a session in bytes, as its ledger counts it, without the rest of the process and the page cache.

    `peak_bytes` and `average_bytes` (over time) are of the run; of the first run, since the session's creation. `by_category`
    splits the peak. `process_peak_rss_bytes` is the peak of the whole process since its start, drivers included.
    `process_start_rss_bytes` is its resident memory after the creation of the device's context, before the rest of the session.
    Both are None if the system does not report them. `over_time`: (seconds, bytes from then on); `changes`: (seconds, category,
    its bytes from then on). `host`: memory that the host budget counts, and the other fields do not; None without one.
    """

    peak_bytes: int
    average_bytes: float
    budget_bytes: int | None
    by_category: dict[Category, int]
    process_peak_rss_bytes: int | None
    over_time: tuple[tuple[float, int], ...]
    process_start_rss_bytes: int | None = None
    changes: tuple[tuple[float, Category, int], ...] = ()
    host: HostMemoryUse | None = None

    @classmethod
    def of(cls, account: Account, until: float, budget: int | None, start_rss: int | None, host: Account | None = None) -> Self:
        """The use that `account` counted from the begin of its history to `until`, a time of `time.perf_counter()`.

        `host`: the account of the host budget.
        """
        return cls(
            account.peak,
            account.average(until),
            budget,
            dict(account.peak_by_category),
            process_peak_rss(),
            tuple(account.history),
            start_rss,
            tuple(account.changes),
            None if host is None else HostMemoryUse.of(host),
        )


@dataclass(frozen=True)
class RunReport:
    """Report of one run. `layers` is filled when the session traces; times are seconds of `time.perf_counter()`.

    `loads` may begin before the run does. A load without a step "read" in a mode that copies is a copy from the host
    tier. `steady`: the run used the kernels of later runs. `ended` is when the outputs were in
    host memory; the run, without the session's creation, began `latency.exec` seconds before. `direct_bytes`: bytes that were
    read past the page cache since the last run, because memory cannot hold the weight file. `no_direct_reads`: why the file
    system refuses such reads, if it has. `loaded_bytes`: bytes of `loads`, whose times a device with memory of its own tells
    only when they are asked for, once it has made all copies so far.
    """

    latency: Latency
    memory: MemoryUse
    loads: Sequence[TimedInterval]
    layers: tuple[TimedInterval, ...]
    steady: bool = False
    ended: float = 0.0
    direct_bytes: int = 0
    no_direct_reads: str = ""
    loaded_bytes: int = 0

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of weights that this run copied from the host tier, without a read."""
        if self.memory.host is None:
            return 0
        return sum(load.nbytes for load in self.loads if all(step != "read" for step, _ in load.steps))


class _Peak:
    """The peak of this process's resident memory, read again only after a page fault: without one it has no new pages.

    A reading takes 12 us, and a small network runs in as many.
    """

    def __init__(self) -> None:
        self._faults = -1
        self._peak: int | None = None

    def read(self) -> int | None:
        """The peak in bytes; None if /proc does not report it."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults = usage.ru_minflt + usage.ru_majflt
        if faults != self._faults:
            self._faults = faults
            self._peak = _resident("VmHWM")
        return self._peak


def process_peak_rss() -> int | None:
    """Peak resident memory of this process in bytes; None if /proc does not report it."""
    return _PEAK.read()


def process_rss() -> int | None:
    """Resident memory of this process in bytes; None if /proc does not report it."""
    return _resident("VmRSS")


def _resident(field: str) -> int | None:
    try:  # without text files, which take three times as long
        status = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(status, mmap.PAGESIZE)
    finally:
        os.close(status)
    _, found, rest = text.partition(f"\n{field}:".encode("ascii"))
    return 1024 * int(rest.split(maxsplit=1)[0]) if found else None


_PEAK = _Peak()
