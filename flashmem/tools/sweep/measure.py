"""A measured run in its own process: a request as JSON on stdin, the result as JSON on stdout.

The request has a plan that replaces the bundle's, so that a sweep packs the weights of a model once. Only the online half of
flashmem is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flashmem.base.streams import exit_codes
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.validation import check_bundle
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.session import Session
from flashmem.schedule.plan import OverlapPlan


def run(request: dict[str, Any]) -> dict[str, float]:
    """Measure the first run of a session, and a later one; milliseconds and bytes."""
    path = Path(request["bundle"])
    plan = OverlapPlan.from_json(request["plan"])
    bundle = Bundle.open(path)
    inputs = complete_inputs(bundle.program, {}, seed=0)
    if request["cold"]:
        _drop(bundle.weights_path)
    begun = time.perf_counter()
    bundle = Bundle.open(path)
    check_bundle(bundle.program, plan)
    planned = bundle.with_plan(plan, {**bundle.meta, "budget_bytes": request["budget"]})
    opened = time.perf_counter() - begun  # a session that is given a path opens the bundle itself
    with Session(planned, device=request["device"], mode=request["mode"]) as session:
        session.run(None, inputs)
        first = session.last_run
        session.run(None, inputs)
        later = session.last_run
    assert first is not None and later is not None
    return {
        "integrated_ms": 1e3 * (opened + first.latency.integrated),
        "init_ms": 1e3 * (opened + first.latency.init),
        "exec_ms": 1e3 * first.latency.exec,
        "warm_ms": 1e3 * later.latency.exec,
        "average_bytes": round(first.memory.average_bytes),
        "peak_bytes": max(first.memory.peak_bytes, later.memory.peak_bytes),
    }


def _drop(path: Path) -> None:
    """Drop the file from the page cache. The host of a virtual machine may still cache it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


if __name__ == "__main__":
    with exit_codes():
        print(json.dumps(run(json.load(sys.stdin))))
