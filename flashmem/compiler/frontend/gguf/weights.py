"""Tensors of a GGUF file as codes with scales, or as floats.

The formats are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h` and `ggml-quants.c`). A row is cut in blocks of
32 or 256 weights; in the latter, each 16 or 32 weights have their own scale. All become codes of 4 or 8 bits with a scale, and
in some formats a minimum, for each 16 or 32 weights: `scale * code + minimum` is bit for bit what the package `gguf` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.contrib.packed import packed_codes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOATS = ("F32", "F16", "BF16")
"""Formats of floats."""

WHOLE = slice(None)
"""All rows."""


@dataclass(frozen=True)
class BlockedMatrix:
    """A matrix [rows, depth] in blocks along its rows.

    `codes` uint8 [rows, depth * bits / 8] are two's complement if `signed`; of four bits, two are in a byte, the first in its
    lower half. `scales` and `minima` are float32 [rows, depth / block]; `minima` is None for zeros.
    """

    codes: Bytes
    scales: Floats
    minima: Floats | None
    bits: int
    signed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and depth."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def block(self) -> int:
        """Weights that share a scale."""
        return self.shape[1] // int(self.scales.shape[1])


def matrix(tensor: Any, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix of `gguf.GGUFReader`: in blocks, or floats [rows, depth].

    Raises:
        UserError: it has another format.
    """
    kind = tensor.tensor_type.name
    if kind in FLOATS:
        return dequantised(tensor, rows)
    if kind not in _FORMATS:
        known = ", ".join((*_FORMATS, *FLOATS))
        raise UserError(
            f"the tensor {tensor.name} has the format {kind}, which is not supported; convert the file to one of {known}"
        )
    fields, bits, signed, read = _FORMATS[kind]
    depth, height = (int(size) for size in tensor.shape)
    data = np.ascontiguousarray(tensor.data.reshape(height, -1)[rows])
    blocks = read(*np.split(data.reshape(-1, sum(fields)), np.cumsum(fields)[:-1], axis=1))
    codes: Bytes = blocks.codes.astype(np.uint8).reshape(-1, depth)
    minima = None if blocks.minima is None else blocks.minima.reshape(len(codes), -1)
    return BlockedMatrix(packed_codes(codes, bits), blocks.scales.reshape(len(codes), -1), minima, bits, signed)


def sketched(tensor: Any, rows: slice = WHOLE) -> BlockedMatrix | Floats:
    """Some rows of a matrix in the form that `matrix` gives it, but of zeros: no data is read.

    The first elements depend on its name, because the compiler stores equal weights once. Raises UserError like `matrix`.
    """
    depth, height = (int(size) for size in tensor.shape)
    first, last, _ = rows.indices(height)
    kind, mark = tensor.tensor_type.name, np.frombuffer(crc32(tensor.name.encode()).to_bytes(4, "little"), np.uint8)

    def marked(size: int, dtype: type) -> NDArray[Any]:
        array: NDArray[Any] = np.zeros((last - first, size), dtype)
        if first == 0:
            array.reshape(-1)[: len(mark)] = mark[: array.size]
        return array

    if kind not in _FORMATS:
        return marked(depth, np.float32) if kind in FLOATS else matrix(tensor)
    fields, bits, signed, read = _FORMATS[kind]
    one = read(*np.split(np.zeros((1, sum(fields)), np.uint8), np.cumsum(fields)[:-1], axis=1))
    scales = marked(depth * one.scales.size // one.codes.size, np.float32)
    if kind.endswith("_K") and last == height:
        scales[-1, -1] = 0.1  # scales of these formats are products, and need float32
    minima = None if one.minima is None else -scales
    return BlockedMatrix(marked(depth * bits // 8, np.uint8), scales, minima, bits, signed)


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


class _Blocks(NamedTuple):
    """Blocks of one format: codes [blocks, weights], scales and minima [blocks, scales]."""

    codes: NDArray[Any]
    scales: Floats
    minima: Floats | None = None


def _half(field: Bytes) -> Floats:
    """A number in float16 for each block."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _bits(field: Bytes, count: int, run: int) -> Bytes:
    """Numbers of `count` bits; of each `run` bytes, first all with the lowest bits: [blocks, 8 / count * bytes]."""
    shifts = np.arange(0, 8, count, dtype=np.uint8)[:, None]
    return (field.reshape(len(field), -1, 1, run) >> shifts & np.uint8((1 << count) - 1)).reshape(len(field), -1)


def _fifth_bits(field: Bytes) -> Bytes:
    """Bits of 32 weights in their order, as 16 or 0."""
    return np.unpackbits(field, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(scale: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks(_bits(codes, 4, 16) - np.uint8(8), _half(scale))


def _q4_1(scale: Bytes, minimum: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks(_bits(codes, 4, 16), _half(scale), _half(minimum))


def _q5_0(scale: Bytes, high: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks((_bits(codes, 4, 16) | _fifth_bits(high)) - np.uint8(16), _half(scale))


def _q5_1(scale: Bytes, minimum: Bytes, high: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks(_bits(codes, 4, 16) | _fifth_bits(high), _half(scale), _half(minimum))


def _q8_0(scale: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks(codes, _half(scale))


def _q2_k(scales: Bytes, codes: Bytes, scale: Bytes, minimum: Bytes) -> _Blocks:
    return _Blocks(_bits(codes, 2, 32), _half(scale) * (scales & 15), -(_half(minimum) * (scales >> 4)))


def _q3_k(high: Bytes, codes: Bytes, scales: Bytes, scale: Bytes) -> _Blocks:
    """The high bit of a weight is inverted: a weight without it is 4 less. Scales of six bits are 32 more."""
    low, upper = _bits(scales[:, :8], 4, 8), _bits(scales[:, 8:], 2, 4)
    six = (low | upper << np.uint8(4)).astype(np.int8) - np.int8(32)
    return _Blocks((_bits(codes, 2, 32) | _bits(high, 1, 32) << np.uint8(2)) - np.uint8(4), _half(scale) * six)


def _scales_and_minima(scale: Bytes, minimum: Bytes, packed: Bytes) -> tuple[Floats, Floats]:
    """Of eight blocks: six bits each, in twelve bytes. The upper bits of the last four are those of the first eight bytes."""
    first, second, third = np.split(packed, 3, axis=1)
    upper = np.uint8(2), np.uint8(0x30)
    scales = np.concatenate([first & 63, third & 15 | first >> upper[0] & upper[1]], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> upper[0] & upper[1]], axis=1)
    return _half(scale) * scales, -(_half(minimum) * minima)


def _q4_k(scale: Bytes, minimum: Bytes, packed: Bytes, codes: Bytes) -> _Blocks:
    return _Blocks(_bits(codes, 4, 32), *_scales_and_minima(scale, minimum, packed))


def _q5_k(scale: Bytes, minimum: Bytes, packed: Bytes, high: Bytes, codes: Bytes) -> _Blocks:
    fifth = _bits(high, 1, 32) << np.uint8(4)
    return _Blocks(_bits(codes, 4, 32) | fifth, *_scales_and_minima(scale, minimum, packed))


def _q6_k(codes: Bytes, high: Bytes, scales: Bytes, scale: Bytes) -> _Blocks:
    six = _bits(codes, 4, 64) | _bits(high, 2, 32) << np.uint8(4)
    return _Blocks(six - np.uint8(32), _half(scale) * scales.view(np.int8))


_FORMATS: dict[str, tuple[tuple[int, ...], int, bool, Callable[..., _Blocks]]] = {
    "Q4_0": ((2, 16), 4, True, _q4_0),
    "Q4_1": ((2, 2, 16), 4, False, _q4_1),
    "Q5_0": ((2, 4, 16), 8, True, _q5_0),
    "Q5_1": ((2, 2, 4, 16), 8, False, _q5_1),
    "Q8_0": ((2, 32), 8, True, _q8_0),
    "Q2_K": ((16, 64, 2, 2), 4, False, _q2_k),
    "Q3_K": ((32, 64, 12, 2), 4, True, _q3_k),
    "Q4_K": ((2, 2, 12, 128), 4, False, _q4_k),
    "Q5_K": ((2, 2, 12, 32, 128), 8, False, _q5_k),
    "Q6_K": ((128, 64, 16, 2), 8, True, _q6_k),
}
"""Of each format: the bytes of a block's fields, stored bits of a code, whether it is signed, and what reads the fields."""
