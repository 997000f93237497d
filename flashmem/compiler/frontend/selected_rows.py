"""The boxes that NonMaxSuppression selects: which axis of which value has one place for each of them.

A value with such an axis has room for the most boxes there can be. Places behind the last box have valid data, of another box.
A node may read it if it computes each place from the same place of its inputs. Then the places behind the last box reach no
other one, and a run drops them from the outputs. Every other node, such as a sum over the boxes, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from flashmem.compiler.operators import REGISTRY


@dataclass(frozen=True)
class SelectedRows:
    """The axis with one place for each box, and the output of the NonMaxSuppression that selects the boxes."""

    axis: int
    of: ir.Value


Known = dict[ir.Value, SelectedRows]
"""The values with such an axis."""


def follow(node: ir.Node, known: Known) -> str | None:
    """Add the outputs of `node` to `known` if they have such an axis. Returns why the node cannot run, or None."""
    if node.op_type == "NonMaxSuppression" and node.domain in ("", "ai.onnx"):
        known[node.outputs[0]] = SelectedRows(0, node.outputs[0])
        return None
    read = [None if value is None else known.get(value) for value in node.inputs]
    found = [rows for rows in read if rows is not None]
    if not found or not all(_is_known(value) for value in (*node.inputs, *node.outputs) if value is not None):
        return None
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None and node.op_type in REGISTRY and REGISTRY[node.op_type].expression is not None:
        rule = _elementwise
    axis = rule(node, read) if rule is not None and len({rows.of for rows in found}) == 1 else None
    if axis is None:
        return (
            f"{node.op_type} of what NonMaxSuppression selects is not supported, because the number of boxes depends on data; "
            f"end the model before it"
        )
    for output in node.outputs:
        known[output] = replace(found[0], axis=axis)
    return None


def most_boxes(node: ir.Node, boxes: tuple[int, ...]) -> list[int] | None:
    """The shape of the output of NonMaxSuppression with room for all boxes that it can select; None if it is not known."""
    scores = node.inputs[1] if len(node.inputs) > 1 else None
    if len(boxes) != 3 or scores is None or scores.shape is None or not scores.shape.is_static() or len(scores.shape) != 3:
        return None
    images, classes, places = scores.shape.numpy()
    limit = node.inputs[2] if len(node.inputs) > 2 else None
    most = 0
    if limit is not None:
        given = limit.const_value
        most = places if given is None or not given.size else int(given.numpy().reshape(-1)[0])
    return [images * classes * max(0, min(most, places)), 3]


Rule = Callable[[ir.Node, Sequence[SelectedRows | None]], int | None]
"""Returns the axis of the outputs of a node that reads such rows (None for other inputs); None if it mixes places."""


def _is_known(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.is_static()


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    return () if value is None or value.shape is None else tuple(value.shape.numpy())


def _integers(node: ir.Node, index: int, attribute: str) -> list[int] | None:
    """Integers of the constant input `index`, or of an attribute."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is not None:
        return None if value.const_value is None else [int(i) for i in value.const_value.numpy().reshape(-1)]
    given = node.attributes.get(attribute)
    return None if given is None else [int(i) for i in np.atleast_1d(given.value)]


def _elementwise(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    rank = len(_shape(node.outputs[0]))
    axes = {rows.axis + rank - len(_shape(value)) for value, rows in zip(node.inputs, read, strict=True) if rows is not None}
    if len(axes) > 1:
        return None
    (axis,) = axes
    for value, rows in zip(node.inputs, read, strict=True):
        if rows is None and value is not None:
            place = axis + len(_shape(value)) - rank
            if place >= 0 and _shape(value)[place] != 1:
                return None
    return axis


def _gather(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    data = read[0]
    indices = read[1]
    rank = len(_shape(node.inputs[0]))
    along = (node.attributes.get_int("axis", 0) or 0) % max(rank, 1)
    if data is None:
        return None if indices is None else along + indices.axis
    if indices is not None or data.axis == along:
        return None
    return data.axis if data.axis < along else data.axis + len(_shape(node.inputs[1])) - 1


def _gather_nd(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    indices = read[1]
    if read[0] is not None or indices is None or node.attributes.get_int("batch_dims"):
        return None
    return indices.axis if indices.axis < len(_shape(node.inputs[1])) - 1 else None


def _slice(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    data = read[0]
    if data is None or any(read[1:]):
        return None
    rank = len(_shape(node.inputs[0]))
    axes = _integers(node, 3, "axes")
    if axes is None:
        starts = _integers(node, 1, "starts")
        axes = None if len(node.inputs) > 3 and node.inputs[3] is not None else list(range(len(starts or ())))
    return None if axes is None or data.axis in {axis % rank for axis in axes} else data.axis


def _split(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    data = read[0]
    along = (node.attributes.get_int("axis", 0) or 0) % len(_shape(node.inputs[0]))
    return None if data is None or data.axis == along else data.axis


def _transpose(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    rank = len(_shape(node.inputs[0]))
    perm = list(node.attributes.get_ints("perm") or reversed(range(rank)))
    return None if read[0] is None else perm.index(read[0].axis)


def _unsqueeze(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    axes = _integers(node, 1, "axes")
    rank = len(_shape(node.outputs[0]))
    if axes is None or read[0] is None:
        return None
    return [axis for axis in range(rank) if axis not in {each % rank for each in axes}][read[0].axis]


def _squeeze(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    axes = _integers(node, 1, "axes")
    shape = _shape(node.inputs[0])
    if axes is None or read[0] is None:
        return None
    kept = [axis for axis in range(len(shape)) if axis not in {each % len(shape) for each in axes}]
    return kept.index(read[0].axis) if read[0].axis in kept else None


def _reshape(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    """The axis that the model leaves open, or copies, if as many elements precede it as before."""
    data = read[0]
    wanted = _integers(node, 1, "shape")
    made = _shape(node.outputs[0])
    if data is None or wanted is None:
        return None
    source = _shape(node.inputs[0])
    for axis, size in enumerate(wanted):
        is_open = size == -1 or (size == 0 and axis == data.axis and not node.attributes.get_int("allowzero"))
        if is_open and made[axis] == source[data.axis] and math.prod(made[:axis]) == math.prod(source[: data.axis]):
            return axis
    return None


def _concat(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    rank = len(_shape(node.outputs[0]))
    along = (node.attributes.get_int("axis", 0) or 0) % rank
    axes = {None if rows is None else rows.axis for rows in read}
    return None if len(axes) > 1 or along in axes else axes.pop()


def _product(node: ir.Node, read: Sequence[SelectedRows | None]) -> int | None:
    """The rows of a matrix."""
    left = _shape(node.inputs[0])
    right = _shape(node.inputs[1])
    fits = len(left) >= 2 and len(right) == 2 and read[0] is not None and read[1] is None
    return read[0].axis if fits and read[0] is not None and read[0].axis < len(left) - 1 else None


_RULES: dict[str, Rule] = {
    "Cast": _elementwise,
    "Concat": _concat,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _elementwise,
    "MatMul": _product,
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
