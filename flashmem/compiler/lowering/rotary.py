"""Lowering of rotary positions: each work-item rotates a vector of pairs, or copies elements that do not rotate."""

from __future__ import annotations

import math

from flashmem.compiler.ir.broadcast import affine
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import broadcast_strides
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.operators.vector import Vector
from flashmem.program.launches import Arg, KernelShape

_WIDEST = 8
"""The most pairs of a vector: neighbouring pairs are loaded as one vector of twice the width."""


def lower_rotary(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Rotary to one launch."""
    node = group.main
    x, half = node.input(0), node.attributes["half"]
    columns = x.shape[-1]
    rows, rest = x.size // columns, columns - 2 * half
    vector = math.gcd(half, rest, context.vector_for(half), _WIDEST)
    numbers: list[int] = []

    def argument(number: int) -> str:
        numbers.append(number)
        return f"f{len(numbers) - 1}"

    def row_of(table: Value) -> str:
        """The offset of the row of a table."""
        domain = x.shape[:-1]
        strides = broadcast_strides(table.shape, (*domain, table.shape[-1]))[:-1]
        return affine(domain, strides, "row", size_as=argument, stride_as=argument)

    tables = [node.input(1), node.input(2)]
    at = [row_of(table) for table in tables]
    items = ((half + rest) // vector, rows)
    local = context.work_group(items)
    wide, interleaved = tables[0].shape[-1] > half, node.attributes["interleaved"]
    kernel = context.kernels.kernel(
        "attention/rotary",
        attributes=context.attributes(local),
        stored=context.stored(x),
        made=context.stored(group.output),
        tables=[context.stored(table) for table in tables],
        at=at,
        numbers=len(numbers),
        wide=wide,
        interleaved=interleaved,
        copies=rest > 0,
        vector=vector,
        vec=Vector(vector).named("float"),
        pair=Vector(2 * vector).named("float"),
        over="x" if context.buffers.overwritten.get(node) is x else "",
    )
    args: list[Arg | int] = [context.operand(x), context.tensor(group.output), *map(context.operand, tables), *numbers]
    shape = KernelShape(rows=rows, columns=columns, run=columns, vector=vector)
    context.launch(group, kernel, [*args, rows, half, rest] if rest else [*args, rows, half], items, local, shape)
