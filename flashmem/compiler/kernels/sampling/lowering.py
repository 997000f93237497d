"""Lowering of GridSample and RoiAlign, channels-last."""

from __future__ import annotations

import math

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import STORED, scalar_literal
from flashmem.program.launches import Arg, KernelShape


@lowers("grid_sample")
def lower_grid_sample(context: LoweringContext, group: FusionGroup) -> None:
    """Lower GridSample in two or three dimensions; images are volumes of depth 1."""
    node = group.main
    x = node.input(0)
    grid = node.input(1)
    y = node.outputs[0]
    _, *sizes, columns = x.shape
    volume = len(sizes) == 3
    taps = node.attributes["taps"]
    rows = y.size // columns
    vector = context.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "sampling/grid_sample",
        attributes=context.attributes(local),
        volume=volume,
        taps=taps,
        padding=node.attributes["padding"],
        align=node.attributes["align"],
        stored=context.stored(x),
        made=context.stored(group.output),
        **context.vectors(vector),
    )
    pointers = [context.operand(x), context.operand(grid), context.tensor(y)]
    args: list[Arg | int] = [*pointers, rows, *([] if volume else [1]), *sizes, columns, rows // y.shape[0]]
    shape = KernelShape(rows=rows, columns=columns, depth=taps ** len(sizes), run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape)


@lowers("roi_align")
def lower_roi_align(context: LoweringContext, group: FusionGroup) -> None:
    """Lower RoiAlign by mean or maximum. If the number of samples depends on the rectangles, its cost is that of 2 x 2."""
    node = group.main
    x = node.input(0)
    rois = node.input(1)
    batch = node.input(2)
    y = node.outputs[0]
    images, height, width, columns = x.shape
    rows = math.prod(y.shape[:3])
    vector = context.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    half = node.attributes["half_pixel"]
    samples = node.attributes["sampling_ratio"]
    kernel = context.kernels.kernel(
        "sampling/roi_align",
        attributes=context.attributes(local),
        index=STORED[batch.dtype],
        scale=scalar_literal("float32", node.attributes["spatial_scale"]),
        offset="0.5f" if half else "0.0f",
        offset_is_half=half,
        samples=samples,
        largest=node.attributes["mode"] == "max",
        stored=context.stored(x),
        made=context.stored(group.output),
        **context.vectors(vector),
    )
    pointers = [context.operand(x), context.operand(rois), context.operand(batch), context.tensor(y), context.status()]
    args: list[Arg | int] = [*pointers, rows, images, height, width, columns, *y.shape[1:3], len(context.launches) + 1]
    shape = KernelShape(rows=rows, columns=columns, depth=4 * (samples or 2) ** 2, run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape)
