"""Resize of any dimensions, as Resize of the last two of four, with attributes `scales` and `regions` for these.

A Resize of some rows of an image also has attribute `part` (`height_taps`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.spatial.resize_taps import Axis, Rule, Taps, resize_taps
from flashmem.compiler.operators.registry import ANY, FLOAT, INDEX, constant_inputs, each, register
from flashmem.compiler.operators.rewriting import constant_integers, from_front, reshaped
from flashmem.compiler.operators.tiling_interface import AxisRange, TiledNode

_KEPT = ("mode", "cubic_coeff_a", "exclude_outside", "antialias")


@dataclass(frozen=True)
class _Side:
    """One dimension: sizes before and after, the scale, and the region of the input, as fractions."""

    size: int
    out_size: int
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0

    @property
    def is_resized(self) -> bool:
        return self != _Side(self.size, self.size)


def _rewrite_resize(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Resize as one Resize of images for the last two dimensions, and one for each other.

    Other dimensions become the height of images. Dimensions are resized independently, so their order does not matter. `scales`
    of the result are those of height and width; `regions` their starts and ends, for tf_crop_and_resize.
    """
    x = node.input(0)
    output = node.outputs[0]
    rank = len(x.shape)
    sides = _sides(node, opset)
    resized = [axis for axis in range(rank) if sides[axis].is_resized]
    last = [axis for axis in resized if axis >= rank - 2]
    if last and (rank > 3 or len(last) == 2):
        runs = [(rank - 2, rank - 1), *((axis, axis) for axis in resized if axis < rank - 2)]
    else:
        runs = [(axis, axis) for axis in resized]
    if not resized and x.constant is not None:
        rewriter.replaced[output] = x
        return
    value = x
    for index, (first, end) in enumerate(runs, start=1):
        across = math.prod(value.shape[end + 1 :])
        height = sides[first]
        width = sides[end] if end > first else _Side(across, across)
        images = reshaped(rewriter, value, _images(value.shape[:first], height.size, width.size))
        made = (*value.shape[:first], *(side.out_size for side in sides[first : end + 1]), *value.shape[end + 1 :])
        shape = _images(value.shape[:first], height.out_size, width.out_size)
        is_last = index == len(runs) and shape == output.shape
        result = output if is_last else Value(f"{output.name}.axis{first}", shape, output.dtype)
        scales = (height.scale, width.scale)
        regions = (height.start, height.end, width.start, width.end)
        rewriter.add("Resize", [images], result, f"{node.name}.{first}", scales=scales, regions=regions, **_rule(node, opset))
        value = reshaped(rewriter, result, made)
    if value is not output:
        rewriter.add("Reshape", [value], output, node.name)


def _images(lead: Sequence[int], height: int, width: int) -> tuple[int, int, int, int]:
    """An image shape with the leading dimensions as batch and channels."""
    return (lead[0] if len(lead) > 1 else 1, math.prod(lead[1:] if len(lead) > 1 else lead), height, width)


def _rule(node: Node, opset: int) -> dict[str, object]:
    """The attributes that remain, with those that operator sets 9 and 10 lack."""
    rule = {name: node.attributes[name] for name in _KEPT if name in node.attributes}
    rule["coordinate_transformation_mode"] = node.attributes.get("coordinate_transformation_mode", "half_pixel")
    rule["nearest_mode"] = node.attributes.get("nearest_mode", "round_prefer_floor")
    rule["extrapolation_value"] = float(node.attributes.get("extrapolation_value", 0.0))
    if opset < 11:
        rule |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "simple"}
    return rule


def _sides(node: Node, opset: int) -> list[_Side]:
    """Sizes and scale of each dimension. Given scales are kept (they need not equal the ratio of the sizes)."""
    shape = node.input(0).shape
    made = node.outputs[0].shape
    axes = [from_front(int(axis), len(shape)) for axis in node.attributes.get("axes") or range(len(shape))]
    scales = _numbers(node.optional(1 if opset < 11 else 2)) or [float(s) for s in node.attributes.get("scales", ())]
    if not scales:
        sizes = constant_integers(node, 3, "sizes") or [made[axis] for axis in axes]
        scales = [size / shape[axis] if shape[axis] else 1.0 for size, axis in zip(sizes, axes, strict=True)]
        policy = node.attributes.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            scales = [min(scales) if policy == "not_larger" else max(scales)] * len(axes)
    crops = node.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    region = (_numbers(node.optional(1)) if crops else []) or [0.0] * len(axes) + [1.0] * len(axes)
    sides = [_Side(size, size) for size in shape]
    if shape == made and not crops:
        return sides  # for any scales: ONNX Runtime copies, as does the ratio of the sizes, which is ONNX's scale
    for scale, axis, start, end in zip(scales, axes, region[: len(axes)], region[len(axes) :], strict=True):
        sides[axis] = _Side(shape[axis], made[axis], scale, start, end)
    return sides


def _numbers(value: Value | None) -> list[float]:
    """The numbers of a constant; an empty list if it is omitted or empty."""
    return [] if value is None or value.constant is None else [float(i) for i in value.constant.array().reshape(-1)]


_CHOICES = {
    "coordinate_transformation_mode": (
        "align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    ),
    "nearest_mode": ("ceil", "floor", "round_prefer_ceil", "round_prefer_floor"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
}  # fmt: skip


def _check_resize(node: Node) -> str | None:
    mode, coordinates = (node.attributes.get(name) for name in ("mode", "coordinate_transformation_mode"))
    if mode not in (None, "nearest", "linear", "cubic"):
        return f"{node.op} with mode {mode!r} is not implemented"
    for name, known in _CHOICES.items():
        if (chosen := node.attributes.get(name)) not in (None, *known):
            return f"{node.op} with {name} {chosen!r}"
    if mode in ("linear", "cubic") and node.input(0).dtype != "float32":
        return f"{node.op} of integers with mode {mode!r} is not implemented"
    if node.attributes.get("antialias", 0) and mode not in ("linear", "cubic"):
        return f"{node.op} with antialias and mode 'nearest' is not defined"
    if coordinates == "tf_crop_and_resize" and node.optional(1) is None:
        return f"{node.op} with tf_crop_and_resize lacks the region to crop"
    crops = coordinates == "tf_crop_and_resize" or node.op == "Upsample"
    return constant_inputs(*([1] if crops else []), 2, 3)(node)


def height_taps(node: Node) -> Taps:
    """The taps of the output's rows, in rows of the input.

    A node that computes part of a larger image has attribute `part`. It holds the first row of its output and of its input, and
    the numbers of rows of the whole input and output.
    """
    given = node.attributes
    height = node.input(0).shape[1]
    out_height = node.outputs[0].shape[1]
    first, offset, size, out_size = given.get("part", (0, 0, height, out_height))
    top, bottom, *_ = given["regions"]
    whole = resize_taps(Axis(size, out_size, given["scales"][0], (top, bottom)), Rule.of(given))
    at = whole.at[first : first + out_height]
    return Taps(np.where(at < 0, at, at - np.int32(offset)), whole.weights[first : first + out_height])


def _resized_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile Resize: rows need the rows under their taps. Images of a batch, and channels, are independent."""
    others: tuple[AxisRange | None, ...] = (None,) * (len(node.inputs) - 1)
    if span.axis in (0, 3):
        return TiledNode((span, *others), node.attributes)
    if span.axis != 1 or "part" in node.attributes:
        return None
    at = height_taps(node).at[span.start : span.stop]
    inside = at[at >= 0]
    if not inside.size:
        return None
    rows = AxisRange(1, int(inside.min()), int(inside.max()) + 1)
    sizes = node.input(0).shape[1], node.outputs[0].shape[1]
    return TiledNode((rows, *others), {**node.attributes, "part": (span.start, rows.start, *sizes)})


register(
    __name__,
    *each(
        ("Resize", "Upsample"), inputs=(ANY, FLOAT, FLOAT, INDEX), check=_check_resize, rewrite=_rewrite_resize,
        kernel="resize", layout="channels_last", tiling=_resized_tile,
    ),
)  # fmt: skip
