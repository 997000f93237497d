"""Rewrites of reductions and normalizations, over opsets and over axes that are not neighbours."""

from __future__ import annotations

import numpy as np

from flashmem.graph.builder import Rewriter, constant, derived
from flashmem.graph.ir import Node
from flashmem.graph.rewrites.common import chain, elementwise_chain, from_front, reshaped, settled_integers


def rewrite_global_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Global pooling is a reduction over the spatial axes."""
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    axes = tuple(range(2, len(node.input(0).shape)))
    rewriter.add(op, [node.input(0)], node.outputs[0], node.name, axes=axes)


def rewrite_batch_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Folded into one Mul and one Add per channel, which the producer's epilogue takes in."""
    arrays = []
    for i in range(1, 5):
        source = node.input(i).constant
        assert source is not None
        arrays.append(np.asarray(source.array(), np.float64))
    scale, bias, mean, variance = arrays
    factor = scale / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5)))
    shape = (-1, *[1] * (len(node.input(0).shape) - 2))
    steps = [
        ("Mul", constant(f"{node.name}.factor", factor.astype(np.float32).reshape(shape))),
        ("Add", constant(f"{node.name}.shift", (bias - mean * factor).astype(np.float32).reshape(shape))),
    ]
    elementwise_chain(rewriter, node, node.input(0), steps)


def rewrite_layer_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Normalize, then scale and bias."""
    x, scale, bias = node.input(0), node.input(1), node.optional(2)
    rank = len(x.shape)
    axes = tuple(range(from_front(int(node.attributes.get("axis", -1)), rank), rank))
    steps = [("Mul", scale), *([("Add", bias)] if bias is not None else [])]
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=epsilon)


def rewrite_instance_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Normalize over the spatial axes, then scale and bias per channel."""
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    rank = len(x.shape)
    shape = (scale.shape[0], *[1] * (rank - 2))
    steps = [("Mul", reshaped(rewriter, scale, shape)), ("Add", reshaped(rewriter, bias, shape))]
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=tuple(range(2, rank)), epsilon=epsilon)


def rewrite_group_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Groups of channels become rows; scale and bias stay per channel (per group before opset 21)."""
    x, scale, bias, output = node.input(0), node.input(1), node.input(2), node.outputs[0]
    groups = int(node.attributes["num_groups"])
    batch, channels = x.shape[:2]
    rows = reshaped(rewriter, x, (batch * groups, x.size // (batch * groups)))
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    normal = rewriter.emit("Normalize", [rows], rows.shape, x.dtype, f"{node.name}.rows", axes=(1,), epsilon=epsilon)
    normal = reshaped(rewriter, normal, x.shape)
    shape = (channels, *[1] * (len(x.shape) - 2))
    steps = []
    for op, value in (("Mul", scale), ("Add", bias)):
        if value.shape[0] != channels:
            value = derived(value, f"{value.name}.channels", (channels,), lambda a: a.repeat(channels // groups))
        steps.append((op, reshaped(rewriter, value, shape)))
    node = Node(node.op, node.name, [normal], [output], {})
    elementwise_chain(rewriter, node, normal, steps)


def rewrite_softmax(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Softmax over one axis, or from it on before opset 13."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", -1 if opset >= 13 else 1)), rank)
    # Before opset 13 everything from `axis` on is one dimension.
    axes = (axis,) if opset >= 13 else tuple(range(axis, rank))
    rewriter.add(node.op, [x], output, node.name, axes=axes)


def rewrite_reduce(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Reductions over axes that are not neighbours are done one run of axes after the other."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    given = settled_integers(node, 1, "axes")
    if not given and node.attributes.get("noop_with_empty_axes", 0):
        rewriter.add("Identity", [x], output, node.name)
        return
    axes = sorted(from_front(a, rank) for a in given or range(rank))
    runs: list[list[int]] = []
    for axis in axes:
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    inner, outer = _SPLIT_REDUCTION.get(node.op, (node.op, node.op))
    value = x
    for i, run in enumerate(runs):
        shape = tuple(1 if a in run else size for a, size in enumerate(value.shape))
        op = node.op if len(runs) == 1 else inner if i == 0 else outer
        value = rewriter.emit(op, [value], shape, x.dtype, f"{node.name}.{i}", axes=tuple(run))
    if len(runs) > 1 and node.op == "ReduceL2":
        value = rewriter.emit("Sqrt", [value], value.shape, x.dtype, f"{node.name}.root")
    rewriter.add("Reshape", [value], output)


_SPLIT_REDUCTION = {
    "ReduceL1": ("ReduceL1", "ReduceSum"),
    "ReduceL2": ("ReduceSumSquare", "ReduceSum"),
    "ReduceLogSum": ("ReduceSum", "ReduceLogSum"),
    "ReduceLogSumExp": ("ReduceLogSumExp", "ReduceLogSumExp"),
    "ReduceSumSquare": ("ReduceSumSquare", "ReduceSum"),
}
