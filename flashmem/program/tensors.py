"""Tensors and weights of a device program: activations, weight slices, ports (inputs and outputs), embedding tables.

Offsets and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from flashmem.base.types import ITEMSIZE, Channel, DType, StoredType, TableType


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation in the arena, or a state in the memory of states, from byte `offset` on; stored as `dtype`.

    `nbytes` includes the slack that lets a vector load run past the last element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredType
    offset: int
    nbytes: int
    memory: Literal["arena", "states"] = "arena"


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of one weight, stored as one texture or one buffer: the unit that a plan streams.

    `offset` and `nbytes` are its range in `weights.bin`; `offset` is a multiple of the program's `page_bytes`. On the memory
    path `texture` it is an image of `height` rows of `width` RGBA texels of `channel` type. In the file each row is padded to
    `row_pitch` bytes. `width == 0` marks a plain buffer on either path. The first `raw` bytes are the weight's elements, the
    rest is padding.
    """

    name: str
    weight: str
    offset: int
    nbytes: int
    width: int = 0
    height: int = 0
    row_pitch: int = 0
    channel: Channel = "float"
    raw: int = 0

    @property
    def is_image(self) -> bool:
        """Whether it is a texture rather than a buffer."""
        return self.width > 0

    @property
    def file_bytes(self) -> int:
        """Bytes in the weight file, including the padding of an image's rows."""
        return self.row_pitch * self.height if self.is_image else self.nbytes


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the model with its ONNX name, shape and dtype; `tensor` is the device tensor that holds it.

    `tensor` is None for an input that only selects table rows on the host (see `HostEmbeddingLookup`), and for an output
    without elements. `ready` is the layer after which an output must be read, because another tensor overwrites its memory
    later; None: read it after the last layer. `count` is the tensor with the number of its places along
    `axis` that a run returns, the first ones; None: all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy name of the ONNX type: float32, float16, int64, int32, bool ...
    tensor: str | None
    ready: int | None = None
    count: str | None = None
    axis: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a run reads, and leaves changed for the next run: an input of the model and one of its outputs.

    `name` is the ONNX name of the input, `output` that of the output, `tensor` the device tensor that holds both.
    """

    name: str
    output: str
    shape: tuple[int, ...]
    dtype: str  # as of a `Port`
    tensor: str


@dataclass(frozen=True)
class HostEmbeddingLookup:
    """An embedding lookup on the host: rows of a table, selected by the input `indices`. Only the selected rows are read.

    The table has `rows` x `columns` elements of `dtype`, from `offset` in `weights.bin` on. If `panel` is 1, element (r, c) is
    at r * row_stride + c * column_stride bytes. A table that a matmul reads too is packed in panels of `panel` rows: the
    element is at (r // panel) * row_stride + (r % panel) * itemsize + c * column_stride. Two 4-bit elements share a byte, low
    nibble first; each row then starts on a byte, and `column_stride` is 0. The device tensor is float32 or float16, or int8 or
    uint8 for a table of integers.

    The panels of a head in ggml's blocks have, for each block, `block_halves` numbers of two bytes of each of its rows, then
    `block_bytes` bytes of each, then `block_fours` times four bits of each, those of the first half of the rows in low nibbles.
    A row is what its panel has of it, in this order.
    """

    indices: str
    tensor: str
    offset: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: TableType
    panel: int = 1
    block_halves: int = 0
    block_bytes: int = 0
    block_fours: int = 0

    @functools.cached_property
    def block(self) -> int:
        """Bytes of a row in one of ggml's blocks; 0 if the table is in none."""
        return 2 * self.block_halves + self.block_bytes + self.block_fours // 2

    @functools.cached_property
    def panel_bytes(self) -> int:
        """Bytes from the first element of a panel of rows to the end of its last one, the unit of a read."""
        if self.block:
            return self.columns * self.panel
        if self.dtype.endswith("int4"):
            return -(-self.columns // 2)
        itemsize = {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.dtype, 1)
        return (self.columns - 1) * self.column_stride + self.panel * itemsize


def port_dtype(port: Port | State) -> DType:
    """The element type in which the device computes with a port or a state. The type in memory is the `dtype` of its tensor.

    Raises:
        ValueError: the port has an unknown dtype.
    """
    if port.dtype in _FLOATS:
        return "float32"
    for dtype in get_args(DType):
        if dtype == port.dtype:
            found: DType = dtype
            return found
    raise ValueError(f"port {port.name!r} has the unknown dtype {port.dtype!r}")


def array_bytes(port: Port) -> int:
    """Bytes of a port's array on the host, in the port's own dtype."""
    return math.prod(port.shape) * _FLOATS.get(port.dtype, ITEMSIZE[port_dtype(port)])


_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of a floating point port on the host."""


ONNX_NAMES = {"float32": "float", "float64": "double"}
"""ONNX's names of element types, where they are not numpy's."""


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a port's element type.

    Raises:
        ValueError: numpy has no such type.
    """
    if name == "bfloat16":
        try:
            importlib.import_module("ml_dtypes")  # registers the type
        except ImportError:
            raise ValueError("arrays of bfloat16 need the package ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(name)
