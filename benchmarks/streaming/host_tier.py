"""The host tier: later runs without it, with it, and with all weights resident.

    python -m benchmarks.streaming.host_tier [gpt2 | model.onnx] --device nvidia [--memory-path texture] [--rounds 3]

The model is a known architecture with random weights, or an ONNX file. It is compiled for a device budget of `--share` of its
weights. One process opens sessions of each kind in turn, `--rounds` times; a row has the medians over its sessions, of each of
which the median of `--runs` later runs counts. The file is in the page cache.

- *no tier*: `--host-budget` is not given. *half tier*: half of what later runs load fits into the tier. *tier*: all of it.
- *resident*: all weights on the device, without a budget.
- *by hand*: with PyTorch, where it is installed, for decoders: blocks of the same sizes within the same device budget, the
  others copied from pinned memory on a second stream, two ahead. Its weights are random, and its answer is not compared.

*First answer* includes the opening of the session; the tier is allocated after it. *Read* and *copy* are the parts of a later
run in which at least one load did so. *Bound* is the larger of two times: what a later run loads at the rate of one
large copy from pinned memory, and a run with everything resident. Answers of sessions that stream are compared, bit for bit.

The device's memory is what nvidia-smi reports while the session is open, above what it reported before; - without it.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.streaming.loading import covered, pinned_rate, steps
from benchmarks.streaming.random_weights import random_inputs, with_weights
from flashmem.base.units import format_size
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.program.program import Program, host_bytes, pinned_output_bytes
from flashmem.request.request import BundleRequest
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.request.options import device_here
from flashmem.schedule.host_tier import reloaded, tier_bytes
from flashmem.schedule.residency import SPARE_PIECES, streamed_layout
from flashmem.tools.zoo.graphs import zoo_graph

PIECE = 4 << 20
NAMES = ("no tier", "half tier", "tier", "resident")


@dataclass
class Kind:
    """The measurements of one kind of session: a number for each of its sessions, in seconds and bytes."""

    first: list[float] = field(default_factory=list)
    opening: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    loaded: int = 0
    copied: int = 0  # from the tier
    ledger: int = 0
    host: int = 0
    device: list[float] = field(default_factory=list)


def compiled(model: str, args: Any, path: Path, **limits: Any) -> Program:
    """Compile the model to a bundle at `path`."""
    shutil.rmtree(path, ignore_errors=True)
    asked = BundleRequest(objective=args.objective, device=args.device, mode=args.mode, memory_path=args.memory_path, **limits)
    options = resolve(asked)
    graph = read_graph(Path(model), options) if model.endswith(".onnx") else prepare(with_weights(zoo_graph(model)))
    made, plan = plan_graph(graph, options)
    plan = with_layouts(made.program, plan, options.descriptor.modes[made.program.memory_path])
    with BundleWriter(path) as writer:
        made.write(writer)
        writer.commit(made.program, made.source, plan, options.descriptor, {"mode": options.mode})
    return made.program


def read_rate(device: str, path: Path, threads: int) -> float:
    """Bytes per second that `threads` threads read from a file in the page cache into pinned memory."""
    context = Context(device_here(device))
    ledger, queue = Ledger(context, None), context.queue()
    buffer = ledger.buffer("staging", threads * PIECE, "pinned memory", host_visible=True)
    pinned = ledger.mapped(queue, buffer, threads * PIECE)
    nbytes, descriptor = path.stat().st_size, os.open(path, os.O_RDONLY)

    def once() -> float:
        left, lock = iter(range(0, nbytes, PIECE)), threading.Lock()

        def work(thread: int) -> None:
            part = pinned[thread * PIECE : (thread + 1) * PIECE].data
            while True:
                with lock:
                    first = next(left, None)
                if first is None:
                    return
                os.preadv(descriptor, [part[: min(PIECE, nbytes - first)]], first)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - begun

    seconds = [once() for _ in range(6)]
    os.close(descriptor)
    ledger.unmap(pinned)
    ledger.close()
    return nbytes / statistics.median(seconds[1:])


def device_memory() -> float | None:
    """Bytes of device memory in use, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return float(done.stdout.split()[0]) * (1 << 20)


def measure(kind: Kind, open_session: Callable[[], flashmem.Session], inputs: dict[str, Any], runs: int) -> list[Any]:
    """Open a session, run it, and add its numbers to `kind`; returns the answers of the first and the last run."""
    before, begun = device_memory(), time.perf_counter()
    with open_session() as session:
        answers = [session.run(None, inputs)]
        kind.first.append(time.perf_counter() - begun)
        assert session.last_run is not None
        kind.opening.append(session.last_run.latency.init)
        for _ in range(3):
            session.run(None, inputs)
            session.prepared()
        rows = []
        for _ in range(runs):
            since = time.perf_counter()
            answer = session.run(None, inputs)
            rows.append((time.perf_counter() - since, session.last_run))
        answers.append(answer)
        if before is not None and (now := device_memory()) is not None:
            kind.device.append(now - before)
    seconds, report = sorted(rows, key=lambda row: row[0])[runs // 2]
    kind.later.append(seconds)
    kind.read.append(covered(steps(report.loads, "read")))
    kind.copy.append(covered(steps(report.loads, "copy")))
    kind.loaded, kind.copied = sum(load.nbytes for load in report.loads), report.host_tier_bytes
    kind.ledger = report.memory.peak_bytes
    kind.host = report.memory.host.peak_bytes if report.memory.host is not None else 0
    return answers


DECODERS = {"gpt2": (768, 12, 12), "gptneo-125m": (768, 12, 12), "gptneo-1.3b": (2048, 16, 24), "gptneo-2.7b": (2560, 20, 32)}
"""Width, heads and blocks of decoders whose blocks have the matrices of GPT-2's."""


def by_hand(name: str, budget: int, runs: int) -> tuple[float, int] | None:
    """Median seconds of a run of a decoder's sizes with PyTorch, and the bytes that it streams; None without it or its GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or name not in DECODERS:
        return None
    (width, heads, blocks), tokens, vocabulary, parts = DECODERS[name], 128, 50257, 6
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    columns = -(-vocabulary // parts)
    block, head = sum(a * b for a, b in shapes), width * columns
    sizes = [block] * blocks + [head] * parts
    held, left = set[int](), budget - 2 * 4 * max(sizes)
    for unit in reversed(range(len(sizes))):  # the first ones are copied while the device computes
        if 4 * sizes[unit] <= left:
            held.add(unit)
            left -= 4 * sizes[unit]
    weights = [(torch.randn(size) / width**0.5).pin_memory() for size in sizes]
    resident = {unit: weights[unit].cuda() for unit in held}
    buffers = [torch.empty(max(sizes), device="cuda") for _ in range(2)]
    copies, main = torch.cuda.Stream(), torch.cuda.current_stream()
    streamed = [unit for unit in range(len(sizes)) if unit not in held]
    start = torch.randn(tokens, width, device="cuda")
    normal, attention = torch.nn.functional.layer_norm, torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        ready = [torch.cuda.Event() for _ in streamed]
        free: list[Any] = [None, None]

        def copy(turn: int) -> None:
            with torch.cuda.stream(copies):
                if free[turn % 2] is not None:
                    copies.wait_event(free[turn % 2])
                unit = streamed[turn]
                buffers[turn % 2][: sizes[unit]].copy_(weights[unit], non_blocking=True)
                ready[turn].record(copies)

        for turn in range(min(2, len(streamed))):
            copy(turn)
        x, turn, logits = start, 0, []
        for unit, size in enumerate(sizes):
            if unit in resident:
                weight = resident[unit]
            else:
                main.wait_event(ready[turn])
                weight = buffers[turn % 2][:size]
            if unit < blocks:
                qkv, out, up, down = (
                    part.view(shape) for part, shape in zip(weight.split([a * b for a, b in shapes]), shapes, strict=True)
                )
                q, k, v = (normal(x, (width,)) @ qkv).view(tokens, 3, heads, -1).permute(1, 2, 0, 3)
                x = x + attention(q, k, v, is_causal=True).transpose(0, 1).reshape(tokens, width) @ out
                x = x + torch.nn.functional.gelu(normal(x, (width,)) @ up) @ down
            else:
                logits.append(normal(x, (width,)) @ weight.view(width, columns))
            if unit not in resident:
                event = free[turn % 2] = torch.cuda.Event()
                event.record(main)
                turn += 1
                if turn + 1 < len(streamed):
                    copy(turn + 1)
        torch.cat(logits, dim=1).cpu()

    seconds = []
    for _ in range(runs + 3):
        torch.cuda.synchronize()
        since = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[3:]), 4 * sum(sizes[unit] for unit in streamed)


def main() -> None:
    """Measure each kind of session, in turn."""
    parser = Arguments(__doc__)
    parser.add_argument("model", nargs="?", default="gpt2", help="a known architecture, or an .onnx file")
    parser.add_device()
    parser.add_argument("--share", type=float, default=0.4, help="the device budget, as a share of the weights")
    parser.add_argument("--mode", default="dma", choices=("dma", "interleave"))
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--objective", default="first", choices=("first", "steady"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    parser.check_device(args.device)
    if device_here(args.device).unified_memory:
        parser.error(f"{device_here(args.device).name} shares its memory with the host; name a device with memory of its own")
    parser.check_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "whole.flashmem", Path(folder) / "small.flashmem"
        weights = sum(part.nbytes for part in compiled(args.model, args, whole).slices)
        budget = int(args.share * weights)
        program = compiled(args.model, args, small, budget=budget)
        inputs = random_inputs(program)
        bundle = flashmem.Bundle.open(small)
        layout = streamed_layout(program, bundle.plan, args.mode, shares_memory=False)
        again = sum(map(tier_bytes, reloaded([(bundle.plan, program.slices)])))
        readers = layout.threads + SPARE_PIECES
        others = layout.ring_bytes + host_bytes(program) + pinned_output_bytes(program)
        budgets = {"no tier": None, "half tier": others + again // 2, "tier": others + again}

        def opener(name: str) -> Callable[[], flashmem.Session]:
            if name == "resident":
                return lambda: flashmem.Session(whole, device=args.device, strategy="preload")
            return lambda: flashmem.Session(small, device=args.device, mode=args.mode, host_budget=budgets[name])

        kinds, order = {name: Kind() for name in NAMES}, random.Random(0)
        measure(Kind(), opener("no tier"), inputs, 1)  # fills the cache of kernels
        measure(Kind(), opener("resident"), inputs, 1)
        first: list[Any] | None = None
        equal = True
        for _ in range(args.rounds):
            for name in order.sample(NAMES, len(NAMES)):
                answers = measure(kinds[name], opener(name), inputs, args.runs)
                if name != "resident":  # compiled without a budget, its kernels may sum in another order
                    first = first or answers
                    pairs = zip(chain(*answers), chain(*first), strict=True)
                    equal &= all(np.array_equal(got, wanted) for got, wanted in pairs)
        copies, reads = pinned_rate(args.device), read_rate(args.device, bundle.weights_path, readers)
        hand = by_hand(args.model, budget, args.runs)
    report(args, kinds, weights, budget, readers, copies, reads, hand, equal=equal)


def report(
    args: Any, kinds: dict[str, Kind], weights: int, budget: int, threads: int, copies: float, reads: float,
    hand: tuple[float, int] | None, *, equal: bool,
) -> None:  # fmt: skip
    """Print the rates and the table."""
    print(
        f"{args.model}, {args.mode}, memory path {args.memory_path}: {format_size(weights)} of weights, "
        f"device budget {format_size(budget)}; "
        f"copies from pinned memory {copies / 1e9:.1f} GB/s; page cache to pinned memory with {threads} threads "
        f"{reads / 1e9:.1f} GB/s; answers of streaming sessions are {'equal' if equal else 'NOT EQUAL'}, bit for bit\n"
    )
    print(
        "| | first answer (session opened), ms | later run, ms (least, most of sessions) | MB loaded | of them from the tier "
        "| read, ms | copy, ms | bound, ms | reads alone, ms | device budget counts, MB | host, MB | device's memory, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    resident = statistics.median(kinds["resident"].later)
    for name, kind in kinds.items():
        middle = statistics.median
        row = (
            name, f"{1e3 * middle(kind.first):.1f} ({1e3 * middle(kind.opening):.1f})",
            f"{1e3 * middle(kind.later):.2f} ({1e3 * min(kind.later):.2f}, {1e3 * max(kind.later):.2f})",
            f"{kind.loaded / 1e6:.0f}", f"{kind.copied / 1e6:.0f}", f"{1e3 * middle(kind.read):.2f}",
            f"{1e3 * middle(kind.copy):.2f}", f"{1e3 * max(kind.loaded / copies, resident):.2f}",
            f"{1e3 * (kind.loaded - kind.copied) / reads:.2f}", f"{kind.ledger / 1e6:.0f}", f"{kind.host / 1e6:.0f}",
            f"{middle(kind.device) / 1e6:.0f}" if kind.device else "-",
        )  # fmt: skip
        print("|", " | ".join(row), "|")
    if hand is not None:
        print(f"| by hand | | {1e3 * hand[0]:.2f} | {hand[1] / 1e6:.0f} | | | | {1e3 * hand[1] / copies:.2f} | | | | |")


if __name__ == "__main__":
    run_command(main)
