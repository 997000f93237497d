"""Index expressions of broadcast operands, in kernels whose output is a matrix of rows and columns.

A kernel computes vectors of neighbouring columns. An operand's columns must be contiguous too, or all be one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import broadcast_strides, merged, row_major


def matrix_of(shape: Sequence[int], split: int | None = None) -> tuple[int, int]:
    """`shape` as (rows, columns); columns are the dimensions from `split` on (the last one if not given)."""
    split = len(shape) - 1 if split is None else split
    return math.prod(shape[: max(split, 0)]), math.prod(shape[max(split, 0) :])


Number = Callable[[int], str]
"""Writes a number in an expression: its digits, or the name of an argument."""


def affine(shape: Sequence[int], strides: Sequence[int], index: str, *, size_as: Number = str, stride_as: Number = str) -> str:
    """The offset of element `index` (row-major over `shape`) in memory with `strides`, as a C expression."""
    terms: list[str] = []
    factors = merged(list(zip(shape, strides, strict=True)))
    inner = 1
    for i, (size, stride) in reversed(list(enumerate(factors))):
        if stride:
            place = index if inner == 1 else f"({index} / {size_as(inner)})"
            place = place if i == 0 else f"({place} % {size_as(size)})"
            terms.append(place if stride == 1 else f"{place} * {stride_as(stride)}")
        inner *= size
    return " + ".join(reversed(terms)) or "0"


@dataclass(frozen=True)
class Operand:
    """A tensor that the expression reads: `index` is the offset of a vector's first element; `spread`: one element fills it."""

    value: Value
    index: str
    spread: bool


def place(value: Value, domain: Sequence[int], split: int, *, size_as: Number = str, stride_as: Number = str) -> Operand | None:
    """The operand `value` at (row, col) of `domain`; None if its columns are neither contiguous nor all the same."""
    strides, start = _places(value, domain)
    columns = domain[split:]
    column_strides = strides[split:]
    row = affine(domain[:split], strides[:split], "row", size_as=size_as, stride_as=stride_as)
    spread = all(stride == 0 for stride in column_strides)
    if not spread and affine(columns, column_strides, "col") != "col":
        return None
    terms = [*([row] if row != "0" else []), *([stride_as(start)] if start else []), *([] if spread else ["col"])]
    return Operand(value, " + ".join(terms) or "0", spread)


def _places(value: Value, domain: Sequence[int]) -> tuple[list[int], int]:
    """The strides of `value` in `domain`, and its first element, in the memory that it is read from."""
    part = row_part(value)
    if part is None:
        return broadcast_strides(value.shape, domain), 0
    whole, start = part
    sizes = [1] * (len(domain) - len(value.shape)) + list(value.shape)
    strides = [0] * (len(domain) - len(whole.shape)) + row_major(whole.shape)
    return [0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True)], start


def row_part(value: Value) -> tuple[Value, int] | None:
    """The tensor of whose rows `value` is a part, and the first column (`compiler.passes.row_parts`); None if it is none."""
    node = value.producer
    return (node.input(0), int(node.attributes["starts"][-1])) if node is not None and node.op == "RowPart" else None


def best_split(domain: Sequence[int], values: Sequence[Value]) -> int:
    """The first dimension of the longest column that all `values` allow; len(domain) (scalar columns) if they allow none."""
    for split in range(len(domain)):
        if all(place(value, domain, split) is not None for value in values):
            return split
    return len(domain)
