"""Where a broadcast operand lies under the outputs of a kernel, which are seen as a matrix of rows and columns.

A kernel computes vectors of neighbouring columns. An operand can be read so if its columns are neighbours too, or all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmem.compiler.ir.graph import Value


def matrix_of(shape: Sequence[int], split: int | None = None) -> tuple[int, int]:
    """`shape` as (rows, columns); columns are the dimensions from `split` on (the last one if not given)."""
    split = len(shape) - 1 if split is None else split
    return math.prod(shape[: max(split, 0)]), math.prod(shape[max(split, 0) :])


Number = Callable[[int], str]
"""How an expression says a number: as it is, or by the name of an argument that holds it."""


def affine(shape: Sequence[int], strides: Sequence[int], index: str, *, size_as: Number = str, stride_as: Number = str) -> str:
    """The offset of element `index` (row-major over `shape`) in memory with `strides`, as a C expression."""
    terms: list[str] = []
    merged: list[list[int]] = []  # [size, stride], neighbours merged where one stride covers both
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    inner = 1
    for i, (size, stride) in reversed(list(enumerate(merged))):
        if stride:
            place = index if inner == 1 else f"({index} / {size_as(inner)})"
            place = place if i == 0 else f"({place} % {size_as(size)})"
            terms.append(place if stride == 1 else f"{place} * {stride_as(stride)}")
        inner *= size
    return " + ".join(reversed(terms)) or "0"


def broadcast_strides(shape: Sequence[int], domain: Sequence[int]) -> list[int]:
    """Row-major strides of a tensor of `shape`, in elements, aligned with `domain`; 0 where it is broadcast."""
    padded = [1] * (len(domain) - len(shape)) + list(shape)
    strides, stride = [0] * len(padded), 1
    for i in reversed(range(len(padded))):
        if padded[i] != 1:
            strides[i] = stride
        stride *= padded[i]
    return strides


@dataclass(frozen=True)
class Operand:
    """A tensor the expression reads: `index` is the offset of a vector's first element; `spread` if one element fills it."""

    value: Value
    index: str
    spread: bool


def place(value: Value, domain: Sequence[int], split: int, *, size_as: Number = str, stride_as: Number = str) -> Operand | None:
    """Where `value` lies under (row, col) of `domain`; None if its columns are neither contiguous nor all the same."""
    strides = broadcast_strides(value.shape, domain)
    columns, column_strides = domain[split:], strides[split:]
    row = affine(domain[:split], strides[:split], "row", size_as=size_as, stride_as=stride_as)
    if all(stride == 0 for stride in column_strides):
        return Operand(value, row, True)
    if affine(columns, column_strides, "col") != "col":
        return None
    return Operand(value, "col" if row == "0" else f"{row} + col", False)


def best_split(domain: Sequence[int], values: Sequence[Value]) -> int:
    """The first dimension of the longest column that all `values` allow; len(domain) (scalar columns) if none do."""
    for split in range(len(domain)):
        if all(place(value, domain, split) is not None for value in values):
            return split
    return len(domain)
