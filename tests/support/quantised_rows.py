"""Rows of int8 codes with a scale, in numpy: how flashmem stores caches of keys and values with `--kv int8`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def quantised(rows: Array) -> NDArray[np.int8]:
    """float32 `rows` [..., size] as bytes [..., bytes]: codes, zeros up to a multiple of 4, the scale in float32."""
    assert rows.dtype == np.float32
    size = rows.shape[-1]
    largest = np.abs(rows).max(-1, keepdims=True)
    empty = largest < np.float32(127 * 2.0**-80)
    scale = np.where(empty, np.float32(0), largest * np.float32(1 / 127))
    inverse = np.float32(127) / np.where(empty, np.float32(np.inf), largest)
    codes = np.rint(rows * inverse).astype(np.int8)
    padding = np.zeros((*rows.shape[:-1], -size % 4), np.int8)
    return np.concatenate([codes, padding, scale.astype("<f4").view(np.int8)], -1)


def scales_of(stored: Array) -> NDArray[np.float32]:
    """The scales [..., 1] of rows of bytes."""
    return np.ascontiguousarray(stored[..., -4:]).view("<f4")


def dequantised(stored: Array, size: int) -> NDArray[np.float32]:
    """The floats [..., size] that rows of bytes stand for."""
    return stored[..., :size] * scales_of(stored)
