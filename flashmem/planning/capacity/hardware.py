"""The facts of a GPU that models of a family have as features: widths of pipelines, rates of memory and of transfers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmem.base.types import TransferMode
from flashmem.planning.capacity.features import LaunchFeatures
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor

HARDWARE_FEATURES = (
    "log_arithmetic_over_memory", "log_texture_per_slot", "log_load_per_slot", "log_slots_per_byte", "half_rate",
    "log_full", "log_launch_share", "log_bytes_per_weight", "log_bytes_per_value",
)  # fmt: skip
"""Features of a launch on a GPU. All are ratios, so that GPUs of one family that differ in size look alike."""


class ByMode(dict[TransferMode, float]):
    """A number by transfer mode, which never changes."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Hardware:
    """A GPU: `slots` issue slots of work-items a second, `texture` and `load` bytes a second out of caches, all as kernels
    reach them; `items` work-items that keep it busy; `memory` bytes a second.

    `host`: bytes a second that the host reads from the page cache. By transfer mode, `last` is the rate of the last step in
    bytes a second, and `contention` as in a descriptor.
    """

    slots: float
    texture: float
    load: float
    half_rate: float
    items: float
    memory: float
    launch_seconds: float
    host: float
    last: ByMode
    contention: ByMode

    @classmethod
    def of(cls, descriptor: DeviceDescriptor) -> Hardware:
        """The facts in a descriptor that has [pipelines]."""
        pipes, rates = descriptor.pipelines, descriptor.rates
        assert pipes is not None
        cycles = pipes.clock * pipes.reached
        last = ByMode({name: kind.last_bandwidth(rates) for name, kind in MODES.items()})
        return cls(
            pipes.lanes * cycles, pipes.texture_bytes * cycles, pipes.load_bytes * cycles, pipes.half_rate,
            float(descriptor.parallelism), rates.memory_bandwidth, rates.launch_seconds, rates.cached_bandwidth, last,
            ByMode(rates.contention),
        )  # fmt: skip

    def ideal_seconds(self, launch: LaunchFeatures) -> float:
        """The seconds of a launch with one issue slot for each multiply-add or output, or of its memory traffic; without the
        launch itself."""
        return max(self._arithmetic(launch), self._traffic(launch))

    def _arithmetic(self, launch: LaunchFeatures) -> float:
        return max(launch.macs, launch.rows * launch.columns, 1) / self.slots

    def _traffic(self, launch: LaunchFeatures) -> float:
        return max(launch.bytes + launch.weight_bytes, 1) / self.memory

    def features(self, launch: LaunchFeatures) -> list[float]:
        """`HARDWARE_FEATURES` of a launch."""
        ideal = self.ideal_seconds(launch)
        values = max(1, launch.rows * launch.columns)
        return [
            math.log2(self._arithmetic(launch) / self._traffic(launch)), math.log2(self.texture / self.slots),
            math.log2(self.load / self.slots), math.log2(self.slots / self.memory), self.half_rate,
            math.log2(launch.items / self.items), math.log2(self.launch_seconds / ideal),
            math.log2(1 + launch.weight_bytes / (launch.depth * launch.columns)), math.log2(1 + launch.bytes / values),
        ]  # fmt: skip
