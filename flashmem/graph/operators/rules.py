"""Operators that are not elementwise, and the forms of them that cannot run yet.

A rule gives the reason why a node cannot run, or None. Everything a rule lets through, `graph.normalize` rewrites into the few
forms that the code generator knows.
"""

from __future__ import annotations

from collections.abc import Callable

from flashmem.graph.ir import Node

Rule = Callable[[Node], str | None]


def _constant_inputs(*indices: int) -> Rule:
    """These inputs, where given, must be constants."""

    def rule(node: Node) -> str | None:
        for index in indices:
            value = node.optional(index)
            if value is not None and value.constant is None:
                return f"{node.op} with input {index} ({value.name}) computed at run time is not implemented"
        return None

    return rule


def _convolution(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    if rank not in (3, 4):
        return f"{node.op} over {rank - 2} spatial dimensions is not implemented (1 and 2 are)"
    if node.input(1).constant is None:
        return f"{node.op} with weights computed at run time is not implemented"
    if node.op == "ConvTranspose" and node.attributes.get("group", 1) != 1:
        return "ConvTranspose with groups is not implemented"
    return None


def _pool(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    if rank not in (3, 4):
        return f"{node.op} over {rank - 2} spatial dimensions is not implemented (1 and 2 are)"
    if len(node.outputs) > 1:
        return f"{node.op} with the indices as second output is not implemented"
    return None


def _resize(node: Node) -> str | None:
    mode, coordinates = (node.attributes.get(name) for name in ("mode", "coordinate_transformation_mode"))
    if mode not in (None, "nearest", "linear", "cubic"):
        return f"{node.op} with mode {mode!r} is not implemented"
    if mode in ("linear", "cubic") and node.input(0).dtype != "float32":
        return f"{node.op} of integers with mode {mode!r} is not implemented"
    if node.attributes.get("antialias", 0) and mode not in ("linear", "cubic"):
        return f"{node.op} with antialias and mode 'nearest' is not defined"
    if coordinates == "tf_crop_and_resize" and node.optional(1) is None:
        return f"{node.op} with tf_crop_and_resize lacks the region to crop"
    crops = coordinates == "tf_crop_and_resize" or node.op == "Upsample"
    return _constant_inputs(*([1] if crops else []), 2, 3)(node)


def _gather(node: Node) -> str | None:
    return None if node.input(1).dtype == "int32" else "Gather with indices that are not integers"


def _pad(node: Node) -> str | None:
    mode = node.attributes.get("mode", "constant")
    if mode not in ("constant", "edge", "reflect"):
        return f"Pad with mode {mode!r} is not implemented"
    return _constant_inputs(1, 2, 3)(node)


def _normalization(node: Node) -> str | None:
    if len(node.outputs) > 1 and node.op == "LayerNormalization":
        return "LayerNormalization with mean and deviation as outputs is not implemented"
    return None


def _batch_normalization(node: Node) -> str | None:
    if node.attributes.get("training_mode", 0) or len(node.outputs) > 1:
        return "BatchNormalization in training mode is not implemented"
    return _constant_inputs(1, 2, 3, 4)(node)


def _always(node: Node) -> str | None:
    return None


RULES: dict[str, Rule] = {
    "AveragePool": _pool,
    "BatchNormalization": _batch_normalization,
    "Clip": _constant_inputs(1, 2),
    "Concat": _always,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Expand": _always,
    "Flatten": _always,
    "Gather": _gather,
    "Gemm": _always,
    "GlobalAveragePool": _always,
    "GlobalMaxPool": _always,
    "GroupNormalization": _constant_inputs(1, 2),
    "InstanceNormalization": _constant_inputs(1, 2),
    "LayerNormalization": _normalization,
    "LogSoftmax": _always,
    "MatMul": _always,
    "MaxPool": _pool,
    "Pad": _pad,
    **{
        f"Reduce{kind}": _constant_inputs(1)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Reshape": _always,
    "Resize": _resize,
    "Slice": _constant_inputs(1, 2, 3, 4),
    "Softmax": _always,
    "Split": _constant_inputs(1),
    "Squeeze": _always,
    "Tile": _constant_inputs(1),
    "Transpose": _always,
    "Unsqueeze": _always,
    "Upsample": _resize,
}
