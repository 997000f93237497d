"""The kernel config of reductions, softmax and normalizations over rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from flashmem.compiler.configs.config import READ, WAIT, CompiledCost, EstimatedDevice, KernelConfig
from flashmem.compiler.configs.kinds import register, register_plain
from flashmem.compiler.configs.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor, Feature

_SHUFFLE = 4.0
"""Cost of reading a register of another work-item of the subgroup, in multiplications: assumed."""


@register
@dataclass(frozen=True)
class RowConfig(KernelConfig):
    """`lanes` work-items share a row and read vectors of `vector`.

    With `subgroups` the work-items of a subgroup combine their numbers by shuffles, in the same order, without local memory and
    barriers.
    """

    kind: ClassVar[str] = "rows"

    vector: int
    lanes: int = 1
    subgroups: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        """See `KernelConfig.families`."""
        return ("reduce_rows",)

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"1-{self.vector}-{self.vector}-1x1-0-0-{self.lanes}" + ("-subgroups" if self.subgroups else "")

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return self.lanes

    @property
    def local_bytes(self) -> int:
        """Bytes of the numbers that lanes exchange."""
        return 4 * self.lanes if self.lanes > 1 else 0

    @property
    def needs(self) -> frozenset[Feature]:
        """Shuffles, if it uses subgroups."""
        return frozenset({"shuffle"} if self.subgroups else ())

    def fits(self, workload: Workload) -> bool:
        """Any row."""
        return True

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`.

        A row is read three times, as in a normalization. Twice its parts are combined pairwise: in local memory, where the
        group waits each time, or by shuffles.
        """
        reads = 3 * math.ceil(workload.depth / (self.lanes * self.vector))
        joins = 2 * math.log2(self.lanes)
        at_once = max(1, device.parallelism / self.lanes)
        return math.ceil(workload.rows / at_once) * (READ * reads + joins * (_SHUFFLE if self.subgroups else WAIT))


@register_plain("reduce_rows")
def _plain(descriptor: DeviceDescriptor, family: str) -> tuple[RowConfig, ...]:
    return (RowConfig("tile", descriptor.tile.vector, descriptor.tile.lanes),)
