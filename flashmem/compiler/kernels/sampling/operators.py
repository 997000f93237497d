"""Sampling at positions that are computed at run time: GridSample, RoiAlign, DeformConv; and AffineGrid, which makes them.

After the rewrites `GridSample` has attributes `taps` (in each dimension: 1, 2 or 4), `padding` and `align`. `DeformConv` has
those of Conv (contraction.py) and `offset_group`, and no bias.
"""

from __future__ import annotations

import math

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.kernels.contraction.operators import bad_window, window
from flashmem.compiler.operators.registry import FLOAT, INDEX, Operator, all_of, constant_inputs, fp32_inputs, register
from flashmem.compiler.operators.rewriting import chain, constant_integers, reshaped

_TAPS = {"nearest": 1, "bilinear": 2, "linear": 2, "bicubic": 4, "cubic": 4}


def _rewrite_grid_sample(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite GridSample: the mode becomes a number of taps."""
    rewriter.add(
        "GridSample", [node.input(0), node.input(1)], node.outputs[0], node.name,
        taps=_TAPS[node.attributes.get("mode", "linear")], padding=node.attributes.get("padding_mode", "zeros"),
        align=bool(node.attributes.get("align_corners", 0)),
    )  # fmt: skip


def _check_grid_sample(node: Node) -> str | None:
    x = node.input(0).shape
    grid = node.input(1).shape
    mode = node.attributes.get("mode", "linear")
    padding = node.attributes.get("padding_mode", "zeros")
    if mode not in _TAPS:
        return f"GridSample with mode {mode!r}"
    if padding not in ("zeros", "border", "reflection"):
        return f"GridSample with padding_mode {padding!r}"
    if len(x) not in (4, 5):
        return f"GridSample over {len(x) - 2} spatial dimensions is not implemented (2 and 3 are)"
    if len(grid) != len(x) or grid[0] != x[0] or grid[-1] != len(x) - 2:
        return f"GridSample of shape {x} by a grid of shape {grid}"
    return None


_LARGEST_GRID = 1 << 24
"""The most positions of an AffineGrid, which are a constant."""


def _rewrite_affine_grid(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite AffineGrid: the positions of a plain grid times the transposed matrices."""
    theta = node.input(0)
    output = node.outputs[0]
    count, *sizes = output.shape[:-1]
    axes = [_places(size, bool(node.attributes.get("align_corners", 0))) for size in sizes]
    mesh = np.meshgrid(*axes, indexing="ij")[::-1]
    plain = np.stack([*mesh, np.ones(sizes)], -1).reshape(math.prod(sizes), len(sizes) + 1).astype(np.float32)
    turned = rewriter.emit("Transpose", [theta], (count, *theta.shape[:0:-1]), theta.dtype, f"{node.name}.t", perm=(0, 2, 1))
    shape = (count, math.prod(sizes), len(sizes))
    places = rewriter.emit(
        "MatMul", [constant(f"{node.name}.plain", plain), turned], shape, theta.dtype, node.name, transposed=0
    )
    rewriter.add("Reshape", [places], output)


def _places(size: int, align: bool) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The middle of each of `size` pixels between -1 and 1, or, with aligned corners, from -1 to 1."""
    return np.linspace(-1, 1, size) if align else (2 * np.arange(size) + 1) / size - 1


def _check_affine_grid(node: Node) -> str | None:
    theta = node.input(0).shape
    size = constant_integers(node, 1, "size") or []
    rank = len(size) - 2
    if rank not in (2, 3) or min(size) < 1:
        return f"AffineGrid for an image of shape {tuple(size)}"
    if math.prod(size[2:]) > _LARGEST_GRID:
        return f"AffineGrid of {math.prod(size[2:])} places is not implemented ({_LARGEST_GRID} at most)"
    if theta != (size[0], rank, rank + 1) or node.outputs[0].shape != (size[0], *size[2:], rank):
        return f"AffineGrid for an image of shape {tuple(size)} by matrices of shape {theta}"
    return None


def _rewrite_roi_align(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite RoiAlign with default attributes; before operator set 16 pixels are not shifted by half a pixel."""
    shifts = node.attributes.get("coordinate_transformation_mode", "half_pixel" if opset >= 16 else "output_half_pixel")
    rewriter.add(
        "RoiAlign", [node.input(i) for i in range(3)], node.outputs[0], node.name, mode=node.attributes.get("mode", "avg"),
        half_pixel=shifts == "half_pixel", sampling_ratio=int(node.attributes.get("sampling_ratio", 0)),
        spatial_scale=float(node.attributes.get("spatial_scale", 1.0)),
    )  # fmt: skip


def _check_roi_align(node: Node) -> str | None:
    x, rois, batch = (node.input(i).shape for i in range(3))
    for name, known in (("mode", ("avg", "max")), ("coordinate_transformation_mode", ("half_pixel", "output_half_pixel"))):
        if (chosen := node.attributes.get(name)) not in (None, *known):
            return f"RoiAlign with {name} {chosen!r}"
    if len(x) != 4 or len(rois) != 2 or rois[1] != 4 or batch != rois[:1]:
        return f"RoiAlign of shape {x} in rectangles of shape {rois}, in images given by a tensor of shape {batch}"
    if not 0 <= int(node.attributes.get("sampling_ratio", 0)) <= 1024:
        return f"RoiAlign with sampling_ratio {node.attributes['sampling_ratio']}"
    made = node.outputs[0].shape
    if made[0] != rois[0] or made[1] != x[1]:
        return f"RoiAlign of shape {x} gives {made}"
    return None


def _rewrite_deform_conv(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite DeformConv: the bias becomes an Add."""
    x = node.input(0)
    w = node.input(1)
    offset = node.input(2)
    bias = node.optional(3)
    mask = node.optional(4)
    group = int(node.attributes.get("group", 1))
    offset_group = int(node.attributes.get("offset_group", 1))
    steps = [("Add", reshaped(rewriter, bias, (bias.shape[0], 1, 1)))] if bias is not None else []
    inputs = [x, w, offset] if mask is None else [x, w, offset, mask]
    sliding = window(node, w.shape[2:])
    chain(rewriter, node, "DeformConv", inputs, node.outputs[0], steps, group=group, offset_group=offset_group, **sliding)


def _check_deform_conv(node: Node) -> str | None:
    x, w, offset = (node.input(i).shape for i in range(3))
    bias = node.optional(3)
    mask = node.optional(4)
    y = node.outputs[0].shape
    if len(x) != 4 or len(w) != 4:
        return f"DeformConv over {len(x) - 2} spatial dimensions is not implemented (2 are)"
    group = int(node.attributes.get("group", 1))
    offset_group = int(node.attributes.get("offset_group", 1))
    if group < 1 or x[1] != w[1] * group or w[0] % group:
        return f"DeformConv with weights of shape {w} and group {group} over an input of shape {x}"
    if offset_group < 1 or x[1] % offset_group:
        return f"DeformConv of {x[1]} channels with offset_group {offset_group}"
    kernel = node.attributes.get("kernel_shape")
    if kernel is not None and tuple(kernel) != w[2:]:
        return f"DeformConv with kernel_shape {tuple(kernel)} but weights of shape {w}"
    if (reason := bad_window(node, w[2:])) is not None:
        return reason
    taps = offset_group * w[2] * w[3]
    if y[:2] != (x[0], w[0]) or offset != (x[0], 2 * taps, *y[2:]):
        return f"DeformConv that gives {y} with offsets of shape {offset}"
    if mask is not None and mask.shape != (x[0], taps, *y[2:]):
        return f"DeformConv that gives {y} with a mask of shape {mask.shape}"
    if bias is not None and bias.shape != w[:1]:
        return f"DeformConv with a bias of shape {bias.shape} for {w[0]} channels"
    return None


register(
    __name__,
    Operator("AffineGrid", (FLOAT, INDEX), check=all_of(constant_inputs(1), _check_affine_grid), rewrite=_rewrite_affine_grid),
    Operator(
        "DeformConv", (FLOAT,), check=_check_deform_conv, rewrite=_rewrite_deform_conv, kernel="deform_convolution",
        layout="channels_last", columns=lambda node: 3, in_place="epilogue", keep_fp32=fp32_inputs(2, 3),
        operator_class="reusable",
    ),
    Operator(
        "GridSample", (FLOAT,), check=_check_grid_sample, rewrite=_rewrite_grid_sample, kernel="grid_sample",
        layout="channels_last", keep_fp32=fp32_inputs(1), operator_class="reusable",
    ),
    Operator(
        "RoiAlign", (FLOAT, FLOAT, INDEX), check=_check_roi_align, rewrite=_rewrite_roi_align, kernel="roi_align",
        layout="channels_last", keep_fp32=fp32_inputs(1), operator_class="reusable",
    ),
)  # fmt: skip
