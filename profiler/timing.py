"""Device time of one operator's kernels, from profiling events, for tuning and the kernel benchmark.

Launches are repeated on one queue, without counting the first ones, and the median is used. It is the time from a kernel's
start to its end, without the host's time to enqueue it; or that of a run among others (`Stand.time_in_a_row`), which an event
of its own would lengthen. Everything is resident, and weights keep their places over all repeats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.base.types import POOL_ALIGNMENT, TEXEL_BYTES, Precision
from flashmem.compiler.ir.graph import Graph, GraphPort
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.weights.slicing import Slicing
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.steps import Command, Resources, make_steps
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import CompiledProgram, Context, event_seconds
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.handles import Buffer, Texture
from flashmem.runtime.opencl.launching import PreparedLaunch
from flashmem.target.descriptor import DeviceDescriptor

from .checked import CheckedKernels

_BLOCK = 16 << 20  # bytes written at a time
_HELD_BYTES = 4 << 30  # bytes of buffers and textures kept for the next operator
_LARGEST_SLICE = 1 << 30
_FEWEST = 3
_MOST = 60
_SECONDS = 0.04  # device time for which an operator is repeated
_BATCH = 10
_HOPELESS = 0.5  # seconds from which the first launch is not repeated
_IN_A_ROW = 20
_ROW_SECONDS = 0.02  # the most runs of an operator one after the other, and about the longest such row
_HOLD = """
__kernel void hold(__global float* x, const int steps)
{
    float a = x[get_global_id(0)];
    for (int i = 0; i < steps; ++i) a = a * 0.999f + 0.001f;
    x[get_global_id(0)] = a;
}
"""
_HOLD_STEPS = 250_000  # half a ms, in which the host enqueues a row
_LAYOUT = ("movement",)
"""Kernels that only rearrange data that another operator of a model would have left in place."""


def generated(graph: Graph, descriptor: DeviceDescriptor, precision: Precision = "fp32") -> Generated:
    """The program of `graph` as in `flashmem compile`, but with every weight in one slice if the device allows it.

    With `precision` "fp16", inputs and outputs are halves, as activations between the operators of a model are.
    """
    if precision == "fp16":
        graph = replace(graph, inputs=_in_half(graph.inputs), outputs=_in_half(graph.outputs))
    graph = prepare(graph)
    largest = min(_LARGEST_SLICE, descriptor.max_alloc_bytes)
    return generate(fuse(graph), descriptor, precision=precision, slicing=Slicing(least=largest, most=largest))


def _in_half(ports: Sequence[GraphPort]) -> list[GraphPort]:
    return [replace(port, dtype="float16") if port.dtype == "float32" else port for port in ports]


@dataclass(frozen=True)
class Timed:
    """Device seconds of one run of an operator: the median, the least, the number of repeats, and the number of launches."""

    seconds: float
    least: float
    repeats: int
    launches: int


class Stand:
    """A device with a profiling queue and memory for operators. Close it, or use it as a context manager."""

    def __init__(self, device: Device) -> None:
        self.context = Context(device)
        self.queue = self.context.queue(profiling=True)
        self._random = np.random.default_rng(0).uniform(0.5, 1.5, _BLOCK // 4).astype(np.float32)
        self._ledger = Ledger(self.context, None)
        self._buffers: dict[tuple[object, ...], Buffer] = {}  # in use by one program after the other
        self._images: dict[tuple[object, ...], Texture] = {}
        self._programs: dict[str, CompiledProgram] = {}
        self._hold: PreparedLaunch | None = None
        self.checks = CheckedKernels(device)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all resources."""
        self._programs.clear()
        self.checks.close()
        self._let_go()

    def _let_go(self) -> None:
        self._hold = None
        self._buffers.clear()
        self._images.clear()
        self._ledger.close()
        self._ledger = Ledger(self.context, None)

    def works(self) -> bool:
        """Whether the device still works: after some failures it refuses everything in this context."""
        try:
            self.queue.write(self._buffer(("probe",), POOL_ALIGNMENT), self._random[:1024])
        except RunError:
            return False
        return True

    # -- kernels and memory

    def build(self, made: Generated) -> CompiledProgram:
        """The kernels of `made`, compiled once for each text. Other threads may build other kernels at the same time.

        Raises:
            RunError: the driver refuses them.
        """
        source = made.source.plain
        if source not in self._programs:
            self._programs[source] = self.context.build(source, made.program.build_options)
        return self._programs[source]

    def _content(self, channel: str) -> NDArray[np.uint8]:
        """Ordinary numbers, because zeros or denormals would have unusual timings."""
        kind = np.float16 if channel == "half" else np.float32
        return self._random.astype(kind).view(np.uint8)

    def _buffer(self, key: tuple[object, ...], nbytes: int, channel: str = "float") -> Buffer:
        key = (*key, nbytes, channel)
        if key not in self._buffers:
            self._buffers[key] = self._filled(nbytes, self._content(channel))
        return self._buffers[key]

    def _filled(self, nbytes: int, content: NDArray[np.uint8]) -> Buffer:
        buffer = self._ledger.buffer("weights", nbytes, "an operand")
        for start in range(0, nbytes, content.nbytes):
            self.queue.write(buffer, content[: min(content.nbytes, nbytes - start)], offset=start)
        return buffer

    def _image(self, key: tuple[object, ...], part: Slice) -> Texture:
        key = (*key, part.width, part.height, part.channel)
        if key not in self._images:
            self._images[key] = self._painted(part)
        return self._images[key]

    def _painted(self, part: Slice) -> Texture:
        image = self._ledger.image("weights", part.width, part.height, part.channel, "a weight")
        pitch = part.width * TEXEL_BYTES[part.channel]
        content = self._content(part.channel)
        if pitch > content.nbytes:
            content = np.resize(content, pitch)
        rows = content.nbytes // pitch
        for first in range(0, part.height, rows):
            count = min(rows, part.height - first)
            self.queue.write_image(image, content, first_row=first, width=part.width, rows=count, row_pitch=pitch)
        return image

    # -- timing

    def commands(
        self, made: Generated, program: CompiledProgram, *, layouts: bool = False, families: Collection[str] = ()
    ) -> list[Command]:
        """The launches of `made`, ready to enqueue, except those that change layouts if not `layouts`.

        `families`: only launches of these kernel families, if any are given; the others run now, once.

        Raises:
            RunError: the device refuses a kernel or its memory.
        """
        plan = made.program
        resources = self.resources(made)
        steps = make_steps(plan, {}, {}, resources, program, None)
        pairs = zip(plan.launches, steps, strict=True)
        if families:
            chosen = [(launch.shape.family in families, step) for launch, step in pairs]
            self._play([command for is_measured, step in chosen if not is_measured for command in step.commands], 1)
            measured = [step for is_measured, step in chosen if is_measured]
        else:
            measured = [step for launch, step in pairs if layouts or launch.shape.family not in _LAYOUT]
        return [command for step in measured for command in step.commands]

    def resources(self, made: Generated) -> Resources:
        """Memory for the launches of `made`, filled with ordinary numbers; memory of earlier programs is reused.

        Raises:
            RunError: the device refuses it.
        """
        if self._ledger.total > _HELD_BYTES:
            self._let_go()
        plan = made.program
        channel = "half" if any(tensor.dtype == "float16" for tensor in plan.tensors) else "float"
        arena = self._buffer(("arena",), _rounded(plan.arena_bytes), channel)
        constants = None
        if made.constants.nbytes:
            constants = self._buffer(("constants",), _rounded(made.constants.nbytes))
            self.queue.write(constants, made.constants)
        weights = {
            part.name: self._image((i,), part)
            if part.is_image and plan.memory_path == "texture"
            else self._buffer(("slice", i), _rounded(part.nbytes), part.channel)
            for i, part in enumerate(plan.slices)
        }
        states = self._buffer(("states",), _rounded(plan.states_bytes)) if plan.states_bytes else None
        return Resources(self._ledger, arena, constants, weights, {}, states)

    def time(self, commands: Sequence[Command], seconds: float = _SECONDS, slow: float = math.inf) -> Timed:
        """Time `commands` for about `seconds`, short ones more often; only once if that takes longer than `slow`.

        Raises:
            RunError: the device refuses a launch, or fails.
        """
        first = self._play(commands, 1)[0]
        if first < _HOPELESS:  # the very first launch is slower than any other
            first = min(self._play(commands, 2))
        if first > slow:
            return Timed(first, first, 1, len(commands))
        repeats = max(1 if first > 10 * seconds else _FEWEST, min(_MOST, math.ceil(seconds / max(first, 1e-9))))
        times: list[float] = []
        while len(times) < repeats:
            times += self._play(commands, min(_BATCH, repeats - len(times)))
        return Timed(statistics.median(times), min(times), len(times), len(commands))

    def time_in_a_row(self, commands: Sequence[Command], rows: int = 7, slow: float = math.inf) -> float:
        """Seconds of one run of `commands` among others, as in a model: the median of `rows` rows of runs.

        On a GPU. The device is kept busy until a row is enqueued, so host time is excluded. What takes longer than `slow` is
        timed alone.

        Raises:
            RunError: the device refuses a launch, or fails.
        """
        if self._hold is None:
            program = self.context.build(_HOLD, ())
            arguments = [self._buffer(("hold",), POOL_ALIGNMENT), np.int32(_HOLD_STEPS)]
            self._hold = self.queue.prepare(program.kernel("hold", arguments), (32,), (32,))
        self._play(commands, 1)  # the very first launch is slower than any other
        [first] = self._play(commands, 1)
        if first > min(slow, _HOPELESS):
            return first
        runs = max(2, min(_IN_A_ROW, round(_ROW_SECONDS / max(first, 1e-9))))
        launches = [self.queue.prepare(each.kernel, each.global_size, each.local_size) for each in commands]
        found = []
        for _ in range(rows):
            self.queue.launch(self._hold)
            *_, begin = [self.queue.launch(each) for each in launches]
            self.queue.launch_all(launches * (runs - 1))
            *_, end = [self.queue.launch(each) for each in launches]
            self.queue.finish()
            found.append((event_seconds(end)[1] - event_seconds(begin)[1]) / runs)
        return statistics.median(found)

    def _play(self, commands: Sequence[Command], count: int) -> list[float]:
        events = [[self._launch(each) for each in commands] for _ in range(count)]
        self.queue.finish()
        return [sum(end - start for start, end in map(event_seconds, run)) for run in events]

    def _launch(self, command: Command) -> Any:
        return self.queue.launch(self.queue.prepare(command.kernel, command.global_size, command.local_size))


def _rounded(nbytes: int) -> int:
    """Round up to a power of two below a MiB, to whole MiB above, so that memory can be reused."""
    if nbytes <= 1 << 20:
        return max(POOL_ALIGNMENT, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // (1 << 20)) * (1 << 20)


def time_graph(stand: Stand, graph: Graph, descriptor: DeviceDescriptor) -> Timed:
    """Time one operator alone.

    Raises:
        UserError: it cannot be compiled for the device.
        RunError: the device refuses it, or miscompiles a kernel.
    """
    made = generated(graph, descriptor)
    stand.checks.refuse_wrong(made.program, made.source)
    commands = stand.commands(made, stand.build(made))
    if not commands:
        raise RunError("the graph has no kernel to time")
    return stand.time(commands)
