"""What a session's opening takes beyond the driver's own, in fresh processes.

    python -m benchmarks.streaming.opening [gpt2 | model.onnx] --device nvidia [--share 0.4] [--mode auto] [--runs 7]

The model is a known architecture with random weights, or an ONNX file, compiled for a budget of `--share` of its weights.

- *driver*: pyopencl alone starts the drivers, makes a context and a queue.
- *driver, buffer*: and allocates its first buffer, which many drivers take long for.
- *session*: `flashmem.Session`, from before the drivers start. *first answer*: and its first run.

The processes take turns; a row has medians. The file and the compiled kernels are in the system's page cache: a first process,
which is not counted, puts them there. What `import flashmem` imports is not in the times; what it postpones is.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.disk import warm

KINDS = ("driver", "session")


def driver(platform: str) -> dict[str, float]:
    """Seconds of the driver's own opening."""
    import numpy as np

    from flashmem.runtime.opencl.binding import cl

    begun = time.perf_counter()
    device = next(device for each in cl.get_platforms() for device in each.get_devices() if each.name == platform)
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    made = time.perf_counter()
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, size=1 << 20)
    cl.enqueue_copy(queue, buffer, np.zeros(1, np.uint8))
    return {"driver": made - begun, "driver, buffer": time.perf_counter() - begun}


def session(bundle: str, device: str) -> dict[str, float]:
    """Seconds of a session's opening, and with its first run."""
    from benchmarks.streaming.random_weights import random_inputs
    from flashmem import Bundle, Session

    inputs = random_inputs(Bundle.open(bundle).program)
    begun = time.perf_counter()
    with Session(bundle, device=device) as opened:
        made = time.perf_counter()
        opened.run(None, inputs)
        return {"session": made - begun, "first answer": time.perf_counter() - begun}


def in_process(kind: str, *given: str) -> dict[str, float]:
    """What a fresh process measures; exits if it fails."""
    command = [sys.executable, "-m", "benchmarks.streaming.opening", "--one", kind, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """Measure, in turn."""
    parser = Arguments(__doc__)
    parser.add_argument("model", nargs="?", default="gpt2", help="a known architecture, or an .onnx file")
    parser.add_device()
    parser.add_argument("--share", type=float, default=0.4, help="the budget, as a share of the weights")
    parser.add_argument("--mode", default="auto", help="the transfer mode")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--one", choices=KINDS, help="measure this in this process, and print it as JSON")
    parser.add_argument("--bundle", help="of a process with --one")
    parser.add_argument("--platform", help="of the device, for a process with --one")
    parser.set_defaults(objective="first", memory_path="auto")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(driver(args.platform) if args.one == "driver" else session(args.bundle, args.device)))
        return
    parser.check_device(args.device)
    from benchmarks.streaming.host_tier import compiled
    from flashmem import Bundle
    from flashmem.runtime.request.options import device_here

    parser.check_model(args.model)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "model.flashmem"
        weights = sum(part.nbytes for part in compiled(args.model, args, bundle).slices)
        compiled(args.model, args, bundle, budget=int(args.share * weights))
        warm(Bundle.open(bundle).weights_path)
        given = ["--device", args.device, "--bundle", str(bundle), "--platform", device_here(args.device).platform]
        for turn in range(args.runs + 1):
            for kind in KINDS:
                row = in_process(kind, *given)
                for name, seconds in row.items() if turn else ():
                    found.setdefault(name, []).append(seconds)
    print("| | ms, median (least, most) |\n|---|---|")
    for name, times in found.items():
        print(f"| {name} | {1e3 * statistics.median(times):.0f} ({1e3 * min(times):.0f}, {1e3 * max(times):.0f}) |")


if __name__ == "__main__":
    run_command(main)
