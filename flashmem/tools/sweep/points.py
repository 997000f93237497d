"""One point of a sweep: planned in memory, then simulated here or measured in new processes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import BudgetError, RunError
from flashmem.base.types import Precision, TransferMode
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.ir.portable import PortableGraph
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.options import Options
from flashmem.compiler.stages.planned import with_layouts
from flashmem.planning.planner import make_plan
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import device_here
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.simulation.scenario import Disk, describe
from flashmem.tools.simulation.simulator import simulate
from flashmem.tools.sweep.grid import RESULTS, Cell, Point
from flashmem.tools.sweep.settings import keywords


@dataclass(frozen=True)
class Subject:
    """The common data of the points of one model, device and precision: the graph or the program, and the bundle.

    Every point is planned from `graph`. Without a graph, all points run `program`, that of a bundle. `bundle` has the weights
    of `program`, for measurements.
    """

    descriptor: DeviceDescriptor
    mode: TransferMode
    graph: Graph | PortableGraph | None
    program: Program | None = None
    bundle: Path | None = None


@dataclass(frozen=True)
class _Planned:
    """A program and its plan. `generated` is None if the program is the bundle's."""

    program: Program
    plan: OverlapPlan
    generated: Generated | None


def simulated(subject: Subject, point: Point) -> dict[str, Cell]:
    """The predicted row of a point. It needs no file and no device, so it can be computed on any machine."""
    row, planned = _planned(subject, point)
    if planned is None:
        return row
    scenario = describe(planned.program, planned.plan, subject.descriptor, subject.mode, disk=cast(Disk, point.disk))
    prediction = simulate(scenario)
    latency = prediction.report.latency
    memory = prediction.report.memory
    return row | {
        "integrated_ms": 1e3 * latency.integrated,
        "init_ms": 1e3 * latency.init,
        "exec_ms": 1e3 * latency.exec,
        "warm_ms": 1e3 * prediction.later,
        "average_bytes": round(memory.average_bytes),
        "peak_bytes": memory.peak_bytes,
    }


def measured(subject: Subject, point: Point, runs: int) -> dict[str, Cell]:
    """The measured row of a point: medians over `runs` new processes, after one that fills the program cache.

    Raises:
        RunError: a process failed.
        UserError: the disk is full.
    """
    row, planned = _planned(subject, point)
    if planned is None:
        return row
    with _packed(subject, planned) as bundle:
        request = {
            "bundle": str(bundle),
            "plan": planned.plan.to_json(),
            "device": _session_device(point.device, subject.descriptor),
            "mode": subject.mode,
            "budget": point.budget_bytes,
            "cold": point.disk == "cold",
        }
        results = [_run_apart(request) for _ in range(runs + 1)][1:]
    return row | {name: median(result[name] for result in results) for name in results[0]}


def _session_device(name: str, descriptor: DeviceDescriptor) -> str:
    """The device name for a session: a descriptor in a file names no device, only its kind."""
    return device_here(name, prefer=descriptor.name).descriptor_name if name.endswith(".toml") else name


@contextmanager
def _packed(subject: Subject, planned: _Planned) -> Iterator[Path]:
    """A bundle with the weights of the planned program: the subject's, or a new one if this point split fusion groups."""
    assert subject.bundle is not None
    if planned.generated is None or planned.program == subject.program:
        yield subject.bundle
        return
    with TemporaryDirectory(prefix=".sweep-", dir=subject.bundle.parent) as folder:
        path = Path(folder) / subject.bundle.name
        with BundleWriter(path) as writer:
            planned.generated.write(writer)
            writer.commit(planned.program, planned.generated.source, planned.plan, subject.descriptor, {"mode": subject.mode})
        yield path


def _planned(subject: Subject, point: Point) -> tuple[dict[str, Cell], _Planned | None]:
    """The plan of a point and the columns that describe it; None if no plan exists."""
    row: dict[str, Cell] = dict(point.cells()) | dict.fromkeys(RESULTS)
    request = BundleRequest(
        budget=point.budget_bytes,
        m_peak=point.m_peak_bytes,
        chunk=point.chunk_bytes or None,
        lambda_=point.lambda_,
        mu=point.mu,
        objective=point.objective_asked,
        precision=cast(Precision, point.precision),
        **keywords(point.settings),
    )
    options = Options(subject.descriptor, subject.mode, request)
    begun = time.perf_counter()
    try:
        planned = _plan(subject, options)
    except BudgetError as error:
        return row | {"status": "infeasible", "smallest_bytes": error.smallest_bytes, "solve_seconds": _since(begun)}, None
    plan = planned.plan
    return row | {
        "status": plan.status,
        "passes_m_peak": int(plan.passes_m_peak),
        "tier": plan.tier,
        "member": plan.member,
        "objective_kind": plan.objective_kind,
        "objective": plan.objective,
        "bound": plan.bound,
        "bound_scope": plan.bound_scope,
        "gap": plan.gap,
        "preload_ratio": plan.preload_ratio,
        "solve_seconds": _since(begun),
    }, planned


def _plan(subject: Subject, options: Options) -> _Planned:
    """The plan, with the layout of the point's transfer mode only."""
    generated = None
    if subject.graph is None:
        assert subject.program is not None
        program = subject.program
        plan = make_plan(subject.program, subject.descriptor, subject.mode, options.request)
    else:
        graph = subject.graph.graph() if isinstance(subject.graph, PortableGraph) else subject.graph
        generated, plan = plan_graph(graph, options)
        program = generated.program
    return _Planned(program, with_layouts(program, plan, [subject.mode]), generated)


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 3)


def _run_apart(request: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        python_module("flashmem.tools.sweep.measure"),
        env=module_environment(),
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(f"a measured run failed: {said[0].removeprefix('flashmem: ')}")
    result: dict[str, float] = json.loads(done.stdout)
    return result
