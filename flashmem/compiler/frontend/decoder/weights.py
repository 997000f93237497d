"""Tensors of a decoder's file: rows of ggml's blocks as they are (`flashmem.compiler.ir.blocks`), or floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.compiler.ir.blocks import STORED
from flashmem.compiler.ir.blocks.floats import FloatFormat

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOATS = ("F32", "F16", "BF16")
"""Formats of floats."""

WHOLE = slice(None)
"""All rows."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, in a format of ggml's name `kind`.

    `shape`: rows first. `data`: uint8 [rows, bytes of a row], perhaps mapped.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Bytes


@dataclass(frozen=True)
class BlockedMatrix:
    """A matrix in blocks of a `kind` along its rows, or in floats of 16 bits: `blocks` is uint8 [rows, bytes of a row]."""

    blocks: Bytes
    kind: str


def stored_floats(name: str, array: NDArray[Any]) -> FileTensor:
    """A tensor of computed numbers."""
    made = np.ascontiguousarray(array, np.float32)
    return FileTensor(name, "F32", made.shape, made.reshape(len(made), -1).view(np.uint8))


def matrix(tensor: FileTensor, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix: as they are in the file, or float32 [rows, depth].

    Raises:
        UserError: it has another format.
    """
    if tensor.kind == "F32":
        return dequantised(tensor, rows)
    if tensor.kind not in STORED:
        known = ", ".join((*STORED, "F32"))
        raise UserError(
            f"the tensor {tensor.name} has the format {tensor.kind}, which is not supported; convert the file to one of {known}"
        )
    return BlockedMatrix(np.ascontiguousarray(tensor.data[rows]), tensor.kind)


def sketched(tensor: FileTensor, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix in the form that `matrix` gives it, but of zeros: no data is read.

    The first elements depend on its name, because the compiler stores equal weights once. Raises UserError like `matrix`.
    """
    height, depth = tensor.shape
    first, last, _ = rows.indices(height)
    mark = np.frombuffer(crc32(tensor.name.encode()).to_bytes(4, "little"), np.uint8)
    if tensor.kind not in (*STORED, "F32"):
        return matrix(tensor)
    size, dtype = (depth, np.float32) if tensor.kind == "F32" else (STORED[tensor.kind].row_bytes(depth), np.uint8)
    array: NDArray[Any] = np.zeros((last - first, size), dtype)
    if first == 0:
        array.reshape(-1)[: len(mark)] = mark[: array.size]
    return array if tensor.kind == "F32" else BlockedMatrix(array, tensor.kind)


def floats(tensor: FileTensor) -> Floats:
    """A tensor of floats as float32, its rows first. Raises UserError for other formats."""
    if tensor.kind not in FLOATS:
        raise UserError(f"the tensor {tensor.name} has the format {tensor.kind}, where floats are expected")
    return dequantised(tensor)


def dequantised(tensor: FileTensor, rows: slice = WHOLE) -> Floats:
    """Some rows of a tensor of any format as float32; blocks as the package `gguf` reads them."""
    data = np.ascontiguousarray(tensor.data[rows])
    found: Floats
    if tensor.kind == "F32":
        found = data.view("<f4")
    elif isinstance(kind := STORED.get(tensor.kind), FloatFormat):
        found = kind.floats(data)
    else:
        from gguf import GGMLQuantizationType, quants

        found = quants.dequantize(data, GGMLQuantizationType[tensor.kind])
    return found.reshape([-1, *tensor.shape[1:]])
