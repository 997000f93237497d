"""Cast: integers wrap, floats truncate to integers (`vector.truncated`), and narrower floats round to nearest, ties to even.

The device has one floating point type, float32. The result of a Cast to float16 or bfloat16 is float32 numbers that those types
can represent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.kernels.movement.operators import rewrite_reshape
from flashmem.compiler.operators.registry import ANY, Operator, elementwise, register
from flashmem.compiler.operators.vector import Vector, truncated

_ROUNDED: dict[int, str] = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}


def _cast(node: Node, x: Sequence[str], v: Vector) -> str:
    source = node.input(0).dtype
    target = node.outputs[0].dtype
    value = v.convert(source, target, x[0])
    rounding = node.attributes["rounding"]
    return value if rounding is None else f"fm_to_{rounding}({value}, {v.named('uint')}, {v.named('float')})"


def _rewrite_cast(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Cast: without effect it is a Reshape; a constant is converted when it is read."""
    x = node.input(0)
    output = node.outputs[0]
    rounding = _ROUNDED.get(int(node.attributes["to"]))
    if x.constant is not None:

        def convert(array: NDArray[Any]) -> NDArray[Any]:
            narrow = onnx.helper.tensor_dtype_to_np_dtype(int(node.attributes["to"]))
            if x.dtype == "float32" and np.issubdtype(narrow, np.integer):
                return truncated(array, output.dtype)
            with np.errstate(all="ignore"):
                return array.astype(narrow).astype(output.dtype)

        rewriter.replaced[output] = derived(x, output.name, output.shape, convert, output.dtype)
    elif x.dtype == output.dtype and rounding is None:
        rewrite_reshape(rewriter, node, opset)
    else:
        rewriter.add("Cast", [x], output, node.name, rounding=rounding)


def _bit_cast(node: Node, x: Sequence[str], v: Vector) -> str:
    source = node.input(0).dtype
    target = node.outputs[0].dtype
    if "float32" in (source, target) and source != target:
        return f"as_{v.of(target)}({x[0]})"
    return v.convert(source, target, x[0])


def _check_bit_cast(node: Node) -> str | None:
    source = node.input(0).dtype
    target = node.outputs[0].dtype
    to = int(node.attributes["to"])
    is_wide = target == "float32" and to != onnx.TensorProto.FLOAT
    if not is_wide and ITEMSIZE[source] == ITEMSIZE[target]:
        return None
    if "float32" in (source, target):
        return "BitCast from or to float16, bfloat16 or float64, which are computed as float32, is not implemented"
    return f"BitCast from {source} to {target}, which differ in width"


register(
    __name__,
    elementwise("BitCast", ANY, _bit_cast, check=_check_bit_cast),
    elementwise("Cast", ANY, _cast, rewrite=_rewrite_cast),
    # A group that only copies: an output of the model that is one of its inputs, or a constant.
    Operator("Copy", (ANY,), expression=lambda node, x, v: x[0], layout="either", onnx=False),
)
