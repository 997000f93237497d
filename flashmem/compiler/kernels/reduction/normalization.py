"""Softmax and normalizations over `axes`, a run of neighbouring dimensions; scale and bias fuse with the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.reduction.operators import whole_rows
from flashmem.compiler.operators.registry import FLOAT, Check, Operator, all_of, each, register
from flashmem.compiler.operators.rewriting import (
    axes_last,
    axis_last,
    bad_axis,
    chain,
    elementwise_chain,
    from_front,
    reshaped,
    spreads,
)
from flashmem.compiler.operators.tiling_interface import along_others


def _columns(node: Node) -> int:
    axes: tuple[int, ...] = node.attributes["axes"]
    return axes[0] if whole_rows(node) else axes[-1] + 1


def _epsilon(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-5))


def _rewrite_softmax(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Softmax over one axis; before operator set 13, all dimensions from `axis` on are one."""
    x = node.input(0)
    output = node.outputs[0]
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", -1 if opset >= 13 else 1)), rank)
    axes = (axis,) if opset >= 13 else tuple(range(axis, rank))
    if not axes:  # after the last dimension: rows of one element
        x = reshaped(rewriter, x, (*x.shape, 1))
        axes = (rank,)
        value = rewriter.emit(node.op, [x], x.shape, x.dtype, node.name, axes=axes)
        rewriter.add("Reshape", [value], output)
        return
    rewriter.add(node.op, [x], output, node.name, axes=axes)


def _check_axis(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    axis = int(node.attributes.get("axis", -1))
    return None if node.op != "LayerNormalization" and axis == rank else bad_axis(node, [axis], rank)


def _rewrite_batch_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite BatchNormalization as one Mul and one Add per channel, for the producer's epilogue; constants are precomputed."""
    if node.attributes.get("training_mode", 0):
        _rewrite_training(rewriter, node)
    elif any(node.input(i).constant is None for i in range(1, 5)):
        _normalize_channels(rewriter, node, node.input(3), node.input(4))
    else:
        arrays = []
        for i in range(1, 5):
            source = node.input(i).constant
            assert source is not None
            arrays.append(np.asarray(source.array(), np.float64))
        scale, bias, mean, variance = arrays
        factor = scale / np.sqrt(variance + _epsilon(node))
        shape = _channel_shape(node)
        steps = [
            ("Mul", constant(f"{node.name}.factor", factor.astype(np.float32).reshape(shape))),
            ("Add", constant(f"{node.name}.shift", (bias - mean * factor).astype(np.float32).reshape(shape))),
        ]
        elementwise_chain(rewriter, node, node.input(0), steps)


def _channel_shape(node: Node) -> tuple[int, ...]:
    """The shape in which one number per channel broadcasts over the input."""
    return (node.input(0).shape[1], *[1] * (len(node.input(0).shape) - 2))


def _number(name: str, value: float) -> Value:
    return constant(name, np.array([value], np.float32))


def _inverse_deviation(rewriter: Rewriter, name: str, variance: Value, epsilon: float, output: Value | None = None) -> Value:
    """1 / sqrt(variance + epsilon)."""
    shape = variance.shape
    dtype = variance.dtype
    moved = rewriter.emit("Add", [variance, _number(f"{name}.epsilon", epsilon)], shape, dtype, f"{name}.moved")
    root = rewriter.emit("Sqrt", [moved], shape, dtype, f"{name}.deviation")
    return rewriter.add("Reciprocal", [root], output or Value(f"{name}.inverse", shape, dtype))


def _normalize_channels(rewriter: Rewriter, node: Node, mean: Value, variance: Value) -> None:
    """Normalize by a mean and a variance of each channel that are computed at run time."""
    shape = _channel_shape(node)
    inverse = _inverse_deviation(rewriter, node.name, reshaped(rewriter, variance, shape), _epsilon(node))
    scale = reshaped(rewriter, node.input(1), shape)
    factor = rewriter.emit("Mul", [inverse, scale], shape, inverse.dtype, f"{node.name}.factor")
    steps = [
        ("Sub", reshaped(rewriter, mean, shape)), ("Mul", factor), ("Add", reshaped(rewriter, node.input(2), shape)),
    ]  # fmt: skip
    elementwise_chain(rewriter, node, node.input(0), steps)


def _moments(rewriter: Rewriter, node: Node, axes: Sequence[int]) -> tuple[Value, Value, Value]:
    """The mean of the first input over `axes`, the input minus its mean, and the mean of the squares of that difference."""
    x = node.input(0)

    def mean_of(value: Value, name: str) -> Value:
        """The mean over one run of neighbouring axes after the other, the last ones first."""
        runs: list[list[int]] = []
        for axis in sorted(axes):
            if runs and runs[-1][-1] == axis - 1:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        for i, run in enumerate(reversed(runs)):
            shape = tuple(1 if axis in run else size for axis, size in enumerate(value.shape))
            value = rewriter.emit("ReduceMean", [value], shape, x.dtype, f"{node.name}.{name}.{i}", axes=tuple(run))
        return value

    mean = mean_of(x, "mean")
    centred = rewriter.emit("Sub", [x, mean], x.shape, x.dtype, f"{node.name}.centred")
    square = rewriter.emit("Mul", [centred, centred], x.shape, x.dtype, f"{node.name}.square")
    return mean, centred, mean_of(square, "variance")


def _rewrite_mean_variance(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite MeanVarianceNormalization: the difference from the mean, over its root mean square.

    ONNX's own definition subtracts the mean's square from the mean of squares, which loses precision if the mean is far from 0.
    """
    x = node.input(0)
    rank = len(node.input(0).shape)
    axes = [from_front(int(axis), rank) for axis in node.attributes.get("axes", _SPATIAL)]
    _, centred, variance = _moments(rewriter, node, axes)
    shape = variance.shape
    kind = x.dtype
    root = rewriter.emit("Sqrt", [variance], shape, kind, f"{node.name}.deviation")
    moved = rewriter.emit("Add", [root, _number(f"{node.name}.least", _LEAST_DEVIATION)], shape, kind, f"{node.name}.moved")
    rewriter.add("Div", [centred, moved], node.outputs[0], node.name)


_SPATIAL = (0, 2, 3)
"""The default axes of MeanVarianceNormalization."""

_LEAST_DEVIATION = 1e-9
"""The number that MeanVarianceNormalization adds to the standard deviation."""


def _check_mean_variance(node: Node) -> str | None:
    axes = [int(axis) for axis in node.attributes.get("axes", _SPATIAL)]
    return bad_axis(node, axes, len(node.input(0).shape))


def _rewrite_training(rewriter: Rewriter, node: Node) -> None:
    """Rewrite BatchNormalization in training: normalize by the batch's mean and variance, and update the running ones."""
    x = node.input(0)
    channels = node.input(0).shape[1]
    shape = _channel_shape(node)
    kind = x.dtype
    mean, _, variance = _moments(rewriter, node, [0, *range(2, len(x.shape))])
    _normalize_channels(rewriter, node, reshaped(rewriter, mean, shape), reshaped(rewriter, variance, shape))
    momentum = float(node.attributes.get("momentum", 0.9))
    for output, running, current in zip(node.outputs[1:], (node.input(3), node.input(4)), (mean, variance), strict=False):
        name = output.name or f"{node.name}.unused"
        kept = rewriter.emit("Mul", [running, _number(f"{name}.old", momentum)], (channels,), kind, f"{name}.kept")
        now = reshaped(rewriter, current, (channels,))
        added = rewriter.emit("Mul", [now, _number(f"{name}.new", 1 - momentum)], (channels,), kind, f"{name}.added")
        rewriter.add("Add", [kept, added], output)


def _check_batch_normalization(node: Node) -> str | None:
    if len(node.outputs) > 1 and not node.attributes.get("training_mode", 0):
        return "BatchNormalization with several outputs, but not in training_mode, is not implemented"
    return None


def _one_a_channel(*indices: int) -> Check:
    """A check: these inputs have one number per channel."""

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
    """Rewrite LayerNormalization: Normalize, then scale and bias."""
    x = node.input(0)
    scale = node.input(1)
    bias = node.optional(2)
    rank = len(x.shape)
    axes = tuple(range(from_front(int(node.attributes.get("axis", -1)), rank), rank))
    steps = [("Mul", scale), *([("Add", bias)] if bias is not None else [])]
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=_epsilon(node))
    if len(node.outputs) == 1:
        return
    inner = (*x.shape[: axes[0]], *[1] * len(axes))
    kind = x.dtype
    mean = Value(f"{node.name}.mean", inner, kind)
    rewriter.add("ReduceMean", [x], mean, axes=axes)
    if node.outputs[1].name:
        rewriter.add("Reshape", [mean], node.outputs[1])
    if len(node.outputs) > 2 and node.outputs[2].name:
        centred = rewriter.emit("Sub", [x, mean], x.shape, kind, f"{node.name}.centred")
        square = rewriter.emit("Mul", [centred, centred], x.shape, kind, f"{node.name}.square")
        variance = rewriter.emit("ReduceMean", [square], inner, kind, f"{node.name}.variance", axes=axes)
        _inverse_deviation(rewriter, node.name, variance, _epsilon(node), node.outputs[2])


def _check_layer_normalization(node: Node) -> str | None:
    if (reason := _check_axis(node)) is not None:
        return reason
    shape = node.input(0).shape
    for value in (node.input(1), node.optional(2)):
        if value is not None and not spreads(value.shape, shape):
            return f"LayerNormalization of shape {shape} with {value.name} of shape {value.shape}"
    return None


def _rewrite_instance_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite InstanceNormalization: Normalize over the spatial axes, then scale and bias per channel."""
    x = node.input(0)
    scale = node.input(1)
    bias = node.input(2)
    rank = len(x.shape)
    shape = (scale.shape[0], *[1] * (rank - 2))
    steps = [("Mul", reshaped(rewriter, scale, shape)), ("Add", reshaped(rewriter, bias, shape))]
    axes = tuple(range(2, rank))
    chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=_epsilon(node))


def _check_instance_normalization(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    return None if rank > 2 else f"InstanceNormalization of a tensor of {rank} dimensions"


def _rewrite_group_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite GroupNormalization: groups of channels become rows; scale and bias are per channel.

    ONNX has withdrawn the form in which they are per group.
    """
    x = node.input(0)
    output = node.outputs[0]
    groups = int(node.attributes["num_groups"])
    batch, channels = x.shape[:2]
    rows = reshaped(rewriter, x, (batch * groups, x.size // (batch * groups)))
    name = f"{node.name}.rows"
    normal = rewriter.emit("Normalize", [rows], rows.shape, x.dtype, name, axes=(1,), epsilon=_epsilon(node))
    shape = (channels, *[1] * (len(x.shape) - 2))
    steps: list[tuple[str, Value]] = []
    for op, value in (("Mul", node.input(1)), ("Add", node.input(2))):
        steps.append((op, reshaped(rewriter, value, shape)))
    normal = reshaped(rewriter, normal, x.shape)
    elementwise_chain(rewriter, Node(node.op, node.name, [normal], [output], {}), normal, steps)


def _check_group_normalization(node: Node) -> str | None:
    shape = node.input(0).shape
    groups = int(node.attributes.get("num_groups", 0))
    if len(shape) < 2 or groups < 1 or shape[1] % groups:
        return f"GroupNormalization of shape {shape} in {groups} groups"
    return None


def _rewrite_lrn(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite LRN: the channel axis becomes an attribute, which changes with the layout."""
    numbers = {name: float(node.attributes.get(name, default)) for name, default in _LRN.items()}
    rewriter.add("LRN", [node.input(0)], node.outputs[0], node.name, axis=1, size=int(node.attributes["size"]), **numbers)


_LRN = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}


def _check_lrn(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    size = int(node.attributes["size"])
    return None if rank > 1 and size > 0 else f"LRN over {size} channels of a tensor of {rank} dimensions"


def _rewrite_lp_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite LpNormalization: divide by the norm of numbers over their largest, whose squares fit float32.

    If the largest is 0, all are 0, and stay so. If it is infinite, so is the norm: numbers become 0, and infinities NaN.
    """
    x = node.input(0)
    axis = from_front(int(node.attributes.get("axis", -1)), len(node.input(0).shape))
    shape = tuple(1 if a == axis else size for a, size in enumerate(x.shape))

    def divided(value: Value, size: Value, name: str, most: float | None, output: Value | None = None) -> Value:
        bounds = {"minimum": float(np.finfo(np.float32).tiny), "maximum": most}
        size = rewriter.emit("Clip", [size], shape, x.dtype, f"{node.name}.{name}", **bounds)
        return rewriter.add("Div", [value, size], output or Value(f"{node.name}.by.{name}", x.shape, x.dtype), node.name)

    sizes = rewriter.emit("Abs", [x], x.shape, x.dtype, f"{node.name}.sizes")
    largest = rewriter.emit("ReduceMax", [sizes], shape, x.dtype, f"{node.name}.most", axes=(axis,))
    scaled = divided(x, largest, "largest", float(np.finfo(np.float32).max))  # an infinite one would make every number 0 or NaN
    op = f"ReduceL{node.attributes.get('p', 2)}"
    norm = rewriter.emit(op, [scaled], shape, x.dtype, f"{node.name}.norm", axes=(axis,))
    divided(scaled, norm, "divisor", None, node.outputs[0])


def _check_lp_normalization(node: Node) -> str | None:
    if (p := int(node.attributes.get("p", 2))) not in (1, 2):
        return f"LpNormalization with p = {p}"
    return bad_axis(node, [int(node.attributes.get("axis", -1))], len(node.input(0).shape))


register(
    __name__,
    Operator(
        "BatchNormalization", (FLOAT,),
        check=all_of(_check_batch_normalization, _one_a_channel(1, 2, 3, 4)),
        rewrite=_rewrite_batch_normalization,
    ),
    Operator(
        "GroupNormalization", (FLOAT,), check=all_of(_check_group_normalization, _one_a_channel(1, 2)),
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
    Operator(
        "LRN", (FLOAT,), check=_check_lrn, rewrite=_rewrite_lrn, kernel="lrn", layout="either", remap=axis_last,
        operator_class="hierarchical", tiling=along_others,
    ),
    Operator(
        "MeanVarianceNormalization", (FLOAT,), check=_check_mean_variance, rewrite=_rewrite_mean_variance,
        operator_class="hierarchical",
    ),
    Operator(
        "LpNormalization", (FLOAT,), check=_check_lp_normalization, rewrite=_rewrite_lp_normalization,
        operator_class="hierarchical",
    ),
    *each(
        ("Softmax", "LogSoftmax"), inputs=(FLOAT,), check=_check_axis, rewrite=_rewrite_softmax, kernel="reduction",
        layout="either", remap=axes_last, columns=_columns, in_place="input", operator_class="hierarchical",
        tiling=along_others, prologue=True,
    ),
    # NormalizeRms divides by the root of the mean square, without a mean.
    *each(
        ("Normalize", "NormalizeRms"), inputs=(FLOAT,), kernel="reduction", layout="either", remap=axes_last, columns=_columns,
        in_place="input", operator_class="hierarchical", onnx=False, tiling=along_others, prologue=True,
    ),
    # Of [outer, depth, groups, columns], over depth and columns: groups of channels in channels-last images.
    Operator(
        "NormalizeGroups", (FLOAT,), kernel="group_normalization", columns=lambda node: 3, in_place="input",
        operator_class="hierarchical", onnx=False,
    ),
)  # fmt: skip
