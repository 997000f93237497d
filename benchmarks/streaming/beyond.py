"""A model larger than the device's and the host's budget together: it streams from disk through both.

    python -m benchmarks.streaming.beyond gptneo-2.7b --device nvidia --budget 2GB --host-budget 3GB [--runs 3]

The model is a known architecture with random weights. It is compiled for both budgets. A fresh process opens a session within
them and runs it; another one keeps all weights on the device, without budgets, and gives the reference. Answers are compared
bit for bit.

It prints seconds of the first answer and of later runs, what these load and copy, and for each memory the budget, what the
session counts, and what the system counts: of the device what nvidia-smi reports above what it reported before the process
began (the driver's context included), of the host the most that was resident (VmHWM) above the same before the session, the
driver's own memory and pages of libraries included. Exit code 1: an answer differs, or a session counts more than a budget.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.streaming.host_tier import device_memory
from benchmarks.streaming.random_weights import random_inputs, with_weights
from flashmem.base.units import format_size, parse_size
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import device_here
from flashmem.tools.zoo.graphs import check_architecture, zoo_graph

Array = NDArray[Any]


def compiled(args: argparse.Namespace, path: Path) -> None:
    """Compile the model to a bundle at `path`, and print how long it took."""
    begun = time.perf_counter()
    options = resolve(BundleRequest(budget=args.budget, device=args.device, mode=args.mode))
    made, plan = plan_graph(prepare(with_weights(zoo_graph(args.model))), options)
    plan = with_layouts(made.program, plan, options.descriptor.modes[made.program.memory_path])
    planned = time.perf_counter()
    with BundleWriter(path) as writer:
        made.write(writer)
        meta = {"mode": options.mode, "budget_bytes": options.request.budget}
        writer.commit(made.program, made.source, plan, options.descriptor, meta)
    print(
        f"{args.model}: {format_size(made.program.weights_bytes)} of weights, planned in {planned - begun:.0f} s, "
        f"written in {time.perf_counter() - planned:.0f} s",
        flush=True,
    )


def resident() -> int:
    """Bytes of this process that have been resident at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class Most:
    """The most bytes of the device that nvidia-smi has reported since it began; a thread asks it."""

    def __init__(self) -> None:
        self.nbytes: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            now = device_memory()
            if now is None:
                return
            self.nbytes = max(self.nbytes or 0, now)
            if self._over.wait(0.2):
                return

    def stop(self) -> float | None:
        """End the thread; the result."""
        self._over.set()
        self._thread.join()
        return self.nbytes


def session(args: argparse.Namespace) -> None:
    """In a process of its own: run the bundle, save the answers, and print what was measured as JSON."""
    bundle = flashmem.Bundle.open(args.bundle)
    inputs, free, most = random_inputs(bundle.program, 1), device_memory(), Most()
    before, begun = resident(), time.perf_counter()
    how: dict[str, Any] = {"strategy": "preload"} if args.reference else {"host_budget": args.host_budget}
    with flashmem.Session(bundle, device=args.device, mode=args.mode, **how) as opened:
        over_time = [device_memory()]
        answers = opened.run(None, inputs)
        first, later, reports = time.perf_counter() - begun, [], []
        over_time.append(device_memory())
        for _ in range(args.runs):
            since = time.perf_counter()
            again = opened.run(None, inputs)
            later.append(time.perf_counter() - since)
            assert all(np.array_equal(one, other) for one, other in zip(answers, again, strict=True))
            assert opened.last_run is not None
            reports.append(opened.last_run)
        over_time.append(device_memory())
        device = most.stop()
    report, host = reports[-1], reports[-1].memory.host
    np.savez(args.answers, *answers)
    print(json.dumps({
        "first": first, "later": later, "loaded": sum(load.nbytes for load in report.loads), "copied": report.host_tier_bytes,
        "counted": max(each.memory.peak_bytes for each in reports), "counted_host": 0 if host is None else host.peak_bytes,
        "over_time": [None if now is None or free is None else now - free for now in over_time],
        "device": None if device is None or free is None else device - free, "host": resident() - before, "before": before,
    }))  # fmt: skip


def child(args: argparse.Namespace, bundle: Path, answers: Path, *, reference: bool) -> dict[str, Any]:
    """The numbers of `session` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.streaming.beyond", args.model, "--device", args.device]
    command += ["--mode", args.mode, "--host-budget", args.host_budget, "--runs", str(args.runs)]
    command += ["--bundle", str(bundle), "--answers", str(answers), *(["--reference"] if reference else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    """Compile, run within both budgets and with everything resident, compare and print."""
    parser = Arguments(__doc__)
    parser.add_argument("model", help="a known architecture")
    parser.add_device()
    parser.add_argument("--budget", default="2GB", help="of the device")
    parser.add_argument("--host-budget", default="3GB")
    parser.add_argument("--mode", default="dma", choices=("dma", "interleave"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bundle is not None:
        session(args)
        return
    parser.check_device(args.device)
    if device_here(args.device).unified_memory:
        parser.error(f"{device_here(args.device).name} shares its memory with the host; name a device with memory of its own")
    check_architecture(args.model)
    with tempfile.TemporaryDirectory() as folder:
        bundle, answers = Path(folder) / "model.flashmem", [Path(folder) / f"{name}.npz" for name in ("within", "resident")]
        compiled(args, bundle)
        whole = child(args, bundle, answers[1], reference=True)  # first: kernels are built in processes with own contexts
        within = child(args, bundle, answers[0], reference=False)
        one, other = (dict(np.load(path)) for path in answers)
        equal = all(bool(np.array_equal(one[name], other[name])) for name in other)
    sys.exit(report(args, within, whole, equal=equal))


def report(args: argparse.Namespace, within: dict[str, Any], whole: dict[str, Any], *, equal: bool) -> int:
    """Print the table; the exit code."""
    budgets = parse_size(args.budget, what="budget"), parse_size(args.host_budget, what="host budget")
    print(f"answers are {'equal' if equal else 'NOT EQUAL'}, bit for bit\n")
    print("| | first answer, s | later runs, s | loaded, MB | copied from the tier, MB | device: counted, by nvidia-smi, MB "
          "| host: counted, resident above before, before, MB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name, each in (("within both budgets", within), ("all resident", whole)):
        smi = "-" if each["device"] is None else f"{each['device'] / 1e6:.0f}"
        print(
            f"| {name} | {each['first']:.2f} | {', '.join(f'{seconds:.3f}' for seconds in each['later'])} "
            f"| {each['loaded'] / 1e6:.0f} | {each['copied'] / 1e6:.0f} | {each['counted'] / 1e6:.0f}, {smi} "
            f"| {each['counted_host'] / 1e6:.0f}, {each['host'] / 1e6:.0f}, {each['before'] / 1e6:.0f} |"
        )
    for name, each in (("within both budgets", within), ("all resident", whole)):
        moments = ["-" if now is None else f"{now / 1e6:.0f}" for now in each["over_time"]]
        print(f"{name}: by nvidia-smi {', '.join(moments)} MB when opened, after the first answer and after the last run")
    kept = within["counted"] <= budgets[0] and within["counted_host"] <= budgets[1]
    return 0 if equal and kept else 1


if __name__ == "__main__":
    run_command(main)
