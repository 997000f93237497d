"""Accuracy of `flashmem simulate`: predicted and measured latency and peak memory.

    python -m benchmarks.planning.simulation --zoo DIR --device pocl [--descriptor FILE] [--modes dma interleave] [--runs 5]

DIR contains models that `benchmarks.exports` wrote. Each model is planned for three budgets (a too small one is replaced by
the smallest that works). Measured: medians of fresh processes, after one that compiles the kernels; the peak is the ledger's.
All rows of the table alternate, so that each one is measured in the machine's fast and slow minutes. Predicted: on the device's
descriptor, or the given one. "Cold" drops the file from the page cache (the host of a virtual machine may still cache it).

Shared machines vary, so two properties are measured after each run, and the prediction is for the machine at that time. They
are the disk rate, for cold files, and the computing speed (`benchmarks.planning.pace`). The second prediction includes the
computing speed. A ratio is predicted over measured. The last lines evaluate the simplest rivals in the same way. For latency
the rival is a + b * bytes of weights, fitted to the measured rows themselves, separately for cold and cached files. For the
peak it is the budget. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.disk import cold_rate
from benchmarks.paper.rates_fit import fitted
from benchmarks.planning.pace import Pace, at_pace
from benchmarks.processes import Row, median, run_bundle, take_turns, weights_of
from benchmarks.zoo import planned_again, within
from flashmem.base.units import parse_size
from flashmem.runtime.request.options import find_descriptor
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate

BUDGETS = {
    "resnet50": ("48MB", "64MB", "96MB"),
    "vit-b16": ("96MB", "160MB", "256MB"),
    "gptneo-125m": ("128MB", "256MB", "512MB"),
    "gptneo-1.3b": ("1GB", "2GB", "4GB"),
}
Disk = Literal["cold", "cached"]
LATENCY_TOLERANCE, MEMORY_TOLERANCE = 0.20, 0.05


@dataclass(frozen=True)
class Comparison:
    """One line of the table; seconds and bytes."""

    model: str
    mode: str
    budget: int
    disk: Disk
    measured: float
    predicted: float
    predicted_at_pace: float
    measured_peak: float
    predicted_peak: int
    weights: int

    @property
    def latency_ratio(self) -> float:
        """Predicted over measured latency."""
        return self.predicted / self.measured

    @property
    def ratio_at_pace(self) -> float:
        """Predicted, at the machine's pace, over measured latency."""
        return self.predicted_at_pace / self.measured

    @property
    def peak_ratio(self) -> float:
        """Predicted over measured peak."""
        return self.predicted_peak / self.measured_peak

    def line(self) -> str:
        """The line of the table."""
        return (
            f"| {self.model} | {self.mode} | {self.budget / 1e6:.1f} | {self.disk} "
            f"| {1e3 * self.measured:.1f} | {1e3 * self.predicted:.1f} "
            f"| {self.latency_ratio:.2f} | {1e3 * self.predicted_at_pace:.1f} | {self.ratio_at_pace:.2f} "
            f"| {self.measured_peak / 1e6:.2f} | {self.predicted_peak / 1e6:.2f} "
            f"| {self.peak_ratio:.3f} |"
        )


@dataclass(frozen=True)
class Case:
    """The subject of one line: a bundle, and the state of its file."""

    model: str
    bundle: flashmem.Bundle
    disk: Disk

    def measure(self, device: str, pace: Pace) -> Row:
        """Run one fresh process; then measure the machine's pace and, for cold files, the disk's bytes per second."""
        weights = self.bundle.weights_path
        row = run_bundle(self.bundle.path, device, "--mode", self.bundle.meta["mode"], cold=self.disk == "cold")
        row["pace"] = pace.now()
        return row | {"disk_rate": cold_rate(weights)} if self.disk == "cold" else row

    def compared(self, rows: list[Row], pace: float, described: DeviceDescriptor | None) -> Comparison:
        """The measured `rows` with their prediction, also at the machine's `pace`."""
        descriptor = described or self.bundle.descriptor
        if self.disk == "cold":
            descriptor = replace(descriptor, rates=replace(descriptor.rates, disk_bandwidth=median(rows, "disk_rate")))
        scenario = describe(self.bundle.program, self.bundle.plan, descriptor, self.bundle.meta["mode"], disk=self.disk)
        predicted = simulate(scenario).report
        there = simulate(at_pace(scenario, pace, host=descriptor.kind == "cpu")).report
        return Comparison(
            self.model,
            self.bundle.meta["mode"],
            self.bundle.budget_bytes or 0,
            self.disk,
            median(rows, "integrated"),
            predicted.latency.integrated,
            there.latency.integrated,
            median(rows, "ledger_peak"),
            there.memory.peak_bytes,
            weights_of(self.bundle),
        )


def by_bytes(table: Sequence[Comparison]) -> list[float]:
    """Seconds by a line through the bytes of the weights over measured seconds, for each state of the file; see the module."""
    ratios = []
    for disk in dict.fromkeys(row.disk for row in table):
        rows = [row for row in table if row.disk == disk]

        def line(factors: Mapping[str, float], rows: Sequence[Comparison] = rows) -> list[float]:
            return [0.1 * factors["a"] + factors["b"] * row.weights / 1e9 for row in rows]

        found = line(fitted(("a", "b"), line, [row.measured for row in rows]))
        ratios += [seconds / row.measured for seconds, row in zip(found, rows, strict=True)]
    return ratios


def cases_of(name: str, model: Path, folder: Path, args: argparse.Namespace) -> list[Case]:
    """Every budget and state of the file, for one model, with its kernels compiled."""
    options = {"device": args.device, "precision": args.precision, "memory_path": args.memory_path}
    whole = flashmem.compile(model, folder / f"{name}.flashmem", unfusion=False, mode=args.modes[0], **options)
    cases = []
    for mode, asked in product(args.modes, args.budgets or BUDGETS[name]):
        output = folder / f"{name}-{mode}-{asked}.flashmem"
        bundle = within(parse_size(asked), partial(planned_again, whole, output, mode=None if mode == "auto" else mode))
        run_bundle(bundle.path, args.device, "--mode", bundle.meta["mode"])
        cases += [Case(name, bundle, disk) for disk in args.disk]
    return cases


def main() -> None:
    """Compare every model in the folder."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_device()
    parser.add_argument("--descriptor", help="predict with this descriptor, by name or file, instead of the device's own")
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--modes", nargs="+", default=["auto"], help="transfer modes, each a part of the table")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--disk", nargs="+", default=["cached", "cold"], choices=("cached", "cold"))
    parser.add_argument("--budgets", nargs="+", help="for all models, instead of three for each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(BUDGETS))
    args = parser.parse_args()
    parser.check_device(args.device)
    described = load_descriptor(args.descriptor) if args.descriptor else None
    if not args.budgets and (unknown := [name for name in args.models if name not in BUDGETS]):
        parser.error(f"no budgets are known for {', '.join(unknown)}; name some with --budgets")
    models = parser.models_in(args.zoo, args.models)
    own = find_descriptor(args.device, args.memory_path)
    with TemporaryDirectory(prefix="flashmem-simulation-") as folder:
        with Pace(args.device, own, Path(folder)) as pace:  # before models are compiled: it refuses a device without a profile
            cases = [case for name, model in models.items() for case in cases_of(name, model, Path(folder), args)]
            rows = take_turns({str(i): partial(case.measure, args.device, pace) for i, case in enumerate(cases)}, args.runs)
        paces = [row["pace"] for found in rows.values() for row in found]  # of all rows, which alternated
        table = [case.compared(rows[str(i)], statistics.median(paces), described) for i, case in enumerate(cases)]
    print(f"the machine's pace: {statistics.median(paces):.2f} in the median, {min(paces):.2f} to {max(paces):.2f}\n")
    print(
        "| model | mode | budget, MB | file | measured, ms | predicted, ms | ratio | at pace, ms | ratio "
        "| measured peak, MB | predicted peak, MB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for comparison in table:
        print(comparison.line())
    exact = sum(abs(c.peak_ratio - 1) <= MEMORY_TOLERANCE for c in table)
    budgets = sum(abs(c.budget / c.measured_peak - 1) <= MEMORY_TOLERANCE for c in table)
    for what, ratios in (
        ("", [c.latency_ratio for c in table]),
        (" at the machine's pace", [c.ratio_at_pace for c in table]),
        (" of a + b * bytes of weights, fitted to these rows,", by_bytes(table)),
    ):
        near = sum(abs(ratio - 1) <= LATENCY_TOLERANCE for ratio in ratios)
        mean = statistics.geometric_mean(ratios)
        print(f"\nlatency{what} within {LATENCY_TOLERANCE:.0%}: {near} of {len(table)}, geometric mean of the ratio {mean:.2f}")
    print(f"peak within {MEMORY_TOLERANCE:.0%}: {exact} of {len(table)}; the budget as the peak: {budgets} of {len(table)}")


if __name__ == "__main__":
    run_command(main)
