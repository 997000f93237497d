"""Lowering of products of two tensors: one launch."""

from __future__ import annotations

import math

from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.strided import broadcast_strides
from flashmem.compiler.kernels.contraction.configs import plain_tile
from flashmem.compiler.kernels.contraction.quantisation import read_both
from flashmem.compiler.kernels.contraction.tile import ContractionTile, MainLoop
from flashmem.compiler.kernels.contraction.tile_choice import config_for, depth_vector, layout_of, operands_of, shares_epilogue
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.program.launches import KernelShape


def lower_dynamic(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a product of two tensors (or of a tensor and a stack of constant matrices), such as attention's two products."""
    a = group.main.input(0)
    b = group.main.input(1)
    y = group.main.outputs[0]
    batch, (rows, columns), depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
    batches = math.prod(batch)
    transposed = bool(group.main.attributes["transposed"])
    right, binding = read_both(context, group.main)
    workload = Workload("matmul_dynamic", "buffer", rows, depth, columns, batches, binding.storage)
    floats = (
        binding.storage in ("float32", "float16")
        and binding.zero is binding.scale is binding.weight_zero is binding.weight_scale is None
    )
    given = None if floats else plain_tile(context.descriptor, workload.family)
    config = config_for(context, group, workload, packed=False, given=given)
    tile = ContractionTile(
        config,
        operands_of(context, group, workload.weights, binding),
        layout_of(workload, config, depth),
        MainLoop(
            depth_vector(context, group, workload, config, depth),
            shared_epilogue=shares_epilogue(context.descriptor, config),
        ),
    )
    epilogue = context.epilogue(group, tile.vector)
    levels = _batch_levels(batch, a.shape, b.shape)
    kernel = context.kernels.kernel(
        "contraction/matmul_dynamic",
        t=tile,
        attributes=context.attributes(tile.group),
        levels=len(levels),
        transposed=transposed,
        **context.epilogue_values(epilogue),
    )
    args = [context.operand(a), right, context.tensor(group.output), *binding.args, *context.operand_args(epilogue)]
    context.launch(
        group,
        kernel,
        [*args, batches, rows, depth, columns, *(number for level in levels for number in level)],
        (*tile.launched(rows, -(-columns // tile.panel)), batches),
        (*tile.group, 1),
        tile.described(
            KernelShape(rows=batches * rows, columns=columns, depth=depth, run=depth, stride=depth if transposed else 1)
        ),
        macs=batches * rows * columns * depth,
    )


def _batch_levels(batch: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Size and strides of each dimension of `batch`, innermost first: (size, stride of `a`, stride of `b`) of matrices.

    A stride is 0 where the operand is broadcast. Neighbours that one stride covers in both operands are merged; at least one
    dimension remains.
    """
    steps = [[stride * shape[-2] * shape[-1] for stride in reversed(broadcast_strides(shape[:-2], batch))] for shape in (a, b)]
    levels: list[tuple[int, int, int]] = []
    for size, *step in zip(reversed(batch), *steps, strict=True):
        if levels and step == [levels[-1][0] * last for last in levels[-1][1:]]:
            levels[-1] = (levels[-1][0] * size, *levels[-1][1:])
        elif size > 1:
            levels.append((size, *step))
    return levels or [(1, 0, 0)]
