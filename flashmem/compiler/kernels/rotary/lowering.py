"""Lowering of rotary positions: each work-item rotates a vector of pairs, or copies elements that do not rotate.

Of few tokens, the launch writes the new keys and values into their caches too (`compiler.memory.joined_updates`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashmem.compiler.ir.broadcast import affine
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import broadcast_strides
from flashmem.compiler.kernels.indexing.lowering import scattered
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import Vector
from flashmem.program.launches import KernelShape

_WIDEST = 8
"""The most pairs of a vector: neighbouring pairs are loaded as one vector of twice the width."""


@dataclass(frozen=True)
class _Turned:
    """Rotary positions as a kernel computes them: template values, and arguments besides the tensors.

    `tables`: of cosines and sines. `items`: vectors of a row. `numbers`: sizes and strides in the offsets of the tables' rows.
    """

    tables: list[Value]
    values: dict[str, Any]
    rows: int
    items: int
    numbers: list[int]
    sizes: list[int]
    shape: KernelShape


def _turned(context: LoweringContext, group: FusionGroup) -> _Turned:
    node = group.main
    x = node.input(0)
    half = node.attributes["half"]
    columns = x.shape[-1]
    rows = x.size // columns
    rest = columns - 2 * half
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
    values = {
        "stored": context.stored(x),
        "made": context.stored(group.output),
        "tables": [context.stored(table) for table in tables],
        "at": [row_of(table) for table in tables],
        "wide": tables[0].shape[-1] > half,
        "interleaved": node.attributes["interleaved"],
        "copies": rest > 0,
        "vector": vector,
        "vec": Vector(vector).named("float"),
        "pair": Vector(2 * vector).named("float"),
    }
    shape = KernelShape(rows=rows, columns=columns, run=columns, vector=vector)
    return _Turned(
        tables,
        values | {"numbers": len(numbers)},
        rows,
        (half + rest) // vector,
        numbers,
        [half, rest] if rest else [half],
        shape,
    )


@lowers("rotary")
def lower_rotary(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Rotary to one launch."""
    if group.joined:
        _lower_with_caches(context, group)
        return
    node = group.main
    turned = _turned(context, group)
    items = (turned.items, turned.rows)
    local = context.work_group(items)
    over = "x" if context.buffers.overwritten.get(node) is node.input(0) else ""
    kernel = context.kernels.kernel("attention/rotary", attributes=context.attributes(local), over=over, **turned.values)
    args = [context.operand(node.input(0)), context.tensor(group.output), *map(context.operand, turned.tables)]
    context.launch(group, kernel, [*args, *turned.numbers, turned.rows, *turned.sizes], items, local, turned.shape)


def _lower_with_caches(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Rotary, and the scatters that are joined with it, to one launch."""
    node = group.main
    turned = _turned(context, group)
    keys, values = sorted(group.joined, key=lambda each: not context.buffers.holds(group.output, each.main.input(2), 0))
    indices = keys.main.input(1)
    updates = values.main.input(2)
    count = math.prod(keys.main.attributes["items"])
    at = scattered([keys, values])
    [(key_at, key_step), (value_at, value_step)] = at.pop("sources")
    steps = keys.main.attributes["steps"]
    items = (turned.items * turned.rows + 2 * count,)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "attention/rotary_scatter",
        attributes=context.attributes(local),
        new=context.stored(updates),
        cached=context.stored(keys.output),
        key_at=key_at,
        key_step=key_step,
        value_at=value_at,
        value_step=value_step,
        **at,
        **turned.values,
    )
    read = [context.operand(updates), context.operand(indices)]
    args = [context.operand(node.input(0)), context.tensor(group.output), *map(context.operand, turned.tables), *read]
    args += [context.tensor(keys.output), context.tensor(values.output), context.status()]
    numbers = [*turned.numbers, turned.rows, *turned.sizes, count, steps, len(context.launches) + 1]
    moved = count * steps * (context.nbytes(updates) // updates.size + 2 * context.nbytes(keys.output) // keys.output.size)
    nbytes = sum(context.nbytes(each) for each in (*node.inputs, group.output, indices) if each is not None) + moved
    context.launch(
        group, kernel, [*args, *numbers], items, local, turned.shape, nbytes=nbytes, part="[scatter]", others=[keys, values]
    )
