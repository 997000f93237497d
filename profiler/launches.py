"""Whether recording launches pays: the executor with recordings beside the plain one, kernels that do nothing."""

from __future__ import annotations

import statistics
from time import perf_counter

from flashmem.runtime.engine.executor import Command, Executor, Step
from flashmem.runtime.opencl.context import Context, Queue

SOURCE = "__kernel void nothing(__global float* data) { if (get_global_id(0) == 1000000) data[0] = 1.0f; }"
_SIZE = (64,)
_OBJECTS = 16  # kernel objects that take turns
_LAUNCHES, _ROUNDS = 256, 15


def nothing_steps(context: Context, count: int) -> list[Step]:
    """`count` layers of one launch each, which do nothing."""
    data = context.buffer(4096)
    program = context.build(SOURCE, [])
    commands = [Command(program.kernel("nothing", [data]), _SIZE, _SIZE, (data,)) for _ in range(_OBJECTS)]
    return [Step("nothing", (commands[i % _OBJECTS],)) for i in range(count)]


def recording_pays(context: Context, queue: Queue) -> bool:
    """Whether recorded launches are done sooner, beyond what runs differ by. False where the driver cannot record.

    Raises:
        RunError: the device fails.
    """
    recorder = context.recorder(queue)
    if recorder is None:
        return False
    steps = nothing_steps(context, _LAUNCHES)
    executors = Executor(queue, steps), Executor(queue, steps, recorder)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS + 3):  # kernels are loaded in the first, recorded in the second
        for executor, taken in zip(executors, times, strict=True):
            begun = perf_counter()
            executor.run(None)
            if turn >= 3:
                taken.append(perf_counter() - begun)
    (least, *_), (*_, most) = statistics.quantiles(times[0], n=4), statistics.quantiles(times[1], n=4)
    return most < least
