"""Time of streaming sessions: reads, copies and launches of first and later runs.

    python -m benchmarks.streaming.loading --device nvidia [--models NAME ...] [--modes dma interleave] [--timeline]

Models are generated from their configurations, with random weights. The limit is a quarter of the weights: on bytes in flight
(`--limit m-peak`, the default with `--objective paper`), or on all memory, where `--beside` is the part that is not weights.
The file is in the page cache. One process; first answers are medians of three sessions after one that is not counted, later
runs of 20.

*Read*, *copy*: the part of the run in which at least one thread did so; *compute*: the launches, on the device's clock, in a
session that traces. *Opening* is the time before the first launch starts. *Bound* is the larger of two times: all bytes at the
rate of one large copy from pinned memory, and a run with everything resident.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.streaming.random_weights import random_inputs
from flashmem.base.units import parse_size
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.options import resolve
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.copier import Copier
from flashmem.runtime.opencl.shared_memory import address_of
from flashmem.runtime.request.options import device_here
from flashmem.runtime.session import RunReport
from flashmem.schedule.loads import TimedInterval
from flashmem.tools.zoo.graphs import zoo_graph

MODELS = ("gptneo-125m", "vit-b16", "resnet50")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds inside at least one span."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def steps(loads: Sequence[TimedInterval], what: str) -> list[tuple[float, float]]:
    """The intervals in which loads read, waited for their release ("wait"), or copied."""
    found = []
    for load in loads:
        since = load.start
        for step, until in load.steps:
            if step == what:
                found.append((since, until))
            since = until
    return found


def pinned_rate(name: str, nbytes: int = 64 << 20) -> float:
    """Bytes per second of large copies from pinned memory, made like the loader threads' copies."""
    context = Context(device_here(name))
    ledger, copier = Ledger(context, None), Copier(context)
    source = ledger.buffer("staging", nbytes, "the source", host_visible=True)
    target = ledger.buffer("weights", nbytes, "the target")
    view = copier.queue.map(source, nbytes)
    view[:] = 1
    copy = copier.prepare(target, 0, nbytes)
    seconds = []
    for _ in range(6):
        begun = time.perf_counter()
        copy(address_of(view)).wait()
        seconds.append(time.perf_counter() - begun)
    copier.queue.unmap(view)
    ledger.close()
    return nbytes / statistics.median(seconds[1:])


class Bench:
    """One model on one device."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        self.name, self.folder, self.args = name, folder, args
        whole, _ = plan_graph(prepare(zoo_graph(name)), self.options("auto", {}))
        self.weights = sum(part.nbytes for part in whole.program.slices)
        self.path = folder / "model.flashmem"
        self.resident = float("inf")

    def options(self, mode: str, limits: dict[str, Any]) -> Any:
        """The options of the compilation."""
        args = self.args
        made = resolve(
            BundleRequest(**limits, device=args.device, mode=mode, memory_path=args.memory_path, optimize=args.optimize)
        )
        if args.threads:
            made = replace(made, descriptor=replace(made.descriptor, loader_threads=args.threads))
        return made

    def limits(self) -> dict[str, Any]:
        """The limits: a fraction of the weights, in flight or with all other memory."""
        part = int(self.weights / self.args.part)
        limits: dict[str, Any] = {"objective": self.args.objective}
        if self.args.limit == "m-peak":
            return {**limits, "m_peak": part}
        return {**limits, "budget": part + parse_size(self.args.beside)}

    def compile(self, mode: str, limits: dict[str, Any]) -> Program:
        """The bundle for `mode`."""
        options = self.options(mode, limits)
        made, plan = plan_graph(prepare(zoo_graph(self.name)), options)
        plan = with_layouts(made.program, plan, options.descriptor.modes[made.program.memory_path])
        shutil.rmtree(self.path, ignore_errors=True)
        with BundleWriter(self.path) as writer:
            made.write(writer)
            writer.commit(made.program, made.source, plan, options.descriptor, {"mode": options.mode})
        return made.program

    def measure_resident(self) -> None:
        """Measure a run with everything resident."""
        inputs = random_inputs(self.compile("auto", {}))
        with flashmem.Session(self.path, device=self.args.device, strategy="preload") as session:
            for _ in range(3):
                session.run(None, inputs)
            self.resident = statistics.median(self.timed(session, inputs)[0] for _ in range(self.args.runs))

    def timed(self, session: flashmem.Session, inputs: dict[str, Any]) -> tuple[float, float, RunReport]:
        """Seconds of a run, its start, and its report."""
        begun = time.perf_counter()
        session.run(None, inputs)
        assert session.last_run is not None
        return time.perf_counter() - begun, begun, session.last_run

    def measure(self, mode: str, rate: float) -> None:
        """Print one row, and its details."""
        inputs, device = random_inputs(self.compile(mode, self.limits())), self.args.device
        firsts: list[tuple[float, float]] = []
        for number in range(4):
            begun = time.perf_counter()
            session = flashmem.Session(self.path, device=device, mode=mode)
            session.run(None, inputs)
            assert session.last_run is not None
            firsts.append((time.perf_counter() - begun, session.last_run.latency.init))
            if number < 3:
                session.close()
        for _ in range(3):
            session.run(None, inputs)
        runs = sorted((self.timed(session, inputs) for _ in range(self.args.runs)), key=lambda run: run[0])
        seconds, begun, report = runs[len(runs) // 2]
        bundle = session.bundle
        session.close()
        layout, later = bundle.plan.layouts[mode], bundle.plan.later()
        streamed = sum(w.nbytes for w in later.weights if not w.preload)
        traced, at, trace = self.traced(mode, inputs)
        compute = sum(layer.end - layer.start for layer in trace.layers)
        opening = trace.layers[0].start - at
        read, copy = (covered(steps(report.loads, what)) for what in ("read", "copy"))
        busiest = max(read, copy, compute)
        bound = max(streamed / rate, self.resident)
        first, init = sorted(firsts[1:])[1]
        row = (
            f"{self.name}, {mode}", f"{1e3 * first:.1f} ({1e3 * init:.1f})", f"{1e3 * seconds:.2f}",
            f"{streamed / 1e6:.0f} of {self.weights / 1e6:.0f}", f"{1e3 * read:.2f}", f"{1e3 * copy:.2f}",
            f"{1e3 * compute:.2f}", f"{1e3 * opening:.2f}", f"{(seconds - opening) / busiest:.2f}", f"{1e3 * bound:.2f}",
            f"{seconds / bound:.2f}", f"{layout.threads}", f"{report.memory.peak_bytes / 1e6:.1f}",
        )  # fmt: skip
        print("|", " | ".join(row), "|", flush=True)
        if self.args.threads_time:
            self.threads(begun, seconds, report)
        if self.args.timeline:
            self.timeline(at, traced, trace, bundle)

    def traced(self, mode: str, inputs: dict[str, Any]) -> tuple[float, float, RunReport]:
        """The median of a few later runs of a session that traces."""
        with flashmem.Session(self.path, device=self.args.device, mode=mode, trace=True) as session:
            for _ in range(2):
                session.run(None, inputs)
            return sorted((self.timed(session, inputs) for _ in range(5)), key=lambda run: run[0])[2]

    def threads(self, begun: float, seconds: float, report: RunReport) -> None:
        """Print each loader thread's times in the median run, and the times of single steps."""
        print("\n  thread: loads; ms reading, waiting, copying, between loads; first load, last load end at ms")
        for thread in sorted({load.thread for load in report.loads}):
            loads = [load for load in report.loads if load.thread == thread]
            spent = [sum(end - start for start, end in steps(loads, what)) for what in ("read", "wait", "copy")]
            first, last = min(load.start for load in loads), max(load.end for load in loads)
            between = last - first - sum(spent)
            print(
                f"  {thread}: {len(loads)}; "
                + ", ".join(f"{1e3 * each:.2f}" for each in (*spent, between))
                + f"; {1e3 * (first - begun):.2f}, {1e3 * (last - begun):.2f} of {1e3 * seconds:.2f}"
            )
        for what in ("read", "wait", "copy"):
            each = sorted(end - start for start, end in steps(report.loads, what))
            if each:
                print(
                    f"  {what}: {len(each)} of them, median {1e3 * each[len(each) // 2]:.3f} ms, most {1e3 * each[-1]:.3f} ms"
                )
        print(flush=True)

    def timeline(self, begun: float, seconds: float, report: RunReport, bundle: flashmem.Bundle) -> None:
        """Print each load of the traced run, and the launch that waits for it; ms since the run began."""
        program = bundle.program
        uses, releases = program.uses(), {w.name: w.read_layer for w in bundle.plan.later().weights}
        sizes = {part.name: part.nbytes for part in program.slices}

        def at(moment: float) -> str:
            return f"{1e3 * (moment - begun):8.2f}"

        print(
            f"\n  the traced run took {1e3 * seconds:.2f} ms. When each load began, was read, was released, was copied; "
            "when its first layer began, and when it was released:"
        )
        for load in sorted(report.loads, key=lambda load: load.start):
            ends = {what: until for what, until in load.steps}
            layer = uses[load.name][0]
            print(
                f"  thread {load.thread} {at(load.start)} {at(ends.get('read', load.start))} "
                f"{at(ends['wait']) if 'wait' in ends else '       -'} {at(ends.get('copy', load.end))}  "
                f"layer {layer} began {at(report.layers[layer - 1].start)}, released at layer {releases[load.name]}, "
                f"at {at(report.layers[releases[load.name] - 2].end) if releases[load.name] > 1 else '       -'}  "
                f"{load.name} ({sizes[load.name] / 1e6:.1f} MB)"
            )
        print(flush=True)


def main() -> None:
    """Measure every model in every mode."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--modes", nargs="*", default=["dma", "interleave"])
    parser.add_argument("--memory-path", default="auto")
    parser.add_argument("--objective", default="first", choices=("first", "steady", "paper"))
    parser.add_argument("--optimize", default="cold", choices=("cold", "steady"))
    parser.add_argument("--limit", choices=("budget", "m-peak"), help="default: m-peak with the paper's objective, else budget")
    parser.add_argument("--part", type=float, default=4, help="the limit is the weights over this")
    parser.add_argument("--beside", default="60MB", help="of a budget, for what is not weights")
    parser.add_argument("--threads", type=int, default=0, help="loader threads, instead of the descriptor's")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads-time", action="store_true", help="what each loader thread did")
    parser.add_argument("--timeline", action="store_true", help="when each load was read and copied, and its layer began")
    args = parser.parse_args()
    parser.check_device(args.device)
    args.limit = args.limit or ("m-peak" if args.objective == "paper" else "budget")
    rate = pinned_rate(args.device)
    print(f"copies out of pinned memory: {rate / 1e9:.1f} GB/s; {args.objective}, {args.limit}\n")
    print(
        "| | first answer (session opened), ms | later run, ms | MB streamed | read, ms | copy | compute | opening "
        "| (run - opening) / busiest | bound, ms | run / bound | threads | peak, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(name, Path(folder), args)
            bench.measure_resident()
            print(f"| {name}, resident | | {1e3 * bench.resident:.2f} |", flush=True)
            for mode in args.modes:
                bench.measure(mode, rate)


if __name__ == "__main__":
    run_command(main)
