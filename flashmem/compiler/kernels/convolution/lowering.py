"""Lowering of convolutions: implicit products, or Winograd's F(2x2, 3x3), as the kernel selector chooses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.quantised import QuantizedConstant
from flashmem.compiler.kernels.contraction.configs import Winograd, plain_tile, transformed
from flashmem.compiler.kernels.contraction.packed_product import PackedProduct, lower_packed
from flashmem.compiler.kernels.contraction.packed_weights import placed
from flashmem.compiler.kernels.contraction.quantisation import read_weights
from flashmem.compiler.kernels.contraction.tile import ContractionTile, Layout, Operands
from flashmem.compiler.kernels.contraction.tile_choice import choice
from flashmem.compiler.kernels.convolution.depthwise import lower_depthwise
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import REGISTER
from flashmem.compiler.weights.packing import Packing
from flashmem.program.launches import Arg, KernelShape

FEW_CHANNELS = 16
"""With fewer channels, a CPU copies taps before it multiplies them."""

_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
"""G of F(2, 3): transforms a filter of three taps to four numbers, which the four transformed inputs are multiplied by."""


@lowers("convolution")
def lower_convolution(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Conv and ConvTranspose as implicit products, or by Winograd's algorithm if it is chosen.

    A 1x1 convolution is a MatMul; a depthwise convolution has its own kernel.
    """
    node = group.main
    rows = math.prod(node.outputs[0].shape[:-1])
    columns = node.outputs[0].shape[-1]
    channels = node.input(0).shape[-1]
    if _is_depthwise(node):
        lower_depthwise(context, group)
    elif _is_pointwise(node):
        lower_packed(context, PackedProduct(group, "matmul", rows, channels, [rows, channels, columns]))
    elif _in_rows(context, node):
        _lower_rows(context, group)
    elif (config := _winograd_config(context, group)) is not None:
        _lower_winograd(context, group, config)
    else:
        lower_packed(context, _implicit_product(context, group))


def _is_depthwise(node: Node) -> bool:
    """Whether each output channel of an image reads one input channel."""
    groups = int(node.attributes["group"])
    x = node.input(0)
    one_each = groups == x.shape[-1] and node.outputs[0].shape[-1] % groups == 0
    return node.op != "ConvTranspose" and len(x.shape) == 4 and groups > 1 and one_each


def _is_pointwise(node: Node) -> bool:
    """Whether each pixel is a product of its own: one tap, stride 1, no padding, one group."""
    given = node.attributes
    ones = {int(given["group"]), *node.input(1).shape[2:], *given["strides"]} == {1}
    return node.op != "ConvTranspose" and ones and not any(given["pads"])


def _winograd_config(context: LoweringContext, group: FusionGroup) -> Winograd | None:
    """The config of Winograd's algorithm, cut to the tiles, if that can compute the convolution and is chosen."""
    node = group.main
    y = group.main.outputs[0]
    if not can_be_winograd(context, node):
        return None
    channels = node.input(0).shape[-1]
    columns = y.shape[-1]
    workload = Workload("conv", context.memory_path, y.size // columns, 9 * channels, columns, taps=9)
    config = choice(context, group, workload, winograd=True)
    return config.cut(transformed(workload, _tiles(y))) if isinstance(config, Winograd) else None


def _implicit_product(context: LoweringContext, group: FusionGroup) -> PackedProduct:
    """The convolution as a product of its taps, which the kernel reads from the image."""
    node = group.main
    x = node.input(0)
    weight = node.input(1)
    y = node.outputs[0]
    *_, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    groups = int(node.attributes["group"])
    volume = len(x.shape) == 5
    rows = y.size // columns
    run = channels // groups
    *front, kernel_h, kernel_w = zip(
        weight.shape[2:], node.attributes["strides"], node.attributes["dilations"], node.attributes["pads"], strict=False
    )
    dims = [
        rows, height, width, channels, run, out_height, out_width, columns, columns // groups,
        *(number for pair in zip(kernel_h, kernel_w, strict=True) for number in pair),
    ]  # fmt: skip
    dims += [x.shape[1], y.shape[1], *front[0]] if volume else []
    return PackedProduct(
        group, "conv", rows, run, dims, groups, stageable=not volume and node.op != "ConvTranspose",
        winograd=can_be_winograd(context, node),
        row=weight.shape[-1] * channels if groups == kernel_w[2] == 1 and channels < FEW_CHANNELS else 0,
        volume=volume, values={"volume": volume, "quads": run % 4 == 0},
    )  # fmt: skip


def _in_rows(context: LoweringContext, node: Node) -> bool:
    """Whether `node` is computed by rows of taps: floats, few channels, image rows of a multiple of four elements."""
    x = node.input(0)
    weight = node.input(1)
    attributes = node.attributes
    if node.op != "Conv" or len(x.shape) != 4 or weight.constant is None or isinstance(weight.constant, QuantizedConstant):
        return False
    _, _, width, channels = x.shape
    run = weight.shape[3] * channels
    stride = attributes["strides"][1] * channels
    return (
        channels % 4 > 0
        and int(attributes["group"]) == attributes["dilations"][1] == 1
        and 4 <= run <= context.descriptor.code.longest_row
        and width * channels % 4 == stride * context.descriptor.tile.rows % 4 == 0
        and REGISTER[node.outputs[0].dtype] == "float"
        and context.stored(x) in ("float", "half")
        and 4 * max(x.size, weight.size) < MOST_OFFSET
    )


def _lower_rows(context: LoweringContext, group: FusionGroup) -> None:
    """Launch the kernel for few channels (convolution/conv_row.cl.j2) once for each slice of the weights."""
    node = group.main
    x = node.input(0)
    weight = node.input(1)
    y = node.outputs[0]
    images, height, width, channels = x.shape
    _, out_height, out_width, columns = y.shape
    kernel_h, kernel_w = weight.shape[2:]
    pads = node.attributes["pads"]
    strides = node.attributes["strides"]
    rows = y.size // columns
    run = kernel_w * channels
    depth = kernel_h * kernel_w * channels
    stride = strides[1] * channels
    binding = read_weights(context, node, blocks=False)
    assert binding.codes is not None  # `_in_rows`: the weights are constant
    workload = Workload("conv", context.memory_path, rows, depth, columns, storage=binding.storage, taps=kernel_h * kernel_w)
    config = plain_tile(context.descriptor, "conv").in_float()
    config = replace(config, columns=config.vector)  # the window needs registers, too
    config = replace(config.cut(workload), rows=config.rows)  # with fewer rows, windows would begin between groups of four
    packing = Packing(depth, columns, 1, config.panel, binding.storage, context.memory_path, run, context.descriptor)
    parts = context.parts(node, packing, config.items_down(rows))
    names = placed(context, node, packing, parts, binding.codes)
    tile = ContractionTile(
        config,
        Operands(binding.storage, activation=context.stored(x), stored=context.stored(group.output)),
        Layout(texture=parts[0].width > 0, aligned_columns=columns % 4 == 0, scattered=group.moved is not None),
    )
    phase = -pads[1] * channels % 4
    values = {
        "run": run,
        "stride": stride,
        "before": pads[1] * channels + phase,
        "steps": _steps(run, stride, phase, tile.rows),
    }
    epilogue = context.epilogue(group, tile.vector)
    kernel = context.kernels.kernel(
        "convolution/conv_row", t=tile, attributes=context.attributes(tile.group), **values, **context.epilogue_values(epilogue)
    )
    dims = [rows, height, width * channels, out_height, out_width, columns, kernel_h, strides[0]]
    dims += [node.attributes["dilations"][0], pads[0]]
    lines = images * out_height * -(-out_width // tile.rows)
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        folds = [part.height, part.panels * packing.panel_texels] if tile.layout.texture else []
        places = [group.places] if tile.layout.scattered else []
        made = min(part.panels * tile.panel, columns)
        context.launch(
            group,
            kernel,
            [
                context.operand(x), Arg("slice", name), context.tensor(group.output), *context.operand_args(epilogue),
                *dims, part.first_panel, part.panels, *folds, *places,
            ],
            (lines, part.panels),
            tile.group,
            tile.described(KernelShape("conv", rows=rows, columns=made, depth=depth, run=run)),
            macs=rows * depth * made,
            nbytes=context.nbytes(x) + ITEMSIZE[context.storage(group.output)] * rows * part.panels * tile.panel,
            part=f"[{i}]" if len(names) > 1 else "",
        )  # fmt: skip


def _steps(run: int, stride: int, phase: int, rows: int) -> list[tuple[int, list[int], list[tuple[int, int]]]]:
    """For each step of a run: itself, the groups of four elements first used there, and (group, element) of each pixel."""
    steps = []
    known = set[int]()
    for step in range(run):
        uses = [divmod(step + pixel * stride + phase, 4) for pixel in range(rows)]
        steps.append((step, sorted({group for group, _ in uses} - known), uses))
        known |= {group for group, _ in uses}
    return steps


def can_be_winograd(context: LoweringContext, node: Node) -> bool:
    """Whether F(2x2, 3x3) can compute `node`: floats, constant weights, 3x3 taps, dilation and stride 1, one group.

    Its sums are those of floats, so `--precision fp16` and `tf32` do without it.
    """
    x = node.input(0)
    weight = node.input(1)
    attributes = node.attributes
    return (
        node.op == "Conv"
        and weight.shape[2:] == (3, 3)
        and {int(attributes["group"]), *attributes["strides"], *attributes["dilations"]} == {1}
        and weight.constant is not None
        and not isinstance(weight.constant, QuantizedConstant)
        and not (context.half or context.tf32)
        and (weight.dtype, context.storage(x)) == ("float32", "float32")
    )


def _tiles(y: Value) -> int:
    """Tiles of 2 x 2 pixels of an output [images, height, width, channels]."""
    images, height, width, _ = y.shape
    return images * -(-height // 2) * -(-width // 2)


def transformed_weights(weight: NDArray[Any]) -> NDArray[np.float32]:
    """Winograd's weights: [columns, channels, 3, 3] as [columns, channels, 4, 4], G g G' for each, computed in double."""
    made = np.empty((*weight.shape[:2], 4, 4), np.float32)
    for i, filters in enumerate(weight):  # one by one: weights are large
        made[i] = _WEIGHTS @ filters.astype(np.float64) @ _WEIGHTS.T
    return made


def _lower_winograd(context: LoweringContext, group: FusionGroup, config: Winograd) -> None:
    """Launch Winograd's kernel once for each slice of the transformed weights. `config` is cut to the tiles."""
    node = group.main
    x = node.input(0)
    weight = node.input(1)
    y = node.outputs[0]
    images, height, width, channels = x.shape
    _, out_height, out_width, columns = y.shape
    tiles = _tiles(y)
    depth = 16 * channels
    assert weight.constant is not None
    read = weight.constant.array
    packing = Packing(depth, columns, 1, config.panel, "float32", context.memory_path, 1, context.descriptor)
    parts = context.parts(node, packing, config.items_down(tiles))
    names = placed(context, node, packing, parts, lambda: transformed_weights(read()))
    texture = parts[0].width > 0
    tile = ContractionTile(
        config,
        Operands(stored=context.stored(group.output)),
        Layout(
            texture=texture,
            folded=texture and parts[0].height < depth,
            whole=True,
            aligned_columns=columns % 4 == 0,
            scattered=group.moved is not None,
        ),
    )
    epilogue = context.epilogue(group, tile.vector)
    kernel = context.kernels.kernel(
        "convolution/winograd", t=tile, attributes=context.attributes(tile.group), **context.epilogue_values(epilogue)
    )
    dims = [images, height, width, channels, out_height, out_width, columns, *node.attributes["pads"][:2]]
    operands = context.operand_args(epilogue)
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        folds = [part.height, part.panels * packing.panel_texels] if texture else []
        places = [group.places] if group.moved is not None else []
        made = min(part.panels * tile.panel, columns)
        context.launch(
            group,
            kernel,
            [
                context.operand(x), Arg("slice", name), context.tensor(group.output), context.zeros(channels), *operands,
                *dims, part.first_panel, part.panels, *folds, *places,
            ],
            tile.launched(tiles, part.panels),
            tile.group,
            tile.described(KernelShape("conv", rows=y.size // columns, columns=made, depth=9 * channels, run=channels)),
            macs=tiles * depth * made,
            nbytes=context.nbytes(x) + ITEMSIZE[context.storage(group.output)] * y.size // columns * part.panels * tile.panel,
            part=f"[{i}]" if len(names) > 1 else "",
        )  # fmt: skip
