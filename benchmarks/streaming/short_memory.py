"""Later runs where memory cannot hold the weight file: past the page cache, and through it.

    python -m benchmarks.streaming.short_memory model.flashmem --device pocl --limits 600MB 450MB [--modes map alias]

Each side is a process in a memory cgroup of a limit (needs root), the file dropped from the page cache before. "parts" is what
flashmem does: a fixed part of the streamed weights passes through the page cache, as much as memory can hold, and the rest past
it (O_DIRECT), in mode `map` into memory of its own. "direct": all weights past it. "page cache": the file's pages stay there,
and the kernel takes what it likes. Inputs are ones, and a position of 100 for a language model. It prints
for each the median milliseconds of a run, its processor time, the bytes that it loads and those that the disk reads for it,
and how often the kernel took pages because the limit was reached. Sides take turns, `--rounds` times.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from benchmarks.processes import Row, take_turns
from benchmarks.worker import drop
from flashmem import Bundle, Session
from flashmem.base.units import format_size, parse_size
from flashmem.bundle.language import IDS, TOTAL
from flashmem.runtime.streaming.cached_part import CachedPart
from flashmem.runtime.streaming.weight_file import WeightFile

_SIDES = ("parts", "direct", "page cache")


def main() -> None:
    """Measure both sides in turn within each limit."""
    parser = Arguments(__doc__)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("model.flashmem"))
    parser.add_device()
    parser.add_argument("--limits", nargs="+", default=["600MB"], help="of the memory of each process")
    parser.add_argument("--modes", nargs="+", default=["map"], help="transfer modes")
    parser.add_argument("--budget", help="of each session; by default the bundle's")
    parser.add_argument("--runs", type=int, default=12, help="of each process; the first two do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=_SIDES)
    parser.add_argument("--side", choices=_SIDES, help="measure one of them, in this process")
    args = parser.parse_args()
    parser.check_device(args.device)
    if args.side:
        print(json.dumps(_measured(args.bundle, args.device, args.modes[0], args.budget, args.runs, args.side)))
        return
    if (reason := why_no_limit()) is not None:
        raise SystemExit(f"no hard limit can be set here ({reason}); it needs root and a memory cgroup that can be written")
    for limit in args.limits:
        sides = {
            f"{mode}, {side}": partial(_limited, args, mode, side, parse_size(limit, what="limit"))
            for mode in args.modes
            for side in args.sides
        }
        for name, rows in take_turns(sides, args.rounds).items():
            ended = [row["ended"] for row in rows if "ended" in row]
            done = [row for row in rows if "ended" not in row]
            print(f"{limit}, {name}: {_said(done) if done else ''} {' '.join(ended)}".rstrip(), flush=True)


def _said(rows: list[Row]) -> str:
    seconds, processor, loaded, read, taken = (
        median(row[key] for row in rows) for key in ("seconds", "processor", "loaded", "read", "taken")
    )
    each = ", ".join(f"{1e3 * row['seconds']:.0f}" for row in rows)
    return (
        f"{1e3 * seconds:.0f} ms ({each}), {1e3 * processor:.0f} ms of "
        f"processor time, {format_size(int(loaded))} loaded, {format_size(int(read))} read from the disk, limit reached "
        f"{taken:.0f} times"
    )


def _limited(args: Any, mode: str, side: str, limit: int) -> Row:
    command = [sys.executable, "-m", "benchmarks.streaming.short_memory", str(args.bundle), "--device", args.device]
    command += ["--side", side, "--modes", mode, "--runs", str(args.runs), *(["--budget", args.budget] if args.budget else [])]
    drop([Bundle.open(args.bundle).weights_path])
    with HardLimit(limit) as group:
        done = group.run(command)
        count = group.folder / ("memory.events" if group.v2 else "memory.failcnt")
        words = count.read_text(encoding="ascii").split()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"ended": "killed" if done.returncode in (-9, 137) else f"failed: {last}"}
    return {**json.loads(done.stdout.splitlines()[-1]), "taken": int(words[words.index("max") + 1] if group.v2 else words[0])}


def _measured(path: Path, device: str, mode: Any, budget: str | None, runs: int, side: str) -> Row:
    if side == "page cache":
        WeightFile.look_at_memory = lambda *given: None  # type: ignore[method-assign]
    if side == "direct":
        CachedPart.choose = lambda part, ranges, free: []  # type: ignore[method-assign]
    bundle = Bundle.open(path)
    sizes = [sum(int(np.prod(port.shape)) for port in each.program.inputs) for each in bundle.variants]
    bundle = bundle.variant(sizes.index(min(sizes)))
    inputs = {
        port.name: np.full(port.shape, 101 if port.name == TOTAL else 0 if port.name == IDS else 1, port.dtype)
        for port in bundle.program.inputs
    }
    seconds, processor, read = list[float](), list[float](), list[int]()
    with Session(bundle, device=device, mode=mode, budget=budget) as session:
        for _ in range(runs):
            before, spent, since = _disk_bytes(), os.times(), perf_counter()
            session.run(None, dict(inputs))
            seconds.append(perf_counter() - since)
            now = os.times()
            processor.append(now.user + now.system - spent.user - spent.system)
            read.append(_disk_bytes() - before)
        assert session.last_run is not None
        loaded = sum(load.nbytes for load in session.last_run.loads)
    later = slice(2, None)
    return {
        "seconds": median(seconds[later]),
        "processor": sum(processor[later]) / len(processor[later]),
        "read": median(read[later]),
        "loaded": loaded,
    }


def _disk_bytes() -> int:
    """Bytes that this process has caused the disk to read."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    run_command(main)
