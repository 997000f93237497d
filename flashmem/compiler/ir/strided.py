"""Strided views: a tensor as a start and strides in the memory of another tensor, and the algebra of such views.

Reshape, Transpose, Slice and Expand of a tensor give a view without a copy. `compiler.ir.view_nodes` converts nodes to views
and views to nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flashmem.compiler.ir.graph import Value

Factor = tuple[int, int]
"""(size, stride in elements) of a part of a dimension; stride 0 repeats one element."""

Dimension = tuple[Factor, ...]
"""One dimension as factors, the slowest first: a merged dimension needs several if no single stride covers them."""


def row_major(shape: Sequence[int]) -> list[int]:
    """The row-major strides, in elements, of a contiguous tensor of `shape`."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def broadcast_strides(shape: Sequence[int], domain: Sequence[int]) -> list[int]:
    """Strides of a row-major tensor of `shape` for each dimension of `domain`, to which it broadcasts; 0 if it is repeated."""
    padded = [1] * (len(domain) - len(shape)) + list(shape)
    return [0 if size == 1 else stride for size, stride in zip(padded, row_major(padded), strict=True)]


def merged(factors: Sequence[Factor]) -> Dimension:
    """Factors in canonical form: without those of size 1, neighbours joined if one stride covers both."""
    made: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if made and made[-1][1] == size * stride:
            made[-1] = (made[-1][0] * size, stride)
        else:
            made.append((size, stride))
    return tuple(made)


@dataclass(frozen=True)
class StridedView:
    """A tensor in the memory of `root`: element (i, j, ...) is at `start` plus the offset of each dimension, times `scale`."""

    root: Value
    start: int
    dimensions: tuple[Dimension, ...]
    scale: float = 1.0

    @classmethod
    def of(cls, value: Value) -> StridedView:
        """The view of all of `value`, contiguous and row-major."""
        factors = zip(value.shape, row_major(value.shape), strict=True)
        return cls(value, 0, tuple(merged([factor]) for factor in factors))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(math.prod(size for size, _ in dimension) for dimension in self.dimensions)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all dimensions, in order."""
        return tuple(factor for dimension in self.dimensions for factor in dimension)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements, in order, are contiguous in memory: a Reshape of a range of the root."""
        flat = merged(self.factors)
        return not flat or (len(flat) == 1 and flat[0][1] == 1)

    def has_rows(self, axis: int) -> bool:
        """Whether the dimensions from `axis` on are, in order, contiguous in memory and have more than one element."""
        columns = math.prod(self.shape[axis:])
        return columns > 1 and merged([factor for each in self.dimensions[axis:] for factor in each]) == ((columns, 1),)

    def groups(self, axes: Sequence[int]) -> tuple[int, ...] | None:
        """(outer, depth, groups, columns) if memory has this order and `axes` are its depth and columns; else None."""
        flat = ((stride, size, axis in axes) for axis, each in enumerate(self.dimensions) for size, stride in each)
        runs: list[tuple[bool, int]] = []
        for _, size, is_inside in sorted(flat, reverse=True):
            if runs and runs[-1][0] == is_inside:
                runs[-1] = (is_inside, runs[-1][1] * size)
            else:
                runs.append((is_inside, size))
        if runs and runs[0][0]:
            runs.insert(0, (False, 1))
        are_groups = [is_inside for is_inside, _ in runs] == [False, True, False, True]
        return tuple(size for _, size in runs) if are_groups else None

    def transposed(self, perm: Sequence[int]) -> StridedView:
        """Permute dimensions: dimension i of the result is dimension `perm[i]` of this view."""
        return replace(self, dimensions=tuple(self.dimensions[axis] for axis in perm))

    def untransposed(self, perm: Sequence[int]) -> StridedView:
        """The inverse of `transposed(perm)`."""
        return self.transposed([list(perm).index(axis) for axis in range(len(perm))])

    def reshaped(self, shape: Sequence[int]) -> StridedView | None:
        """Reshape: the same elements in the same order; None if a dimension of `shape` begins or ends inside a factor."""
        factors = list(self.factors)
        made: list[Dimension] = []
        for size in shape:
            taken: list[Factor] = []
            while size > 1:
                inner, stride = factors.pop(0)
                if inner > size and inner % size == 0:
                    factors.insert(0, (inner // size, stride))
                    stride = stride * (inner // size)
                    inner = size
                if size % inner:
                    return None
                taken.append((inner, stride))
                size //= inner
            made.append(merged(taken))
        return replace(self, dimensions=tuple(made))

    def sliced(self, shape: Sequence[int], starts: Sequence[int], steps: Sequence[int]) -> StridedView | None:
        """Slice: every `steps`-th element from `starts`; None if a cut dimension has no single stride."""
        start = self.start
        made = []
        for dimension, whole, size, first, step in zip(self.dimensions, self.shape, shape, starts, steps, strict=True):
            if (first, step, size) == (0, 1, whole):
                made.append(dimension)
                continue
            if len(dimension) > 1 or step < 1:
                return None
            stride = dimension[0][1] if dimension else 0
            start += first * stride
            made.append(merged([(size, stride * step)]))
        return replace(self, start=start, dimensions=tuple(made))

    def expanded(self, shape: Sequence[int]) -> StridedView:
        """Broadcast to `shape`: repeated dimensions have stride 0."""
        dimensions = ((),) * (len(shape) - len(self.dimensions)) + self.dimensions
        made = (
            dimension if dimension or size == 1 else ((size, 0),) for dimension, size in zip(dimensions, shape, strict=True)
        )
        return replace(self, dimensions=tuple(made))


@dataclass(frozen=True)
class ElementOrder:
    """The order of a tensor's elements in memory.

    Attributes:
        split: for each of its dimensions, the sizes of the factors.
        perm: for each place in memory, outermost first, the number of a factor, counted over all dimensions.
        shape: the shape in which that memory is read.
    """

    split: tuple[tuple[int, ...], ...]
    perm: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: StridedView) -> ElementOrder:
        """The memory order of the elements of `view`, in the shape of its root if possible."""
        split = [tuple(_cut(dimension, view.root.shape)) for dimension in view.dimensions]
        flat = [each for dimension in split for each in dimension]
        perm = tuple(sorted(range(len(flat)), key=lambda i: -flat[i][1]))
        return cls(tuple(tuple(size for size, _ in dimension) for dimension in split), perm, view.root.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the factors in the order of memory."""
        flat = [size for dimension in self.split for size in dimension]
        return tuple(flat[i] for i in self.perm)

    def parts_of(self, value: Value) -> tuple[int, ...]:
        """The shape of `value`, which broadcasts, with each dimension split into factors."""
        padded = (1,) * (len(self.split) - len(value.shape)) + value.shape
        found: list[int] = []
        for size, factors in zip(padded, self.split, strict=True):
            found += factors if size > 1 else [1] * len(factors)
        return tuple(found)

    def operand_shape(self, parts: Sequence[int]) -> tuple[int, ...] | None:
        """The shape of an operand with factors `parts`, so that it broadcasts to `shape`; None if no such shape exists."""
        sizes = list(self.sizes)
        own = [parts[i] for i in self.perm]
        found = []
        for size in self.shape:
            there = 1
            mine = 1
            while there < size:
                if not sizes:
                    return None
                there = there * sizes.pop(0)
                mine = mine * own.pop(0)
            if there != size or mine not in (1, size):
                return None
            found.append(mine)
        return tuple(found)

    def view(self, value: Value) -> StridedView:
        """The tensor in its logical order, as a view of `value`, whose memory has this order."""
        strides = [0] * len(self.perm)
        for i, stride in zip(self.perm, row_major(self.sizes), strict=True):
            strides[i] = stride
        left = iter(strides)
        return StridedView(value, 0, tuple(merged([(size, next(left)) for size in factors]) for factors in self.split))


def _cut(dimension: Dimension, shape: Sequence[int]) -> list[Factor]:
    """The factors of a dimension, cut at borders between dimensions of its root's `shape` where possible."""
    ends = list(accumulate(reversed(shape), lambda a, b: a * b))
    found: list[Factor] = []
    for size, stride in dimension:
        inner: list[Factor] = []
        for end in ends:
            if stride < end < size * stride and end % stride == 0 and size * stride % end == 0:
                inner.append((end // stride, stride))
                size = size * stride // end
                stride = end
        found += [(size, stride), *reversed(inner)]
    return found
