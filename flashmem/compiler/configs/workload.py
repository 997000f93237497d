"""Workloads: the sizes and types for which kernel configs are measured and selected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from flashmem.base.types import MemoryPath

HALVES = ("float16", "bfloat16")
"""Types of packed weights that are floats of 16 bits."""

FLOATS = ("float32", *HALVES)
"""Types of packed weights that are floats."""

TF32: Final = "tf32"
"""The storage of a workload whose weights are float32, and whose operands may be rounded to TF32 when they are multiplied."""


@dataclass(frozen=True)
class Workload:
    """The computation of a kernel, for any config: `batches` products of [rows, depth] and [depth, columns].

    Convolution: `depth` counts every tap (a multiple of `taps`), `stride` is its stride, `batches` its groups. Attention:
    `rows` are queries, `columns` keys, `depth` is the width of a head, `batches` counts heads. Reductions of rows: `depth` is
    the length of a row. `storage`: the type of packed weights, or `TF32`.
    """

    family: str
    path: MemoryPath
    rows: int
    depth: int
    columns: int
    batches: int = 1
    storage: str = "float32"
    taps: int = 1
    stride: int = 1

    @property
    def weights(self) -> str:
        """The type of packed weights."""
        return "float32" if self.storage == TF32 else self.storage

    @property
    def macs(self) -> int:
        """Number of multiplications."""
        return self.batches * self.rows * self.depth * self.columns

    @property
    def kind(self) -> tuple[str, str]:
        """Family and memory path: times of one workload predict another only if both are equal."""
        return self.family, self.path

    def distance(self, other: Workload) -> float:
        """Distance to a workload of the same kind, in doublings of sizes; another storage, taps or stride counts as one."""
        sizes = [(getattr(self, name), getattr(other, name)) for name in ("rows", "depth", "columns", "batches")]
        unlike = (self.storage != other.storage) + ((self.taps > 1) != (other.taps > 1)) + (self.stride != other.stride)
        return math.hypot(*(math.log2(max(1, a) / max(1, b)) for a, b in sizes), unlike)
