"""Four models in random order: one `Runtime`, one `Session` at a time, and ONNX Runtime.

    python -m benchmarks.serving.fifo --zoo DIR [--device pocl] [--budget 200MB] [--iterations 10] [--runs 3] [--plot PNG]

DIR contains models that `benchmarks.exports` wrote. Each method runs in its own process, `--runs` times alternately; prints
medians. `runtime` is `flashmem.Runtime`, with all requests submitted in advance. `sessions` opens a `Session` for each request
and closes it; `ort-each` does so with ONNX Runtime, `ort-open` keeps all models open. Seconds are from the first request to the
last answer; memory is the peak above the bare process. With root rights, `runtime` also runs under a memory cgroup of a bare
process, the budget and 48 MiB. Every answer of flashmem is compared with the first one of the same model.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from benchmarks.worker import inputs_for, vm

MODELS = ("resnet50", "vit-b16", "gptneo-125m", "depthanything-s")
ABOVE = 48 << 20
WAYS = ("runtime", "sessions", "ort-each", "ort-open")


def order(count: int, iterations: int) -> list[int]:
    """The model of each request: the same number for each, in an order from a seed."""
    chosen = [model for model in range(count) for _ in range(iterations)]
    random.Random(0).shuffle(chosen)
    return chosen


class Same:
    """Compares each answer with the first one of its model, by hash: whole answers, and their comparison, would use memory of
    this process.
    """

    def __init__(self) -> None:
        self._first: dict[int, list[int]] = {}

    def check(self, model: int, outputs: list[Any]) -> None:
        """Exits if an answer differs in a bit."""
        made = [zlib.crc32(np.ascontiguousarray(output).reshape(-1).view(np.uint8).data) for output in outputs]
        if self._first.setdefault(model, made) != made:
            raise SystemExit(f"two answers of model {model} differ")


def drawn(bundle: Any, given: Path) -> dict[str, Any]:
    """The inputs of a model, from its export."""
    return inputs_for([(port.name, port.shape, port.dtype) for port in bundle.program.inputs], given)


def play_runtime(args: argparse.Namespace, sequence: list[int]) -> dict[str, Any]:
    """One `Runtime`; all requests are submitted at once."""
    from flashmem import Bundle, Runtime
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import find_device

    driver = Context(find_device(args.device)).queue()
    bundles = [Bundle.open(path) for path in args.bundles]
    inputs = [drawn(bundle, path) for bundle, path in zip(bundles, args.inputs, strict=True)]
    bare, same, begun = vm("VmHWM"), Same(), time.perf_counter()
    with Runtime(args.budget, device=args.device) as runtime:
        models = [runtime.open(bundle) for bundle in bundles]
        answers = deque(runtime.submit(models[which], inputs[which]) for which in sequence)
        for which in sequence:
            same.check(which, answers.popleft().result())  # frees the answer
        seconds = time.perf_counter() - begun
        if runtime.budget is not None and runtime.peak > runtime.budget:
            raise SystemExit(f"{runtime.peak} bytes were held, the budget is {runtime.budget}")
        over_time = [(at - begun, held) for at, held in runtime.over_time()]
        peak = runtime.peak
    driver.finish()
    return {"seconds": seconds, "bare": bare, "ledger_peak": peak, "over_time": over_time}


def play_sessions(args: argparse.Namespace, sequence: list[int]) -> dict[str, Any]:
    """A `Session` for each request."""
    from flashmem import Bundle, Session
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import find_device

    driver = Context(find_device(args.device)).queue()
    bundles = [Bundle.open(path) for path in args.bundles]
    inputs = [drawn(bundle, path) for bundle, path in zip(bundles, args.inputs, strict=True)]
    bare, same, begun, peak = vm("VmHWM"), Same(), time.perf_counter(), 0
    over_time: list[tuple[float, int]] = []
    for which in sequence:
        with Session(bundles[which], device=args.device, budget=args.budget, prepare=False) as session:
            same.check(which, session.run(None, inputs[which]))
            assert session.last_run is not None
            peak = max(peak, session.last_run.memory.peak_bytes)
            over_time += [(at - begun, held) for at, held in session.last_run.memory.over_time]
        over_time.append((time.perf_counter() - begun, 0))
    seconds = time.perf_counter() - begun
    driver.finish()
    return {"seconds": seconds, "bare": bare, "ledger_peak": peak, "over_time": over_time}


def play_onnxruntime(args: argparse.Namespace, sequence: list[int], *, keep: bool) -> dict[str, Any]:
    """ONNX Runtime as installed: a session for each request, or all sessions open."""
    import onnxruntime as ort

    from flashmem import Bundle

    inputs = [drawn(Bundle.open(path), given) for path, given in zip(args.bundles, args.inputs, strict=True)]
    bare, begun = vm("VmHWM"), time.perf_counter()
    opened: dict[int, Any] = {}
    for which in sequence:
        session = opened.get(which) or ort.InferenceSession(args.models[which])
        if keep:
            opened[which] = session
        session.run(None, inputs[which])
        del session
    return {"seconds": time.perf_counter() - begun, "bare": bare}


def worker(args: argparse.Namespace) -> None:
    """Run one method in this process."""
    sequence = order(len(args.bundles), args.iterations)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "runtime": lambda: play_runtime(args, sequence),
        "sessions": lambda: play_sessions(args, sequence),
        "ort-each": lambda: play_onnxruntime(args, sequence, keep=False),
        "ort-open": lambda: play_onnxruntime(args, sequence, keep=True),
    }
    row = ways[args.way]()
    print(json.dumps({**row, "above_bare": vm("VmHWM") - row["bare"]}))


def compiled(args: argparse.Namespace, scratch: Path) -> list[Path]:
    """A bundle of each model within the budget, compiled in a new process, with its kernels."""
    bundles = []
    for name in args.models:
        path = scratch / f"{name}.flashmem"
        model = args.zoo / name / "model.onnx"
        command = ["-m", "flashmem", "compile", str(model), "-o", str(path), "--device", args.device, "--budget", args.budget]
        subprocess.run([sys.executable, *command], check=True)
        bundles.append(path)
    return bundles


def main() -> None:
    """Compile, measure alternately, print."""
    parser = Arguments(__doc__)
    parser.add_zoo(required=False)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_device("pocl")
    parser.add_argument("--budget", default="200MB")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--bundles", type=Path, nargs="*", help="compiled before, one for each model")
    parser.add_argument("--inputs", type=Path, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        worker(args)
        return
    parser.check_device(args.device)
    if args.zoo is None:
        parser.error("name the folder of the exported models with --zoo")
    parser.all_models_in(args.zoo, args.models)
    with tempfile.TemporaryDirectory() as scratch:
        bundles = args.bundles or compiled(args, Path(scratch))
        folders = [args.zoo / name for name in args.models]
        common = [
            "-m", "benchmarks.serving.fifo", "--device", args.device, "--budget", args.budget,
            "--iterations", str(args.iterations),
            "--bundles", *map(str, bundles), "--models", *(str(folder / "model.onnx") for folder in folders),
            "--inputs", *(str(folder / "inputs.npz") for folder in folders),
        ]  # fmt: skip
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        shuffled = random.Random(1)
        for _ in range(args.runs):
            for way in shuffled.sample(WAYS, len(WAYS)):
                done = subprocess.run([sys.executable, *common, "--way", way], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{way} failed:\n{done.stderr}")
                rows[way].append(json.loads(done.stdout.splitlines()[-1]))
        hard = limited([sys.executable, *common, "--way", "runtime"], args)
    show(rows, hard)
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "hard": hard}))
    if args.plot is not None:
        from flashmem.base.units import parse_size
        from flashmem.tools.plots.queue import draw_queue

        drawn = {"one runtime": rows["runtime"][0]["over_time"], "a session for each request": rows["sessions"][0]["over_time"]}
        draw_queue(args.plot, drawn, parse_size(args.budget))


def limited(command: list[str], args: argparse.Namespace) -> str:
    """The outcome of the runtime under a hard limit."""
    from flashmem.base.units import parse_size

    why = why_no_limit()
    if why is not None:
        return f"not tried ({why})"
    bare = json.loads(
        subprocess.run(
            [sys.executable, "-m", "benchmarks.worker", "bare", "--device", args.device],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()[-1]
    )["bare"]  # fmt: skip
    limit = bare + parse_size(args.budget) + ABOVE
    with HardLimit(limit) as group:
        done = group.run(command)
    if done.returncode:
        return f"ended with {done.returncode} in {limit / 1e6:.0f} MB: {done.stderr.strip().splitlines()[-1:]}"
    return f"finishes in {limit / 1e6:.0f} MB"


def show(rows: dict[str, list[dict[str, Any]]], hard: str) -> None:
    """Print medians, and each method's time over the runtime's."""
    middle = {way: statistics.median(row["seconds"] for row in rows[way]) for way in WAYS}
    print("way        seconds  runtime takes  peak above bare, MB  held at most, MB")
    for way in WAYS:
        above = statistics.median(row["above_bare"] for row in rows[way]) / 1e6
        held = f"{max(row['ledger_peak'] for row in rows[way]) / 1e6:.1f}" if "ledger_peak" in rows[way][0] else ""
        print(f"{way:10} {middle[way]:7.2f}  {middle['runtime'] / middle[way]:13.2f}  {above:19.0f}  {held:>16}")
    print(f"under a hard limit of bare + budget + 48 MiB: {hard}")


if __name__ == "__main__":
    run_command(main)
