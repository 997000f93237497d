"""Rewrites of elementwise operators whose constants become attributes."""

from __future__ import annotations

import numpy as np

from flashmem.graph.builder import Rewriter, constant
from flashmem.graph.ir import Node, Value
from flashmem.graph.rewrites.movement import rewrite_reshape
from flashmem.program import DeviceDType


def rewrite_clip(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Bounds as attributes."""
    bounds = [node.attributes.get("min", -np.inf), node.attributes.get("max", np.inf)]
    for i in (1, 2):
        value = node.optional(i)
        if value is not None and value.constant is not None:
            bounds[i - 1] = float(value.constant.array().reshape(-1)[0])
    if node.input(0).dtype == "int32":
        bounds = [float(np.clip(b, -(2**31) + 1, 2**31 - 1)) for b in bounds]
    rewriter.add("Clip", [node.input(0)], node.outputs[0], node.name, minimum=float(bounds[0]), maximum=float(bounds[1]))


def rewrite_pow(rewriter: Rewriter, node: Node, opset: int) -> None:
    """A settled exponent as attribute; integers by way of float."""
    base, exponent, output = node.input(0), node.input(1), node.outputs[0]
    if exponent.constant is not None and exponent.size == 1 and base.dtype == "float32" and base.shape == output.shape:
        value = float(exponent.constant.array().reshape(-1)[0])
        rewriter.add("Pow", [base], output, node.name, exponent=value)
    elif "int32" in (base.dtype, exponent.dtype):
        # OpenCL has no integer power; float is exact where the result fits its mantissa.
        operands = [_as_float(rewriter, value) for value in (base, exponent)]
        product = rewriter.emit("Pow", operands, output.shape, "float32", f"{node.name}.float")
        rewriter.add("Cast", [product], output, node.name)
    else:
        rewriter.add("Pow", [base, exponent], output, node.name)


def _as_float(rewriter: Rewriter, value: Value) -> Value:
    if value.dtype == "float32":
        return value
    return rewriter.emit("Cast", [value], value.shape, "float32", f"{value.name}.float")


def rewrite_cast(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Casts between device types; those within one are Reshapes."""
    x, output = node.input(0), node.outputs[0]
    to_bool = int(node.attributes["to"]) == 9  # onnx.TensorProto.BOOL
    if x.dtype == output.dtype and not to_bool:
        rewrite_reshape(rewriter, node, opset)
    else:
        rewriter.add("Cast", [x], output, node.name, to_bool=to_bool)


def rewrite_mean(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Mean of the inputs is Sum and Mul."""
    output = node.outputs[0]
    count = len(node.inputs)
    total = rewriter.emit("Sum", node.inputs, output.shape, output.dtype, f"{node.name}.sum")
    share: DeviceDType = "float32"
    assert output.dtype == share
    rewriter.add("Mul", [total, constant(f"{node.name}.share", np.array([1 / count], np.float32))], output, node.name)
