"""Quantised constants: integers, with a scale and a zero point for each tensor, channel or block.

A DequantizeLinear of a constant in ONNX is one constant here. Its elements are float32, computed when they are read.
Contractions do not read them: they pack the integers, and dequantise them in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import ArrayConstant, Constant


@dataclass(frozen=True)
class QuantizedConstant:
    """(codes - zero) * scale + minimum, in float32.

    `scale`, `zero` and `minimum` have the rank of `codes`. Along each axis, element i of `codes` uses their element i // block,
    where each axis has its own block. A value for a whole axis has size 1 along it.

    Attributes:
        codes: integers of 8, 16 or 32 bits; those of 4 bits are read as 8.
        scale: float32, or float16 where all of them are exact in it.
        zero: integers of the type of `codes`; None for zeros.
        block: of each axis.
        bits: stored bits of one element of `codes`.
        minimum: of the type of `scale` in each block, or None (ONNX has none; GGUF's Q4_1 does).
    """

    codes: Constant
    scale: Constant
    zero: Constant | None
    block: tuple[int, ...]
    bits: int
    minimum: Constant | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return np.dtype(np.float32)

    @property
    def storage(self) -> str:
        """The type of the stored codes: int8, uint4 ..."""
        return f"{'u' if self.codes.dtype.kind == 'u' else ''}int{self.bits}"

    def array(self) -> NDArray[np.float32]:
        """Compute the elements."""
        codes = self.codes.array()
        scale = self.spread(self.scale.array())
        if self.zero is not None:
            codes = codes.astype(np.int32) - self.spread(self.zero.array()).astype(np.int32)
        elements: NDArray[np.float32] = codes.astype(np.float32) * scale
        return elements if self.minimum is None else elements + self.spread(self.minimum.array())

    def with_parts(self, change: Callable[[Constant], Constant], codes: Constant, block: tuple[int, ...]) -> QuantizedConstant:
        """The constant of other codes and blocks, whose scale, zero and minimum are changed by `change`."""
        zero, minimum = (None if part is None else change(part) for part in (self.zero, self.minimum))
        return replace(self, codes=codes, scale=change(self.scale), zero=zero, minimum=minimum, block=block)

    def spread(self, array: NDArray[Any], axes: Sequence[int] | None = None) -> NDArray[Any]:
        """Expand a scale or zero point to one element for each of `codes` along `axes` (all, if None). Axes of size 1 stay."""
        for axis in range(array.ndim) if axes is None else axes:
            if array.shape[axis] > 1 and self.block[axis] > 1:
                array = array.take(np.arange(self.shape[axis]) // self.block[axis], axis)
        return array

    def transposed(self, perm: Sequence[int]) -> QuantizedConstant:
        """The constant with its axes permuted."""
        return self.with_parts(
            lambda part: moved(part, tuple(part.shape[axis] for axis in perm), tuple(perm)),
            MovedConstant(self.codes, tuple(self.shape[axis] for axis in perm), tuple(perm)),
            tuple(self.block[axis] for axis in perm),
        )

    def sliced(self, axis: int, first: int, end: int) -> QuantizedConstant | None:
        """Elements `first` to `end` along `axis`; None if they begin or end inside a block."""
        block = self.block[axis]
        varies = any(part is not None and part.shape[axis] > 1 for part in (self.scale, self.zero, self.minimum))
        if varies and (first % block or end % block):
            return None

        def of(part: Constant) -> Constant:
            if part.shape[axis] <= 1:
                return part
            return part_of(part, axis, first // block, end // block)

        sizes = tuple(size if a != axis or varies else end - first for a, size in enumerate(self.block))
        return self.with_parts(of, _Part(self.codes, axis, first, end), sizes)

    def reshaped(self, shape: tuple[int, ...]) -> QuantizedConstant | None:
        """The constant in another shape; None if scales and blocks cannot be expressed along the new axes."""
        if 0 in shape:
            return None
        sizes: list[tuple[int, int]] = []  # of each new axis: the size of the scale along it, and its block
        old = iter(zip(self.shape, self.scale.shape, self.block, strict=True))
        new = iter(shape)
        for group in _groups(self.shape, shape):
            before = [next(old) for _ in range(group[0])]
            after = [next(new) for _ in range(group[1])]
            varying = [entry for entry in before if entry[1] > 1]
            wide = [size for size in after if size > 1]
            if not varying:
                sizes += [(1, max(size, 1)) for size in after]
            elif len(wide) == 1 and wide[0] == varying[0][0]:  # one axis, among others of size 1
                sizes += [(varying[0][1], varying[0][2]) if size > 1 else (1, 1) for size in after]
            else:
                return None
        scales = tuple(count for count, _ in sizes)
        return self.with_parts(
            lambda part: moved(part, scales),
            MovedConstant(self.codes, shape),
            tuple(block for _, block in sizes),
        )


def wide(part: Constant) -> NDArray[Any]:
    """The elements of a scale, zero or minimum, floats in float32."""
    array = part.array()
    return array.astype(np.float32) if array.dtype == np.float16 else array


@dataclass(frozen=True)
class _Part:
    """Elements `first` to `end` of a constant along an axis, computed when read."""

    source: Constant
    axis: int
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's shape, cut along the axis."""
        return (*self.source.shape[: self.axis], self.end - self.first, *self.source.shape[self.axis + 1 :])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The source's type."""
        return self.source.dtype

    def array(self) -> NDArray[Any]:
        """Read the part."""
        return self.source.array()[(*[slice(None)] * self.axis, slice(self.first, self.end))]


def part_of(source: Constant, axis: int, first: int, end: int) -> Constant:
    """Elements `first` to `end` of `source` along an axis: at once if it is in memory, else when they are read."""
    found = _Part(source, axis, first, end)
    return ArrayConstant(found.array()) if isinstance(source, ArrayConstant) else found


@dataclass(frozen=True)
class MovedConstant:
    """A constant permuted, or reshaped if `perm` is None, computed when read."""

    source: Constant
    shape: tuple[int, ...]
    perm: tuple[int, ...] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The source's type."""
        return self.source.dtype

    def array(self) -> NDArray[Any]:
        """Read and permute the data."""
        array = self.source.array()
        return array.reshape(self.shape) if self.perm is None else array.transpose(self.perm)


@dataclass(frozen=True)
class HalvedConstant:
    """Floats of a constant as float16, which is exact for them, computed when read."""

    source: Constant

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's shape."""
        return self.source.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float16."""
        return np.dtype(np.float16)

    def array(self) -> NDArray[Any]:
        """Read and convert the data."""
        return self.source.array().astype(np.float16)


def moved(part: Constant, shape: tuple[int, ...], perm: tuple[int, ...] | None = None) -> Constant:
    """`part` permuted, or reshaped if `perm` is None: at once if it is in memory, else when it is read."""
    found = MovedConstant(part, shape, perm)
    return ArrayConstant(found.array()) if isinstance(part, ArrayConstant) else found


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Group axes of `old` with axes of `new`: the shortest runs of both with equal numbers of elements, as pairs of counts."""
    groups = []
    i = 0
    j = 0
    while i < len(old) or j < len(new):
        first = i
        second = j
        left = right = 1
        while (i == first and j == second) or left != right:
            if i < len(old) and (left <= right or j == len(new)):
                left = left * old[i]
                i = i + 1
            else:
                right = right * new[j]
                j = j + 1
        groups.append((i - first, j - second))
    return groups
