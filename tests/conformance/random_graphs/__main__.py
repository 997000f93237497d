"""Command line of the random graphs: draws them from a seed, judges them in worker processes, and saves failures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

from ..isolated import call_isolated
from .task import Task, work

TIMEOUT = 120.0
"""Seconds after which a graph counts as hanging."""


def main() -> int:
    """Run the command; returns 1 if it found a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.random_graphs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="graphs")
    parser.add_argument("--first", type=int, default=0, help="index of the first graph of the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="as of flashmem run; several are taken in turn: pocl,intel-cpu")
    parser.add_argument("--path", default="buffer", help="buffer or texture; several are taken in turn: buffer,texture")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16"), help="as of flashmem run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes")
    parser.add_argument("--findings", type=Path, default=Path("random-graphs"), help="folder for what is not well")
    arguments = parser.parse_args()
    devices, paths = arguments.device.split(","), arguments.path.split(",")
    folder = str(arguments.findings)
    places = [(device, path) for path in paths for device in devices]
    tasks = (
        Task(arguments.seed, index, *places[index % len(places)], folder, arguments.precision)
        for index in range(arguments.first, arguments.first + arguments.count)
    )
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    found: Counter[str] = Counter()
    doubts: Counter[str] = Counter()
    nodes = 0
    begun = time.monotonic()
    for task, result in call_isolated(work, tasks, jobs=arguments.jobs, timeout=TIMEOUT):
        if isinstance(result, str):
            kinds[result] += 1
            found[result] += 1
            print(f"{result}: {task.name}", file=sys.stderr, flush=True)
        else:
            kinds[result.kind] += 1
            nodes += result.nodes
            doubts.update(dict(result.doubts))
            if result.kind == "refused":
                reasons.update(result.reasons)
            elif result.kind != "agreed":
                found[f"{result.kind}: {result.culprit.split('(')[0]}"] += 1
                print(f"{result.kind}: {task.name}: {result.culprit}: {result.reasons[-1]}", file=sys.stderr, flush=True)
        done = sum(kinds.values())
        if done % 100 == 0:
            print(f"{done}: {dict(kinds)}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begun
    print(
        f"{sum(kinds.values())} graphs, {nodes} nodes, {seconds:.0f} s: "
        + ", ".join(f"{n} {k}" for k, n in kinds.most_common())
    )
    for title, counter in (("refused because", reasons), ("found", found), ("evaluators disagree", doubts)):
        if counter:
            print(f"{title}:", *(f"  {count:6} {reason}" for reason, count in counter.most_common()), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
