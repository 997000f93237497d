"""A synthetic profile: rows that follow a formula, for a machine with round rates."""

from __future__ import annotations

import numpy as np

from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.features import MAX_RATIO, LaunchFeatures
from flashmem.profiler.dataset import Row

BASIS = Basis(100e9, 10e9, 10e-6, {"buffer map": 5e9, "buffer interleave": 4e9}, "a law made up for a test")


def features(rows: int, columns: int, depth: int) -> LaunchFeatures:
    return LaunchFeatures(
        family="matmul", operator_class="reusable", memory_path="buffer", rows=rows, columns=columns, depth=depth, run=depth,
        stride=1, vector=16, simple_ops=0, special_ops=0, macs=rows * columns * depth, bytes=4 * rows * (depth + columns),
        weight_bytes=4 * depth * columns, items=max(1, rows * columns // 256), across=max(1, rows // 8), group=1,
    )  # fmt: skip


def law(count: int, seed: int = 0) -> list[Row]:
    """Kernels at 1.5 times their roofline, delayed by half the time of the streamed bytes alone."""
    generator = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        m, n, k = (int(2**e) for e in generator.uniform(5, 10, 3))
        made = features(m, n, k)
        seconds = 1.5 * BASIS.roofline(made)
        rows.append(Row("sample", f"case{seed}-{i}", "MatMul", made, "none", 0.0, seconds, 1.0, 0.0, 1.0))
        for ratio in (0.1, 0.3, 1.0, MAX_RATIO):
            streamed = ratio * made.own_bytes
            slowdown = 1 + 0.5 * streamed / 5e9 / seconds
            rows.append(Row("sample", f"case{seed}-{i}", "MatMul", made, "map", streamed, seconds, slowdown, 0.0, 1.0))
    return rows
