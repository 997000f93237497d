"""Output sizes that onnx's shape inference gets wrong; what runtimes compute is set before it runs, and it keeps what it finds.

- Resize by scales: floor(size * scale) in float32, where the inference multiplies in higher precision: 10 * 0.7 is 7, not 6.
- Pooling with `ceil_mode`: the last window is left out where it would start in the padding after the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def settle_size(node: ir.Node) -> None:
    """Set the output shape of `node`, if it is one of these and all that it follows from is known."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return
    shape = node.inputs[0].shape
    if shape is None or not shape.is_static():
        return
    if node.op_type == "Resize":
        _set(node, _resized(node, shape.numpy()))
    elif node.op_type in ("AveragePool", "LpPool", "MaxPool") and node.attributes.get_int("ceil_mode"):
        _set(node, _pooled(node, shape.numpy()))


def _set(node: ir.Node, sizes: list[int] | None) -> None:
    if sizes is not None:
        for output in node.outputs:
            output.shape = ir.Shape(sizes)


def _resized(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    given = node.inputs[2] if len(node.inputs) > 2 else None
    if given is None or given.const_value is None:
        return None
    scales = given.const_value.numpy().reshape(-1).astype(np.float32)
    axes = node.attributes.get_ints("axes") or range(len(shape))
    if len(scales) != len(axes):  # none, where sizes are given; or wrong, which is said elsewhere
        return None
    sizes = list(shape)
    for axis, scale in zip(axes, scales, strict=True):
        sizes[axis] = math.floor(np.float32(shape[axis]) * scale)
    return sizes


def _pooled(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    kernel = node.attributes.get_ints("kernel_shape")
    automatic = node.attributes.get_string("auto_pad", "NOTSET")
    if not kernel or len(kernel) != len(shape) - 2 or automatic not in ("NOTSET", "VALID"):
        return None
    rank = len(kernel)
    strides = node.attributes.get_ints("strides") or [1] * rank
    dilations = node.attributes.get_ints("dilations") or [1] * rank
    pads = node.attributes.get_ints("pads") if automatic == "NOTSET" else None
    sizes = list(shape)
    for axis, (size, before, after) in enumerate(zip(shape[2:], *_halves(pads or [0] * (2 * rank)), strict=True)):
        room = size + before + after - dilations[axis] * (kernel[axis] - 1) - 1
        if room < 0:
            return None
        windows = -(-room // strides[axis]) + 1
        starts_outside = (windows - 1) * strides[axis] >= size + before
        sizes[axis + 2] = windows - starts_outside
    return sizes


def _halves(pads: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return pads[: len(pads) // 2], pads[len(pads) // 2 :]
