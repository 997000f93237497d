"""First and later answers predicted for phones that are not here: streamed, or with weights loaded first.

    python -m benchmarks.paper.portability [--models gptneo-125m gptneo-1.3b ...] [--devices adreno540 ...] [--zoo DIR]

FlashMem's Figure 10 has latency and memory on three phones, beside a framework that preloads. NNV12's Figures 8 and 10 have
first answers on the processors and GPUs of phones, beside later ones. Here each model is planned for each descriptor with the
paper's M_peak and simulated with a cold file. "Preloaded" is the same program with all weights loaded before its first launch:
no other framework is simulated. Descriptors of phones are not measured (`flashmem simulate` says so); compare the columns of a
row rather than rows. `--budgets` adds rows within budgets, as FlexNN's Figure 10 has a curve of memory and latency for each
model. A budget below the smallest one becomes that. Models are known architectures, or files DIR/NAME/model.onnx. No device is
needed. Needs the `compile` extra.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from flashmem.base.errors import BudgetError
from flashmem.base.types import Precision
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode
from flashmem.schedule.plan import Strategy
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names, load_descriptor
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate
from flashmem.tools.zoo.graphs import check_architecture, zoo_graph

MODELS = ("gptneo-125m", "gptneo-1.3b", "whisper-medium-encoder")
DEVICES = ("adreno540", "adreno740", "mali-g715", "adreno750", "generic-cpu")
"""FlashMem's three other phones have an Adreno 540, an Adreno 740 and a Mali-G715."""


@dataclass(frozen=True)
class Answers:
    """Seconds of the first and of a later answer, and bytes of the first run: average and peak."""

    first: float
    later: float
    average: float
    peak: int


def predicted(
    graph: Graph, descriptor: DeviceDescriptor, limits: Mapping[str, Any], precision: Precision = "fp16"
) -> tuple[int, int | None, dict[Strategy, Answers]]:
    """The bytes of the weights, the budget, and the answers of one plan by strategy, from a cold file."""
    options = Options(descriptor, choose_mode(descriptor, "auto"), BundleRequest(**limits, precision=precision))
    try:
        generated, plan = plan_graph(graph, options)
    except BudgetError as error:
        return predicted(graph, descriptor, {**limits, "budget": error.smallest_bytes}, precision)
    program = generated.program
    plan = with_layouts(program, plan, [options.mode])
    found: dict[Strategy, Answers] = {}
    for strategy in ("stream", "preload"):
        chosen: Strategy = strategy  # type: ignore[assignment]
        made = simulate(describe(program, plan, descriptor, options.mode, disk="cold", strategy=chosen))
        memory = made.report.memory
        found[chosen] = Answers(made.report.latency.integrated, made.later, memory.average_bytes, memory.peak_bytes)
    return sum(part.nbytes for part in program.slices), options.request.budget, found


def graph_of(name: str, file: Path | None, descriptor: DeviceDescriptor, precision: Precision) -> Graph:
    """The graph of a file; None: of a known architecture. Raises UserError."""
    if file is not None:
        return read_graph(file, Options(descriptor, choose_mode(descriptor, "auto"), BundleRequest(precision=precision)))
    return prepare(zoo_graph(name))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one table: streamed and preloaded beside each other."""
    print("| model | device | budget, MB | first, ms: streamed, preloaded | later, ms | average, MB | peak, MB |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ours, theirs = row["stream"], row["preload"]
        budget = "" if row["budget"] is None else f"{row['budget'] / 1e6:.0f}"
        cells = [
            f"{factor * ours[key]:.0f}, {factor * theirs[key]:.0f}"
            for key, factor in (("first", 1e3), ("later", 1e3), ("average", 1e-6), ("peak", 1e-6))
        ]
        print(f"| {row['model']} | {row['device']} | {budget} | " + " | ".join(cells) + " |")


def main() -> None:
    """Simulate each model on each device."""
    parser = Arguments(__doc__)
    parser.add_zoo(required=False)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), choices=descriptor_names(), metavar="NAME")
    parser.add_argument("--m-peak", default="500MB", help="limit on weights in flight, without a budget")
    parser.add_argument("--budgets", nargs="*", default=[], metavar="SIZE")
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    exported = parser.models_in(args.zoo, args.models) if args.zoo is not None else {}
    files = {name: exported.get(name) for name in args.models}
    for name, file in files.items():
        if file is None:
            check_architecture(name)
    rows = []
    limits = [{"m_peak": args.m_peak}, *({"budget": budget} for budget in args.budgets)]
    for name, file in files.items():
        for device in args.devices:
            descriptor = load_descriptor(device)
            graph = graph_of(name, file, descriptor, args.precision)
            for limit in limits:
                weights, budget, found = predicted(graph, descriptor, limit, args.precision)
                row = {"model": name, "device": device, "weights": weights, "budget": budget}
                rows.append(row | {strategy: asdict(answers) for strategy, answers in found.items()})
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    run_command(main)
