"""Host cost of a kernel launch in steady state: flashmem's executor, plain and recorded, and pyopencl.

    python -m benchmarks.kernels.launches [--device pocl] [--launches 500] [--repeats 30] [--json o.json]

Measures empty kernels, with everything resident, on each OpenCL device of this machine. Reports microseconds a launch, the
least of the repeats: processor time of the launching thread, and elapsed time until the device is done. `pyopencl, events`
waits for the launch 8 before. `recorded`: one call enqueues many launches (cl_khr_command_buffer), if the driver supports it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from flashmem.profiler.launches import nothing_steps
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.opencl.context import Context, cl, wait
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import no_device
from flashmem.runtime.opencl.discovery import list_devices

AHEAD = 8


def ways(device: Device, count: int) -> dict[str, Callable[[], None]]:
    """Functions that make `count` launches on `device` and wait for the last, by name."""
    context = Context(device)
    queue, steps = context.queue(), nothing_steps(context, count)
    turns = [step.commands[0] for step in steps]
    executor, recorder = Executor(queue, steps), context.recorder(queue)
    handle = queue.handle

    def with_events() -> None:
        flying: deque[Any] = deque()
        for each in turns:
            flying.append(cl.enqueue_nd_range_kernel(handle, each.kernel, each.global_size, each.local_size))
            if len(flying) > AHEAD:
                wait(flying.popleft())
        for event in flying:
            wait(event)

    def without_waiting() -> None:
        for each in turns:
            cl.enqueue_nd_range_kernel(handle, each.kernel, each.global_size, each.local_size)
        queue.finish()

    found = {"flashmem": executor.run, "pyopencl, events": with_events, "pyopencl": without_waiting}
    if recorder is None:
        return found
    recorded = Executor(queue, steps, recorder)
    return {"flashmem, recorded": recorded.run, **found}


def measure(device: Device, count: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Microseconds a launch by way: processor time of the thread, and elapsed time. The ways alternate."""
    found = ways(device, count)
    best = dict.fromkeys(found, (float("inf"), float("inf")))
    for repeat in range(repeats + 2):
        for name, run in found.items():
            busy, clock = time.thread_time(), time.perf_counter()
            run()
            taken = (time.thread_time() - busy, time.perf_counter() - clock)
            if repeat >= 2:  # kernels are loaded in the first run, recorded in the second
                best[name] = tuple(min(old, 1e6 * new / count) for old, new in zip(best[name], taken, strict=True))  # type: ignore[assignment]
    return best


def main() -> None:
    """See the module docstring."""
    parser = Arguments(__doc__)
    parser.add_argument("--device", help="part of the name of the devices to measure; all by default")
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for device in list_devices():
        names = f"{device.platform} {device.name} {device.descriptor_name}"
        if args.device and args.device.lower() not in names.lower():
            continue
        best = measure(device, args.launches, args.repeats)
        base = best["pyopencl, events"]
        print(f"{device.platform}: {device.name}, driver {device.driver_version}")
        print(f"  {'':18} {'host us':>8} {'ratio':>6} {'clock us':>9} {'ratio':>6}")
        for name, (host, clock) in best.items():
            print(f"  {name:18} {host:8.2f} {host / base[0]:6.2f} {clock:9.2f} {clock / base[1]:6.2f}")
            rows.append({"device": names, "way": name, "host_us": host, "clock_us": clock})
    if not rows:
        parser.error(f"no OpenCL device is called {args.device!r}" if args.device else str(no_device()))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
