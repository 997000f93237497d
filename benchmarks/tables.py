"""FlashMem's Tables 7 and 8 by simulation: latency and average memory on the OnePlus 12, predicted beside published.

    python -m benchmarks.tables --zoo DIR [--fit gptneo-125m vit-103m resnet50 depthanything-s] [--m-peak 500MB] [--json o.json]

Each model is planned in fp16 for `adreno750` (objective `first`, M_peak as in the paper) and played on a cold file. Two
numbers of the
descriptor are assumptions: the rate that products reach, and what a launch costs. They are fitted on at most four rows by
latency; what was fitted is printed, and errors are those of the other rows. The models' files are read for their shapes
only. Needs the `compile` extra.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.zoo import models_in
from flashmem.compile import plan_graph, read_graph, with_layouts
from flashmem.device import DeviceDescriptor, load_descriptor
from flashmem.graph.ir import Graph
from flashmem.planning.limits import read_limits
from flashmem.request import Options, choose_mode
from flashmem.simulation.scenario import describe
from flashmem.simulation.simulator import simulate

PUBLISHED: dict[str, tuple[float, float]] = {
    "gptneo-125m": (577, 260), "gptneo-1.3b": (3086, 554), "gptneo-2.7b": (7567, 1132), "resnet50": (473, 83),
    "sam2-large": (1267, 150), "vit-103m": (347, 83), "deepvit-204m": (785, 165), "sd15-unet": (3212, 838),
    "whisper-medium-encoder": (1565, 240), "depthanything-s": (496, 86), "depthanything-l": (1382, 246),
}  # fmt: skip
"""Milliseconds (Table 7, "Ours") and average MB (Table 8, "Ours")."""

_GEMM = (0.125, 0.25, 0.5, 1.0, 2.0)
_LAUNCH = (1.0, 3.0, 10.0, 30.0)
"""Factors of the descriptor's values that are tried."""

_MOST_FITTED = 4


def predicted(graph: Graph, descriptor: DeviceDescriptor, m_peak: str) -> tuple[float, float]:
    """Milliseconds of the first answer, and average MB held during it."""
    options = Options(descriptor, choose_mode(descriptor, "auto"), read_limits(m_peak=m_peak, unfusion=False), "fp16")
    generated, plan = plan_graph(graph, options)
    plan = with_layouts(generated.program, plan, [options.mode])
    report = simulate(describe(generated.program, plan, descriptor, options.mode, disk="cold")).report
    return 1e3 * report.latency.integrated, report.memory.average_bytes / 1e6


def scaled(descriptor: DeviceDescriptor, gemm: float, launch: float) -> DeviceDescriptor:
    """The descriptor with products `gemm` times as fast and launches `launch` times as dear."""
    rates = descriptor.rates
    return replace(
        descriptor, rates=replace(rates, gemm_flops=rates.gemm_flops * gemm, launch_seconds=rates.launch_seconds * launch)
    )


def off_by(values: Sequence[tuple[float, float]]) -> float:
    """The geometric mean of how many times too much or too little is predicted."""
    return geometric_mean(math.exp(abs(math.log(ours / theirs))) for ours, theirs in values)


def rank_correlation(values: Sequence[tuple[float, float]]) -> float:
    """Spearman's, of values without ties."""
    ranks = [{value: rank for rank, value in enumerate(sorted(column))} for column in zip(*values, strict=True)]
    distance = sum((ranks[0][a] - ranks[1][b]) ** 2 for a, b in values)
    return 1 - 6 * distance / (len(values) * (len(values) ** 2 - 1))


def main() -> None:
    """Command line: see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(PUBLISHED))
    parser.add_argument("--fit", nargs="*", default=["gptneo-125m", "vit-103m", "resnet50", "depthanything-s"])
    parser.add_argument("--m-peak", default="500MB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len(args.fit) > _MOST_FITTED:
        parser.error(f"at most {_MOST_FITTED} rows may be fitted")
    base = load_descriptor("adreno750")
    reading = Options(base, choose_mode(base, "auto"), read_limits(), "fp16")
    graphs = {name: read_graph(file, reading) for name, file in models_in(args.zoo, args.models, parser).items()}
    fitted = [name for name in args.fit if name in graphs]

    def error(factors: tuple[float, float]) -> float:
        found = [(predicted(graphs[name], scaled(base, *factors), args.m_peak)[0], PUBLISHED[name][0]) for name in fitted]
        return off_by(found)

    gemm, launch = min(product(_GEMM, _LAUNCH), key=error) if fitted else (1.0, 1.0)
    descriptor = scaled(base, gemm, launch)
    print(
        f"fitted on {', '.join(fitted) or 'nothing'}: gemm_flops {descriptor.rates.gemm_flops:.3g}, "
        f"launch_seconds {descriptor.rates.launch_seconds:.3g}"
    )
    rows: list[dict[str, Any]] = []
    for name, graph in graphs.items():
        latency, memory = predicted(graph, descriptor, args.m_peak)
        rows.append({"model": name, "fitted": name in fitted, "ms": latency, "MB": memory, "published": PUBLISHED[name]})
        theirs = PUBLISHED[name]
        print(
            f"{name:24} {latency:8.0f} ms, published {theirs[0]:6.0f}   {memory:6.0f} MB, published {theirs[1]:6.0f}",
            flush=True,
        )
    judged = [row for row in rows if not row["fitted"]]
    for at, unit in enumerate(("ms", "MB")):
        values = [(row[unit], row["published"][at]) for row in (judged if unit == "ms" else rows)]
        if len(values) > 1:
            ratio = geometric_mean(ours / theirs for ours, theirs in values)
            print(
                f"{unit}: Spearman {rank_correlation(values):.2f}, off by {off_by(values):.2f} times, ours / theirs {ratio:.2f}"
            )
    if args.json:
        args.json.write_text(json.dumps({"gemm": gemm, "launch": launch, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
