"""Kernel config of attention on matrix units: NVIDIA's tensor cores multiply small blocks of halves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from flashmem.compiler.configs.config import CompiledCost, EstimatedDevice
from flashmem.compiler.configs.kinds import register
from flashmem.compiler.configs.matrix_units import CHUNK, CORE, STEP
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.attention.configs import AttentionConfig
from flashmem.target.descriptor import Feature

_WARP = 32
_TILE = 16
"""Work-items of a warp, and queries of one instruction."""

_LOCAL = 48 << 10
"""Bytes of local memory of a work-group, at most: NVIDIA's limit for OpenCL."""

_MULTIPLIED = 1 / 7.0
_COPIED = 3.5
"""Cost of a product of attention and its share of softmax, and of copying a half, in multiplications of floats of a core. These
and the next fit 85 pairs of a config and a shape on an H200, 2026-11-27.
"""

_ROUND = 78.0
_ROUND_SCORE = 0.35
"""Cost of a block of keys for a group that is alone, and for each row of scores of a warp: latencies."""

_BEGIN = 155.0
_BEGIN_SCORE = 1.3
"""The same, once for each group."""


@register
@dataclass(frozen=True)
class TensorAttention(AttentionConfig):
    """Attention in half by tensor cores, with scores and sums in float.

    A work-group has `queries` queries and `pipeline` blocks of `keys` keys and values in local memory: while it computes with
    one, the others are being copied. A warp has `tiles` times 16 queries. `parts` parts of the group each have a share of every
    block; their sums are added in a fixed order. `queries` are a multiple of 16 * `tiles`, a part's keys one of 16, and
    `pipeline` is 2 to 5.
    """

    kind: ClassVar[str] = "tensor-attention"

    tiles: int = field(default=1, kw_only=True)
    parts: int = field(default=1, kw_only=True)
    pipeline: int = field(kw_only=True)

    @property
    def needs(self) -> frozenset[Feature]:
        """Matrix units."""
        return frozenset({"mma"})

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{self.queries}-{self.keys}-2-{self.items}x1-{self.tiles}-{self.pipeline - 1}-{self.parts}-t"

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return self.queries // (_TILE * self.tiles) * _WARP * self.parts

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory for the narrowest head."""
        return self.bytes_for(CHUNK, CHUNK)

    def stage_pitches(self, depth: int, channels: int) -> tuple[int, int]:
        """Chunks from one key, and from one value, to the next in local memory: odd, so that they are in different banks."""
        return -(-depth // STEP) * STEP // CHUNK | 1, -(-channels // STEP) * STEP // CHUNK | 1

    def bytes_for(self, depth: int, channels: int) -> int:
        """Bytes of local memory for heads of `depth` channels and values of `channels`: K-blocks, then the parts' sums."""
        staged = 2 * CHUNK * self.pipeline * self.keys * sum(self.stage_pitches(depth, channels))
        lines = self.items * self.tiles
        sums = 16 * (lines - lines // self.parts) * (channels // CHUNK) + 8 * lines if self.parts > 1 else 0
        return max(staged, sums)

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: in half, with heads of whole chunks that fit local memory and registers."""
        depth = workload.depth
        halves = workload.storage == "float16" and depth % CHUNK == 0
        return halves and self.bytes_for(depth, depth) <= _LOCAL and self._registers(depth) <= _REGISTERS

    def _registers(self, depth: int) -> int:
        """Registers of queries, scores and sums of a work-item."""
        return self.tiles * (4 * -(-depth // STEP) + self.keys // self.parts // 2 + depth // 2)

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. The work-groups of a core share its copies and its matrix units."""
        groups = workload.batches * math.ceil(workload.rows / self.queries)
        each = math.ceil(groups / max(1, device.parallelism // CORE))
        rounds = math.ceil(workload.columns / self.keys)
        alone = self.tiles * self.keys / self.parts
        copied = 2 * self.keys * workload.depth
        multiplied = 2 * self.queries * self.keys * workload.depth
        work = each * (_COPIED * copied + _MULTIPLIED * multiplied) / CORE
        return _BEGIN + _BEGIN_SCORE * alone + rounds * max(work, _ROUND + _ROUND_SCORE * alone)


_REGISTERS = 168
"""Registers for these, at most, of the 255 of a work-item."""
