"""Softmax and normalizations, over `axes`, a run of neighbouring dimensions; scale and bias are fused after the kernel."""

from __future__ import annotations

import numpy as np

from flashmem.graph.builder import Rewriter, constant, derived
from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.lowering import axes_last, bad_axis, chain, elementwise_chain, from_front, reshaped, spreads
from flashmem.graph.operators.reduction import whole_rows
from flashmem.graph.operators.registry import FLOAT, Check, Operator, all_of, constant_inputs, each, register


def _columns(node: Node) -> int:
    axes: tuple[int, ...] = node.attributes["axes"]
    return axes[0] if whole_rows(node) else axes[-1] + 1


def _epsilon(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-5))


def _rewrite_softmax(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Softmax over one axis; before operator set 13 everything from `axis` on is one dimension."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", -1 if opset >= 13 else 1)), rank)
    axes = (axis,) if opset >= 13 else tuple(range(axis, rank))
    if not axes:  # behind the last dimension: rows of one element
        x, axes = reshaped(rewriter, x, (*x.shape, 1)), (rank,)
        value = rewriter.emit(node.op, [x], x.shape, x.dtype, node.name, axes=axes)
        rewriter.add("Reshape", [value], output)
        return
    rewriter.add(node.op, [x], output, node.name, axes=axes)


def _check_axis(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    axis = int(node.attributes.get("axis", -1))
    return None if node.op != "LayerNormalization" and axis == rank else bad_axis(node, [axis], rank)


def _rewrite_batch_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Folded into one Mul and one Add per channel, which the producer's epilogue takes in."""
    arrays = []
    for i in range(1, 5):
        source = node.input(i).constant
        assert source is not None
        arrays.append(np.asarray(source.array(), np.float64))
    scale, bias, mean, variance = arrays
    factor = scale / np.sqrt(variance + _epsilon(node))
    shape = (-1, *[1] * (len(node.input(0).shape) - 2))
    steps = [
        ("Mul", constant(f"{node.name}.factor", factor.astype(np.float32).reshape(shape))),
        ("Add", constant(f"{node.name}.shift", (bias - mean * factor).astype(np.float32).reshape(shape))),
    ]
    elementwise_chain(rewriter, node, node.input(0), steps)


def _check_batch_normalization(node: Node) -> str | None:
    if node.attributes.get("training_mode", 0) or len(node.outputs) > 1:
        return "BatchNormalization in training mode is not implemented"
    return None


def _one_a_channel(*indices: int) -> Check:
    """A check: these inputs have one number for each channel."""

    def check(node: Node) -> str | None:
        shape = node.input(0).shape
        if len(shape) < 2:
            return f"{node.op} of a tensor of {len(shape)} dimensions"
        for index in indices:
            if node.input(index).shape != (shape[1],):
                return f"{node.op} of {shape[1]} channels with {node.input(index).name} of shape {node.input(index).shape}"
        return None

    return check


def _rewrite_layer_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Normalize, then scale and bias."""
    x, scale, bias = node.input(0), node.input(1), node.optional(2)
    rank = len(x.shape)
    axes = tuple(range(from_front(int(node.attributes.get("axis", -1)), rank), rank))
    steps = [("Mul", scale), *([("Add", bias)] if bias is not None else [])]
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=_epsilon(node))


def _check_layer_normalization(node: Node) -> str | None:
    if len(node.outputs) > 1:
        return "LayerNormalization with mean and deviation as outputs is not implemented"
    if (reason := _check_axis(node)) is not None:
        return reason
    shape = node.input(0).shape
    for value in (node.input(1), node.optional(2)):
        if value is not None and not spreads(value.shape, shape):
            return f"LayerNormalization of shape {shape} with {value.name} of shape {value.shape}"
    return None


def _rewrite_instance_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Normalize over the spatial axes, then scale and bias per channel."""
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    rank = len(x.shape)
    shape = (scale.shape[0], *[1] * (rank - 2))
    steps = [("Mul", reshaped(rewriter, scale, shape)), ("Add", reshaped(rewriter, bias, shape))]
    axes = tuple(range(2, rank))
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=_epsilon(node))


def _check_instance_normalization(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    return None if rank > 2 else f"InstanceNormalization of a tensor of {rank} dimensions"


def _rewrite_group_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Groups of channels become rows; scale and bias stay per channel (per group before operator set 21)."""
    x, output = node.input(0), node.outputs[0]
    groups = int(node.attributes["num_groups"])
    batch, channels = x.shape[:2]
    rows = reshaped(rewriter, x, (batch * groups, x.size // (batch * groups)))
    name = f"{node.name}.rows"
    normal = rewriter.emit("Normalize", [rows], rows.shape, x.dtype, name, axes=(1,), epsilon=_epsilon(node))
    shape = (channels, *[1] * (len(x.shape) - 2))
    steps: list[tuple[str, Value]] = []
    for op, value in (("Mul", node.input(1)), ("Add", node.input(2))):
        if value.shape[0] != channels:
            value = derived(value, f"{value.name}.channels", (channels,), lambda a: a.repeat(channels // groups))
        steps.append((op, reshaped(rewriter, value, shape)))
    normal = reshaped(rewriter, normal, x.shape)
    elementwise_chain(rewriter, Node(node.op, node.name, [normal], [output], {}), normal, steps)


def _check_group_normalization(node: Node) -> str | None:
    shape, groups = node.input(0).shape, int(node.attributes.get("num_groups", 0))
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        return f"GroupNormalization of shape {shape} in {groups} groups"
    for index in (1, 2):
        if node.input(index).shape not in ((shape[1],), (groups,)):
            return f"GroupNormalization of {shape[1]} channels with {node.input(index).name} of shape {node.input(index).shape}"
    return None


register(
    __name__,
    Operator(
        "BatchNormalization", (FLOAT,),
        check=all_of(_check_batch_normalization, constant_inputs(1, 2, 3, 4), _one_a_channel(1, 2, 3, 4)),
        rewrite=_rewrite_batch_normalization,
    ),
    Operator(
        "GroupNormalization", (FLOAT,), check=all_of(constant_inputs(1, 2), _check_group_normalization),
        rewrite=_rewrite_group_normalization, operator_class="hierarchical",
    ),
    Operator(
        "InstanceNormalization", (FLOAT,), check=all_of(_check_instance_normalization, _one_a_channel(1, 2)),
        rewrite=_rewrite_instance_normalization, operator_class="hierarchical",
    ),
    Operator(
        "LayerNormalization", (FLOAT,), check=_check_layer_normalization, rewrite=_rewrite_layer_normalization,
        operator_class="hierarchical",
    ),
    *each(
        ("Softmax", "LogSoftmax"), inputs=(FLOAT,), check=_check_axis, rewrite=_rewrite_softmax, kernel="reduction",
        layout="either", remap=axes_last, columns=_columns, operator_class="hierarchical",
    ),
    Operator(
        "Normalize", (FLOAT,), kernel="reduction", layout="either", remap=axes_last, columns=_columns,
        operator_class="hierarchical", onnx=False,
    ),
)  # fmt: skip
