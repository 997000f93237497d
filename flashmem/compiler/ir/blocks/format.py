"""The description of a kind of block, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GROUP = 8
"""Rows of a plane whose bits are side by side in memory: a word has bits of weights that are this many steps apart."""


class Parts(NamedTuple):
    """Blocks, taken apart.

    Attributes:
        codes: uint8 [blocks, weights]; of 8 bits, they are two's complement.
        scale: the bytes of a float16 in each block, [blocks, 2].
        minimum: the same of what is added, or of what a factor of it is subtracted; None if there is none.
        factors: uint8 [blocks, factors]: what `scale` is multiplied by in each run, then what `minimum` is.
    """

    codes: Bytes
    scale: Bytes
    minimum: Bytes | None = None
    factors: Bytes | None = None


class Plane(NamedTuple):
    """`bits` of numbers, above `below` bits of other planes, in `rows` rows from byte `at` of a packed block on."""

    bits: int
    below: int
    at: int
    rows: int


@dataclass(frozen=True)
class BlockFormat:
    """A kind of block: (code - `offset`) * scale + minimum for each of `weights` weights, in float32.

    A scale is a float16 for the whole block. With `factor_planes`, each run of `run` weights has a factor of it, an integer
    less `factor_offset`, and the minimum is a float16 times another such integer, subtracted.

    Attributes:
        name: ggml's.
        fields: bytes of a block's fields in a file, which `split` receives.
        planes: bits of a code, in planes of 1, 2, 4 or 8 bits, the lowest first.
        factor_planes: bits of a factor, likewise. Factors of 8 bits are signed.
        values: the integers that codes of four bits stand for, if not for themselves.
        has_minimum: whether something is added.
    """

    name: str
    weights: int
    fields: tuple[int, ...]
    planes: tuple[int, ...]
    split: Callable[..., Parts]
    offset: int = 0
    has_minimum: bool = False
    run: int = 32
    factor_planes: tuple[int, ...] = ()
    factor_offset: int = 0
    values: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(self.fields)

    @property
    def bits(self) -> float:
        """Bits of a weight."""
        return 8 * self.nbytes / self.weights

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of `depth` weights."""
        return depth // self.weights * self.nbytes

    @property
    def runs(self) -> int:
        """Runs of weights that share a scale."""
        return self.weights // self.run

    @property
    def factors(self) -> int:
        """Factors of a block: of scales, then of minima."""
        return self.runs * (2 if self.has_minimum else 1) if self.factor_planes else 0

    @property
    def is_narrow(self) -> bool:
        """Whether codes have less than 8 bits. They are unsigned then, otherwise signed."""
        return self.planes[0] < 8

    @property
    def storage(self) -> str:
        """The type of codes to which those of a block are most alike, for the choice of kernels."""
        return "uint4" if self.is_narrow else "int8"

    def parts(self, data: Bytes) -> Parts:
        """Take blocks apart: uint8 [..., bytes], whole blocks."""
        return self.split(*np.split(data.reshape(-1, self.nbytes), np.cumsum(self.fields)[:-1], axis=1))

    def scales(self, parts: Parts) -> tuple[Floats, Floats | None]:
        """The scales and minima of runs, [blocks, runs]."""
        scale = half(parts.scale)
        minimum = None if parts.minimum is None else half(parts.minimum)
        if parts.factors is None:
            return scale, minimum
        factors = parts.factors[:, : self.runs]
        signed = factors.view(np.int8) if self.factor_planes[0] == 8 else factors.astype(np.int8) - np.int8(self.factor_offset)
        return scale * signed, None if minimum is None else -(minimum * parts.factors[:, self.runs :])

    def floats(self, data: Bytes) -> Floats:
        """What blocks stand for: [rows, bytes] as float32 [rows, weights]."""
        parts = self.parts(data)
        blocks = self.integers(parts).astype(np.float32).reshape(len(parts.codes), self.runs, -1)
        scale, minimum = self.scales(parts)
        made: Floats = blocks * scale[:, :, None]
        if minimum is not None:
            made += minimum[:, :, None]
        return made.reshape(len(data), -1)

    def integers(self, parts: Parts) -> NDArray[np.int16]:
        """What codes stand for before they are scaled, [blocks, weights]."""
        if self.values:
            return np.array(self.values, np.int16)[parts.codes]
        if self.is_narrow:
            return parts.codes.astype(np.int16) - np.int16(self.offset)
        return parts.codes.view(np.int8).astype(np.int16)

    @property
    def words_of_values(self) -> list[int]:
        """`values` as the bytes of words of 32 bits."""
        return [int(word) for word in np.array(self.values, np.int8).view("<i4")]

    # -- packed panels

    def factor_rows(self) -> list[Plane]:
        """The planes of factors, a row of which has a byte of each column; `at` in bytes of each column."""
        found = list[Plane]()
        below = 0
        at = 4 if self.has_minimum else 2  # after a scale and a minimum
        for bits in self.factor_planes:
            found.append(Plane(bits, below, at, self.factors * bits // 8))
            below = below + bits
            at = at + self.factors * bits // 8
        return found

    @property
    def head(self) -> int:
        """Bytes of each column before the codes of a packed block."""
        return self.nbytes - self.weights * sum(self.planes) // 8

    def code_rows(self, panel: int) -> list[Plane]:
        """The planes of codes of a panel of `panel` columns; a row has four bits of each column, or eight."""
        found = list[Plane]()
        below = 0
        at = self.head * panel
        for bits in self.planes:
            found.append(Plane(bits, below, at, self.weights * bits // max(4, bits)))
            below = below + bits
            at = at + self.weights * bits * panel // 8
        return found

    def pack(self, data: Bytes, panel: int) -> Bytes:
        """Pack some columns [columns, bytes] into a panel: for each block, the same bits with columns side by side."""
        parts = self.parts(data)
        columns = len(data)

        def beside(array: Bytes) -> Bytes:
            """[columns * blocks, n] as [blocks, n, panel]; columns beyond the last are zero."""
            made = np.zeros((array.shape[0] // columns, array.shape[1], panel), np.uint8)
            made[:, :, :columns] = array.reshape(columns, -1, array.shape[1]).transpose(1, 2, 0)
            return made

        rows = [halves(beside(each)) for each in (parts.scale, parts.minimum) if each is not None]
        if parts.factors is not None:
            factors = beside(parts.factors)
            rows += [side_by_side(factors, plane) for plane in self.factor_rows()]
        codes = beside(parts.codes)
        rows += [in_groups(codes, plane) for plane in self.code_rows(panel)]
        packed = np.concatenate([each.reshape(len(each), -1) for each in rows], axis=1)
        assert packed.shape[1] == self.nbytes * panel
        return packed.reshape(-1)

    def rows(self, data: Bytes) -> Bytes:
        """Rows of blocks [rows, bytes] in the order of a packed panel, each by itself: what a panel has of one column.

        Four bits of a row of codes come after those of the row before, two rows in a byte.
        """
        parts = self.parts(data)
        fields = [each for each in (parts.scale, parts.minimum) if each is not None]
        if parts.factors is not None:
            fields += [side_by_side(parts.factors[:, :, None], plane)[:, :, 0] for plane in self.factor_rows()]
        if self.is_narrow:
            fours = np.concatenate([in_fours(parts.codes[:, :, None], plane)[:, :, 0] for plane in self.code_rows(1)], axis=1)
            fields.append(fours[:, 0::2] | fours[:, 1::2] << np.uint8(4))
        else:
            fields.append(parts.codes)
        return np.concatenate(fields, axis=1).reshape(data.shape)

    @property
    def packed_rows(self) -> tuple[int, int, int]:
        """What a packed block has of each column: numbers in half, bytes, and fours of bits."""
        plain = sum(plane.rows for plane in self.factor_rows())
        codes = sum(plane.rows for plane in self.code_rows(1))
        halves = 2 if self.has_minimum else 1
        return (halves, plain, codes) if self.is_narrow else (halves, plain + codes, 0)


def half(field: Bytes) -> Floats:
    """A number in float16 for each block, [blocks, 2] as float32 [blocks, 1]."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def bits(field: Bytes, count: int, run: int) -> Bytes:
    """Numbers of `count` bits; of each `run` bytes, first all with the lowest bits: [blocks, 8 / count * bytes]."""
    shifts = np.arange(0, 8, count, dtype=np.uint8)[:, None]
    return (field.reshape(len(field), -1, 1, run) >> shifts & np.uint8((1 << count) - 1)).reshape(len(field), -1)


def halves(field: Bytes) -> Bytes:
    """The two bytes of a float16 of each column, [blocks, 2, panel], side by side."""
    return np.ascontiguousarray(field.transpose(0, 2, 1))


def side_by_side(factors: Bytes, plane: Plane) -> Bytes:
    """A plane of factors [blocks, factors, panel]: factor i has its bits in row i % rows, from bit i / rows * bits on."""
    few = factors >> np.uint8(plane.below) & np.uint8((1 << plane.bits) - 1)
    return _joined(few.reshape(len(few), -1, plane.rows, few.shape[2]).transpose(1, 0, 2, 3), plane.bits)


def in_groups(codes: Bytes, plane: Plane) -> Bytes:
    """A plane of codes [blocks, weights, panel].

    A row has the bits of weights that are `GROUP` steps apart, so many that they fill four bits of each column. The first half
    of the columns is in the low nibbles of its bytes, so that vectors unpack without a shuffle.
    """
    if plane.bits == 8:
        return codes
    nibbles = in_fours(codes, plane)
    panel = codes.shape[2]
    return nibbles[:, :, : panel // 2] | nibbles[:, :, panel // 2 :] << np.uint8(4)


def in_fours(codes: Bytes, plane: Plane) -> Bytes:
    """The same with a byte for the four bits of each column."""
    blocks, _, panel = codes.shape
    few = codes >> np.uint8(plane.below) & np.uint8((1 << plane.bits) - 1)
    apart = few.reshape(blocks, -1, 4 // plane.bits, GROUP, panel).transpose(2, 0, 1, 3, 4)
    return _joined(apart, plane.bits).reshape(blocks, -1, panel)


def _joined(parts: Sequence[Bytes] | Bytes, count: int) -> Bytes:
    """Numbers of `count` bits in one byte, the first in the lowest bits."""
    made = np.zeros_like(parts[0])
    for index, part in enumerate(parts):
        made |= part << np.uint8(index * count)
    return made


def fifth_bits(field: Bytes) -> Bytes:
    """Bits of 32 weights in their order, as 16 or 0."""
    return np.unpackbits(field, axis=1, bitorder="little") << np.uint8(4)


def six_bits(packed: Bytes) -> Bytes:
    """Factors of eight scales, then those of eight minima, six bits each, in twelve bytes.

    The upper bits of the last four of both are those of the first eight bytes.
    """
    first, second, third = np.split(packed, 3, axis=1)
    upper = np.uint8(2), np.uint8(0x30)
    last = third & np.uint8(15) | first >> upper[0] & upper[1], third >> np.uint8(4) | second >> upper[0] & upper[1]
    return np.concatenate([first & np.uint8(63), last[0], second & np.uint8(63), last[1]], axis=1)
