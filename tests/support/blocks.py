"""Matrices in ggml's blocks of random bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.format import BlockFormat

Bytes = NDArray[np.uint8]


def scale_places(kind: BlockFormat) -> list[int]:
    """The bytes of a block in a file at which its numbers in half begin, found by blocks of which one byte is set."""
    parts = kind.parts(np.eye(kind.nbytes, dtype=np.uint8))
    return [int(each[:, 0].argmax()) for each in (parts.scale, parts.minimum) if each is not None]


def any_blocks(kind: BlockFormat, rows: int, depth: int, seed: int, *, finite: bool = False) -> Bytes:
    """Blocks of any bytes, [rows, bytes]; also with infinite scales and NaN, or with scales below 2 if they are `finite`."""
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows * depth // kind.weights, kind.nbytes), np.uint8)
    if finite:
        for at in scale_places(kind):
            data[:, at + 1] &= 0xBF
    return data.reshape(rows, -1)


def bound(kind: BlockFormat, data: Bytes, x: NDArray[np.float32]) -> NDArray[Any]:
    """(depth + 8) roundings of the sum of |x| ((|code| + offset) |scale| + |minimum|), as kernels compute it."""
    parts = kind.parts(data)
    scale, minimum = (0.0 if each is None else np.abs(each)[:, :, None].astype(np.float64) for each in kind.scales(parts))
    codes = np.abs((parts.codes if kind.is_narrow else parts.codes.view(np.int8)).astype(np.float64)) + kind.offset
    codes = np.abs(np.array(kind.values, float))[parts.codes] if kind.values else codes
    sizes = codes.reshape(len(codes), kind.runs, -1) * scale + minimum
    found: NDArray[Any] = np.abs(x).astype(np.float64) @ sizes.reshape(len(data), -1).T
    return (x.shape[1] + 8) * 2.0**-24 * found
