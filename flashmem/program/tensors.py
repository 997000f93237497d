"""What a program's launches read and write: activations, weight slices, inputs and outputs, embedding tables.

Offsets and sizes are bytes unless a name says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from flashmem.base.types import ITEMSIZE, Channel, DType, StoredType, TableType


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation in the arena: `dtype` is what it is stored in. `nbytes` includes the slack that lets a vector load run past
    the last element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one weight that is one texture (or one buffer): the unit the plan streams.

    `offset`, `nbytes`: its place in `weights.bin`, `offset` a multiple of the program's
    `page_bytes`. For the memory path `texture`
    it is an image of `height` rows of `width` RGBA texels of `channel` type, each row padded in the file to `row_pitch`
    bytes; `width == 0` marks a plain buffer on either path. `raw` of its bytes are the weight's own elements, the rest is
    padding.
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
        """Whether it is a texture on the memory path `texture`."""
        return self.width > 0

    @property
    def file_bytes(self) -> int:
        """Bytes in the weight file, the padding of an image's rows included."""
        return self.row_pitch * self.height if self.is_image else self.nbytes


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the model, as the user sees it: ONNX name, shape and dtype; `tensor` is its device twin.

    `tensor` is None for an input that no kernel reads (it only selects table rows on the host, see `RowGather`), and for an
    output without elements. `ready` is the layer after which an output is read, since its place in the arena may be another
    tensor's from then on; None: after the last.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy name of the ONNX type: float32, float16, int64, int32, bool ...
    tensor: str | None
    ready: int | None = None


@dataclass(frozen=True, slots=True)
class RowGather:
    """Rows of a table picked on the host by the input `indices`: only the rows asked for are ever read.

    The table lies in `weights.bin` at `offset`. `rows` x `columns` elements of `dtype`. Element (r, c) is at
    r * row_stride + c * column_stride bytes if `panel` is 1; a table shared with a matmul is packed in panels of `panel`
    rows, where it is at (r // panel) * row_stride + (r % panel) * itemsize + c * column_stride. Of 4 bits two elements share a
    byte, low nibble first, each row starts on a byte, and `column_stride` is 0. The tensor's elements are float32 or
    float16 or, of integers, int8 or uint8.
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


def port_dtype(port: Port) -> DType:
    """The element type that a port is computed in on the device. Its tensor says what it is stored in.

    Raises:
        ValueError: it has none.
    """
    if port.dtype in _FLOATS:
        return "float32"
    for dtype in get_args(DType):
        if dtype == port.dtype:
            found: DType = dtype
            return found
    raise ValueError(f"port {port.name!r} has the unknown dtype {port.dtype!r}")


def panel_bytes(gather: RowGather) -> int:
    """Bytes from the first element of a panel of rows to the end of its last one: what is read at once."""
    if gather.dtype.endswith("int4"):
        return -(-gather.columns // 2)
    itemsize = {"float32": 4, "float16": 2}.get(gather.dtype, 1)
    return (gather.columns - 1) * gather.column_stride + gather.panel * itemsize


def array_bytes(port: Port) -> int:
    """The array of a port, in its own type."""
    return math.prod(port.shape) * _FLOATS.get(port.dtype, ITEMSIZE[port_dtype(port)])


_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of a model's floating point types."""
