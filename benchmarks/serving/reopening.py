"""Memory growth of a process that opens, runs and closes a model repeatedly.

    python -m benchmarks.serving.reopening BUNDLE [--device pocl] [--mode map] [--times 1000] [--prepare]

Prints resident bytes, descriptors, threads and Python's objects after every tenth of the times. At the end it prints the growth
for each time, from the second tenth on. Before that, allocators and drivers fill pools that they keep. The command exits with 1
if the growth exceeds `GROWTH` bytes, or if descriptors or threads remain.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.serving.requests import State
from flashmem import Bundle, Runtime
from flashmem.runtime.engine.inputs import complete_inputs

GROWTH = 2 << 10
"""Bytes of growth for each time: a page of 4 KiB for every second one. The memory of a model is a hundred times that."""


def main() -> None:
    """Open, run, close, print."""
    parser = Arguments(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_device("pocl")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--prepare", action="store_true", help="run twice each time, with steady kernels made ready between")
    args = parser.parse_args()
    parser.check_device(args.device)
    inputs = complete_inputs(Bundle.open(args.bundle).program, {}, 0)
    states: list[State] = []
    with Runtime(device=args.device, prepare=args.prepare) as runtime:
        wanted = None
        for number in range(1, args.times + 1):
            with runtime.open(args.bundle, mode=args.mode) as model:
                outputs = model.run(None, inputs)
                if args.prepare:
                    runtime.prepared()
                    model.run(None, inputs)
            wanted = outputs if wanted is None else wanted
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(wanted, outputs, strict=True)):
                raise SystemExit(f"the answer of model {number} has other bits")
            if number % max(1, args.times // 10) == 0:
                del outputs
                states.append(State.now())
                print(f"{number}: {states[-1]}, {len(gc.get_objects())} objects", flush=True)
        left = runtime.held
    first, last = states[1], states[-1]
    growth = (last.resident - first.resident) / (args.times * (len(states) - 2) / len(states))
    print(f"{args.times} times: {growth:.0f} bytes each from the second tenth on, {left} bytes held at the end")
    worse = growth > GROWTH or last.descriptors > first.descriptors or last.threads > first.threads or left
    raise SystemExit(1 if worse else 0)


if __name__ == "__main__":
    run_command(main)
