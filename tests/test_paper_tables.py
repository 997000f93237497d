"""What the benchmarks of the paper's tables rest on: fitted rates, ranks, and copies that kernels do not take along."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from mini_bundle import write_mini_bundle

from benchmarks.rates_fit import fitted, scaled
from benchmarks.tables import off_by, rank_correlation
from flashmem.capacity.classes import predict_seconds
from flashmem.device import DeviceDescriptor, Rates
from flashmem.program import KernelShape, Launch
from flashmem.simulation.scenario import describe

BASE = DeviceDescriptor("made-up", rates=Rates(gemm_flops=100e9, disk_bandwidth=1e9, launch_seconds=10e-6))


def test_rates_that_the_rows_say_something_of_are_found() -> None:
    """Rows of so many operations, bytes and launches, on a device of other rates than are assumed."""
    rows = [(40e9, 0.5e9, 300), (5e9, 3e9, 100), (400e9, 1e9, 500), (1e9, 0.01e9, 20000)]

    def seconds(factors: Mapping[str, float]) -> list[float]:
        rates = scaled(BASE, factors).rates
        return [f / rates.gemm_flops + b / rates.disk_bandwidth + n * rates.launch_seconds for f, b, n in rows]

    true = {"gemm_flops": 1.6, "disk_bandwidth": 0.5, "launch_seconds": 2.0}
    found = fitted([*true, "session_seconds"], lambda factors: seconds(factors), seconds(true))
    for name, factor in true.items():
        assert found[name] == pytest.approx(factor, rel=0.25)
    assert found["session_seconds"] == pytest.approx(1.0)  # of which they say nothing
    assert off_by(list(zip(seconds(found), seconds(true), strict=True))) < 1.05 < off_by([(2.0, 1.0), (1.0, 2.0)])


def test_ranks() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1


def test_convolutions_have_a_rate_of_their_own_where_one_is_stated() -> None:
    def seconds(family: str, rates: Rates) -> float:
        launch = Launch("l", "k", (1,), None, (), "reusable", (), 10**9, 4, KernelShape(family=family))
        return predict_seconds(launch, replace(BASE, rates=rates))

    plain, slow = replace(BASE.rates, launch_seconds=0.0), replace(BASE.rates, launch_seconds=0.0, conv_flops=25e9)
    assert seconds("conv", plain) == seconds("matmul", plain) == seconds("matmul", slow) == pytest.approx(0.02)
    assert seconds("conv", slow) == seconds("depthwise", slow) == pytest.approx(0.08)
    assert scaled(BASE, {"conv_flops": 0.5}).rates.conv_flops == 50e9


def test_moves_that_no_kernel_takes_along_are_launches_that_take_their_time(tmp_path: Path) -> None:
    bundle = write_mini_bundle(tmp_path / "mini.flashmem", preload=0).open()
    device = DeviceDescriptor("made-up", rates=Rates(copy_bandwidth=1e6, launch_seconds=0.0, contention={"interleave": 0.0}))
    free, apart = (describe(bundle.program, bundle.plan, device, "interleave", lanes=lanes) for lanes in (True, False))
    moved = sum(w.nbytes for w in bundle.plan.weights)
    delay = math.fsum(layer.seconds for layer in apart.layers) - math.fsum(layer.seconds for layer in free.layers)
    assert delay == pytest.approx(moved / 1e6, rel=0.05)
