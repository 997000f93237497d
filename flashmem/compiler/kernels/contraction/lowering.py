"""Lowering of MatMul and DeformConv: products with packed weights, or of two activations."""

from __future__ import annotations

import math

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.kernels.contraction.dynamic_matmul import lower_dynamic
from flashmem.compiler.kernels.contraction.packed_product import PackedProduct, lower_packed
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers


@lowers("matmul")
def lower_matmul(context: LoweringContext, group: FusionGroup) -> None:
    """Lower MatMul: constant weights are packed in slices; other operands are a product of two activations."""
    weight = group.main.input(1)
    is_packed = weight.constant is not None and weight.dtype in ("float32", "int8", "uint8")
    if not is_packed or math.prod(weight.shape[:-2]) != 1:
        lower_dynamic(context, group)
        return
    shape = group.main.outputs[0].shape
    rows = math.prod(shape[:-1])
    columns = shape[-1]
    depth = group.main.input(0).shape[-1]
    lower_packed(context, PackedProduct(group, "matmul", rows, depth, [rows, depth, columns]))


@lowers("deform_convolution")
def lower_deform_convolution(context: LoweringContext, group: FusionGroup) -> None:
    """Lower DeformConv: an implicit product whose taps are sampled."""
    node = group.main
    x = node.input(0)
    weight = node.input(1)
    y = node.outputs[0]
    _, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    groups = node.attributes["group"]
    offset_group = node.attributes["offset_group"]
    masked = len(node.inputs) > 3
    dims = [
        y.size // columns, height, width, channels, channels // groups, out_height, out_width, columns, columns // groups,
        *weight.shape[2:], *node.attributes["strides"], *node.attributes["dilations"], *node.attributes["pads"][:2],
        offset_group, channels // offset_group,
    ]  # fmt: skip
    sampled = [context.operand(node.input(i)) for i in range(2, len(node.inputs))]
    product = PackedProduct(
        group, "deform_conv", dims[0], channels // groups, dims, groups, sampled=sampled, stageable=False,
        values={"masked": masked},
    )  # fmt: skip
    lower_packed(context, product)
