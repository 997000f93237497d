"""Lowering of NonMaxSuppression (see `compiler.kernels.suppression.operators` for the attributes)."""

from __future__ import annotations

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import scalar_literal
from flashmem.program.launches import Arg, KernelShape


@lowers("suppression")
def lower_suppression(context: LoweringContext, group: FusionGroup) -> None:
    """Lower NonMaxSuppression: a launch selects boxes for each image and class, and a second one lists them."""
    node = group.main
    name = group.output.name
    boxes, scores, order = (node.input(index) for index in range(3))
    images, classes, depth = scores.shape
    rows = images * classes
    most = node.attributes["most"]
    lanes = min(context.descriptor.tile.lanes, 1 << (depth - 1).bit_length())
    local = (lanes, 1) if lanes > 1 else context.work_group((1, rows))
    least = node.attributes["least"]
    kernel = context.kernels.kernel(
        "selection/suppress",
        attributes=context.attributes(local),
        lanes=lanes,
        centred=node.attributes["centred"],
        overlap=scalar_literal("float32", node.attributes["overlap"]),
        least="" if least is None else scalar_literal("float32", least),
    )
    gone = context.tensor(Value(f"{name}.suppressed", (rows, depth), "uint8"))
    picks = context.tensor(Value(f"{name}.picks", (rows, most), "int32"))
    counts = context.tensor(Value(f"{name}.counts", (rows,), "int32"))
    args: list[Arg | int] = [context.operand(boxes), context.operand(scores), context.operand(order), gone, picks, counts]
    shape = KernelShape(rows=rows, columns=lanes, depth=depth, stride=4)
    context.launch(group, kernel, [*args, rows, classes, depth, most], (lanes, rows), local, shape, part="[suppress]")
    slots = rows * most
    local = context.work_group((slots,))
    kernel = context.kernels.kernel("selection/list_selected", attributes=context.attributes(local))
    args = [picks, counts, context.tensor(group.output), context.tensor(node.attributes["count"])]
    nbytes = 2 * context.nbytes(group.output)
    context.launch(
        group, kernel, [*args, slots, rows, classes, most], (slots,), local, KernelShape(rows=slots, depth=rows), nbytes=nbytes
    )
