"""Kernel configs of contractions on matrix units: NVIDIA's tensor cores multiply small blocks of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from flashmem.compiler.configs.config import CompiledCost, EstimatedDevice
from flashmem.compiler.configs.kinds import register
from flashmem.compiler.configs.matrix_units import CHUNK, CORE, STEP
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.configs import (
    CODES,
    MOST_PARTIAL,
    Contraction,
    StagedContraction,
    in_group,
    joining,
    split_code,
    splits,
)
from flashmem.target.descriptor import Feature

_FLOAT_ITEMS = 8
_FLOAT_STEPS = 16
"""Of the config for operands that are not in half: work-items, one below the other, and steps of depth of a K-block."""


@register
@dataclass(frozen=True)
class TensorContraction(Contraction):
    """A contraction of two operands in half by tensor cores, with sums in float.

    A work-group has `pipeline` K-blocks of both operands in local memory: while it multiplies one, the others are being copied.
    Its `local_size` work-items are warps of 16 x 2, which multiply blocks of 16 * `rows` x 2 * `columns`. It has `slice_k`
    parts of so many work-items. Each part multiplies its share of every K-block; their sums are added in a fixed order. With
    `split_k`, as many groups share the depth (`StagedContraction`).
    `columns` are a multiple of 8, a part's share is one of 16 steps, and `pipeline` is 2 to 5. `copiers` further work-items,
    whole warps, only copy; if there are none, all copy. Those that copy are a multiple of the chunks in a line of an operand.

    Of a class: `element` of both operands in memory, `itemsize` of its bytes, `chunk` elements that are copied to local memory
    at a time (16 bytes), `step` steps of depth of one instruction, and `storage` of the workloads (`Workload.storage`).
    `warp_items` (down, across) arranges a warp's results: a work-item has rows and vectors of four columns at distances
    `between`. `rate`: multiplications in the time of one by plain arithmetic. `copy`: the cost of copying an element, in
    multiplications of floats of its core. Both fit 20 products on an H200, 2026-11-26.
    """

    kind: ClassVar[str] = "tensor"
    element: ClassVar[str] = "half"
    itemsize: ClassVar[int] = 2
    chunk: ClassVar[int] = CHUNK
    step: ClassVar[int] = STEP
    storage: ClassVar[str] = "float16"
    warp_items: ClassVar[tuple[int, int]] = (16, 2)
    between: ClassVar[tuple[int, int]] = (16, 8)
    rate: ClassVar[float] = 13.0
    copy: ClassVar[float] = 6.0

    vector: int = field(default=4, init=False)
    families: tuple[str, ...] = field(default=("matmul", "conv"), init=False)
    k_block: int = field(kw_only=True)
    pipeline: int = field(kw_only=True)
    slice_k: int = field(default=1, kw_only=True)
    split_k: int = field(default=1, kw_only=True)
    copiers: int = field(default=0, kw_only=True)

    @property
    def needs(self) -> frozenset[Feature]:
        """Matrix units."""
        return frozenset({"mma"})

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}-t" + (f"-{self.copiers}" if self.copiers else "") + split_code(self)

    @property
    def groups_deep(self) -> int:
        """See `Contraction.groups_deep`."""
        return self.split_k

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return super().items + self.copiers

    @property
    def copying(self) -> int:
        """Number of work-items that copy."""
        return self.copiers or self.items

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
        return self.local_size[0] // self.warp_items[0]

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and columns of the outputs of a warp."""
        down, across = self.warp_items
        return down * self.rows, across * self.columns

    @property
    def steps(self) -> int:
        """Instructions along the depth of a part's share of a K-block."""
        return self.k_block // self.step // self.slice_k

    @property
    def left_chunks(self) -> int:
        """Chunks of the left operand's K-block that a work-item copies."""
        return -(-self.block[0] * self.k_block // self.chunk // self.copying)

    @property
    def right_chunks(self) -> int:
        """Chunks of the right operand's K-block that a work-item copies."""
        return -(-self.block[1] * self.k_block // self.chunk // self.copying)

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one K-block of both operands."""
        return self.itemsize * self.k_block * sum(self.block)

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: weights of its type in a buffer, and whole chunks of the depth of each tap."""
        whole = workload.depth // workload.taps % self.chunk == 0
        stored = workload.path == "buffer" and workload.storage == self.storage
        return stored and whole and in_group(self, workload) and splits(self, workload)

    def cut(self, workload: Workload) -> Self:
        """See `StagedContraction.cut`."""
        return self if workload.family == "matmul" else replace(self, split_k=1)

    def in_float(self) -> Contraction:
        """A config for the same packed weights and a left operand of another type."""
        across = self.panel // 4
        return StagedContraction(self.name, 4, 4, (_FLOAT_ITEMS, across), k_block=_FLOAT_STEPS, two_stage=True)

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. The work-groups of a core share its copies and its matrix units."""
        down, across = self.block
        groups = workload.batches * math.ceil(workload.rows / down) * math.ceil(workload.columns / across) * self.split_k
        rounds = math.ceil(groups / max(1, device.parallelism // CORE))
        depth = math.ceil(workload.depth / self.split_k)
        time = rounds * depth * (self.copy * (down + across) + down * across / self.rate) / CORE
        return time + (joining(self, workload, device) if self.split_k > 1 else 0.0)


@register
@dataclass(frozen=True)
class Tf32Contraction(TensorContraction):
    """A contraction of two operands in float by tensor cores, which round them to TF32: 8 bits of exponent, 10 of mantissa.

    Its warps are 8 x 4 work-items, which multiply blocks of 8 * `rows` x 4 * `columns`, and a part's share of a K-block is one
    of 8 steps. `rows` are even; everything else is as above. `rate` and `copy` are those of halves for twice the bytes.
    """

    kind: ClassVar[str] = "tensor-tf32"
    element: ClassVar[str] = "float"
    itemsize: ClassVar[int] = 4
    chunk: ClassVar[int] = 4
    step: ClassVar[int] = 8
    storage: ClassVar[str] = TF32
    warp_items: ClassVar[tuple[int, int]] = (8, 4)
    between: ClassVar[tuple[int, int]] = (8, 16)
    rate: ClassVar[float] = 6.5
    copy: ClassVar[float] = 12.0

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}f"


@register
@dataclass(frozen=True)
class CodesContraction(TensorContraction):
    """A product of floats and quantised weights by tensor cores, exact but for its sums (contraction/tensor_codes.cl.j2).

    Its warps are 8 x 4 work-items, which multiply blocks of 8 * `rows` x 64. `rows` are even. A part's share of a K-block is a
    multiple of 32 steps. It reads the panels of the plain config, of eight columns, in buffers. Everything else is as above;
    `rate` is a third of that of halves, for three pieces of each float.
    """

    kind: ClassVar[str] = "tensor-codes"
    step: ClassVar[int] = 32
    storage: ClassVar[str] = "uint4"
    warp_items: ClassVar[tuple[int, int]] = (8, 4)
    between: ClassVar[tuple[int, int]] = (8, 4)
    rate: ClassVar[float] = 4.0

    columns: int = field(default=16, init=False)
    pipeline: int = field(default=2, init=False)
    copiers: int = field(default=0, init=False)
    families: tuple[str, ...] = field(default=("matmul",), init=False)

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}c"

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one K-block of the left operand: three pieces of two bytes of each element."""
        return 6 * self.k_block * self.block[0]

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: codes of at most 8 bits in a buffer, whole instructions, few sums to exchange."""
        whole = workload.family == "matmul" and workload.storage in CODES and workload.depth % self.step == 0
        sums = 4 * self.split_k * workload.rows * math.ceil(workload.columns / CODES_PANEL) * CODES_PANEL
        shared = self.split_k == 1 or (workload.depth >= self.split_k * self.k_block and sums <= MOST_PARTIAL)
        return whole and workload.path == "buffer" and shared

    def in_float(self) -> Self:
        """The config itself: its left operand is in float."""
        return self


CODES_PANEL = 8
"""Columns of a panel of codes that tensor cores multiply."""
