"""Reductions. After the rewrites they have attribute `axes`, a run of neighbouring dimensions, which stay with size 1."""

from __future__ import annotations

import math

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.registry import (
    ANY,
    FLOAT,
    INDEX,
    WIDE,
    Operator,
    Types,
    all_of,
    constant_inputs,
    each,
    fp32_outputs,
    register,
)
from flashmem.compiler.operators.rewriting import axes_last, bad_axis, constant_integers, from_front, reshaped
from flashmem.compiler.operators.tiling_interface import along_others

_OF_NOTHING = {
    "ReduceL1": 0.0, "ReduceL2": 0.0, "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf, "ReduceMax": -np.inf,
    "ReduceMean": np.nan, "ReduceMin": np.inf, "ReduceProd": 1.0, "ReduceSum": 0.0, "ReduceSumSquare": 0.0,
}  # fmt: skip
"""Results of reductions of no elements."""

_SPLIT = {
    "ReduceL1": ("ReduceL1", "ReduceSum"),
    "ReduceL2": ("ReduceSumSquare", "ReduceSum"),
    "ReduceLogSum": ("ReduceSum", "ReduceLogSum"),
    "ReduceSumSquare": ("ReduceSumSquare", "ReduceSum"),
}
"""The reductions of the first run of axes and of the others, if they differ from the whole reduction."""


def _axes(node: Node) -> list[int]:
    """Reduced axes, counted from the front and sorted; empty if the node has no effect."""
    rank = len(node.input(0).shape)
    given = constant_integers(node, 1, "axes")
    if not given and node.attributes.get("noop_with_empty_axes", 0):
        return []
    return sorted(from_front(axis, rank) for axis in given or range(rank))


def _rewrite_reduce(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite a reduction: axes that are not neighbours are reduced in runs, one after the other."""
    x = node.input(0)
    output = node.outputs[0]
    if not x.size:
        kind = np.dtype(output.dtype)
        result = _OF_NOTHING[node.op]
        if kind.kind != "f" and np.isinf(result):  # the smallest or the largest number of the type
            limits = (False, True) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
            result = limits[result > 0]
        rewriter.replaced[output] = constant(output.name, np.full(output.shape, result, kind))
        return
    runs: list[list[int]] = []
    for axis in _axes(node):
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    value = x
    if not runs:  # of a scalar, or over no axes: each element is reduced alone
        value = reshaped(rewriter, x, (*x.shape, 1))
        runs = [[len(x.shape)]]
    inner, outer = _SPLIT.get(node.op, (node.op, node.op))
    divided = len(runs) > 1 and node.op == "ReduceMean" and x.dtype != "float32"  # divide, and so truncate, only once
    if divided:
        inner = outer = "ReduceSum"
        value = rewriter.emit("Cast", [x], x.shape, "int64", f"{node.name}.wide", rounding=None)
    for i, run in enumerate(runs):
        shape = tuple(1 if a in run else size for a, size in enumerate(value.shape))
        op = node.op if len(runs) == 1 else inner if i == 0 else outer
        value = rewriter.emit(op, [value], shape, value.dtype, f"{node.name}.{i}", axes=tuple(run))
    if divided:
        count = constant(f"{node.name}.count", np.array(x.size // value.size, np.int64))
        value = rewriter.emit("Div", [value, count], value.shape, "int64", f"{node.name}.mean")
        value = rewriter.emit("Cast", [value], value.shape, x.dtype, f"{node.name}.narrow", rounding=None)
    if len(runs) > 1 and node.op == "ReduceL2":
        value = rewriter.emit("Sqrt", [value], value.shape, x.dtype, f"{node.name}.root")
    rewriter.add("Reshape", [value], output)


def _check_reduce(node: Node) -> str | None:
    shape = node.input(0).shape
    given = constant_integers(node, 1, "axes") or []
    if (reason := bad_axis(node, given, len(shape))) is not None:
        return reason
    if node.op == "ReduceMean" and node.input(0).dtype != "float32" and not node.input(0).size:
        return "ReduceMean of no integers"
    return None


def _rewrite_global_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite global pooling as a reduction over the spatial axes."""
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    axes = tuple(range(2, len(node.input(0).shape)))
    rewriter.add(op, [node.input(0)], node.outputs[0], node.name, axes=axes)


def _check_global_pool(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    return None if rank > 2 else f"{node.op} of a tensor of {rank} dimensions"


def _reduction(name: str, types: Types) -> Operator:
    return Operator(
        name, (types, INDEX), check=all_of(constant_inputs(1), _check_reduce), rewrite=_rewrite_reduce, kernel="reduction",
        layout="either", remap=axes_last, keep_fp32=fp32_outputs, operator_class="hierarchical", empty=True,
        tiling=along_others, prologue=True,
    )  # fmt: skip


register(
    __name__,
    # No square root or logarithm of integers: ONNX does not define how they are rounded.
    *(_reduction(f"Reduce{kind}", FLOAT) for kind in ("L2", "LogSum", "LogSumExp")),
    *(_reduction(f"Reduce{kind}", WIDE) for kind in ("L1", "Mean", "Prod", "Sum", "SumSquare")),
    *(_reduction(f"Reduce{kind}", ANY) for kind in ("Max", "Min")),
    *each(
        ("GlobalAveragePool", "GlobalMaxPool"), inputs=(FLOAT,), check=_check_global_pool, rewrite=_rewrite_global_pool,
        operator_class="hierarchical",
    ),
)  # fmt: skip


def whole_rows(node: Node) -> bool:
    """Whether the reduced axes of a node are its input's last ones, so that each row is contiguous in memory."""
    return math.prod(node.input(0).shape[node.attributes["axes"][-1] + 1 :]) == 1
