"""Selecting and counting along an axis: largest elements and their positions, cumulative sums and products, position masks."""

from __future__ import annotations

import math

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.indexing.operators import gather_elements
from flashmem.compiler.operators.registry import (
    ANY,
    FLOAT,
    NUMBERS,
    WIDE,
    Operator,
    Types,
    all_of,
    constant_inputs,
    each,
    register,
)
from flashmem.compiler.operators.rewriting import bad_axis, constant_integers, from_front, reshaped, too_long
from flashmem.compiler.operators.tiling_interface import along_others

SHAPED_BY_DATA = {
    "Compress": "make its condition a constant, or keep all elements and mask them with Where",
    "NonZero": "keep all elements and mask them with Where, or end the model before it",
    "OneHot": "make its depth a constant",
    "TopK": "make its k a constant",
    "Unique": "end the model before it",
}
"""Operators whose output shape depends on data, each with a remedy: shapes must be known at compile time."""

_INT64: Types = frozenset({"int64"})


def _rewrite_extreme(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite ArgMax and ArgMin: the axis is counted from the front. A kept axis of size 1 changes nothing in memory."""
    x = node.input(0)
    axis = from_front(int(node.attributes.get("axis", 0)), len(x.shape))
    last = bool(node.attributes.get("select_last_index", 0))
    rewriter.add(node.op, [x], node.outputs[0], node.name, axis=axis, last=last)


def _check_axis(node: Node) -> str | None:
    return bad_axis(node, [int(node.attributes.get("axis", 0))], len(node.input(0).shape))


def _rewrite_top(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite TopK: positions of the elements, and a gather of the elements. All results are sorted, even if not required.

    NaN counts as the largest number, as in ONNX Runtime and numpy: first among the largest, last among the smallest.
    """
    x = node.input(0)
    values = node.outputs[0]
    axis = from_front(int(node.attributes.get("axis", -1)), len(x.shape))
    indices = node.outputs[1] if len(node.outputs) > 1 else Value(f"{values.name}.indices", values.shape, "int64")
    if not indices.name:  # the model does not use them
        indices = Value(f"{values.name}.indices", values.shape, "int64")
    largest = bool(node.attributes.get("largest", 1))
    kept = {"k": indices.shape[axis], "largest": largest, "nan_first": largest}
    rewriter.add("TopK", [x], indices, f"{node.name}.indices", axis=axis, **kept)
    if values.name:
        gather_elements(rewriter, x, indices, axis, values, node.name)


def _check_top(node: Node) -> str | None:
    shape = node.input(0).shape
    axis = int(node.attributes.get("axis", -1))
    if (reason := bad_axis(node, [axis], len(shape))) is not None:
        return reason
    k = (constant_integers(node, 1, "k") or [0])[0]
    return None if 0 <= k <= shape[axis] else f"TopK of {k} among {shape[axis]} elements"


def _rewrite_scan(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite CumSum and CumProd: the axis becomes an attribute, counted from the front."""
    x = node.input(0)
    axis = from_front((constant_integers(node, 1, "axis") or [0])[0], len(x.shape))
    exclusive, reverse = (bool(node.attributes.get(name, 0)) for name in ("exclusive", "reverse"))
    rewriter.add(node.op, [x], node.outputs[0], node.name, axis=axis, exclusive=exclusive, reverse=reverse)


def _check_scan(node: Node) -> str | None:
    axes = constant_integers(node, 1, "axis") or []
    if len(axes) != 1:
        return f"{node.op} along {len(axes)} axes"
    return bad_axis(node, axes, len(node.input(0).shape))


def _positions(name: str, size: int, axis: int = 0, rank: int = 1) -> Value:
    """0, 1, 2 ... along an axis of a tensor of `rank` dimensions."""
    return constant(name, np.arange(size).reshape(tuple(size if a == axis else 1 for a in range(rank))))


def _rewrite_hardmax(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Hardmax: 1 at the position of ArgMax; before operator set 13, all dimensions from the axis on are one."""
    x = node.input(0)
    output = node.outputs[0]
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", -1 if opset >= 13 else 1)), rank)
    if opset < 13:
        rows = int(np.prod(x.shape[:axis], dtype=np.int64))
        x = reshaped(rewriter, x, (rows, x.size // rows))
        axis = 1
        rank = 2
    shape = tuple(1 if a == axis else size for a, size in enumerate(x.shape))
    found = rewriter.emit("ArgMax", [x], shape, "int64", f"{node.name}.place", axis=axis, last=False)
    position = _positions(f"{node.name}.positions", x.shape[axis], axis, rank)
    is_there = rewriter.emit("Equal", [found, position], x.shape, "bool", f"{node.name}.there")
    # A row that begins with NaN has no largest element, and stays 0.
    is_nan = rewriter.emit("IsNaN", [x], x.shape, "bool", f"{node.name}.nan")
    is_number = rewriter.emit("Not", [is_nan], x.shape, "bool", f"{node.name}.number")
    is_there = rewriter.emit("And", [is_there, is_number], x.shape, "bool", f"{node.name}.largest")
    value = rewriter.emit("Cast", [is_there], x.shape, output.dtype, f"{node.name}.cast", rounding=None)
    rewriter.add("Reshape", [value], output)


def _check_hardmax(node: Node) -> str | None:
    shape = node.input(0).shape
    axis = int(node.attributes.get("axis", -1))
    # Before operator set 13, all dimensions from this one on are one.
    return bad_axis(node, [axis], len(shape)) or too_long(node, math.prod(shape[axis:]))


def _rewrite_one_hot(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite OneHot: compare each index, counted from the front, with each position; one out of range equals none."""
    indices = node.input(0)
    values = node.input(2)
    output = node.outputs[0]
    depth = (constant_integers(node, 1, "depth") or [0])[0]
    axis = from_front(int(node.attributes.get("axis", -1)), len(output.shape))
    shape = (*output.shape[:axis], 1, *output.shape[axis + 1 :])
    if indices.dtype != "int64":
        indices = rewriter.emit("Cast", [indices], indices.shape, "int64", f"{node.name}.indices", rounding=None)
    given = reshaped(rewriter, indices, shape)
    zero, size = (constant(f"{node.name}.{n}", np.array(n, np.int64)) for n in (0, depth))
    is_negative = rewriter.emit("Less", [given, zero], shape, "bool", f"{node.name}.negative")
    turned = rewriter.emit("Add", [given, size], shape, "int64", f"{node.name}.turned")
    place = rewriter.emit("Where", [is_negative, turned, given], shape, "int64", f"{node.name}.place")
    position = _positions(f"{node.name}.positions", depth, axis, len(shape))
    is_there = rewriter.emit("Equal", [place, position], output.shape, "bool", f"{node.name}.there")
    off, on = (
        rewriter.emit("Slice", [values], (1,), values.dtype, f"{node.name}.value{i}", starts=(i,), steps=(1,)) for i in (0, 1)
    )
    rewriter.add("Where", [is_there, on, off], output, node.name)


def _check_one_hot(node: Node) -> str | None:
    depth = constant_integers(node, 1, "depth") or []
    if len(depth) != 1:
        return f"OneHot with a depth of {len(depth)} numbers"
    if node.input(2).shape != (2,):
        return f"OneHot with values of shape {node.input(2).shape}, not (2,)"
    axis = int(node.attributes.get("axis", -1))
    return bad_axis(node, [axis], len(node.outputs[0].shape)) or too_long(node, depth[0])


def _rewrite_eye(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite EyeLike: compare each column with the position of its row's 1."""
    output = node.outputs[0]
    rows, columns = output.shape
    diagonal = constant(f"{node.name}.diagonal", (np.arange(rows) + int(node.attributes.get("k", 0))).reshape(-1, 1))
    is_on = rewriter.emit(
        "Equal", [diagonal, _positions(f"{node.name}.columns", columns)], output.shape, "bool", f"{node.name}.on"
    )
    rewriter.add("Cast", [is_on], output, node.name, rounding=None)


def _check_eye(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    return too_long(node, *node.outputs[0].shape) if rank == 2 else f"EyeLike of a tensor of {rank} dimensions"


def _rewrite_triangle(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Trilu: select by the column at which each row crosses the diagonal."""
    x = node.input(0)
    k = node.optional(1)
    output = node.outputs[0]
    rows, columns = x.shape[-2:]
    crossing = _positions(f"{node.name}.rows", rows, 0, 2)
    if k is not None and k.constant is None:
        k = reshaped(rewriter, k, (1, 1))
        crossing = rewriter.emit("Add", [crossing, k], (rows, 1), "int64", f"{node.name}.crossing")
    elif k is not None:
        crossing = constant(crossing.name, np.arange(rows).reshape(-1, 1) + (constant_integers(node, 1, "k") or [0])[0])
    upper = bool(node.attributes.get("upper", 1))
    column = _positions(f"{node.name}.columns", columns)
    compare = "GreaterOrEqual" if upper else "LessOrEqual"
    is_kept = rewriter.emit(compare, [column, crossing], (rows, columns), "bool", f"{node.name}.kept")
    zero = constant(f"{node.name}.zero", np.zeros((), x.dtype))
    rewriter.add("Where", [is_kept, x, zero], output, node.name)


def _check_triangle(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    k = node.optional(1)
    if rank < 2:
        return f"Trilu of a tensor of {rank} dimensions"
    if k is not None and k.size != 1:
        return f"Trilu with {k.size} diagonals ({k.name})"
    return too_long(node, *node.input(0).shape[-2:])


register(
    __name__,
    *each(
        ("ArgMax", "ArgMin"), inputs=(NUMBERS,), check=_check_axis, rewrite=_rewrite_extreme, kernel="extreme",
        tiling=along_others,
    ),
    *each(
        ("CumProd", "CumSum"), inputs=(WIDE,), check=all_of(constant_inputs(1), _check_scan), rewrite=_rewrite_scan,
        kernel="scan", tiling=along_others,
    ),
    Operator("EyeLike", (ANY,), check=_check_eye, rewrite=_rewrite_eye),
    Operator("Hardmax", (FLOAT,), check=_check_hardmax, rewrite=_rewrite_hardmax),
    Operator(
        "OneHot", (NUMBERS, NUMBERS, ANY), check=all_of(constant_inputs(1), _check_one_hot), rewrite=_rewrite_one_hot
    ),
    Operator("TopK", (NUMBERS, _INT64), check=all_of(constant_inputs(1), _check_top), rewrite=_rewrite_top, kernel="top"),
    Operator("Trilu", (ANY, _INT64), check=_check_triangle, rewrite=_rewrite_triangle),
)  # fmt: skip
