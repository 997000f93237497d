"""What `flashmem simulate` predicts beside what fresh processes measure: integrated latency and peak memory.

    python -m benchmarks.simulation --zoo DIR --device pocl [--descriptor pocl.toml] [--disk cached cold] [--runs 5]

DIR holds models as `flashmem zoo export` writes them. Each model is compiled for three budgets (one too small is replaced by
the smallest that works). Measured: medians of fresh processes, after one that compiles the kernels; the peak is the ledger's.
Predicted: on the device's descriptor, or the one given. "Cold" drops the file from the page cache (the host of a virtual
machine may still hold it); the disk is measured between those runs, because shared ones vary, and the prediction is for the
disk that was there. A ratio is predicted over measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.disk import cold_rate
from benchmarks.models import compiled_within
from benchmarks.processes import median, run_bundle
from flashmem.device import DeviceDescriptor, load_descriptor
from flashmem.simulation.scenario import describe
from flashmem.simulation.simulator import simulate
from flashmem.units import parse_size

BUDGETS = {
    "resnet50": ("48MB", "64MB", "96MB"),
    "vit-b16": ("96MB", "160MB", "256MB"),
    "gptneo-125m": ("128MB", "256MB", "512MB"),
}
LATENCY_TOLERANCE, MEMORY_TOLERANCE = 0.20, 0.05


@dataclass(frozen=True)
class Comparison:
    """One line of the table; seconds and bytes."""

    model: str
    budget: int
    disk: str
    measured: float
    predicted: float
    measured_peak: float
    predicted_peak: int

    @property
    def latency_ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def peak_ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_peak / self.measured_peak

    def line(self) -> str:
        """For the table."""
        return (
            f"| {self.model} | {self.budget / 1e6:.1f} | {self.disk} | {1e3 * self.measured:.1f} | {1e3 * self.predicted:.1f} "
            f"| {self.latency_ratio:.2f} | {self.measured_peak / 1e6:.2f} | {self.predicted_peak / 1e6:.2f} "
            f"| {self.peak_ratio:.3f} |"
        )


def compare(model: Path, args: argparse.Namespace, described: DeviceDescriptor | None) -> list[Comparison]:
    """Every budget and state of the file, for one model."""
    options = {"device": args.device, "mode": args.mode, "precision": args.precision, "memory_path": args.memory_path}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for asked in args.budgets or BUDGETS[model.parent.name]:
            bundle = compiled_within(model, Path(folder) / "model.flashmem", parse_size(asked), **options)
            mode = bundle.meta["mode"]
            run_bundle(bundle.path, args.device, "--mode", mode)
            for disk in args.disk:
                rows, disk_rates = [], []
                for _ in range(args.runs):
                    rows.append(run_bundle(bundle.path, args.device, "--mode", mode, cold=disk == "cold"))
                    if disk == "cold":
                        disk_rates.append(cold_rate(bundle.path / "weights.bin"))
                descriptor = described or bundle.descriptor
                if disk_rates:
                    rates = replace(descriptor.rates, disk_bandwidth=statistics.median(disk_rates))
                    descriptor = replace(descriptor, rates=rates)
                prediction = simulate(describe(bundle.program, bundle.plan, descriptor, mode, disk=disk)).report
                comparison = Comparison(
                    model.parent.name,
                    bundle.budget_bytes or 0,
                    disk,
                    median(rows, "integrated"),
                    prediction.latency.integrated,
                    median(rows, "ledger_peak"),
                    prediction.memory.peak_bytes,
                )
                print(comparison.line(), flush=True)
                found.append(comparison)
    return found


def main() -> None:
    """Compare every model found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--descriptor", help="predict with this descriptor, by name or file, instead of the device's own")
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"))
    parser.add_argument("--disk", nargs="+", default=["cached", "cold"], choices=("cached", "cold"))
    parser.add_argument("--budgets", nargs="+", help="for all models, instead of three for each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(BUDGETS))
    args = parser.parse_args()
    described = load_descriptor(args.descriptor) if args.descriptor else None
    print(
        "| model | budget, MB | file | measured, ms | predicted, ms | ratio | measured peak, MB | predicted peak, MB | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    models = sorted(path for path in args.zoo.glob("*/model.onnx") if path.parent.name in args.models)
    found = [comparison for model in models for comparison in compare(model, args, described)]
    if not found:
        raise SystemExit(f"{args.zoo} holds none of: {', '.join(args.models)}")
    near = sum(abs(c.latency_ratio - 1) <= LATENCY_TOLERANCE for c in found)
    exact = sum(abs(c.peak_ratio - 1) <= MEMORY_TOLERANCE for c in found)
    mean = statistics.geometric_mean(c.latency_ratio for c in found)
    print(f"\nlatency within {LATENCY_TOLERANCE:.0%}: {near} of {len(found)}, geometric mean of the ratio {mean:.2f}")
    print(f"peak within {MEMORY_TOLERANCE:.0%}: {exact} of {len(found)}")


if __name__ == "__main__":
    main()
