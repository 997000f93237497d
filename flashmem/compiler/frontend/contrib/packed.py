"""Packed weights: the same bytes with another element type and shape, without a copy if the order allows it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.floats import FloatFormat
from flashmem.compiler.ir.blocks.format import BlockFormat


class BlocksTensor(ir.LazyTensor):
    """A matrix of float32 in ggml's blocks: `source` is uint8 [rows, bytes of a row], perhaps in a file."""

    def __init__(self, source: ir.TensorProtocol, format: BlockFormat | FloatFormat) -> None:
        self.source = source
        self.format = format
        rows, nbytes = source.shape.numpy()
        shape = ir.Shape((rows, nbytes // format.nbytes * format.weights))
        super().__init__(lambda: ir.tensor(format.floats(source.numpy())), ir.DataType.FLOAT, shape, name=source.name)


def is_in_file(tensor: ir.TensorProtocol) -> bool:
    """Whether the data of a tensor are in a file and stay there, as blocks do where they are few."""
    return isinstance(tensor, ir.ExternalTensor | BlocksTensor)


def stored(tensor: ir.TensorProtocol | None) -> ir.ExternalTensor | None:
    """The range of a file that has the data of a tensor; None if it is in memory."""
    tensor = tensor.source if isinstance(tensor, BlocksTensor) else tensor
    return tensor if isinstance(tensor, ir.ExternalTensor) else None


def placed_at(place: tuple[str, int, int], like: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """A tensor of a file, offset and length, of the type and shape of `like`, a tensor in a file too."""
    if isinstance(like, BlocksTensor):
        return BlocksTensor(placed_at(place, like.source, name), like.format)
    return ir.ExternalTensor(*place, like.dtype, shape=ir.Shape(like.shape.numpy()), name=name)


def reinterpreted(tensor: ir.TensorProtocol, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
    """The bytes of `tensor`, which stay in their file, as elements of `dtype` in `shape`."""
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            dtype,
            shape=ir.Shape(shape),
            name=tensor.name or "",
            base_dir=tensor.base_dir,
        )
    data = np.frombuffer(tensor.tobytes(), np.uint8)
    if dtype in (ir.DataType.UINT4, ir.DataType.INT4):
        return ir.PackedTensor(data, dtype, shape=ir.Shape(shape), name=tensor.name)
    return ir.Tensor(data.view(np.dtype(dtype.numpy())).reshape(shape), dtype, name=tensor.name)


def quantised_matrix(
    tensor: ir.TensorProtocol, shape: tuple[int, int], block: int, bits: int, wanted: int | None = None
) -> ir.TensorProtocol:
    """Rows of blocks of `block` numbers of `bits` bits, the last block padded, as a matrix of `shape` with `wanted` bits.

    Two numbers of four bits share a byte, the first in its low half, as in ONNX's uint4.
    """
    rows, columns = shape
    wanted = bits if wanted is None else wanted
    kind = ir.DataType.UINT4 if wanted == 4 else ir.DataType.UINT8
    if bits == wanted and columns % block == 0:
        return reinterpreted(tensor, kind, shape)
    data = np.frombuffer(tensor.tobytes(), np.uint8).reshape(rows, -1)
    numbers = (data if bits == 8 else _nibbles(data))[:, :columns].reshape(-1)
    if wanted == 8:
        return ir.Tensor(numbers.reshape(shape), kind, name=tensor.name)
    numbers = np.append(numbers, np.zeros(numbers.size % 2, np.uint8))
    return ir.PackedTensor(numbers[::2] | numbers[1::2] << 4, kind, shape=ir.Shape(shape), name=tensor.name)


def packed_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Rows of codes as bytes; of four bits, two are in a byte, the first in its lower half."""
    return codes if bits == 8 else codes[:, 0::2] & np.uint8(15) | codes[:, 1::2] << np.uint8(4)


def packed_zero_points(data: NDArray[np.uint8], blocks: int, bits: int) -> NDArray[np.uint8]:
    """Zero points of `bits` bits, each row packed separately, as one byte each: [rows, `blocks`]."""
    return data if bits == 8 else _nibbles(data)[:, :blocks]


def _nibbles(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack every byte of each row to two numbers, the low half first."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)
