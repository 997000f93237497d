"""Tensors of a GGUF file: rows of ggml's blocks as they are (`flashmem.compiler.ir.blocks`), or floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.compiler.ir.blocks import FORMATS

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOATS = ("F32", "F16", "BF16")
"""Formats of floats."""

WHOLE = slice(None)
"""All rows."""


@dataclass(frozen=True)
class BlockedMatrix:
    """A matrix in blocks of a `kind` along its rows: `blocks` is uint8 [rows, bytes of a row]."""

    blocks: Bytes
    kind: str


def matrix(tensor: Any, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix of `gguf.GGUFReader`: in blocks, or floats [rows, depth].

    Raises:
        UserError: it has another format.
    """
    kind = tensor.tensor_type.name
    if kind in FLOATS:
        return dequantised(tensor, rows)
    if kind not in FORMATS:
        known = ", ".join((*FORMATS, *FLOATS))
        raise UserError(
            f"the tensor {tensor.name} has the format {kind}, which is not supported; convert the file to one of {known}"
        )
    return BlockedMatrix(np.ascontiguousarray(tensor.data.reshape(int(tensor.shape[1]), -1)[rows]), kind)


def sketched(tensor: Any, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix in the form that `matrix` gives it, but of zeros: no data is read.

    The first elements depend on its name, because the compiler stores equal weights once. Raises UserError like `matrix`.
    """
    depth, height = (int(size) for size in tensor.shape)
    first, last, _ = rows.indices(height)
    kind = tensor.tensor_type.name
    mark = np.frombuffer(crc32(tensor.name.encode()).to_bytes(4, "little"), np.uint8)
    if kind not in FORMATS and kind not in FLOATS:
        return matrix(tensor)
    size, dtype = (depth, np.float32) if kind in FLOATS else (FORMATS[kind].row_bytes(depth), np.uint8)
    array: NDArray[Any] = np.zeros((last - first, size), dtype)
    if first == 0:
        array.reshape(-1)[: len(mark)] = mark[: array.size]
    return array if kind in FLOATS else BlockedMatrix(array, kind)


def floats(tensor: Any) -> Floats:
    """A tensor of floats as float32, its rows first. Raises UserError for other formats."""
    if tensor.tensor_type.name not in FLOATS:
        raise UserError(f"the tensor {tensor.name} has the format {tensor.tensor_type.name}, where floats are expected")
    return dequantised(tensor)


def dequantised(tensor: Any, rows: slice = WHOLE) -> Floats:
    """Some rows of a tensor of any format as float32, as the package `gguf` reads them."""
    from gguf import quants

    *inner, height = (int(size) for size in tensor.shape)
    array: Floats = quants.dequantize(tensor.data.reshape(height, -1)[rows], tensor.tensor_type)
    return array.reshape([-1, *reversed(inner)])
