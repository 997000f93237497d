"""A table of counted instructions as a capacity model: the reference beside which boosters of families are judged.

The seconds of a launch are those of the busiest pipeline: arithmetic, texture reads, loads from buffers, memory. C_l follows:
bytes stream during a launch until one pipeline has no time left within the slowdown that the class tolerates. A launch has the
counts of the kernel config that is nearest in the table, so that kernels which no table lists have those of another one.
"""

from __future__ import annotations

from collections.abc import Iterable

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.compiler.selection.counted_code import CODE, LANE, KernelCode, cycles_of, load_codes
from flashmem.program.launches import Launch
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.target.pipelines import Pipelines


class CompiledCode:
    """Capacity model of a GPU from its compiler's code. A launch of a family without rows has the roofline's seconds."""

    def __init__(
        self, descriptor: DeviceDescriptor, pipelines: Pipelines, codes: Iterable[KernelCode], path: MemoryPath
    ) -> None:
        self._descriptor = descriptor
        self._pipelines = pipelines
        self._path = path
        self._codes: dict[str, list[KernelCode]] = {}
        for code in codes:
            self._codes.setdefault(code.family, []).append(code)

    @classmethod
    def load(cls, descriptor: DeviceDescriptor, path: MemoryPath) -> CompiledCode:
        """The model whose file the descriptor names: see `load_codes`.

        Raises:
            UserError: the file is damaged, or the descriptor has no [pipelines].
        """
        if descriptor.pipelines is None:
            name = f"{descriptor.counted}{CODE}"
            raise UserError(f"device descriptor {descriptor.name} names {name} and has no [pipelines]; add them")
        return cls(descriptor, descriptor.pipelines, load_codes(descriptor.counted), path)

    @property
    def note(self) -> str:
        """States that the numbers are a compiler's, and no measurement."""
        return f"load capacities from compiled code and published figures of {self._descriptor.name}, not measured"

    @property
    def tells_classes(self) -> bool:
        """No: a table knows no kernel's own response."""
        return False

    def prepare(self, launches: Iterable[tuple[Launch, int]], mode: TransferMode) -> None:
        """Nothing is predicted ahead."""

    def busy(self, launch: Launch, weight_bytes: int = 0) -> dict[str, float]:
        """Seconds of each pipeline in a launch: "arithmetic", "texture", "load" and "memory"."""
        code = self.code_of(launch, weight_bytes)
        memory = (launch.bytes + weight_bytes) / self._descriptor.rates.memory_bandwidth
        if code is None or not launch.macs:
            rates = self._descriptor.rates
            return {"arithmetic": 2 * launch.macs / rates.flops_of(launch.shape.family), "memory": memory}
        p = self._pipelines
        cycle = 1 / (p.clock * p.reached)
        return {name: launch.macs * cycles * cycle for name, cycles in cycles_of(code, p).items()} | {"memory": memory}

    def code_of(self, launch: Launch, weight_bytes: int) -> KernelCode | None:
        """The row closest to a launch: of its family, then its memory path, its tile, and its sums in half."""
        found = self._codes.get(launch.shape.family, [])
        if not found:
            return None
        shape = launch.shape
        half = _stores_half(launch, weight_bytes)

        def distance(code: KernelCode) -> tuple[bool, bool, int]:
            tile = abs(code.rows - shape.tile_rows) + abs(code.columns - shape.tile_columns)
            return bool(code.memory_path) and code.memory_path != self._path, bool(code.half) != half, tile

        return min(found, key=distance)

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency alone: the busiest pipeline, and the launch itself."""
        return max(self.busy(launch, weight_bytes).values()) + self._descriptor.rates.launch_seconds

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with the work of a transfer added to each pipeline; in mode `dma`, as by the roofline's contention."""
        if MODES[mode].by_engine:
            alone = self.seconds(launch, weight_bytes)
            rates = self._descriptor.rates
            return alone + rates.contention_of(mode) * streamed_bytes / MODES[mode].last_bandwidth(rates)
        busy = self.busy(launch, weight_bytes)
        each = self._each_byte(mode)
        loaded = max(busy.get(name, 0.0) + each.get(name, 0.0) * streamed_bytes for name in {*busy, *each})
        return loaded + self._descriptor.rates.launch_seconds

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The bytes for which the first pipeline has no time left."""
        if MODES[mode].by_engine:
            contention = self._descriptor.rates.contention_of(mode)
            alone = self.seconds(launch, weight_bytes)
            share = min(slowdown / max(contention, 1e-9), 1.0 + slowdown)
            return share * alone * MODES[mode].last_bandwidth(self._descriptor.rates)
        return min(self.room(launch, weight_bytes, slowdown, mode).values())

    def room(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> dict[str, float]:
        """The bytes that each pipeline, by name, can stream during a launch within `slowdown`; the least is C_l."""
        busy = self.busy(launch, weight_bytes)
        each = self._each_byte(mode)
        time = (1 + slowdown) * self.seconds(launch, weight_bytes) - self._descriptor.rates.launch_seconds
        return {name: max(0.0, time - busy.get(name, 0.0)) / cost for name, cost in each.items() if cost > 0}

    def _each_byte(self, mode: TransferMode) -> dict[str, float]:
        """Seconds of each pipeline for a streamed byte.

        The host reads into memory that the device shares (`alias`): the byte is written once, and the reads' own rate limits
        it. With `interleave` the kernel's copy stream reads and writes it again, by instructions of its own.
        """
        rates = self._descriptor.rates
        p = self._pipelines
        each = {"memory": 1 / rates.memory_bandwidth, "host": 1 / rates.cached_bandwidth}
        lanes = [code for code in self._codes.get(LANE, []) if code.memory_path == self._path]
        if MODES[mode].by_kernels and lanes:
            cycle = 1 / (p.clock * p.reached)
            each["memory"] *= 3
            each["arithmetic"] = lanes[0].slots / p.lanes * cycle
            each["load"] = lanes[0].load_bytes / p.load_bytes * cycle
        return each


def _stores_half(launch: Launch, weight_bytes: int) -> bool:
    """Whether a launch reads operands stored in half: by the bytes of its weights, or of its activations without weights."""
    shape = launch.shape
    if weight_bytes:
        return weight_bytes < 3 * shape.depth * shape.columns
    read = shape.run if shape.family == "attention" else shape.depth
    return launch.bytes < 4 * shape.rows * (shape.columns + read)
