"""One point of a sweep: planned in memory, then simulated here or measured in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

from flashmem.compile import Options, plan_program
from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import BudgetError, RunError
from flashmem.planning.plan import OverlapPlan
from flashmem.planning.planner import Limits
from flashmem.program import Program
from flashmem.simulation.scenario import Disk, describe
from flashmem.simulation.simulator import simulate
from flashmem.sweeping.grid import RESULTS, Cell, Point


@dataclass(frozen=True)
class Subject:
    """What the points of one model, device and precision share. `bundle`: where its weights are, for measuring."""

    program: Program
    descriptor: DeviceDescriptor
    mode: TransferMode
    bundle: Path | None = None


def simulated(subject: Subject, point: Point) -> dict[str, Cell]:
    """The row of a point, predicted. It needs no file and no device, so it can run on any machine."""
    row, plan = _planned(subject, point)
    if plan is None:
        return row
    scenario = describe(subject.program, plan, subject.descriptor, subject.mode, disk=cast(Disk, point.disk))
    prediction = simulate(scenario)
    latency, memory = prediction.report.latency, prediction.report.memory
    return row | {
        "integrated_ms": 1e3 * latency.integrated,
        "init_ms": 1e3 * latency.init,
        "exec_ms": 1e3 * latency.exec,
        "warm_ms": 1e3 * prediction.later,
        "average_bytes": round(memory.average_bytes),
        "peak_bytes": memory.peak_bytes,
    }


def measured(subject: Subject, point: Point, runs: int) -> dict[str, Cell]:
    """The row of a point, medians over `runs` fresh processes; one more before them fills the program cache.

    Raises:
        RunError: a process failed.
    """
    row, plan = _planned(subject, point)
    if plan is None:
        return row
    request = {
        "bundle": str(subject.bundle),
        "plan": plan.to_json(),
        "device": point.device,
        "mode": subject.mode,
        "budget": point.budget_bytes,
        "cold": point.disk == "cold",
    }
    results = [_run_apart(request) for _ in range(runs + 1)][1:]
    return row | {name: median(result[name] for result in results) for name in results[0]}


def _planned(subject: Subject, point: Point) -> tuple[dict[str, Cell], OverlapPlan | None]:
    """The plan of a point and the columns that describe it; no plan where none exists."""
    row: dict[str, Cell] = dict(point.cells()) | dict.fromkeys(RESULTS)
    limits = Limits(
        budget=point.budget_bytes,
        m_peak=point.m_peak_bytes,
        chunk=point.chunk_bytes,
        lambda_=point.lambda_,
        mu=point.mu,
        objective=cast(Literal["auto", "paper", "latency"], point.objective_asked),
    )
    begun = time.perf_counter()
    try:
        plan = plan_program(subject.program, Options(subject.descriptor, subject.mode, limits))
    except BudgetError as error:
        return row | {"status": "INFEASIBLE", "smallest_bytes": error.smallest_bytes, "solve_seconds": _since(begun)}, None
    # The runtime plays one mode, and a plan travels lighter without the places of the others.
    plan = replace(plan, layouts={subject.mode: plan.layouts[subject.mode]})
    return row | {
        "status": plan.status,
        "tier": plan.tier,
        "objective_kind": plan.objective_kind,
        "objective": plan.objective,
        "bound": plan.bound,
        "gap": plan.gap,
        "preload_ratio": plan.preload_ratio,
        "solve_seconds": _since(begun),
    }, plan


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 3)


def _run_apart(request: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "flashmem.sweeping.measure"],
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
