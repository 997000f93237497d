"""Where the elements of a tensor lie in another tensor's memory, seen through Reshape, Transpose, Slice and Expand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value

Factor = tuple[int, int]
"""(size, stride in elements) of a part of a dimension; stride 0 repeats what lies there."""

Dimension = tuple[Factor, ...]
"""One dimension as factors, the slowest first: a merged dimension needs several where no one stride covers them."""


@dataclass(frozen=True)
class View:
    """A tensor whose element (i, j, ...) is what lies in the memory of `root` at `start` plus what each dimension adds, times
    `scale`.
    """

    root: Value
    start: int
    dimensions: tuple[Dimension, ...]
    scale: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(math.prod(size for size, _ in dimension) for dimension in self.dimensions)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all dimensions, in order."""
        return tuple(factor for dimension in self.dimensions for factor in dimension)

    @property
    def is_in_order(self) -> bool:
        """Whether the elements follow one another as they lie in memory: a Reshape of what is there."""
        flat = merged(self.factors)
        return not flat or (len(flat) == 1 and flat[0][1] == 1)

    def has_rows(self, axis: int) -> bool:
        """Whether the dimensions from `axis` on lie side by side, in order."""
        columns = math.prod(self.shape[axis:])
        return columns > 1 and merged([factor for each in self.dimensions[axis:] for factor in each]) == ((columns, 1),)

    def groups(self, axes: Sequence[int]) -> tuple[int, ...] | None:
        """(outer, depth, groups, columns), if that is how the elements lie in memory, and `axes` are its depth and columns."""
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

    def transposed(self, perm: Sequence[int]) -> View:
        """Dimension i of the result is dimension `perm[i]` of this view."""
        return replace(self, dimensions=tuple(self.dimensions[axis] for axis in perm))

    def untransposed(self, perm: Sequence[int]) -> View:
        """The tensor that `transposed(perm)` turns into this view."""
        return self.transposed([list(perm).index(axis) for axis in range(len(perm))])

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """The same elements in the same order; None if a dimension of `shape` begins or ends inside a factor."""
        factors = [factor for dimension in self.dimensions for factor in dimension]
        made: list[Dimension] = []
        for size in shape:
            taken: list[Factor] = []
            while size > 1:
                inner, stride = factors.pop(0)
                if inner > size and inner % size == 0:
                    factors.insert(0, (inner // size, stride))
                    inner, stride = size, stride * (inner // size)
                if size % inner:
                    return None
                taken.append((inner, stride))
                size //= inner
            made.append(merged(taken))
        return replace(self, dimensions=tuple(made))

    def sliced(self, shape: Sequence[int], starts: Sequence[int], steps: Sequence[int]) -> View | None:
        """Every `steps`-th element from `starts`; None if a dimension is cut that has no stride of its own."""
        start, made = self.start, []
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

    def expanded(self, shape: Sequence[int]) -> View:
        """Broadcast to `shape`: what is repeated has stride 0."""
        dimensions = ((),) * (len(shape) - len(self.dimensions)) + self.dimensions
        made = (
            dimension if dimension or size == 1 else ((size, 0),) for dimension, size in zip(dimensions, shape, strict=True)
        )
        return replace(self, dimensions=tuple(made))


def merged(factors: Sequence[Factor]) -> Dimension:
    """The same factors, neighbours joined where one stride covers both."""
    made: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if made and made[-1][1] == size * stride:
            made[-1] = (made[-1][0] * size, stride)
        else:
            made.append((size, stride))
    return tuple(made)


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor of `shape` in its own memory."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def whole(value: Value) -> View:
    """`value` as it lies in its own memory, row-major."""
    return View(value, 0, tuple(merged([factor]) for factor in zip(value.shape, row_major(value.shape), strict=True)))


def write(rewriter: Rewriter, view: View, output: Value, moved: dict[object, Value] | None = None) -> Value:
    """Append what makes `output` of `view`, which shows each element of its root once: a Reshape, or one Transpose at most.

    `moved` holds the Transposes that are there already.
    """
    moved = {} if moved is None else moved
    factors, root = merged(view.factors), view.root
    if view.is_in_order:
        return rewriter.add("Reshape", [root], output)
    key = root, factors
    if key not in moved:
        outward = sorted(range(len(factors)), key=lambda i: -factors[i][1])
        shape = tuple(factors[i][0] for i in outward)
        source = root if root.shape == shape else rewriter.emit("Reshape", [root], shape, root.dtype, f"{root.name}.parts")
        perm = tuple(outward.index(i) for i in range(len(factors)))
        made = tuple(size for size, _ in factors)
        if made == output.shape:
            moved[key] = rewriter.add("Transpose", [source], output, perm=perm)
            return output
        moved[key] = rewriter.emit("Transpose", [source], made, root.dtype, f"{output.name}.moved", perm=perm)
    return rewriter.add("Reshape", [moved[key]], output)


KEPT = 4
"""A Slice of less than one part in so many of its source is copied: a view would keep all of the source."""


def view_of(value: Value) -> View:
    """`value` as a view of the farthest tensor from which only moves, and products with one constant, lead to it."""
    node = value.producer
    if value.constant is not None or node is None:
        return whole(value)
    multiplied = factor(node)
    if multiplied is not None:
        source, scale = multiplied
        view = view_of(source)
        return replace(view, scale=view.scale * scale)
    if node.op not in ("Reshape", "Transpose", "Slice", "Expand"):
        return whole(value)
    view = view_of(node.input(0))
    found: View | None
    if node.op == "Reshape":
        found = view.reshaped(value.shape)
    elif node.op == "Transpose":
        found = view.transposed(node.attributes["perm"])
    elif node.op == "Expand":
        found = view.expanded(value.shape)
    elif value.size * KEPT >= view.root.size:
        found = view.sliced(value.shape, node.attributes["starts"], node.attributes["steps"])
    else:
        found = None
    return found or whole(value)


def factor(node: Node) -> tuple[Value, float] | None:
    """(x, c) if the node multiplies x by the one constant c, or divides it by 1 / c."""
    if node.op not in ("Mul", "Div") or node.outputs[0].dtype != "float32":
        return None
    for x, other in (node.inputs, node.inputs[::-1])[: 2 if node.op == "Mul" else 1]:
        if x is None or other is None or other.constant is None or other.size != 1 or x.shape != node.outputs[0].shape:
            continue
        number = float(other.constant.array().reshape(-1)[0])
        if not math.isfinite(number) or (node.op == "Div" and not number):
            continue
        return x, number if node.op == "Mul" else 1 / number
    return None
