"""Reference definitions of operators: as functions of simpler operators (`DEFINITIONS`), and by numpy (`NUMPY`).

ONNX does not define these by other operators, or its definitions overflow or cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tests.support.recurrent import recurrent

Array = NDArray[Any]


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _constant(name: str, array: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array), name))


def _lp_normalization(node: onnx.NodeProto, operands: Sequence[Array | None]) -> onnx.FunctionProto:
    """x / norm, computed from the numbers over the largest one, whose squares are in float32's range."""
    given = attributes_of(node)
    squares = given.get("p", 2) == 2
    nodes = [
        _constant("axes", [given.get("axis", -1)]),
        _constant("least", np.finfo(np.float32).tiny.astype(np.float64)),
        helper.make_node("Abs", ["x"], ["size"]),
        helper.make_node("ReduceMax", ["size", "axes"], ["most"]),
        helper.make_node("Max", ["most", "least"], ["largest"]),
        helper.make_node("Div", ["x", "largest"], ["scaled"]),
        helper.make_node("Mul", ["scaled", "scaled"], ["square"]),
        helper.make_node("Abs", ["scaled"], ["absolute"]),
        helper.make_node("ReduceSum", ["square" if squares else "absolute", "axes"], ["sum"]),
        helper.make_node("Sqrt" if squares else "Identity", ["sum"], ["root"]),
        helper.make_node("Max", ["root", "least"], ["norm"]),
        helper.make_node("Div", ["scaled", "norm"], ["y"]),
    ]
    return _body(["x"], ["y"], nodes)


def _normalization(node: onnx.NodeProto, operands: Sequence[Array | None]) -> onnx.FunctionProto:
    """Distances from the mean over their root mean square. ONNX's own definitions subtract the square of the mean from the mean
    of squares, which cancels if the mean is large.
    """
    given, x = attributes_of(node), operands[0]
    assert x is not None
    shape, per_channel = x.shape, [-1, *[1] * (x.ndim - 2)]
    axes: Sequence[int] = range(2, len(shape))
    rows = shape
    if node.op_type == "LayerNormalization":
        axes, per_channel = range(given.get("axis", -1) % len(shape), len(shape)), []
    elif node.op_type == "MeanVarianceNormalization":
        axes = given.get("axes", [0, 2, 3])
    elif node.op_type == "GroupNormalization":
        axes, rows = [2], (shape[0], given["num_groups"], -1)
    variance = [helper.make_node("Add", ["variance", "epsilon"], ["moved"]), helper.make_node("Sqrt", ["moved"], ["deviation"])]
    if node.op_type == "MeanVarianceNormalization":
        variance = [
            helper.make_node("Sqrt", ["variance"], ["root"]),
            helper.make_node("Add", ["root", "epsilon"], ["deviation"]),
        ]
    nodes = [
        _constant("axes", list(axes)),
        _constant("rows", rows),
        _constant("shape", shape),
        _constant("epsilon", np.float64(given.get("epsilon", 1e-9 if node.op_type.startswith("Mean") else 1e-5))),
        helper.make_node("Reshape", ["x", "rows"], ["row"]),
        helper.make_node("ReduceMean", ["row", "axes"], ["mean"]),
        helper.make_node("Sub", ["row", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["variance"]),
        *variance,
        helper.make_node("Reciprocal", ["deviation"], ["inverse"]),
        helper.make_node("Mul", ["centred", "inverse"], ["normal"]),
        helper.make_node("Reshape", ["normal", "shape"], ["last"]),
    ]
    last = "last"
    for op, name, operand in zip(("Mul", "Add"), ("scale", "bias"), operands[1:], strict=False):
        if operand is not None:
            nodes.append(_constant(f"{name}.shape", per_channel or operand.shape))
            nodes.append(helper.make_node("Reshape", [name, f"{name}.shape"], [f"{name}.each"]))
            nodes.append(helper.make_node(op, [last, f"{name}.each"], [f"{name}.done"]))
            last = f"{name}.done"
    return _body(["x", "scale", "bias"], [last, "mean", "inverse"][: len(node.output)], nodes)


def _body(inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("", "definition", inputs, outputs, nodes, [helper.make_opsetid("", 20)])


def _batch_normalization(node: onnx.NodeProto, operands: Sequence[Array | None]) -> onnx.FunctionProto:
    """With given statistics, or with `training_mode` with the batch's own, which update the running ones."""
    given, x = attributes_of(node), operands[0]
    assert x is not None
    momentum, rank = given.get("momentum", 0.9), x.ndim
    nodes = [
        _constant("shape", [1, -1, *[1] * (rank - 2)]),
        _constant("axes", [0, *range(2, rank)]),
        _constant("epsilon", np.float64(given.get("epsilon", 1e-5))),
        _constant("old", np.float64(momentum)),
        _constant("new", np.float64(1 - momentum)),
        *(helper.make_node("Reshape", [name, "shape"], [f"{name}.each"]) for name in ("scale", "bias", "mean", "variance")),
    ]
    if given.get("training_mode", 0):
        nodes += [
            helper.make_node("ReduceMean", ["x", "axes"], ["m"]),
            helper.make_node("Sub", ["x", "m"], ["centred"]),
            helper.make_node("Mul", ["centred", "centred"], ["square"]),
            helper.make_node("ReduceMean", ["square", "axes"], ["v"]),
        ]
        for name, now in (("mean", "m"), ("variance", "v")):
            nodes += [
                helper.make_node("Reshape", [now, "flat"], [f"{name}.now"]),
                helper.make_node("Mul", [name, "old"], [f"{name}.kept"]),
                helper.make_node("Mul", [f"{name}.now", "new"], [f"{name}.added"]),
                helper.make_node("Add", [f"{name}.kept", f"{name}.added"], [f"{name}.moved"]),
            ]
        nodes.insert(0, _constant("flat", [-1]))
    else:
        nodes += [helper.make_node("Sub", ["x", "mean.each"], ["centred"])]
    nodes += [
        helper.make_node("Add", ["v" if given.get("training_mode", 0) else "variance.each", "epsilon"], ["above"]),
        helper.make_node("Sqrt", ["above"], ["deviation"]),
        helper.make_node("Div", ["centred", "deviation"], ["normal"]),
        helper.make_node("Mul", ["normal", "scale.each"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias.each"], ["y"]),
    ]
    outputs = ["y", "mean.moved", "variance.moved"][: len(node.output)]
    return _body(["x", "scale", "bias", "mean", "variance"], outputs, nodes)


def _log_sum_exp(node: onnx.NodeProto, operands: Sequence[Array | None]) -> onnx.FunctionProto:
    """Computed from differences to the largest number: ONNX's own definition overflows."""
    keep, axes = attributes_of(node).get("keepdims", 1), len(operands) > 1 and operands[1] is not None
    nodes = [
        helper.make_node("ReduceMax", ["x", "axes"] if axes else ["x"], ["top"]),
        helper.make_node("Sub", ["x", "top"], ["below"]),
        helper.make_node("Exp", ["below"], ["each"]),
        helper.make_node("ReduceSum", ["each", "axes"] if axes else ["each"], ["sum"], keepdims=keep),
        helper.make_node("Log", ["sum"], ["more"]),
        helper.make_node("ReduceMax", ["x", "axes"] if axes else ["x"], ["most"], keepdims=keep),
        helper.make_node("Add", ["more", "most"], ["y"]),
    ]
    return _body(["x", "axes"], ["y"], nodes)


def _heads(node: onnx.NodeProto, operands: Sequence[Array | None]) -> onnx.FunctionProto:
    """ONNX Runtime's MultiHeadAttention with queries, keys and values only."""
    heads, q = attributes_of(node)["num_heads"], operands[0]
    assert q is not None and len(operands) == 3
    nodes = [_constant("shape", [0, 0, heads, -1]), _constant("merged", [0, 0, -1])]
    for name in "qkv":
        nodes.append(helper.make_node("Reshape", [name, "shape"], [f"{name}.heads"]))
        perm = (0, 2, 3, 1) if name == "k" else (0, 2, 1, 3)
        nodes.append(helper.make_node("Transpose", [f"{name}.heads"], [f"{name}.each"], perm=perm))
    nodes += [
        _constant("scale", (q.shape[-1] / heads) ** -0.5),
        helper.make_node("MatMul", ["q.each", "k.each"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v.each"], ["answers"]),
        helper.make_node("Transpose", ["answers"], ["rows"], perm=(0, 2, 1, 3)),
        helper.make_node("Reshape", ["rows", "merged"], ["y"]),
    ]
    return _body(["q", "k", "v"], ["y"], nodes)


DEFINITIONS: dict[str, Callable[[onnx.NodeProto, Sequence[Array | None]], onnx.FunctionProto]] = {
    "BatchNormalization": _batch_normalization,
    "LpNormalization": _lp_normalization,
    "MultiHeadAttention": _heads,
    "ReduceLogSumExp": _log_sum_exp,
    **dict.fromkeys(
        ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "MeanVarianceNormalization"), _normalization
    ),
}
"""Definitions that ONNX lacks, or whose reference evaluator is wrong."""


def by_numpy(node: onnx.NodeProto) -> bool:
    """Whether `NUMPY` computes `node`. ONNX's definition of Gelu by erf cancels, and so do implementations of it."""
    return node.op_type in NUMPY and (node.op_type != "Gelu" or attributes_of(node).get("approximate") == b"tanh")


def _lrn(node: onnx.NodeProto, x: Array) -> Array:
    given = attributes_of(node)
    size, channels = given["size"], x.shape[1]
    square = np.stack(
        [np.sum(x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2, axis=1) for c in range(channels)], axis=1
    )
    return np.asarray(x / (given.get("bias", 1.0) + given.get("alpha", 1e-4) / size * square) ** given.get("beta", 0.75))


def _global_lp_pool(node: onnx.NodeProto, x: Array) -> Array:
    p = attributes_of(node).get("p", 2)
    return np.asarray(np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p))


def _exponential(alpha: float, gamma: float) -> Callable[..., Array]:
    def run(node: onnx.NodeProto, x: Array) -> Array:
        given = attributes_of(node)
        below = given.get("alpha", alpha) * np.expm1(x / (given.get("alpha", 1.0) if node.op_type == "Celu" else 1.0))
        return np.asarray(given.get("gamma", gamma) * np.where(x < 0, below, x))

    return run


def _gelu(node: onnx.NodeProto, x: Array) -> Array:
    """By the sigmoid of twice the argument of tanh, which does not cancel."""
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return np.asarray(x / (1 + np.exp(-2 * u)))


def _conv_transpose(node: onnx.NodeProto, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Each element of the input adds the weights of its group to the output."""
    given, kernel = attributes_of(node), weight.shape[2:]
    rank, groups = len(kernel), given.get("group", 1)
    strides, dilations = given.get("strides", [1] * rank), given.get("dilations", [1] * rank)
    more = given.get("output_padding", [0] * rank)
    reach = [
        stride * (n - 1) + dilation * (k - 1) + 1 + extra
        for n, k, stride, dilation, extra in zip(x.shape[2:], kernel, strides, dilations, more, strict=True)
    ]
    automatic = given.get("auto_pad", b"NOTSET").decode()
    wanted = given.get("output_shape")
    if wanted is None and automatic.startswith("SAME"):
        wanted = [n * stride for n, stride in zip(x.shape[2:], strides, strict=True)]
    pads = given.get("pads", [0] * 2 * rank)
    if wanted is not None:
        cut = [max(0, full - size) for full, size in zip(reach, wanted[-rank:], strict=True)]
        before = [-(-each // 2) if automatic == "SAME_LOWER" else each // 2 for each in cut]
        pads = [*before, *(each - first for each, first in zip(cut, before, strict=True))]
    y = np.zeros((x.shape[0], weight.shape[1] * groups, *reach))
    parts = zip(np.split(x, groups, 1), np.split(weight, groups, 0), np.split(y, groups, 1), strict=True)
    for part, factors, into in parts:
        for tap in np.ndindex(*kernel):
            places = tuple(
                slice(k * dilation, k * dilation + stride * n, stride)
                for k, n, stride, dilation in zip(tap, x.shape[2:], strides, dilations, strict=True)
            )
            into[(slice(None), slice(None), *places)] += np.einsum("nc...,ck->nk...", part, factors[(..., *tap)])
    inside = tuple(slice(pads[i], reach[i] - pads[rank + i]) for i in range(rank))
    y = y[(slice(None), slice(None), *inside)]
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


NUMPY: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "Celu": _exponential(1.0, 1.0),
    "ConvTranspose": _conv_transpose,
    "Elu": _exponential(1.0, 1.0),
    "Gelu": _gelu,
    "GlobalLpPool": _global_lp_pool,
    "GlobalMaxPool": lambda node, x: x.max(tuple(range(2, x.ndim)), keepdims=True),
    "LRN": _lrn,
    "Mish": lambda node, x: x * np.tanh(np.logaddexp(0, x)),
    "Selu": _exponential(1.67326319217681884765625, 1.05070102214813232421875),
    "Sigmoid": lambda node, x: np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x))),
    "Softplus": lambda node, x: np.logaddexp(0, x),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
}
"""Operators that the reference evaluator of onnx 1.23 lacks or computes wrongly, or whose definitions overflow or cancel."""
