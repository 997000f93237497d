"""A thousand requests from eight threads, some of them cancelled: every answer right, and nothing left behind.

python -m benchmarks.requests BUNDLE... [--requests 1000] [--threads 8] [--budget SIZE] [--device pocl]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashmem import Bundle, Runtime, Session
from flashmem.inputs import complete_inputs


def state() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def main() -> None:
    """Ask, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--device", default="pocl")
    args = parser.parse_args()
    bundles = [Bundle.open(path) for path in args.bundles]
    inputs = [complete_inputs(bundle.program, {}, 0) for bundle in bundles]
    wanted = []
    for bundle, given in zip(bundles, inputs, strict=True):
        with Session(bundle, device=args.device) as session:
            wanted.append(session.run(None, given))
    before, counts, lock = state(), {"right": 0, "wrong": 0, "cancelled": 0}, threading.Lock()
    with Runtime(args.budget, device=args.device) as runtime:
        models = [runtime.open(bundle) for bundle in bundles]

        def note(what: str) -> None:
            with lock:
                counts[what] += 1

        def ask(seed: int) -> None:
            rng, waiting = random.Random(seed), list[tuple[int, Any]]()
            for _ in range(args.requests // args.threads):
                which = rng.randrange(len(models))
                waiting.append((which, runtime.submit(models[which], inputs[which])))
                if rng.random() < 0.3:
                    rng.choice(waiting)[1].cancel()
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 0.01)
            for which, answer in waiting:
                if answer.cancelled():
                    note("cancelled")
                    continue
                same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(answer.result(), wanted[which], strict=True))
                note("right" if same else "wrong")

        asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(args.threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        peak = runtime.peak
    after = state()
    print(f"{counts}; at most {peak} bytes; held at the end: {runtime.held}; threads, descriptors: {before} -> {after}")
    if counts["wrong"] or runtime.held or after[0] > before[0] or after[1] > before[1]:
        raise SystemExit("wrong answers, or something was left behind")


if __name__ == "__main__":
    main()
