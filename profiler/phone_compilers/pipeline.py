"""The pipeline model: seconds of a compiled kernel on a GPU, from its instructions and the widths of the GPU's pipelines.

It is the label that boosters of a family learn (docs/research/boosters.md#the-pipeline-model). A launch takes as long as its
busiest pipeline: issue slots, texture reads, loads from buffers, memory. No phone was measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashmem.base.types import TransferMode
from flashmem.planning.capacity.features import LaunchFeatures
from flashmem.planning.capacity.hardware import Hardware
from flashmem.profiler.phone_compilers.statistics import KernelStatistics, LoopStatistics
from flashmem.schedule.modes import MODES

_BLOCK = re.compile(r"LANE_FETCH\n(?:.*\n){0,3}?.*min\((\d+), \w+ - k0\)|for \(int k0 = 0; k0 < depth; k0 \+= (\d+)\)")
_INNER = "at < copied_;"
_LINE = re.compile(r"start \+= (\d+)\) \{\s*LANE_FETCH|lane_start \+= (\d+)\) \{\s*LANE_FETCH")
_VECTOR = 4
"""Steps of depth that an innermost loop with a copy stream reads at a time."""
_WAVES = 4
"""Waves on a core that hide the latency of memory: with fewer, the rate falls in proportion. Assumed."""

_TEXEL = {"float": 16, "half": 8}
_SPILLED = 4
"""Bytes of an access to scratch memory."""


@dataclass(frozen=True)
class CodeCounts:
    """Counted instructions of a kernel for one work-item: in all, in one pass of the main loop, in one pass around it."""

    slots: int
    loop_slots: int
    loop_macs: int
    loop_half_macs: int
    loop_load_bytes: int
    loop_textures: int
    loop_stack: int
    around_slots: int
    loops: int
    registers: int
    threads: int

    @classmethod
    def of(cls, kernel: KernelStatistics) -> CodeCounts:
        """The counts of a compiled kernel."""
        loop = kernel.main_loop or LoopStatistics(0, 0, 0, 0, 0, 0, 0, 0)
        return cls(
            kernel.slots, loop.slots, loop.macs, loop.half_macs, loop.load_bytes, loop.textures, loop.stack,
            kernel.around.slots if kernel.around else 0, kernel.loops, kernel.registers, kernel.threads,
        )  # fmt: skip

    @property
    def once(self) -> int:
        """Slots outside the main loop and the loops around it."""
        return max(0, self.slots - self.loop_slots - self.around_slots)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel as it was compiled: `plain`, and `lane` with its copy stream, of which a step moves `step_bytes` a work-item.

    `fetches` are places of the stream in the text, `block` the depth of a step (0: a place is passed once). `drained`: slots
    for a byte of the kernels that only copy, which the rest costs that no step has moved. `waves`: 16 where the compiler counts
    waves of a core, 0 where it does not.
    """

    plain: CodeCounts
    lane: CodeCounts
    step_bytes: int
    fetches: int
    block: int
    drained: float
    waves: int

    @property
    def step_slots(self) -> float:
        """Slots that a step of the copy stream adds: to the loops around the main loop, or to that loop if it is there."""
        if self.block != _VECTOR and self.plain.around_slots and self.lane.around_slots:
            return max(0, self.lane.around_slots - self.plain.around_slots)
        if self.plain.loop_macs and self.lane.loop_macs:
            return max(0, self.lane.loop_slots - self.plain.loop_slots)
        return self.drained * self.step_bytes


def stream_places(text: str) -> tuple[int, int]:
    """The places of the copy stream in the text of a kernel with one, and the depth between two of them (0: none)."""
    body = text[text.index("__kernel") :]
    if _INNER in body:
        return 1, _VECTOR
    found = _BLOCK.search(body) or _LINE.search(body)
    return body.count("LANE_FETCH"), int(next(filter(None, found.groups()))) if found else 0


def steps(fetches: int, block: int, launch: LaunchFeatures) -> float:
    """Steps of the copy stream that each work-item of a launch passes, for the `stream_places` of its kernel."""
    if not fetches:
        return 0.0
    if block:
        runs = max(1, launch.depth // max(1, launch.run)) if launch.family == "conv" else 1
        each = -(-launch.depth // (runs * block))
        return float(fetches * runs * each)
    return fetches * (max(1.0, launch.depth**0.5) if launch.family in ("depthwise", "pool") else 1.0)


class PipelineModel:
    """A kernel on a GPU. All figures are of a whole launch."""

    def __init__(self, compiled: CompiledKernel, hardware: Hardware) -> None:
        self._compiled, self._gpu = compiled, hardware

    def _steps(self, launch: LaunchFeatures) -> float:
        return steps(self._compiled.fetches, self._compiled.block, launch)

    def _passes(self, launch: LaunchFeatures) -> float:
        """Passes of the main loop by each work-item: what it sums, or else what it reads."""
        code = self._compiled.plain
        if code.loop_macs and launch.macs:
            return launch.macs / (launch.items * code.loop_macs)
        if code.loop_load_bytes:
            return max(1.0, launch.own_bytes / (launch.items * code.loop_load_bytes)) * min(code.loops, 3)
        return 1.0 if code.loops else 0.0

    def busy(self, launch: LaunchFeatures, *, streaming: bool = False) -> dict[str, float]:
        """Seconds of each pipeline in a launch: "arithmetic", "texture", "load" and "memory".

        `streaming`: of the kernel that has a copy stream, without the bytes that it moves.
        """
        plain, lane, gpu = self._compiled.plain, self._compiled.lane, self._gpu
        sums = bool(plain.loop_macs and launch.macs)
        code = lane if streaming and sums and lane.loop_macs == plain.loop_macs else plain
        passes = self._passes(launch)
        halves = code.loop_half_macs * (1 - 1 / gpu.half_rate)
        around = max(1.0, self._steps(launch)) * plain.around_slots
        slots = passes * (code.loop_slots - halves) + around + plain.once
        items = max(launch.items, gpu.items)  # fewer do not fill it, and take as long
        rate = gpu.slots * self._share(lane if streaming else plain)
        texel = _TEXEL["half" if launch.weight_bytes < 3 * launch.depth * launch.columns else "float"]
        loads = code.loop_load_bytes + _SPILLED * code.loop_stack
        return {
            "arithmetic": items * slots / rate,
            "texture": launch.items * passes * code.loop_textures * texel / gpu.texture,
            "load": launch.items * passes * loads / gpu.load,
            "memory": (launch.bytes + launch.weight_bytes) / gpu.memory,
        }

    def _share(self, code: CodeCounts) -> float:
        """The share of the issue rate that the waves on a core reach."""
        return min(1.0, code.threads / _WAVES) if self._compiled.waves and code.threads else 1.0

    def seconds(self, launch: LaunchFeatures) -> float:
        """Latency alone."""
        return max(self.busy(launch).values()) + self._gpu.launch_seconds

    def loaded_seconds(self, launch: LaunchFeatures, nbytes: float, mode: TransferMode) -> float:
        """Latency with `nbytes` streamed during it.

        A copy engine delays it by its contention. The host writes to the memory that it shares (`alias`, `map`): these bytes
        cost memory traffic and the host's read. In `interleave` the kernel reads and writes them again, by its own slots.
        """
        gpu, alone = self._gpu, self.seconds(launch)
        if not nbytes:
            return alone
        if MODES[mode].by_engine:
            return alone + gpu.contention[mode] * nbytes / gpu.last[mode]
        busy = self.busy(launch, streaming=MODES[mode].by_kernels)
        busy["memory"] += nbytes / gpu.memory
        if MODES[mode].by_kernels:
            busy["memory"] += 2 * nbytes / gpu.memory
            busy["load"] += nbytes / gpu.load
            busy["arithmetic"] += self._copy_slots(launch, nbytes) / (gpu.slots * self._share(self._compiled.lane))
        return max(alone, max(busy.values()) + gpu.launch_seconds, nbytes / gpu.host + gpu.launch_seconds)

    def _copy_slots(self, launch: LaunchFeatures, nbytes: float) -> float:
        """Slots that move `nbytes`: of every step, which has no condition, and of what is left after them."""
        compiled = self._compiled
        taken = self._steps(launch) * launch.items
        return taken * compiled.step_slots + max(0.0, nbytes - taken * compiled.step_bytes) * compiled.drained
