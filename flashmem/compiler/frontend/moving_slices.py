"""Slices of fixed length at a position computed at run time, expanded to Gathers.

The length is provable if each end is its start plus a constant: both are followed through integer arithmetic to the same
number. A slice that would reach outside its axis has another length in ONNX. Here its indices are out of range, which ends the
run with an error, like any other index outside a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expansion
from flashmem.compiler.ir.limits import RANK, TABLE

_SAME = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_WIDER = {
    (ir.DataType.INT32, ir.DataType.INT64),
    (ir.DataType.INT32, ir.DataType.INT32),
    (ir.DataType.INT64, ir.DataType.INT64),
}
_INTEGERS = {ir.DataType.INT32, ir.DataType.INT64}


@dataclass(frozen=True)
class _Number:
    """An integer: element `index` of `root` plus `offset`; a constant if `root` is None."""

    root: ir.Value | None
    index: int
    offset: int

    def plus(self, other: _Number, sign: int) -> _Number | None:
        """The sum, or the difference; None if it has no such form."""
        if other.root is None:
            return _Number(self.root, self.index, self.offset + sign * other.offset)
        return _Number(other.root, other.index, self.offset + other.offset) if self.root is None and sign == 1 else None


@dataclass(frozen=True)
class _Cut:
    """The part of one axis of `size` that a Slice takes: from `start` to `end`."""

    axis: int
    size: int
    start: _Number
    end: _Number

    @property
    def length(self) -> int:
        """The number of places; of a cut that `fits`."""
        return self.end.offset - self.start.offset

    @property
    def is_constant(self) -> bool:
        """Whether both ends are known."""
        return self.start.root is None and self.end.root is None

    @property
    def fits(self) -> bool:
        """Whether both ends are known, or its length is, for which a table is not too long."""
        same = (self.start.root, self.start.index) == (self.end.root, self.end.index)
        return self.is_constant or (same and 0 < self.length <= min(self.size, TABLE))


def expand(node: ir.Node, opset: int) -> tuple[Sequence[ir.Value], Sequence[ir.Node]] | None:
    """The replacement of a Slice at a position computed at run time: its output, and the nodes. None for any other node."""
    if node.op_type != "Slice" or node.domain not in ("", "ai.onnx") or opset < 10 or len(node.inputs) < 3:
        return None
    data, starts = node.inputs[0], node.inputs[1]
    if data is None or starts is None or starts.const_value is not None:
        return None
    cuts = _cuts(node, data)
    if cuts is None or not all(cut.fits for cut in cuts):
        return None
    e, value = Expansion(node, opset), data
    for number, cut in enumerate(cuts):
        if cut.is_constant:
            value = e.part(value, cut.axis, cut.start.offset, cut.end.offset)
        else:
            value = e.op("Gather", value, _indices(e, starts, number, cut.length, cut.size), axis=cut.axis)
    return [value], e.nodes


def _cuts(node: ir.Node, data: ir.Value) -> list[_Cut] | None:
    """What a Slice takes of each of its axes; None if that is not known, or not every place of it."""
    _, starts, ends, axes, steps = [*node.inputs, None, None][:5]
    first, last = _given(starts), _given(ends)
    if first is None or last is None or data.shape is None:
        return None
    places = _constants(axes, range(len(first)))
    strides = _constants(steps, [1] * len(first))
    if places is None or strides is None or set(strides) - {1}:
        return None
    if len({len(first), len(last), len(places), len(strides)}) > 1:
        return None
    rank, cuts = len(data.shape), []
    for start, end, place in zip(first, last, places, strict=True):
        axis = place % rank if -rank <= place < rank else rank
        size = data.shape[axis] if axis < rank else None
        if not isinstance(size, int):
            return None
        cuts.append(_Cut(axis, size, start, end))
    return cuts


def _given(value: ir.Value | None) -> list[_Number] | None:
    """The elements of an operand, if there is one."""
    return None if value is None else _numbers(value)


def _constants(value: ir.Value | None, otherwise: Iterable[int]) -> list[int] | None:
    """The elements of an operand that are all known, or those it has where it is left out; None if they are not."""
    if value is None:
        return [*otherwise]
    found = _numbers(value)
    return None if found is None or any(each.root is not None for each in found) else [each.offset for each in found]


def _indices(e: Expansion, starts: ir.Value, number: int, length: int, size: int) -> ir.Value:
    """`length` indices from element `number` of `starts` on, counted from the end if it is negative, in an axis of `size`.

    If it is negative and the slice would pass the end of the axis, they are out of range.
    """
    start = e.part(starts, 0, number, number + 1)
    if starts.dtype != ir.DataType.INT64:
        start = e.cast(start, ir.DataType.INT64)
    end = e.op("Add", start, e.integers(length))
    zero = e.integers(0)
    is_negative = e.op("Less", start, zero)
    passes = e.op("Not", e.op("Less", end, zero))
    indices = e.op("Add", start, e.integers(*range(length)))
    return e.op("Where", e.op("And", is_negative, passes), e.integers(size), indices)


def _numbers(value: ir.Value, depth: int = 0) -> list[_Number] | None:
    """The elements of a small tensor of integers, in order; None if `value` is none, or its shape is not known."""
    tensor = value.const_value
    if tensor is not None:
        known = tensor.size <= RANK and tensor.dtype in _INTEGERS
        return [_Number(None, 0, int(each)) for each in tensor.numpy().reshape(-1)] if known else None
    found = _followed(value, depth + 1) if depth < 2 * RANK else None
    if found is not None:
        return found
    if value.shape is None or not value.shape.is_static() or value.dtype not in _INTEGERS:
        return None
    count = int(np.prod(value.shape.numpy()))
    return [_Number(value, index, 0) for index in range(count)] if count <= RANK else None


def _followed(value: ir.Value, depth: int) -> list[_Number] | None:
    """The elements of `value`, from those of the inputs of its node; None if the node is none of a few."""
    node = value.producer()
    if node is None or node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return None
    source = node.inputs[0]
    if node.op_type in _SAME or (node.op_type == "Cast" and (source.dtype, value.dtype) in _WIDER):
        return _numbers(source, depth)
    return _combined(node, depth) if node.op_type in ("Add", "Concat", "Sub") else None


def _combined(node: ir.Node, depth: int) -> list[_Number] | None:
    """The elements of a sum, a difference or a Concat of lists of numbers; None if they have no such form."""
    known = [each for each in node.inputs if each is not None and each.shape is not None]
    parts = [part for each in known if (part := _numbers(each, depth)) is not None]
    if len(parts) < len(node.inputs):
        return None
    ranks = {len(each.shape) for each in known if each.shape is not None}
    if node.op_type == "Concat":
        return [each for part in parts for each in part] if ranks == {1} else None
    return _sums(parts[0], parts[1], 1 if node.op_type == "Add" else -1) if max(ranks) <= 1 else None


def _sums(left: list[_Number], right: list[_Number], sign: int) -> list[_Number] | None:
    """The sums of two lists, or differences, of which one may have a single number; None if they have no such form."""
    count = max(len(left), len(right))
    if {len(left), len(right)} - {1, count}:
        return None
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    sums = [made for one, other in pairs if (made := one.plus(other, sign)) is not None]
    return sums if len(sums) == count else None
