"""Measures whether recorded launches are faster: the executor with and without recordings, on empty kernels."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType

from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.steps import Command, Step
from flashmem.runtime.opencl.context import Context, Queue

SOURCE = "__kernel void nothing(__global float* data) { if (get_global_id(0) == 1000000) data[0] = 1.0f; }"
_SIZE = (64,)
_OBJECTS = 16  # kernel objects, used in rotation
_LAUNCHES = 256
_ROUNDS = 15


def nothing_steps(context: Context, count: int) -> list[Step]:
    """`count` layers of one empty launch each."""
    data = context.buffer(4096)
    program = context.build(SOURCE, [])
    commands = [Command(program.kernel("nothing", [data]), _SIZE, _SIZE, (data,)) for _ in range(_OBJECTS)]
    return [Step("nothing", (commands[i % _OBJECTS],)) for i in range(count)]


def recording_pays(context: Context, queue: Queue, probed: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Whether recorded launches are faster by more than the variation of runs. False if the driver cannot record.

    `probed`: results of probes (`DeviceDescriptor.probed`).

    Raises:
        RunError: the device fails.
    """
    recorder = context.recorder(queue, probed)
    if recorder is None:
        return False
    steps = nothing_steps(context, _LAUNCHES)
    executors = Executor(queue, steps), Executor(queue, steps, recorder)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS + 3):  # the first turn loads kernels, the second records
        for executor, taken in zip(executors, times, strict=True):
            begun = perf_counter()
            executor.run()
            if turn >= 3:
                taken.append(perf_counter() - begun)
    (least, *_), (*_, most) = statistics.quantiles(times[0], n=4), statistics.quantiles(times[1], n=4)
    return most < least
