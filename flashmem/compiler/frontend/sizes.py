"""Output sizes that onnx's shape inference gets wrong, corrected to the sizes that runtimes compute.

- Resize by scales: floor(size * scale) in float32, where the inference multiplies in higher precision: 10 * 0.7 is 7, not 6.
- Pooling with `ceil_mode`: the last window is omitted if it would start in the padding after the input.
- Compress by a constant condition, and GatherND of one element: for these the inference gives no shape.
- NonMaxSuppression: there is room for all boxes that it can select.
- MaxUnpool: `output_shape` is used unchanged.
- STFT: it is one-sided by default.
- ConvTranspose with `auto_pad`: `output_padding` makes none larger than size * stride; `output_shape` is used unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.selected_rows import most_boxes


def set_size(node: ir.Node) -> None:
    """Set the type and shape of the outputs of `node`, if it is one of these operators and its shape is determined."""
    if node.domain not in ("", "ai.onnx") or not node.inputs or node.inputs[0] is None:
        return
    rule = _RULES.get(node.op_type)
    x = node.inputs[0]
    if rule is None or x.shape is None or not x.shape.is_static():
        return
    sizes = rule(node, x.shape.numpy())
    if sizes is not None:
        node.outputs[0].type = node.outputs[0].type or x.type
        for output in node.outputs:  # the second output of pooling contains indices
            output.shape = ir.Shape(sizes)


def _resized(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    given = node.inputs[min(2, len(node.inputs) - 1)]  # the second of two before operator set 11
    if given is None or given.const_value is None:
        return None
    scales = given.const_value.numpy().reshape(-1).astype(np.float32)
    axes = node.attributes.get_ints("axes") or range(len(shape))
    if len(scales) != len(axes):  # none, if sizes are given; or wrong, which is reported elsewhere
        return None
    sizes = list(shape)
    for axis, scale in zip(axes, scales, strict=True):
        sizes[axis] = math.floor(np.float32(shape[axis]) * scale)
    return sizes


def _pooled(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    kernel = node.attributes.get_ints("kernel_shape") if node.attributes.get_int("ceil_mode") else None
    automatic = node.attributes.get_string("auto_pad", "NOTSET")
    if not kernel or len(kernel) != len(shape) - 2:
        return None
    rank = len(kernel)
    strides = node.attributes.get_ints("strides") or [1] * rank
    if automatic not in ("NOTSET", "VALID"):  # SAME: one window for each stride
        return [*shape[:2], *(-(-size // stride) for size, stride in zip(shape[2:], strides, strict=True))]
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


def _unpooled(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    given = node.inputs[2].const_value if len(node.inputs) > 2 and node.inputs[2] is not None else None
    return None if given is None or given.size != len(shape) else [int(size) for size in given.numpy().reshape(-1)]


def _framed(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    given = [value if value is None else value.const_value for value in (*node.inputs[1:4], None, None)]
    step = given[0]
    window = node.inputs[2] if len(node.inputs) > 2 else None
    length = given[2]
    size = int(length.numpy().reshape(-1)[0]) if length is not None and length.size else 0
    if not size and window is not None and window.shape is not None and window.shape.is_static():
        size = math.prod(window.shape.numpy())
    step_size = int(step.numpy().reshape(-1)[0]) if step is not None and step.size else 0
    if len(shape) < 2 or step_size < 1 or not 1 <= size <= shape[1]:
        return None
    onesided = node.attributes.get_int("onesided", 1)
    return [shape[0], (shape[1] - size) // step_size + 1, size // 2 + 1 if onesided else size, 2]


def _spread(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    if weight is None or weight.shape is None or not weight.shape.is_static() or len(weight.shape) != len(shape):
        return None
    channels = weight.shape.numpy()[1] * (node.attributes.get_int("group") or 1)
    kernel = weight.shape.numpy()[2:]
    given = node.attributes.get_ints("output_shape")
    if given and len(given) == len(kernel):
        return [shape[0], channels, *given]
    if not (node.attributes.get_string("auto_pad") or "").startswith("SAME"):
        return None
    rank = len(kernel)
    strides = node.attributes.get_ints("strides") or [1] * rank
    dilations = node.attributes.get_ints("dilations") or [1] * rank
    extra = node.attributes.get_ints("output_padding") or [0] * rank
    made = zip(shape[2:], kernel, strides, dilations, extra, strict=True)
    return [shape[0], channels, *(min(n * s, (n - 1) * s + d * (k - 1) + 1 + e) for n, k, s, d, e in made)]


def _compressed(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    condition = node.inputs[1] if len(node.inputs) > 1 else None
    if condition is None or condition.const_value is None:
        return None
    axis = node.attributes.get("axis")
    chosen = int(np.count_nonzero(condition.const_value.numpy()))
    return [chosen] if axis is None else [chosen if a == axis.as_int() % len(shape) else n for a, n in enumerate(shape)]


def _gathered(node: ir.Node, shape: tuple[int, ...]) -> list[int] | None:
    indices = node.inputs[1] if len(node.inputs) > 1 else None
    names_one = indices is not None and indices.shape is not None and indices.shape == [len(shape)]
    return [] if names_one and not node.attributes.get_int("batch_dims") else None


def _halves(pads: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return pads[: len(pads) // 2], pads[len(pads) // 2 :]


_RULES: dict[str, Callable[[ir.Node, tuple[int, ...]], list[int] | None]] = {
    "AveragePool": _pooled,
    "Compress": _compressed,
    "ConvTranspose": _spread,
    "GatherND": _gathered,
    "LpPool": _pooled,
    "MaxPool": _pooled,
    "MaxUnpool": _unpooled,
    "NonMaxSuppression": most_boxes,
    "Resize": _resized,
    "STFT": _framed,
    "Upsample": _resized,
}
