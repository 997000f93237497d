"""Pace of this machine: its present speed relative to its profile. A shared machine can change by half in a minute.

It times the profiler's two reference launches, a product and a sum, and compares with the dataset of the device's profile. In a
comparison of 646 launches profiled twice, latencies were 0.80 of the earlier ones, and the references 0.85 and 0.75
(docs/reference/internals/profile.md).
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median
from types import TracebackType

from flashmem.base.errors import UserError
from flashmem.profiler.bench import Bench
from flashmem.profiler.bench import Pace as References
from flashmem.profiler.dataset import SUFFIX, read_dataset
from flashmem.runtime.opencl.discovery import find_device
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.simulation.scenario import Scenario

_DEVICES = Path(__file__).resolve().parents[2] / "devices"


class Pace:
    """The pace of one profiled device. Close it, or use it as a context manager."""

    def __init__(self, device: str, descriptor: DeviceDescriptor, scratch: Path) -> None:
        """`scratch`: a folder for the bench's file.

        Raises:
            UserError: the device is not on this machine, or has no profile.
        """
        dataset = _DEVICES / f"{descriptor.capacity_model}{SUFFIX}"
        if not descriptor.capacity_model or not dataset.is_file():
            raise UserError(
                f"{descriptor.name} has no profile in devices/ to compare its pace with; make one with "
                "`flashmem profile -o devices`"
            )
        _, rows = read_dataset(dataset)
        self._usual = References(median(row.gemm_pace for row in rows), median(row.traffic_pace for row in rows))
        self._bench = Bench(find_device(device), descriptor, scratch)

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bench.close()

    def now(self) -> float:
        """Present computing time over the computing time in the profile."""
        found = self._bench.pace()
        return sqrt(found.gemm / self._usual.gemm * found.traffic / self._usual.traffic)


def at_pace(scenario: Scenario, pace: float, *, host: bool) -> Scenario:
    """`scenario` on a machine with `pace` times the computing time; `host`: scale all other times too, except disk reads."""
    slower = replace(scenario, layers=tuple(replace(layer, seconds=pace * layer.seconds) for layer in scenario.layers))
    if not host:
        return slower
    machine = replace(
        scenario.machine,
        read_bandwidth=scenario.machine.read_bandwidth / pace,
        copy_bandwidth=scenario.machine.copy_bandwidth / pace,
        load_seconds=scenario.machine.load_seconds * pace,
    )
    opening = {"context_seconds": scenario.context_seconds * pace, "kernel_seconds": scenario.kernel_seconds * pace}
    return replace(slower, machine=machine, **opening)
