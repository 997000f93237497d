"""Kernel configs of contractions on matrix units: NVIDIA's tensor cores, which multiply small blocks of halves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Self

from flashmem.target.kernel_configs.config import CompiledCost, EstimatedDevice, Feature
from flashmem.target.kernel_configs.contraction import Contraction, StagedContraction, in_group
from flashmem.target.kernel_configs.workload import Workload

_DOWN, _ACROSS = 16, 2
"""Work-items of a warp in the direction of rows and of columns, as their results are arranged."""

_CHUNK = 8
"""Halves that are copied to local memory at a time: 16 bytes."""

_STEP = 16
"""Steps of depth of one instruction."""

_RATE = 13.0
"""Multiplications of halves in the time of one of floats. This and the next fit 20 products on an H200, 2026-11-26."""

_COPY = 6.0
"""Cost of copying a half to local memory, in multiplications of floats of its core."""

_CORE = 2048
"""Work-items of a core, at most: NVIDIA's programming guide, compute capability 8.0 and 9.0."""

_FLOAT_ITEMS, _FLOAT_STEPS = 8, 16
"""Of the config for operands that are not in half: work-items, one below the other, and steps of depth of a K-block."""


@dataclass(frozen=True)
class TensorContraction(Contraction):
    """A contraction of two operands in half by tensor cores, with sums in float.

    A work-group has `pipeline` K-blocks of both operands in local memory: while it multiplies one, the others are being copied.
    Its `local_size` work-items are warps of 16 x 2, which multiply blocks of 16 * `rows` x 2 * `columns`. It has `slice_k`
    parts of so many work-items. Each part multiplies its share of every K-block; their sums are added in a fixed order.
    `columns` are a multiple of 8, a part's share is one of 16 steps, and `pipeline` is 2 to 5. Work-items of a group are a
    multiple of the chunks in a line of either operand.
    """

    kind: ClassVar[str] = "tensor"

    vector: int = field(default=4, init=False)
    families: tuple[str, ...] = field(default=("matmul", "conv"), init=False)
    k_block: int = field(kw_only=True)
    pipeline: int = field(kw_only=True)
    slice_k: int = field(default=1, kw_only=True)

    @property
    def needs(self) -> frozenset[Feature]:
        """Matrix units."""
        return frozenset({"mma"})

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}-t"

    @property
    def staged_depth(self) -> int:
        """See `Contraction.staged_depth`."""
        return self.k_block

    @property
    def stages(self) -> int:
        """See `Contraction.stages`."""
        return self.pipeline

    @property
    def parts(self) -> int:
        """See `Contraction.parts`."""
        return self.slice_k

    @property
    def warps_down(self) -> int:
        """Warps of a part, one below the other."""
        return self.local_size[0] // _DOWN

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and columns of the outputs of a warp."""
        return _DOWN * self.rows, _ACROSS * self.columns

    @property
    def steps(self) -> int:
        """Instructions along the depth of a part's share of a K-block."""
        return self.k_block // _STEP // self.slice_k

    @property
    def left_chunks(self) -> int:
        """Chunks of the left operand's K-block that a work-item copies."""
        return -(-self.block[0] * self.k_block // _CHUNK // self.items)

    @property
    def right_chunks(self) -> int:
        """Chunks of the right operand's K-block that a work-item copies."""
        return -(-self.block[1] * self.k_block // _CHUNK // self.items)

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one K-block of both operands."""
        return 2 * self.k_block * sum(self.block)

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: weights in half in a buffer, and whole chunks of the depth of each tap."""
        whole = workload.depth // workload.taps % _CHUNK == 0
        return workload.path == "buffer" and workload.storage == "float16" and whole and in_group(self, workload)

    def cut(self, workload: Workload) -> Self:
        """The config itself: its work-groups are whole."""
        return self

    def in_float(self) -> StagedContraction:
        """A config for the same packed weights and a left operand in float."""
        across = self.panel // 4
        return StagedContraction(self.name, 4, 4, (_FLOAT_ITEMS, across), k_block=_FLOAT_STEPS, two_stage=True)

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. The work-groups of a core share its copies and its matrix units."""
        down, across = self.block
        groups = workload.batches * math.ceil(workload.rows / down) * math.ceil(workload.columns / across)
        rounds = math.ceil(groups / max(1, device.parallelism // _CORE))
        return rounds * workload.depth * (_COPY * (down + across) + down * across / _RATE) / _CORE
