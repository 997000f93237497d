"""Lowering of elementwise groups: the whole group is one pointwise body."""

from __future__ import annotations

from flashmem.compiler.ir.broadcast import best_split, matrix_of
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.pointwise import PointwiseBody
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import STORED, Vector
from flashmem.program.launches import Arg, KernelShape


@lowers("")
def lower_elementwise(context: LoweringContext, group: FusionGroup) -> None:
    """Lower an elementwise group to one launch of its pointwise body."""
    domain = group.output.shape or (1,)
    inside = {node.outputs[0] for node in group.nodes}
    values = [v for node in group.nodes for v in node.inputs if v is not None and v not in inside]
    split = best_split(domain, values)
    rows, columns = matrix_of(domain, split)
    vector = context.vector_for(columns)
    overwritten = context.buffers.overwritten.get(group.main)
    body = PointwiseBody(group.nodes, None, domain, split, vector, context.storage, overwritten=overwritten)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "elementwise/elementwise",
        attributes=context.attributes(local),
        stored=context.stored(group.output),
        vector=vector,
        vec=Vector(vector).named(STORED[group.output.dtype]),
        **context.epilogue_values(body),
    )
    args: list[Arg | int] = [context.tensor(group.output), *context.operand_args(body), rows, columns]
    shape = KernelShape(rows=rows, columns=columns, run=columns, vector=vector)
    nbytes = context.nbytes(group.output) + sum(map(context.nbytes, values))
    context.launch(group, kernel, args, items, local, shape, nbytes=nbytes)
