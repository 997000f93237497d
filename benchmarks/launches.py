"""What a launch costs the host, in steady state: flashmem's executor beside pyopencl's own calls, and a command buffer.

    python -m benchmarks.launches [--device pocl] [--launches 500] [--repeats 30] [--json o.json]

Kernels that do nothing, everything resident, on each OpenCL device that is here. Microseconds a launch, the least of the
repeats: processor time of the launching thread, and time on the clock until the device is done. `pyopencl, events` waits for
the launch 8 before; a command buffer (cl_khr_command_buffer) is recorded once and enqueued as a whole.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashmem.runtime.devices import Device
from flashmem.runtime.executor import Command, Executor, Step
from flashmem.runtime.opencl import Context, Queue, cl, list_devices, wait

SOURCE = "__kernel void nothing(__global float* data) { if (get_global_id(0) == 1000000) data[0] = 1.0f; }"
SIZE = (64,)
AHEAD = 8
OBJECTS = 16
"""Kernel objects that take turns."""


def ways(device: Device, count: int) -> dict[str, Callable[[], None]]:
    """The ways to make `count` launches on `device` and wait for the last."""
    context = Context(device)
    queue, data = context.queue(), context.buffer(4096)
    program = context.build(SOURCE, [])
    kernels = [program.kernel("nothing", [data]) for _ in range(OBJECTS)]
    turns = [kernels[i % OBJECTS] for i in range(count)]
    executor = Executor(queue, [Step("nothing", (Command(kernel, SIZE, SIZE, (data,)),)) for kernel in turns])
    handle = queue.handle

    def with_events() -> None:
        flying: deque[Any] = deque()
        for kernel in turns:
            flying.append(cl.enqueue_nd_range_kernel(handle, kernel, SIZE, SIZE))
            if len(flying) > AHEAD:
                wait(flying.popleft())
        for event in flying:
            wait(event)

    def without_waiting() -> None:
        for kernel in turns:
            cl.enqueue_nd_range_kernel(handle, kernel, SIZE, SIZE)
        queue.finish()

    found = {"flashmem": lambda: executor.run(None), "pyopencl, events": with_events, "pyopencl": without_waiting}
    recorded = command_buffer(device, queue, turns)
    return {**found, "command buffer": recorded} if recorded else found


def command_buffer(device: Device, queue: Queue, kernels: list[Any]) -> Callable[[], None] | None:
    """Enqueues a recording of the launches; None where the driver has no cl_khr_command_buffer. Never freed."""
    if "cl_khr_command_buffer" not in device.extensions:
        return None
    library, pointer, number = ctypes.CDLL(cl._cl.__file__), ctypes.c_void_p, ctypes.c_uint
    library.clGetExtensionFunctionAddressForPlatform.restype = pointer

    def function(name: str, result: Any, *parameters: Any) -> Any:
        address = library.clGetExtensionFunctionAddressForPlatform(pointer(device.handle.platform.int_ptr), name.encode())
        return ctypes.CFUNCTYPE(result, *parameters)(address)

    create = function("clCreateCommandBufferKHR", pointer, number, pointer, pointer, pointer)
    record = function(
        "clCommandNDRangeKernelKHR", ctypes.c_int, pointer, pointer, pointer, pointer, number,
        pointer, pointer, pointer, number, pointer, pointer, pointer,
    )  # fmt: skip
    finalize = function("clFinalizeCommandBufferKHR", ctypes.c_int, pointer)
    enqueue = function("clEnqueueCommandBufferKHR", ctypes.c_int, number, pointer, pointer, number, pointer, pointer)
    queues, size, error = (pointer * 1)(queue.handle.int_ptr), (ctypes.c_size_t * 1)(*SIZE), ctypes.c_int()
    buffer = create(1, queues, None, ctypes.byref(error))
    codes = [error.value]
    for kernel in kernels:
        codes.append(record(buffer, None, None, kernel.int_ptr, 1, None, size, size, 0, None, None, None))
    codes.append(finalize(buffer))
    if any(codes):
        raise SystemExit(f"{device.platform} does not record a command buffer: {next(filter(None, codes))}")

    def play() -> None:
        if code := enqueue(0, None, buffer, 0, None, None):
            raise SystemExit(f"{device.platform} does not enqueue a command buffer: {code}")
        queue.finish()

    return play


def measure(device: Device, count: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Microseconds a launch by way: processor time of the thread, and the clock's. The ways take turns."""
    found = ways(device, count)
    best = dict.fromkeys(found, (float("inf"), float("inf")))
    for repeat in range(repeats + 2):
        for name, run in found.items():
            busy, clock = time.thread_time(), time.perf_counter()
            run()
            taken = (time.thread_time() - busy, time.perf_counter() - clock)
            if repeat >= 2:  # the first launches of a kernel load it
                best[name] = tuple(min(old, 1e6 * new / count) for old, new in zip(best[name], taken, strict=True))  # type: ignore[assignment]
    return best


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
