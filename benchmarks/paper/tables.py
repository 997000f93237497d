"""FlashMem's Tables 7 and 8 by simulation: latency and average memory, predicted and published.

    python -m benchmarks.paper.tables --zoo DIR [--fit ROW,...] [--m-peak 500MB] [--json o.json]

Each model is planned in fp16 for `adreno750` (objective `first`, default lambda, M_peak as in the paper) and simulated with a
cold file. Only shapes are read from DIR/NAME/model.onnx, or from DIR/NAME-SIZE/model.onnx at the size with the paper's
multiply-adds, if that is not the default size (`benchmarks.exports --size`). A model without a file is planned from
its configuration (`zoo:NAME`), if one exists.

Rates of the descriptor that are assumptions (`--free`) are fitted to the latency of at most four rows (`--fit`). Without
`--fit` the shipped descriptor is used, which is fitted to the rows named above. Launches have the seconds of its compiled code,
unless `--roofline` is given. Plans are made again with the fitted rates, and the rates are fitted again. Errors are those of
the other rows; memory is not fitted, and evaluated for all rows. The second table splits a row's latency into opening, loading,
and the seconds of each kernel family. As a check that no fit has used, it also shows the execution time that the paper measured
for its base framework (Table 7, SmartMem, Exec). The last lines compare each claim with the same figure of its simplest rival
(`benchmarks/paper/tables_verdict.py`). Needs the `compile` extra.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.exports.models import find
from benchmarks.paper.rates_fit import RATES, fitted, scaled
from benchmarks.paper.tables_verdict import Judged, verdict
from flashmem.base.errors import UserError
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.planning.capacity.choice import default_model
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import Prediction, simulate
from flashmem.tools.zoo.graphs import zoo_graph


@dataclass(frozen=True)
class Published:
    """A row of Tables 6 to 8: milliseconds and average MB of FlashMem, 10^9 multiply-adds, SmartMem's ms of execution."""

    ms: float
    mb: float
    gmacs: float
    executed: float | None


PUBLISHED = {
    "gptneo-125m": Published(577, 260, 16, 59),
    "gptneo-1.3b": Published(3086, 554, 170, 501),
    "gptneo-2.7b": Published(7567, 1132, 342, None),
    "resnet50": Published(473, 83, 4.1, 33),
    "sam2-large": Published(1267, 150, 218, 826),
    "vit-103m": Published(347, 83, 21, 73),
    "deepvit-204m": Published(785, 165, 42, 190),
    "sd15-unet": Published(3212, 838, 78, 312),
    "whisper-medium-text": Published(1565, 240, 55, 336),
    "depthanything-s": Published(496, 86, 14, 71),
    "depthanything-l": Published(1382, 246, 180, 807),
}
"""By names of the zoo. Whisper is the model of 356 million parameters in Table 6."""

DEVICE, PRECISION = "adreno750", "fp16"
ASSUMED = {"gemm_flops": 8.31e11, "disk_bandwidth": 4.2e9, "session_seconds": 0.15, "launch_seconds": 30e-6}
"""The descriptor's rates before the fit, from published figures; fits start with these."""

SHIPPED_FIT = ("gptneo-1.3b", "vit-103m", "resnet50", "depthanything-l")
"""The rows that the shipped descriptor is fitted to: they are not evaluated with the shipped descriptor."""

MOST_FITTED = 4
_ROUNDS = 2
"""How often plans are made with the fitted rates, and the rates are fitted again."""


@dataclass(frozen=True)
class Planned:
    """A model's program and its plan for one descriptor."""

    program: Program
    plan: OverlapPlan

    @classmethod
    def made(cls, graph: Graph, descriptor: DeviceDescriptor, limits: Mapping[str, Any]) -> Planned:
        """Plan as `flashmem compile` does."""
        options = Options(descriptor, choose_mode(descriptor, "auto"), BundleRequest(**limits, precision=PRECISION))
        generated, plan = plan_graph(graph, options)
        return cls(generated.program, with_layouts(generated.program, plan, [options.mode]))

    def played(self, descriptor: DeviceDescriptor) -> Prediction:
        """Simulate the first answer with a cold file."""
        return simulate(describe(self.program, self.plan, descriptor, self.plan.mode, disk="cold"))

    def computing(self, descriptor: DeviceDescriptor) -> dict[str, float]:
        """Seconds of the launches by kernel family, the largest first."""
        model = default_model(descriptor, self.program.memory_path)
        sizes = {part.name: part.nbytes for part in self.program.slices}
        seconds: Counter[str] = Counter()
        for launch in self.program.launches:
            read = sum(sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice")
            seconds[launch.shape.family] += model.seconds(launch, read)  # type: ignore[assignment]
        return dict(seconds.most_common())


def graphs_in(zoo: Path, names: Sequence[str], parser: Arguments) -> dict[str, tuple[str, Graph]]:
    """The graph of each model, and its origin; a usage error if a model has neither file nor configuration."""
    descriptor = load_descriptor(DEVICE)
    reading = Options(descriptor, choose_mode(descriptor, "auto"), BundleRequest(precision=PRECISION))
    found = {}
    for name in names:
        model = find(name)
        sizes = [model.paper_size] if model.paper_size else []
        files = [zoo / f"{name}-{size}" / "model.onnx" for size in sizes] + [zoo / name / "model.onnx"]
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            size = model.paper_size if file is files[0] and model.paper_size else model.default_size
            found[name] = f"{size}", read_graph(file, reading)
            continue
        try:
            found[name] = "configuration", prepare(zoo_graph(name))
        except UserError as error:
            parser.error(f"{name}: neither {files[-1]} nor a configuration ({error})")
    return found


def fit_rates(
    graphs: Mapping[str, Graph], base: DeviceDescriptor, free: Sequence[str], limits: Mapping[str, Any]
) -> dict[str, float]:
    """The factors of the rates `free` that fit the published latency of `graphs`."""
    factors = dict.fromkeys(free, 1.0)
    for _ in range(_ROUNDS):
        descriptor = scaled(base, factors)
        plans = [Planned.made(graph, descriptor, limits) for graph in graphs.values()]

        def predict(tried: Mapping[str, float], plans: Sequence[Planned] = plans) -> list[float]:
            there = scaled(base, tried)
            return [1e3 * plan.played(there).report.latency.integrated for plan in plans]

        factors = fitted(free, predict, [PUBLISHED[name].ms for name in graphs])
    return factors


def row_of(name: str, planned: Planned, descriptor: DeviceDescriptor) -> dict[str, Any]:
    """The prediction for one model."""
    prediction = planned.played(descriptor)
    latency, memory = prediction.report.latency, prediction.report.memory
    return {
        "model": name,
        "ms": 1e3 * latency.integrated,
        "MB": memory.average_bytes / 1e6,
        "peak MB": memory.peak_bytes / 1e6,
        "weights MB": sum(part.nbytes for part in planned.program.slices) / 1e6,
        "activations MB": planned.program.arena_bytes / 1e6,
        "gmacs": sum(launch.macs for launch in planned.program.launches) / 1e9,
        "layers": len(planned.program.launches),
        "opening ms": 1e3 * latency.init,
        "busy ms": {resource: 1e3 * seconds for resource, seconds in prediction.busy.items()},
        "computing ms": {family: 1e3 * seconds for family, seconds in planned.computing(descriptor).items()},
    }


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print latency and memory with the published values, then the parts of each."""
    print("\n| model | size | | ms | published | ratio | average MB | published | ratio | GMAC | published |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        p = PUBLISHED[row["model"]]
        print(
            f"| {row['model']} | {row['size']} | {'fitted' if row['fitted'] else ''} | {row['ms']:.0f} | {p.ms:.0f} "
            f"| {row['ms'] / p.ms:.2f} | {row['MB']:.0f} | {p.mb:.0f} | {row['MB'] / p.mb:.2f} "
            f"| {row['gmacs']:.1f} | {p.gmacs} |"
        )
    print("\n| model | layers | ms of opening | disk | computing | SmartMem's exec | most in | MB peak, weights, activations |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        p = PUBLISHED[row["model"]]
        parts = ", ".join(f"{family} {ms:.0f}" for family, ms in list(row["computing ms"].items())[:4])
        print(
            f"| {row['model']} | {row['layers']} | {row['opening ms']:.0f} | {row['busy ms'].get('disk', 0):.0f} "
            f"| {row['busy ms'].get('compute', 0):.0f} | {p.executed or ''} | {parts} "
            f"| {row['peak MB']:.0f}, {row['weights MB']:.0f}, {row['activations MB']:.0f} |"
        )


def judged(row: Mapping[str, Any]) -> Judged:
    """The row with the published values of its model."""
    published = PUBLISHED[row["model"]]
    return Judged(
        row["model"], row["fitted"], row["ms"], published.ms, row["MB"], published.mb, row["busy ms"].get("compute", 0.0),
        published.executed, row["weights MB"], row["gmacs"],
    )  # fmt: skip


def main() -> None:
    """Command line; see the module."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_argument("--models", nargs="*", default=list(PUBLISHED))
    parser.add_argument("--fit", default="", metavar="ROW,...", help="rows by model, four at most")
    parser.add_argument("--free", default="gemm_flops,launch_seconds,disk_bandwidth,session_seconds", metavar="RATE,...")
    parser.add_argument("--m-peak", default="500MB")
    parser.add_argument("--lambda", dest="lambda_", type=float)
    parser.add_argument("--set", action="append", default=[], metavar="RATE=VALUE", help="instead of the descriptor's")
    parser.add_argument(
        "--roofline", action="store_true", help="seconds from gemm_flops, as with --fit, not from compiled code"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows_fitted = [name for name in args.fit.split(",") if name]
    free = args.free.split(",")
    if len(rows_fitted) > MOST_FITTED:
        parser.error(f"at most {MOST_FITTED} rows may be fitted")
    if unknown := {*rows_fitted, *args.models} - PUBLISHED.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such row; there are {', '.join(PUBLISHED)}")
    if unknown := set(free) - set(RATES):
        parser.error(f"{', '.join(sorted(unknown))}: no such rate; there are {', '.join(RATES)}")
    base = load_descriptor(DEVICE)
    if args.roofline or rows_fitted:
        base = replace(base, capacity_model="", pipelines=None)
    assumed = ASSUMED if rows_fitted else {}
    given = assumed | {name: float(value) for name, _, value in (text.partition("=") for text in args.set)}
    base = replace(base, rates=replace(base.rates, **given))
    graphs = graphs_in(args.zoo, args.models, parser)
    limits = {"m_peak": args.m_peak, "unfusion": False, "lambda_": args.lambda_}
    factors: dict[str, float] = {}
    if rows_fitted:
        factors = fit_rates({name: graphs[name][1] for name in rows_fitted}, base, free, limits)
    descriptor = scaled(base, factors)
    print(f"{DEVICE}, {PRECISION}, M_peak {args.m_peak}, file cold; fitted on {', '.join(rows_fitted or SHIPPED_FIT)}")
    for name, factor in factors.items():
        print(f"  {name} = {getattr(descriptor.rates, name):.3g} ({factor:.2f} times what was assumed)")
    rows = []
    for name, (size, graph) in graphs.items():
        row = row_of(name, Planned.made(graph, descriptor, limits), descriptor)
        rows.append(row | {"size": size, "fitted": name in (rows_fitted or SHIPPED_FIT)})
        print(f"  {name} {row['ms']:.0f} ms, {row['MB']:.0f} MB", flush=True)
    show_rows(rows)
    opening, per_mb = 1e3 * ASSUMED["session_seconds"], 1e9 / ASSUMED["disk_bandwidth"]
    print("\n" + "\n".join(verdict([judged(row) for row in rows], opening_ms=opening, ms_per_mb=per_mb)))
    if args.json:
        args.json.write_text(json.dumps({"factors": factors, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
