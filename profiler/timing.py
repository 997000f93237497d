"""Device time of one operator's kernels, by profiling events: what tuning and the kernel benchmark compare.

Launches are repeated on one queue, the first ones not counted, and the median counts: the time from a kernel's start to its
end, not what the host takes to enqueue it. Everything is resident, and weights stay where they are from one repeat to the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.base.types import POOL_ALIGNMENT, TEXEL_BYTES
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.program import Generated, generate
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.weights.slicing import Slicing
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.executor import Command, Resources, make_steps
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context, Memory, Program, event_seconds
from flashmem.runtime.opencl.devices import Device
from flashmem.target.descriptor import DeviceDescriptor

_BLOCK = 16 << 20  # bytes written at a time
_HELD_BYTES = 4 << 30  # of buffers and textures kept for the next operator
_LARGEST_SLICE = 1 << 30
_FEWEST, _MOST = 3, 60
_SECONDS = 0.04  # of device time an operator is repeated for
_BATCH = 10
_HOPELESS = 0.5  # seconds: not repeated to see whether it was the first launch alone
_LAYOUT = ("movement",)
"""Kernels that only rearrange what another operator of a model would have left in place."""


def generated(graph: Graph, descriptor: DeviceDescriptor, precision: Literal["fp32", "fp16"] = "fp32") -> Generated:
    """The program of `graph` as `flashmem compile` makes it, but with every weight in one slice where a device allows it."""
    graph = prepare(graph)
    largest = min(_LARGEST_SLICE, descriptor.max_alloc_bytes)
    return generate(graph, fuse(graph), descriptor, precision=precision, slicing=Slicing(least=largest, most=largest))


@dataclass(frozen=True)
class Timed:
    """Device seconds of one run of an operator: the median, the least, how often it was repeated, and how many launches."""

    seconds: float
    least: float
    repeats: int
    launches: int


class Stand:
    """A device with a queue that keeps times, and memory to run in. Close it, or use it as a context manager."""

    def __init__(self, device: Device) -> None:
        self.context = Context(device)
        self.queue = self.context.queue(profiling=True)
        self._random = np.random.default_rng(0).uniform(0.5, 1.5, _BLOCK // 4).astype(np.float32)
        self._ledger = Ledger(self.context, None)
        self._held: dict[tuple[object, ...], Memory] = {}
        self._programs: dict[str, Program] = {}

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back."""
        self._programs.clear()
        self._let_go()

    def _let_go(self) -> None:
        self._held.clear()
        self._ledger.close()
        self._ledger = Ledger(self.context, None)

    def works(self) -> bool:
        """Whether the device still does what it is asked: after some failures it refuses everything in this context."""
        try:
            self._buffer(("probe",), POOL_ALIGNMENT)
            self.queue.write(self._held["buffer", "probe", POOL_ALIGNMENT, "float"], self._random[:1024])
        except RunError:
            return False
        return True

    # -- kernels and memory

    def build(self, made: Generated) -> Program:
        """The kernels of `made`, compiled once for each text. Other threads may build others meanwhile.

        Raises:
            RunError: the driver refuses them.
        """
        source = made.source.plain
        if source not in self._programs:
            self._programs[source] = self.context.build(source, made.program.build_options)
        return self._programs[source]

    def _content(self, channel: str) -> NDArray[np.uint8]:
        """Ordinary numbers: zeros or denormal ones would not take the usual time."""
        kind = np.float16 if channel == "half" else np.float32
        return self._random.astype(kind).view(np.uint8)

    def _buffer(self, key: tuple[object, ...], nbytes: int, channel: str = "float") -> Memory:
        return self._memory(("buffer", *key, nbytes, channel), lambda: self._filled(nbytes, self._content(channel)))

    def _filled(self, nbytes: int, content: NDArray[np.uint8]) -> Memory:
        buffer = self._ledger.buffer("weights", nbytes, "an operand")
        for start in range(0, nbytes, content.nbytes):
            self.queue.write(buffer, content[: min(content.nbytes, nbytes - start)], offset=start)
        return buffer

    def _image(self, key: tuple[object, ...], part: Slice) -> Memory:
        return self._memory(("image", *key, part.width, part.height, part.channel), lambda: self._painted(part))

    def _painted(self, part: Slice) -> Memory:
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

    def _memory(self, key: tuple[object, ...], make: Callable[[], Memory]) -> Memory:
        if key not in self._held:
            self._held[key] = make()
        return self._held[key]

    # -- timing

    def commands(self, made: Generated, program: Program) -> list[Command]:
        """The launches of `made`, ready to be enqueued, but those that change layouts.

        Raises:
            RunError: the device refuses a kernel or its memory.
        """
        plan, resources = made.program, self.resources(made)
        steps = make_steps(plan, {}, {}, resources, program, None)
        pairs = zip(plan.launches, steps, strict=True)
        return [command for launch, step in pairs if launch.shape.family not in _LAYOUT for command in step.commands]

    def resources(self, made: Generated) -> Resources:
        """Memory for the launches of `made`, full of ordinary numbers; what earlier ones had is used again.

        Raises:
            RunError: the device refuses it.
        """
        if self._ledger.total > _HELD_BYTES:
            self._let_go()
        plan = made.program
        arena = self._buffer(("arena",), _rounded(plan.arena_bytes))
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
        return Resources(self.context, arena, constants, weights, {})

    def time(self, commands: Sequence[Command], seconds: float = _SECONDS, slow: float = math.inf) -> Timed:
        """Repeats of `commands`, short ones more often, for about `seconds`; one alone if that takes longer than `slow`.

        Raises:
            RunError: the device refuses a launch, or fails.
        """
        first = self._play(commands, 1)[0]
        if first < _HOPELESS:  # the very first launch takes longer than any other
            first = min(self._play(commands, 2))
        if first > slow:
            return Timed(first, first, 1, len(commands))
        repeats = max(1 if first > 10 * seconds else _FEWEST, min(_MOST, math.ceil(seconds / max(first, 1e-9))))
        times: list[float] = []
        while len(times) < repeats:
            times += self._play(commands, min(_BATCH, repeats - len(times)))
        return Timed(statistics.median(times), min(times), len(times), len(commands))

    def _play(self, commands: Sequence[Command], count: int) -> list[float]:
        events = [[self._launch(each) for each in commands] for _ in range(count)]
        self.queue.finish()
        return [sum(end - start for start, end in map(event_seconds, run)) for run in events]

    def _launch(self, command: Command) -> Any:
        return self.queue.launch(self.queue.prepare(command.kernel, command.global_size, command.local_size))


def _rounded(nbytes: int) -> int:
    """Up to a power of two below a MiB, whole MiB above: so that memory is found again."""
    if nbytes <= 1 << 20:
        return max(POOL_ALIGNMENT, 1 << (nbytes - 1).bit_length())
    return -(-nbytes // (1 << 20)) * (1 << 20)


def time_graph(stand: Stand, graph: Graph, descriptor: DeviceDescriptor) -> Timed:
    """One operator on its own.

    Raises:
        UserError: it cannot be compiled for the device.
        RunError: the device refuses it.
    """
    made = generated(graph, descriptor)
    commands = stand.commands(made, stand.build(made))
    if not commands:
        raise RunError("the graph has no kernel to time")
    return stand.time(commands)
