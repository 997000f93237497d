"""Tensors of a GGUF file as the arrays of ONNX operators.

The formats are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h`). Blocks of 32 weights along a row have one
scale `d` in float16: Q4_0 is d * (q - 8), Q4_1 is d * q + m with a minimum `m`, and Q8_0 is d * q. In a block of 4 bits, byte j
has the weights j and j + 16. Codes and scales stay as they are; a minimum becomes the zero point -m / d in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError

BLOCK = 32
"""Weights of a block."""

_FIELDS: dict[str, tuple[int, int]] = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}
"""Bytes of scale and minimum, and of the codes of a block."""


@dataclass(frozen=True)
class BlockedMatrix:
    """A matrix [rows, depth] in blocks: `codes` uint8 [rows, depth * bits / 8], scales and zeros float32 [rows, depth / 32].

    Codes of four bits lie two in a byte, the lower half first (as MatMulNBits has them). `zeros` is None for 2 ** (bits - 1).
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and depth."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def middle(self) -> int:
        """The zero point where `zeros` has none."""
        return 1 << (self.bits - 1)

    def centred(self) -> NDArray[np.int8]:
        """The codes minus the middle, a byte each [rows, depth]: for a table, whose rows are read one by one."""
        codes = self.codes if self.bits == 8 else np.stack([self.codes & 15, self.codes >> 4], -1).reshape(self.shape)
        return (codes.astype(np.int16) - self.middle).astype(np.int8)


def blocked_matrix(tensor: Any) -> BlockedMatrix | None:
    """The blocks of a tensor of `gguf.GGUFReader`; None if it has floats.

    Raises:
        UserError: it has another format.
    """
    kind = tensor.tensor_type.name
    if kind in ("F32", "F16", "BF16"):
        return None
    if kind not in _FIELDS:
        known = ", ".join((*_FIELDS, "F16", "F32"))
        raise UserError(
            f"the tensor {tensor.name} has the format {kind}, which is not supported; convert the file to one of {known}"
        )
    head, body = _FIELDS[kind]
    depth, rows = (int(size) for size in tensor.shape)
    blocks = np.ascontiguousarray(tensor.data).reshape(rows, depth // BLOCK, head + body)
    numbers = np.ascontiguousarray(blocks[..., :head]).view("<f2").astype(np.float32)
    codes, scales = blocks[..., head:], numbers[..., 0]
    if kind == "Q8_0":
        return BlockedMatrix((codes ^ np.uint8(0x80)).reshape(rows, depth), scales, None, 8)
    halves = np.concatenate([codes & 15, codes >> 4], axis=-1)
    packed = (halves[..., 0::2] | halves[..., 1::2] << 4).reshape(rows, depth // 2)
    if kind == "Q4_0":
        return BlockedMatrix(packed, scales, None, 4)
    return BlockedMatrix(packed, *_without_minimum(packed, scales, numbers[..., 1]), 4)


def _without_minimum(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], minimum: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zero points of blocks whose weights are scale * code + minimum; blocks of equal weights have no scale."""
    flat = scales == 0
    if flat.any():
        packed.reshape(*scales.shape, -1)[flat] = 0x11
        scales = np.where(flat, minimum, scales)
    zeros = np.divide(-minimum, scales, out=np.zeros_like(minimum), where=~flat & (scales != 0))
    return scales, zeros


def floats(tensor: Any) -> NDArray[np.float32]:
    """A tensor of floats as float32, its rows first. Raises UserError for other formats."""
    from gguf import quants

    if tensor.tensor_type.name not in ("F32", "F16", "BF16"):
        raise UserError(f"the tensor {tensor.name} has the format {tensor.tensor_type.name}, where floats are expected")
    array: NDArray[np.float32] = quants.dequantize(tensor.data, tensor.tensor_type)
    return array.reshape([int(size) for size in reversed(tensor.shape)])
