"""A thousand requests from eight threads, some cancelled: checks the answers, and that no resource leaks.

    python -m benchmarks.serving.requests BUNDLE... [--requests 1000] [--threads 8] [--rounds 3] [--budget SIZE] [--device pocl]

Each round is a new runtime with all requests. The resources of the process after a round are compared with those after the
previous round. So the permanent pools of drivers and allocators do not count. The resources are threads (also the drivers'),
descriptors, and resident bytes. A round longer than `--patience` seconds ends the process with the stack of every thread.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.worker import vm
from flashmem import Bundle, Runtime, Session
from flashmem.runtime.engine.inputs import complete_inputs

GROWTH = 4 << 20
"""Bytes by which the process may grow in a round: fragmentation in allocators. A leak of one small answer in each of a thousand
requests is more.
"""


@dataclass(frozen=True)
class State:
    """Resources of a process: threads, file descriptors, resident bytes."""

    threads: int
    descriptors: int
    resident: int

    @classmethod
    def now(cls) -> State:
        """The present resources, after a garbage collection."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return cls(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), vm("VmRSS"))  # noqa: PTH208


def ask(runtime: Runtime, models: list[Any], inputs: list[Any], wanted: list[Any], count: int, seed: int) -> Counter[str]:
    """Submit `count` requests from one thread; returns their outcomes."""
    rng, seen = random.Random(seed), Counter[str]()
    waiting: list[tuple[int, Any]] = []
    for _ in range(count):
        which = rng.randrange(len(models))
        waiting.append((which, runtime.submit(models[which], inputs[which])))
        if rng.random() < 0.3:
            rng.choice(waiting)[1].cancel()
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.01)
    while waiting:
        which, answer = waiting.pop(0)
        if answer.cancelled():
            seen["cancelled"] += 1
            continue
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(answer.result(), wanted[which], strict=True))
        seen["right" if same else "wrong"] += 1
    return seen


def play(args: argparse.Namespace, bundles: list[Bundle], inputs: list[Any], wanted: list[Any], number: int) -> Counter[str]:
    """Run one round; returns the outcomes of the requests."""
    counts, lock = Counter[str](), threading.Lock()
    shares = [len(range(thread, args.requests, args.threads)) for thread in range(args.threads)]
    with Runtime(args.budget, device=args.device, prepare=False) as runtime:  # every answer has the same bits
        models = [runtime.open(bundle) for bundle in bundles]

        def work(thread: int) -> None:
            try:
                seen = ask(runtime, models, inputs, wanted, shares[thread], number * args.threads + thread)
            except BaseException as error:
                seen = Counter([f"failed: {type(error).__name__}: {error}"])
            with lock:
                counts.update(seen)

        asking = [threading.Thread(target=work, args=(thread,)) for thread in range(args.threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        if runtime.budget is not None and runtime.peak > runtime.budget:
            raise SystemExit(f"{runtime.peak} bytes were held, the budget is {runtime.budget}")
        for model in models:
            model.close()
        if runtime.held:
            raise SystemExit(f"{runtime.held} bytes are held when all models are closed")
    return counts


def main() -> None:
    """Run all rounds, and compare resources and answers."""
    parser = Arguments(__doc__)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=600)
    parser.add_argument("--budget", default=None)
    parser.add_device("pocl")
    args = parser.parse_args()
    parser.check_device(args.device)
    bundles = [Bundle.open(path) for path in args.bundles]
    inputs = [complete_inputs(bundle.program, {}, 0) for bundle in bundles]
    wanted = []
    for bundle, given in zip(bundles, inputs, strict=True):
        with Session(bundle, device=args.device) as session:
            wanted.append(session.run(None, given))
    before: State | None = None
    for number in range(args.rounds):
        faulthandler.dump_traceback_later(args.patience, exit=True)
        counts = play(args, bundles, inputs, wanted, number)
        faulthandler.cancel_dump_traceback_later()
        after = State.now()
        print(f"{dict(counts)}; {after}")
        if counts["right"] + counts["cancelled"] != args.requests or not counts["right"]:
            raise SystemExit("wrong answers, or requests without one")
        if before is not None:
            more = after.threads > before.threads or after.descriptors > before.descriptors
            if more or after.resident > before.resident + GROWTH:
                raise SystemExit(f"something was left behind: {before} before this round")
        before = after


if __name__ == "__main__":
    run_command(main)
