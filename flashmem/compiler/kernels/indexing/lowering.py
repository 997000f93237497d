"""Lowering of gathers and scatters by index tensors (see `compiler.kernels.indexing.operators` for the attributes)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashmem.base.types import ITEMSIZE, DType
from flashmem.compiler.ir.blocks import FORMATS
from flashmem.compiler.ir.blocks.places import bit_places
from flashmem.compiler.ir.broadcast import affine
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.kernels.indexing.quantised_rows import LARGEST_CODE, LEAST, scale_offset
from flashmem.compiler.kernels.movement.lowering import copy_region
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import REGISTER, STORED, Vector, scalar_literal
from flashmem.program.launches import Arg, KernelShape

_PARALLEL = {"cpu": 64, "gpu": 8192}
"""Work-items that keep a device busy, for kernels whose total work grows with the number of work-items."""


def _parts(node: Node) -> list[tuple[int, int]]:
    return list(zip(node.attributes["sizes"], node.attributes["strides"], strict=True))


@lowers("gather_at")
def lower_gather_at(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a gather: copy a run of elements for each position."""
    node = group.main
    x = node.input(0)
    indices = node.input(1)
    positions = node.attributes["positions"]
    run = node.attributes["run"]
    count = math.prod(positions)
    items = (run, count)
    local = context.work_group(items)
    parts = _parts(node)
    stored, made = context.copied(x, group.output)
    kernel = context.kernels.kernel(
        "indexing/gather_at",
        attributes=context.attributes(local),
        stored=stored,
        made=made,
        index=STORED[indices.dtype],
        base=affine(positions, node.attributes["base"], "position"),
        at=affine(positions, node.attributes["index"], "position"),
        parts=parts,
        reach=sum((size - 1) * stride for size, stride in parts),
    )
    args = [context.operand(x), context.operand(indices), context.tensor(group.output), context.status()]
    shape = KernelShape(rows=count, columns=run, run=run, stride=run)
    nbytes = 2 * context.nbytes(group.output) + context.nbytes(indices)
    context.launch(group, kernel, [*args, count, run, len(context.launches) + 1], items, local, shape, nbytes=nbytes)


@lowers("block_rows")
def lower_block_rows(context: LoweringContext, group: FusionGroup) -> None:
    """Lower rows of ggml's blocks to floats."""
    x = group.main.input(0)
    y = group.output
    kind = FORMATS[group.main.attributes["format"]]
    depth = y.shape[-1]
    places = bit_places(kind)
    rows = y.size // depth
    local = context.work_group((depth, rows))
    count = len(places.numbers)
    kernel = context.kernels.kernel(
        "indexing/block_rows",
        attributes=context.attributes(local),
        f=kind,
        made=context.stored(y),
        code_planes=kind.code_rows(1),
        factor_planes=kind.factor_rows(),
        count=count,
        scale_at=places.scale,
        minimum_at=places.minimum,
    )
    table = context.data(f"{kind.name}.places", 2 * count, lambda: places.numbers)
    nbytes = context.nbytes(x) + context.nbytes(y)
    shape = KernelShape(rows=rows, columns=depth, run=depth, stride=depth)
    args = [context.operand(x), table, context.tensor(y)]
    context.launch(group, kernel, [*args, rows, depth], (depth, rows), local, shape, nbytes=nbytes)


def _copy(context: LoweringContext, group: FusionGroup) -> None:
    """Copy the data to the output before updates are written into it; nothing if they cover all of it, or it is there."""
    x = group.main.input(0)
    y = group.output
    fill = group.main.attributes["fill"]
    if group.main.attributes["covered"] or context.buffers.holds(y, x, 0):
        return
    source = x if fill is None else None
    number = "" if fill is None else scalar_literal(y.dtype, fill)
    copy_region(context, group, source, y, (y.size,), (1,), (1,), fill=number, part="[copy]")


@lowers("place")
def lower_place(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a copy of the data and a copy of the updates into a region of it."""
    _copy(context, group)
    given = group.main.attributes
    updates = group.main.input(1)
    start = given["start"]
    copy_region(
        context, group, updates, group.output, given["region"], given["source"], given["target"], target_start=start,
        part="[place]",
    )  # fmt: skip


def _joined(dtype: DType, reduction: str) -> str:
    """The C expression for element `a` after update `b`, in the stored type."""
    if reduction == "none":
        return ""
    if dtype == "bool":
        text = "a | b" if reduction in ("add", "max") else "a & b"
    elif reduction in ("add", "mul"):
        text = f"a {'+' if reduction == 'add' else '*'} b"
    else:
        text = f"{'fm_' if dtype == 'float32' else ''}{reduction}(a, b)"
    scalar = Vector(1)
    return scalar.to_stored(dtype, scalar.wrap(dtype, text))


@lowers("scatter")
def lower_scatter(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a scatter: a copy of the data, then the updates, in order if two of them may reach the same element.

    One that is joined with another copies nothing: its data is there.
    """
    _copy(context, group)
    both = [group, *group.joined]
    node = group.main
    y = group.output
    given = node.attributes
    indices = node.input(1)
    updates = node.input(2)
    count = math.prod(given["items"])
    steps = given["steps"]
    places = given["places"]
    is_ordered = given["ordered"] and steps > 1
    # Each span of places reads all indices, so there are only as many spans as keep the device busy.
    spans = min(places, max(1, _PARALLEL[context.descriptor.kind] // count))
    items = (count, spans if is_ordered else steps, *([len(both)] if group.joined else []))
    local = context.work_group(items)
    stored, made = context.copied(updates, y)
    kernel = context.kernels.kernel(
        "indexing/scatter",
        attributes=context.attributes(local),
        stored=stored,
        made=made,
        kind=REGISTER[y.dtype],
        ordered=is_ordered,
        joined=_joined(y.dtype, given["reduction"]),
        **scattered(both),
    )
    args = [*_scatter_operands(context, both), context.status()]
    numbers = [count, steps, *([spans] if is_ordered else []), len(context.launches) + 1]
    shape = KernelShape(rows=steps, columns=count, depth=steps if is_ordered else 1, stride=given["stride"])
    size = ITEMSIZE[context.storage(updates)] + ITEMSIZE[context.storage(y)]
    nbytes = len(both) * (size * count * steps + context.nbytes(indices))
    context.launch(group, kernel, [*args, *numbers], items, local, shape, nbytes=nbytes, part="[scatter]", others=group.joined)


@lowers("scatter_quantised")
def lower_scatter_quantised(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a scatter of rows that it quantises: one launch, after a copy of the data where it is elsewhere.

    A row has one work-item on a CPU. On a GPU several share it, so that a few rows are no long chain of loads.
    """
    _copy(context, group)
    both = [group, *group.joined]
    node = group.main
    given = node.attributes
    indices = node.input(1)
    updates = node.input(2)
    size = given["size"]
    steps = given["steps"]
    count = math.prod(given["items"])
    vector = math.gcd(size, context.descriptor.tile.vector)
    lanes = min(context.descriptor.tile.lanes, 1 << (size // vector - 1).bit_length())
    items = (lanes, steps, len(both) * count)
    local = (lanes, 1, 1)
    kernel = context.kernels.kernel(
        "indexing/scatter_quantised",
        attributes=context.attributes(local),
        stored=context.stored(updates),
        ordered=given["ordered"] and steps > 1,
        lanes=lanes,
        vector=vector,
        vec=Vector(vector).named("float"),
        size=size,
        scale_at=scale_offset(size),
        least=scalar_literal("float32", LEAST),
        largest_code=LARGEST_CODE,
        unit=scalar_literal("float32", 1 / LARGEST_CODE),
        **scattered(both),
    )
    args = [*_scatter_operands(context, both), context.status()]
    rows = len(both) * steps * count
    shape = KernelShape(rows=rows, columns=size, depth=size, run=size, stride=given["stride"], vector=vector)
    read = size * ITEMSIZE[context.storage(updates)]
    nbytes = rows * (read + scale_offset(size) + 4) + len(both) * context.nbytes(indices)
    numbers = [count, steps, len(context.launches) + 1]
    context.launch(group, kernel, [*args, *numbers], items, local, shape, nbytes=nbytes, part="[scatter]", others=group.joined)


def scattered(groups: Sequence[FusionGroup]) -> dict[str, Any]:
    """Template values of scatters in one launch: where indices, updates and their targets are."""
    node = groups[0].main
    given = node.attributes

    def at(strides: Sequence[int]) -> str:
        return affine(given["items"], strides, "item")

    sources = []
    for attributes in (group.main.attributes for group in groups):
        start = f"{attributes['update_start']} + " if attributes["update_start"] else ""
        steps, strides = zip(*(attributes["update_step"] or ((1, 0),)), strict=True)
        sources.append((start + at(attributes["update"]), affine(steps, strides, "step")))
    return {
        "index": STORED[node.input(1).dtype],
        "index_at": at(given["index"]),
        "target": at(given["target"]),
        "parts": _parts(node),
        "sources": sources,
        **{name: given[name] for name in ("index_step", "stride", "places")},
    }


def _scatter_operands(context: LoweringContext, groups: Sequence[FusionGroup]) -> list[Arg]:
    """The arguments of scatters in one launch: updates of each, the indices of all, and the results."""
    updates = [context.operand(group.main.input(2)) for group in groups]
    return [*updates, context.operand(groups[0].main.input(1)), *(context.tensor(group.output) for group in groups)]
