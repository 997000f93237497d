"""Lowering of depthwise convolutions: each output channel reads one input channel, which several may share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.kernels.contraction.configs import PlainContraction
from flashmem.compiler.kernels.contraction.packed_weights import packed_at_run_time
from flashmem.compiler.kernels.contraction.quantisation import read_weights
from flashmem.compiler.kernels.contraction.tile import ContractionTile, Layout
from flashmem.compiler.kernels.contraction.tile_choice import operands_of
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.operators.vector import REGISTER
from flashmem.program.launches import KernelShape
from flashmem.target.descriptor import DeviceDescriptor

ROW_PIXELS = 4
MOST_TAPS = 11
"""Depthwise convolution on phones: the most outputs of a row that a work-item computes, and the most taps across."""


def lower_depthwise(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a depthwise convolution."""
    node = group.main
    x = node.input(0)
    weight = node.input(1)
    y = node.outputs[0]
    batch, height, width, channels = x.shape
    out_height, out_width, columns = y.shape[1:]
    rows = batch * out_height * out_width
    vector = context.vector_for(columns)
    binding = read_weights(context, node, blocks=False)
    storage = "float32" if binding.storage == "float16" else binding.storage.replace("int4", "int8")
    kernel_h, kernel_w = weight.shape[2:]
    stride_h, stride_w = node.attributes["strides"]
    dilation_h, dilation_w = node.attributes["dilations"]
    pads = node.attributes["pads"][:2]
    activation = context.stored(x)
    floats = (REGISTER[y.dtype], storage) == ("float", "float32") and activation in ("float", "half") and binding.scale is None
    whole = min(vector, columns & -columns)  # the widest vector of which a pixel's channels are a multiple
    vectors = whole == 4 if context.descriptor.code.vector_loads else whole >= 4 and context.descriptor.kind == "cpu"
    in_rows = vectors and floats and columns == channels and kernel_w <= MOST_TAPS and 4 * x.size < MOST_OFFSET
    vector = whole if in_rows else vector
    pixels = _row_pixels(context.descriptor, kernel_w, stride_w, dilation_w) if in_rows else 1
    config = PlainContraction("depthwise", pixels, vector, vector, families=("depthwise",))
    operands = operands_of(context, group, storage, replace(binding, block=0))
    tile = ContractionTile(config, operands, Layout(aligned_columns=columns % 4 == 0))
    values: dict[str, Any]
    if in_rows:
        template = "contraction/depthwise_row"
        lines = batch * out_height * -(-out_width // pixels)
        values = {"taps": kernel_w, "stride": stride_w, "reads": _reads(pixels, kernel_w, stride_w, dilation_w)}
        of_kernel = [kernel_h, stride_h, dilation_h]
    else:
        template = "contraction/depthwise"
        lines = rows
        values = {"multiplier": columns // channels}
        of_kernel = [kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w]
    dims = [rows, height, width, columns, out_height, out_width, *of_kernel, *pads]
    epilogue = context.epilogue(group, vector)
    items = (-(-columns // vector), lines)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        template, t=tile, attributes=context.attributes(local), **values, **context.epilogue_values(epilogue)
    )
    read = binding.codes
    dtype = np.dtype(storage)
    if read is None:
        packed = packed_at_run_time(context, group, 1, columns)
    else:
        packed = context.data(
            weight.name, dtype.itemsize * weight.size, lambda: np.ascontiguousarray(read().reshape(columns, -1).T, dtype)
        )
    zeros = context.zeros(columns)
    args = [
        context.operand(x),
        packed,
        context.tensor(group.output),
        zeros,
        *binding.args,
        *context.operand_args(epilogue),
        *dims,
    ]
    shape = KernelShape("depthwise", rows, columns, weight.size // columns, run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape, macs=rows * weight.size)


def _row_pixels(descriptor: DeviceDescriptor, taps: int, stride: int, dilation: int) -> int:
    """Outputs of a row for each work-item of a depthwise convolution: as many as fit in registers, at least one.

    A work-item has the place of each pixel that it reads and whether that is inside the image; vectors of four floats for each
    sum, each tap and one pixel; and 20 registers more (as Mali's compiler reports: docs/research/phone-compilers.md).
    """
    pixels = ROW_PIXELS
    most = descriptor.registers.most if descriptor.registers else math.inf
    while pixels > 1 and 2 * len(_reads(pixels, taps, stride, dilation)) + 4 * (pixels + taps + 1) + 20 > most:
        pixels //= 2
    return pixels


def _reads(pixels: int, taps: int, stride: int, dilation: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The pixels of an image's row that this many outputs read, from the first on, and the (output, tap) pairs of each."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for pixel in range(pixels):
        for tap in range(taps):
            uses.setdefault(pixel * stride + tap * dilation, []).append((pixel, tap))
    return sorted(uses.items())
