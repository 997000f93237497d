"""Slices of fixed length at a position computed at run time, expanded to Gathers.

The length is provable if each end is its start plus a constant: both are followed through integer arithmetic to the same
number. A slice that would reach outside its axis has another length in ONNX. Here its indices are out of range, which ends the
run with an error, like any other index outside a table.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def expand(node: ir.Node, opset: int) -> tuple[Sequence[ir.Value], Sequence[ir.Node]] | None:
    """The replacement of a Slice at a position computed at run time: its output, and the nodes. None for any other node."""
    if node.op_type != "Slice" or node.domain not in ("", "ai.onnx") or opset < 10 or len(node.inputs) < 3:
        return None
    data, starts, ends, axes, steps = [*node.inputs, None, None][:5]
    if data is None or starts is None or ends is None or data.shape is None or starts.const_value is not None:
        return None
    first = _numbers(starts)
    last = _numbers(ends)
    places = [_Number(None, 0, axis) for axis in range(len(first or ()))] if axes is None else _numbers(axes)
    strides = [_Number(None, 0, 1)] * len(first or ()) if steps is None else _numbers(steps)
    if (
        first is None
        or last is None
        or places is None
        or strides is None
        or len({*map(len, (first, last, places, strides))}) > 1
    ):
        return None
    if any(each.root is not None for each in (*places, *strides)) or any(each.offset != 1 for each in strides):
        return None
    e = Expansion(node, opset)
    value = data
    rank = len(data.shape)
    for number, (start, end, place) in enumerate(zip(first, last, places, strict=True)):
        axis = place.offset % rank if -rank <= place.offset < rank else rank
        size = data.shape[axis] if axis < rank else None
        if not isinstance(size, int):
            return None
        if start.root is None and end.root is None:
            value = e.part(value, axis, start.offset, end.offset)
            continue
        length = end.offset - start.offset
        if (start.root, start.index) != (end.root, end.index) or not 0 < length <= min(size, TABLE):
            return None
        value = e.op("Gather", value, _indices(e, starts, number, length, size), axis=axis)
    return [value], e.nodes


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
    if node.op_type not in ("Add", "Concat", "Sub"):
        return None
    parts = [None if each is None else _numbers(each, depth) for each in node.inputs]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.op_type == "Concat":
        flat = all(each is not None and each.shape is not None and len(each.shape) == 1 for each in node.inputs)
        return [each for part in known for each in part] if flat else None
    left, right = known
    count = max(len(left), len(right))
    if {len(left), len(right)} - {1, count} or any(each is None or each.shape is None for each in node.inputs):
        return None
    if any(len(each.shape) > 1 for each in node.inputs if each is not None and each.shape is not None):
        return None
    pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
    sums = [one.plus(other, 1 if node.op_type == "Add" else -1) for one, other in pairs]
    whole = [each for each in sums if each is not None]
    return whole if len(whole) == count else None
