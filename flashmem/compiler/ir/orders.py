"""Orders in which the elements of a tensor may lie in memory, and what stands beside them for an operand that broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.views import Dimension, Factor, View, merged


@dataclass(frozen=True)
class Order:
    """An order of a tensor's elements: sizes of the factors of each of its dimensions, and which of them, all counted in order,
    lies at each place in memory, outermost first. `shape` is how that memory is seen.
    """

    split: tuple[tuple[int, ...], ...]
    perm: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: View) -> Order:
        """The order in which the elements of `view` lie, seen as its root is if that is possible."""
        split = [tuple(_cut(dimension, view.root.shape)) for dimension in view.dimensions]
        flat = [each for dimension in split for each in dimension]
        perm = tuple(sorted(range(len(flat)), key=lambda i: -flat[i][1]))
        return cls(tuple(tuple(size for size, _ in dimension) for dimension in split), perm, view.root.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the factors, as they lie in memory."""
        flat = [size for dimension in self.split for size in dimension]
        return tuple(flat[i] for i in self.perm)

    def parts_of(self, value: Value) -> tuple[int, ...]:
        """The shape of `value`, which broadcasts, with each dimension as factors."""
        padded = (1,) * (len(self.split) - len(value.shape)) + value.shape
        found: list[int] = []
        for size, factors in zip(padded, self.split, strict=True):
            found += factors if size > 1 else [1] * len(factors)
        return tuple(found)

    def seen(self, parts: Sequence[int]) -> tuple[int, ...] | None:
        """`shape` as an operand broadcasts to it, whose factors are `parts`; None if it cannot be said."""
        sizes, own = list(self.sizes), [parts[i] for i in self.perm]
        found = []
        for size in self.shape:
            there, mine = 1, 1
            while there < size:
                if not sizes:
                    return None
                there, mine = there * sizes.pop(0), mine * own.pop(0)
            if there != size or mine not in (1, size):
                return None
            found.append(mine)
        return tuple(found)

    def view(self, value: Value) -> View:
        """`value`, whose memory has this order, as the tensor in its own."""
        strides = [0] * len(self.perm)
        stride = 1
        for i, size in zip(reversed(self.perm), reversed(self.sizes), strict=True):
            strides[i] = stride
            stride *= size
        left = iter(strides)
        return View(value, 0, tuple(merged([(size, next(left)) for size in factors]) for factors in self.split))


def _cut(dimension: Dimension, shape: Sequence[int]) -> list[Factor]:
    """The factors of a dimension, none of which goes through two dimensions of its root's `shape` where that can be."""
    ends = list(accumulate(reversed(shape), lambda a, b: a * b))
    found: list[Factor] = []
    for size, stride in dimension:
        inner: list[Factor] = []
        for end in ends:
            if stride < end < size * stride and end % stride == 0 and size * stride % end == 0:
                inner.append((end // stride, stride))
                size, stride = size * stride // end, end
        found += [(size, stride), *reversed(inner)]
    return found
