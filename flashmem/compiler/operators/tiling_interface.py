"""Tiling interface: the ranges of its inputs that an operator needs for a range of its output, and the node that computes it.

`Operator.tiling` is a rule that returns these for a node and a range along one axis of its output. `compiler.tiling.patches`
computes chains of operators in patches with it. Rules see the same nodes as fusion: decomposed, layouts assigned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.ir.quantised import QuantizedConstant


class AxisRange(NamedTuple):
    """Places `start` to `stop` (not included) along `axis` of a tensor."""

    axis: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of places."""
        return self.stop - self.start

    def relative_to(self, start: int) -> AxisRange:
        """The same places in a tensor that begins at place `start` of this one."""
        return AxisRange(self.axis, self.start - start, self.stop - start)

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of this range of a tensor of `shape`."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether it is all of a tensor of `shape`."""
        return (self.start, self.stop) == (0, shape[self.axis])

    def hull(self, other: AxisRange) -> AxisRange:
        """The smallest range along the same axis that covers both."""
        return AxisRange(self.axis, min(self.start, other.start), max(self.stop, other.stop))


@dataclass(frozen=True)
class TiledNode:
    """The node that computes a range of another node's output.

    Attributes:
        needs: the range of each input that it reads; None for all of it, or for an omitted input.
        attributes: its attributes.
        made: the range that it computes, if that is larger than the requested one.
    """

    needs: tuple[AxisRange | None, ...]
    attributes: dict[str, Any]
    made: AxisRange | None = None


TilingRule = Callable[[Node, AxisRange], TiledNode | None]
"""Returns the node that computes a range of a node's (only) output; None if the range cannot be computed separately."""


def aligned(shape: Sequence[int], rank: int, span: AxisRange) -> AxisRange | None:
    """`span` of a tensor of `rank` dimensions, for an operand that broadcasts to it; None if it needs the whole operand."""
    axis = span.axis - (rank - len(shape))
    return AxisRange(axis, span.start, span.stop) if axis >= 0 and shape[axis] != 1 else None


def at_each_place(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile an elementwise operator: the same span of operands that are not broadcast along it."""
    rank = len(node.outputs[0].shape)
    return TiledNode(tuple(None if x is None else aligned(x.shape, rank, span) for x in node.inputs), node.attributes)


def along_others(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile an operator along attribute `axes` (or `axis`) that treats other axes place by place: the same span."""
    given = node.attributes.get("axes", node.attributes.get("axis"))
    axes = given if isinstance(given, tuple | list) else (given,)
    if span.axis in axes or len(node.input(0).shape) != len(node.outputs[0].shape):
        return None
    return at_each_place(node, span)


def merged_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Reshape: the places of its input, along the axis that begins where the span's axis does, that contain the span."""
    source = node.input(0).shape
    shape = node.outputs[0].shape
    outer = math.prod(shape[: span.axis])
    inner = math.prod(shape[span.axis + 1 :])
    before = 1
    for axis, size in enumerate(source):
        if before == outer and size > 1:
            step = math.prod(source[axis + 1 :])
            unit = math.lcm(step, inner)  # elements from one common border of places to the next
            first = span.start * inner // unit * unit
            last = -(-span.stop * inner // unit) * unit
            if last > size * step or last > shape[span.axis] * inner:
                return None
            needed = AxisRange(axis, first // step, last // step)
            made = AxisRange(span.axis, first // inner, last // inner)
            return TiledNode((needed, *[None] * (len(node.inputs) - 1)), node.attributes, made)
        before *= size
    return None


def transposed_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Transpose: the same span along the source's axis."""
    return TiledNode((AxisRange(node.attributes["perm"][span.axis], span.start, span.stop),), node.attributes)


def sliced_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Slice: from the first to the last element of the span."""
    starts = node.attributes["starts"]
    steps = node.attributes["steps"]
    start = starts[span.axis]
    step = steps[span.axis]
    if step < 1:
        return None
    needed = AxisRange(span.axis, start + span.start * step, start + (span.stop - 1) * step + 1)
    return TiledNode((needed,), {**node.attributes, "starts": _changed(starts, span.axis, 0)})


def padded_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Pad with a constant: the part of the input inside the span, and pads for the rest."""
    before = node.attributes["before"]
    size = node.input(0).shape[span.axis]
    first = span.start - before[span.axis]
    last = span.stop - before[span.axis]
    needed = AxisRange(span.axis, max(0, first), min(size, last))
    if needed.size < 1:
        return None
    return TiledNode((needed,), {**node.attributes, "before": _changed(before, span.axis, max(0, -first))})


def repeated_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Tile: along a repeated axis, a part of one copy, or whole copies."""
    repeats = node.attributes["repeats"]
    size = node.input(0).shape[span.axis]
    first = span.start // size
    last = (span.stop - 1) // size
    if first == last:
        needed = AxisRange(span.axis, span.start - first * size, span.stop - first * size)
        return TiledNode((needed,), {**node.attributes, "repeats": _changed(repeats, span.axis, 1)})
    if span.start % size or span.stop % size:
        return None
    return TiledNode((None,), {**node.attributes, "repeats": _changed(repeats, span.axis, span.size // size)})


def joined_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Concat along another axis: the same span of every input."""
    if span.axis == node.attributes["axis"]:
        return None
    return TiledNode((span,) * len(node.inputs), node.attributes)


def gathered_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a Gather: along an unchanged axis of the data, or along constant indices."""
    data = node.input(0)
    indices = node.input(1)
    axis = node.attributes["axis"]
    rank = len(indices.shape)
    if axis <= span.axis < axis + rank:
        if indices.constant is None:
            return None
        return TiledNode((None, AxisRange(span.axis - axis, span.start, span.stop)), node.attributes)
    if data.constant is not None:
        return None
    there = span.axis if span.axis < axis else span.axis - rank + 1
    return TiledNode((AxisRange(there, span.start, span.stop), None), node.attributes)


def window_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a channels-last convolution or pool: the rows (or columns, or slices of depth) under the windows of the span.

    Pads remain only at the edge. Images of a batch are independent, and so are channels of a pool.
    """
    x = node.input(0)
    others: tuple[AxisRange | None, ...] = (None,) * (len(node.inputs) - 1)
    rank = len(x.shape)
    if span.axis == 0:
        return TiledNode((span, *others), node.attributes)
    if span.axis == rank - 1:
        return _channels_tile(node, span)
    at = span.axis - 1
    count = rank - 2
    reach = (node.attributes["kernel"] if "kernel" in node.attributes else node.input(1).shape[2:])[at] - 1
    stride = node.attributes["strides"][at]
    dilation = node.attributes["dilations"][at]
    pads = node.attributes["pads"]
    size = x.shape[span.axis]
    before = pads[at]
    after = pads[count + at]
    if node.op == "ConvTranspose":
        first = -(-(span.start + before - dilation * reach) // stride)
        last = (span.stop - 1 + before) // stride + 1
        needed = AxisRange(span.axis, max(0, first), min(size, last))
        changed = (before + span.start - needed.start * stride, 0)
    else:
        first = span.start * stride - before
        last = (span.stop - 1) * stride - before + dilation * reach + 1
        needed = AxisRange(span.axis, max(0, first), min(size, last))
        changed = (max(0, -first), after if last > size else 0)
    if needed.size < 1:
        return None
    pads = _changed(_changed(pads, at, changed[0]), count + at, changed[1])
    return TiledNode((needed, *others), {**node.attributes, "pads": pads})


def _channels_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile channels: those of a convolution are rows of its weights; those of a pool are its input's."""
    if "kernel" in node.attributes:
        return TiledNode((span, *[None] * (len(node.inputs) - 1)), node.attributes)
    weight = node.input(1)
    quantized = isinstance(weight.constant, QuantizedConstant)
    if node.attributes["group"] != 1 or weight.constant is None or quantized or len(node.inputs) > 2:
        return None
    return TiledNode((None, AxisRange(1 if node.op == "ConvTranspose" else 0, span.start, span.stop)), node.attributes)


def product_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile a MatMul: rows of the left operand, columns of the right one, or matrices of a stack."""
    left = node.input(0)
    right = node.input(1)
    rank = len(node.outputs[0].shape)
    others: tuple[AxisRange | None, ...] = (None,) * (len(node.inputs) - 2)  # zero points and scales
    if any(value is not None and value.size != 1 for value in node.inputs[2:]):
        return None
    if span.axis == rank - 1:
        if right.constant is not None and (
            len(right.shape) != 2 or isinstance(right.constant, QuantizedConstant | BlockConstant)
        ):
            return None
        last = len(right.shape) - (2 if node.attributes["transposed"] else 1)
        return TiledNode((None, AxisRange(last, span.start, span.stop), *others), node.attributes)
    if span.axis == rank - 2:
        return TiledNode((AxisRange(len(left.shape) - 2, span.start, span.stop), None, *others), node.attributes)
    return TiledNode((aligned(left.shape, rank, span), aligned(right.shape, rank, span), *others), node.attributes)


def _changed(numbers: Sequence[int], at: int, number: int) -> tuple[int, ...]:
    return (*numbers[:at], number, *numbers[at + 1 :])


def outermost(shape: Sequence[int]) -> int:
    """The axis along which a range of a tensor is contiguous in memory: the first one longer than 1."""
    return next((axis for axis, size in enumerate(shape) if size > 1), 0)
