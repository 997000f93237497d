"""What a session's opening takes beyond the driver's own, in fresh processes.

    python -m benchmarks.streaming.opening BUNDLE --device nvidia [--runs 7]

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
import time
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.disk import warm

KINDS = ("driver", "session")


def driver(name: str) -> dict[str, float]:
    """Seconds of the driver's own opening."""
    import numpy as np

    from flashmem.runtime.opencl.binding import cl

    begun = time.perf_counter()
    devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    device = next(device for device in devices if name in device.platform.name)
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    made = time.perf_counter()
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, size=1 << 20)
    cl.enqueue_copy(queue, buffer, np.zeros(1, np.uint8))
    return {"driver": made - begun, "driver, buffer": time.perf_counter() - begun}


def session(bundle: str, name: str) -> dict[str, float]:
    """Seconds of a session's opening, and with its first run."""
    from benchmarks.streaming.random_weights import random_inputs
    from flashmem import Bundle, Session

    inputs = random_inputs(Bundle.open(bundle).program)
    begun = time.perf_counter()
    with Session(bundle, device=name) as opened:
        made = time.perf_counter()
        opened.run(None, inputs)
        return {"session": made - begun, "first answer": time.perf_counter() - begun}


def main() -> None:
    """Measure, in turn."""
    parser = Arguments(__doc__)
    parser.add_argument("bundle")
    parser.add_device()
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--one", choices=KINDS, help="measure this in this process, and print it as JSON")
    parser.add_argument("--platform", help="of the device, for a process with --one")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(driver(args.platform) if args.one == "driver" else session(args.bundle, args.device)))
        return
    parser.check_device(args.device)
    from flashmem import Bundle
    from flashmem.runtime.request.options import device_here

    platform = device_here(args.device).platform
    warm(Bundle.open(args.bundle).weights_path)
    found: dict[str, list[float]] = {}
    for turn in range(args.runs + 1):
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.streaming.opening", args.bundle, "--device", args.device]
            done = subprocess.run(
                [*command, "--one", kind, "--platform", platform], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            for name, seconds in row.items() if turn else ():
                found.setdefault(name, []).append(seconds)
    print("| | ms, median (least, most) |\n|---|---|")
    for name, times in found.items():
        print(f"| {name} | {1e3 * statistics.median(times):.0f} ({1e3 * min(times):.0f}, {1e3 * max(times):.0f}) |")


if __name__ == "__main__":
    run_command(main)
