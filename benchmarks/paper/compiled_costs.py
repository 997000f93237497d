"""Execution and load capacity of the paper's models on the OnePlus 12, from compiled code.

    python -m benchmarks.paper.compiled_costs [--zoo DIR] [--models NAME,...] [--fit] [--host-bandwidth 9.45e8] [--json o.json]

Models are planned in fp16 for `adreno750`; no device is needed. Their shapes are read from DIR, as `benchmarks.paper.tables`
does, or are those of their configurations (`zoo:NAME`). Without `--models` or DIR, rows with a configuration are made.

- *Execution*: predicted milliseconds of all launches by compiled code (`benchmarks/paper/lookup.py`), by the fitted
  rate of multiply-adds, and SmartMem's execution in FlashMem's Table 7. One row, marked, gave the share that kernels reach:
  `--fit` finds and uses that share again.
- *Load capacity*, by transfer mode: the sum of C_l over the weights' bytes, and the pipelines that limit C_l (share of its
  bytes). In a plan for the paper's objective, also the weights that it preloads and the launches whose moves fill C_l.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.paper.lookup import CompiledCode
from benchmarks.paper.tables import DEVICE, PRECISION, PUBLISHED, graphs_in
from benchmarks.paper.tables_verdict import off_by
from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import prepare
from flashmem.planning.capacity.classes import DEFAULT, load_capacity
from flashmem.planning.capacity.roofline import Roofline
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.tools.zoo.graphs import zoo_graph

CONFIGURED = ("gptneo-125m", "gptneo-1.3b", "resnet50", "vit-103m", "deepvit-204m")
"""Rows of Table 7 that have SmartMem's execution, and whose architectures are known without a file."""

MODELS = tuple(name for name, published in PUBLISHED.items() if published.executed is not None)

FITTED = "gptneo-1.3b"
MODES: tuple[TransferMode, ...] = ("alias", "interleave")


@dataclass(frozen=True)
class Capacity:
    """C_l of a program in one mode. `limits`: bytes by the pipeline that limits them. `full`: share of launches at C_l."""

    over_weights: float
    limits: dict[str, float]
    preloaded: float
    full: float
    status: str


def executed(program: Program, model: CompiledCode | Roofline) -> float:
    """Milliseconds of all launches, alone and one after the other."""
    return 1e3 * sum(model.seconds(launch, nbytes) for launch, nbytes in _launches(program))


def capacity(program: Program, plan: OverlapPlan, model: CompiledCode, mode: TransferMode) -> Capacity:
    """The load capacity of `program`, and what `plan`, made for the paper's objective, uses of it."""
    limits: Counter[str] = Counter()
    carried = [0.0] * len(program.launches)
    for weight in plan.weights:
        for layer, chunks in weight.moves:
            carried[layer - 1] += chunks
    able = full = 0
    for (launch, nbytes), chunks in zip(_launches(program), carried, strict=True):
        most = load_capacity(model, launch, nbytes, mode)
        if most <= 0:
            continue
        room = model.room(launch, nbytes, DEFAULT.slowdown(launch.operator_class), mode)
        limits[min(room, key=lambda name: room[name])] += most  # type: ignore[assignment]
        able += 1
        full += chunks >= int(most // plan.chunk_bytes)
    weights = sum(part.nbytes for part in program.slices)
    total = sum(limits.values())
    sizes = {part.name: part.nbytes for part in program.slices}
    preloaded = sum(sizes[weight.name] for weight in plan.weights if weight.preload) / weights
    shares = {name: nbytes / total for name, nbytes in limits.most_common()}
    return Capacity(total / weights, shares, preloaded, full / max(1, able), str(plan.status))


def _launches(program: Program) -> list[tuple[Any, int]]:
    sizes = {part.name: part.nbytes for part in program.slices}
    return [(launch, sum(sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice")) for launch in program.launches]


def fitted_share(program: Program, descriptor: DeviceDescriptor, milliseconds: float) -> float:
    """The share `reached` of the published widths with which all launches of `program` need `milliseconds`.

    Raises:
        UserError: no share from 0.001 to 1 does.
    """
    pipelines = descriptor.pipelines
    assert pipelines is not None

    def error(reached: float) -> float:
        tried = replace(descriptor, pipelines=replace(pipelines, reached=reached))
        return executed(program, CompiledCode.load(tried, program.memory_path)) - milliseconds

    least, most = 1e-3, 1.0
    if error(least) < 0 or error(most) > 0:
        raise UserError(f"no share of the published widths of {descriptor.name} gives {milliseconds:g} ms")
    for _ in range(40):  # more of the widths never needs more time
        middle = (least + most) / 2
        least, most = (middle, most) if error(middle) > 0 else (least, middle)
    return most


def row_of(name: str, graph: Graph, descriptor: DeviceDescriptor, m_peak: str) -> dict[str, Any]:
    """The figures of one model."""
    row: dict[str, Any] = {"model": name, "published": PUBLISHED[name].executed, "gmacs": PUBLISHED[name].gmacs}
    for mode in MODES:
        limits = BundleRequest(m_peak=m_peak, objective="paper", unfusion=False, precision=PRECISION)
        generated, plan = plan_graph(graph, Options(descriptor, mode, limits))
        program = generated.program
        model = CompiledCode.load(descriptor, program.memory_path)
        row["compiled"] = executed(program, model)
        row["roofline"] = executed(program, Roofline(descriptor))
        row[mode] = vars(capacity(program, plan, model, mode))
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print both tables and the errors."""
    print("\n| model | | compiled code, ms | ratio | one fitted rate, ms | ratio | SmartMem's exec |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ratios = [f"{row[each]:.0f} | {row[each] / row['published']:.2f}" for each in ("compiled", "roofline")]
        mark = "fitted" if row["model"] == FITTED else ""
        print(f"| {row['model']} | {mark} | {ratios[0]} | {ratios[1]} | {row['published']} |")
    held = [row for row in rows if row["model"] != FITTED]
    if held:
        ours = off_by([(row["compiled"], row["published"]) for row in held])
        fitted = PUBLISHED[FITTED]
        assert fitted.executed is not None
        rival = off_by([(fitted.executed / fitted.gmacs * row["gmacs"], row["published"]) for row in held])
        print(f"\n{len(held)} rows not fitted: off by {ours:.2f} times; one rate of multiply-adds from that row: {rival:.2f}")
    print("\n| model | mode | sum of C_l / weights | limited by | preloaded | launches at C_l | status |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        for mode in MODES:
            found = row[mode]
            limits = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found["limits"].items())
            print(
                f"| {row['model']} | {mode} | {found['over_weights']:.2f} | {limits} | {100 * found['preloaded']:.0f} % "
                f"| {100 * found['full']:.0f} % | {found['status']} |"
            )


def main() -> None:
    """Command line; see the module."""
    parser = Arguments(__doc__)
    parser.add_zoo(required=False)
    parser.add_argument("--models", default="", metavar="NAME,...")
    parser.add_argument("--m-peak", default="500MB")
    share = parser.add_mutually_exclusive_group()
    share.add_argument("--reached", type=float, help="the share that kernels reach, instead of the descriptor's")
    share.add_argument("--fit", action="store_true", help=f"the share with which {FITTED} has SmartMem's execution")
    parser.add_argument(
        "--host-bandwidth", type=float, help="bytes per second that the host loads, instead of the descriptor's"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = args.models.split(",") if args.models else list(MODELS if args.zoo else CONFIGURED)
    if unknown := set(names) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: no such row; there are {', '.join(MODELS)}")
    descriptor = load_descriptor(DEVICE)
    assert descriptor.pipelines is not None
    if args.fit:
        limits = BundleRequest(m_peak=args.m_peak, objective="paper", unfusion=False, precision=PRECISION)
        generated, _ = plan_graph(prepare(zoo_graph(FITTED)), Options(descriptor, MODES[0], limits))
        published = PUBLISHED[FITTED].executed
        assert published is not None
        args.reached = fitted_share(generated.program, descriptor, published)
        print(f"reached = {args.reached:.4f} fits {FITTED}", flush=True)
    if args.reached:
        descriptor = replace(descriptor, pipelines=replace(descriptor.pipelines, reached=args.reached))
    if args.host_bandwidth:
        descriptor = replace(descriptor, rates=replace(descriptor.rates, cached_bandwidth=args.host_bandwidth))
    rows = []
    for name, (_, graph) in graphs_in(args.zoo or Path(), names, parser).items():
        rows.append(row_of(name, graph, descriptor, args.m_peak))
        print(f"  {name} {rows[-1]['compiled']:.0f} ms", flush=True)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
