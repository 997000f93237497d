"""Lowering of ArgMax, TopK, CumSum and CumProd along an axis: every tensor is treated as x[outer, depth, inner]."""

from __future__ import annotations

import math

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.lowering.context import WORK_GROUP, LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import REGISTER, STORED, Vector
from flashmem.program.launches import Arg, KernelShape

_RUN = 32
"""Elements of the initial runs of a sort; each element is compared with all of its run."""

_HEAP = 1024
"""The most positions that a CPU's work-item keeps of its chunk, in private memory. More are sorted by merges."""

_SORTED = 1 << 14
"""A column of at most that many elements is selected in two launches, however many of them."""

_CHUNK_OF_HEAP = 1024
"""The fewest elements of a CPU's chunk."""

_COUNTED = (32, 256, 2048)
"""Elements of a GPU's chunk, each compared with all others of it. The last step reads every chunk, so they are few."""

_BUSY = {"cpu": 16, "gpu": 4096}
"""Number of columns from which one work-item for each keeps a device busy."""

_CHUNK = 256
_CHUNKS = 256
"""The fewest elements of a chunk of a cumulative sum, and the most chunks of a column; each chunk adds up those before it."""


def _cut(node: Node) -> tuple[int, int, int]:
    """(outer, depth, inner): the dimensions of the input before, along, and after the node's axis."""
    shape = node.input(0).shape
    axis = node.attributes["axis"]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


@lowers("extreme")
def lower_extreme(context: LoweringContext, group: FusionGroup) -> None:
    """Lower ArgMax and ArgMin: one column for each output; several work-items share a column where columns are few."""
    node = group.main
    x, (outer, depth, inner) = node.input(0), _cut(node)
    columns = outer * inner
    lanes = context.descriptor.tile.lanes if columns < _BUSY[context.descriptor.kind] else 1
    local = (lanes, 1) if lanes > 1 else context.work_group((1, columns))
    kernel = context.kernels.kernel(
        "selection/extreme",
        attributes=context.attributes(local),
        lanes=lanes,
        stored=context.stored(x),
        kind=REGISTER[x.dtype],
        symbol=">" if node.op == "ArgMax" else "<",
        last=node.attributes["last"],
    )
    args: list[Arg | int] = [context.operand(x), context.tensor(group.output), columns, depth, inner]
    context.launch(group, kernel, args, (lanes, columns), local, KernelShape(rows=columns, depth=depth, stride=inner))


@lowers("top")
def lower_top(context: LoweringContext, group: FusionGroup) -> None:
    """Lower TopK: the best positions of each chunk of a column, then their ranks among all chunks; of many, a merge sort."""
    node = group.main
    outer, depth, inner = _cut(node)
    if node.attributes["k"] > _HEAP and depth > _SORTED:
        _sort(context, group)
        return
    x = node.input(0)
    k = node.attributes["k"]
    columns = outer * inner
    on_cpu = context.descriptor.kind == "cpu"
    if on_cpu:
        chunks = max(
            -(-depth // _HEAP) if k > _HEAP else 1, min(-(-_BUSY["cpu"] // columns), depth // max(_CHUNK_OF_HEAP, 4 * k))
        )
        chunk = -(-depth // chunks)
    else:
        chunk = next((run for run in _COUNTED if 4 * depth <= run * run), _COUNTED[-1])
    chunks = -(-depth // chunk)
    kept = min(chunk, k)
    stored = (chunks - 1) * kept + min(kept, depth - (chunks - 1) * chunk)
    best = Value(f"{group.output.name}.best", (outer, stored, inner), "int32") if chunks > 1 else group.output
    values = _order(context, node)
    if on_cpu:
        vector = Vector(min(context.descriptor.tile.vector, 64 // ITEMSIZE[x.dtype]))
        items = (chunks, columns)
        local: tuple[int, ...] = (1, WORK_GROUP if columns >= WORK_GROUP * _BUSY["cpu"] else 1)
        kernel = context.kernels.kernel(
            "selection/best_of_chunks",
            attributes=context.attributes(local),
            index=STORED[best.dtype],
            kept=kept,
            contiguous=inner == 1 and vector.width > 1,
            vector=vector.width,
            load=vector.load(context.storage(x), "a", "next"),
            **values,
        )
        numbers = [columns, depth, inner, chunks, chunk, stored]
    else:
        items = (depth, columns)
        local = context.work_group(items)
        kernel = context.kernels.kernel(
            "selection/sort_runs", attributes=context.attributes(local), run=chunk, index=STORED[best.dtype], **values
        )
        numbers = [columns, depth, inner, kept, stored]
    shape = KernelShape(rows=outer * stored, columns=inner, depth=chunk, stride=inner)
    nbytes = context.nbytes(x) + context.nbytes(best)
    args = [context.operand(x), context.tensor(best), *numbers]
    context.launch(group, kernel, args, items, local, shape, nbytes=nbytes, part="[chunks]" if chunks > 1 else "")
    if chunks > 1:
        _rank(context, group, best, kept, stored)


def _rank(context: LoweringContext, group: FusionGroup, best: Value, kept: int, stored: int) -> None:
    """Launch the last step of a selection: the first k of sorted runs of `kept` positions, `stored` in all."""
    node = group.main
    x, (outer, depth, inner), k = node.input(0), _cut(node), node.attributes["k"]
    items = (stored, outer * inner)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "selection/rank_among_runs",
        attributes=context.attributes(local),
        index=STORED[group.output.dtype],
        **_order(context, node),
    )
    pointers = [context.operand(x), context.tensor(best), context.tensor(group.output)]
    shape = KernelShape(rows=outer * stored, columns=inner, depth=-(-stored // kept) * kept.bit_length(), stride=inner)
    nbytes = context.nbytes(best) + context.nbytes(group.output)
    numbers = [outer * inner, depth, inner, kept, stored, k]
    context.launch(group, kernel, [*pointers, *numbers], items, local, shape, nbytes=nbytes, part="[ranks]")


def _order(context: LoweringContext, node: Node) -> dict[str, str | bool]:
    """Template values of the order of the elements."""
    x = node.input(0)
    symbol = ">" if node.attributes["largest"] else "<"
    nan_first: bool = node.attributes["nan_first"]
    return {"stored": context.stored(x), "kind": REGISTER[x.dtype], "symbol": symbol, "nan_first": nan_first}


def _sort(context: LoweringContext, group: FusionGroup) -> None:
    """Launch a merge sort of positions: short sorted runs, then merges that keep at most `k` positions of a run."""
    node = group.main
    x, (outer, depth, inner), k = node.input(0), _cut(node), node.attributes["k"]
    columns = outer * inner
    values = _order(context, node)

    def results(stored: int, runs: int) -> Value:
        if runs == 1:
            return group.output
        return Value(f"{group.output.name}.runs{runs}", (outer, stored, inner), "int32")

    runs = -(-depth // _RUN)
    kept = min(_RUN, k)
    stored = (runs - 1) * kept + min(kept, depth - (runs - 1) * _RUN)
    target = results(stored, runs)
    items = (depth, columns)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "selection/sort_runs", attributes=context.attributes(local), run=_RUN, index=STORED[target.dtype], **values
    )
    args: list[Arg | int] = [context.operand(x), context.tensor(target), columns, depth, inner, kept, stored]
    shape = KernelShape(rows=outer * depth, columns=inner, depth=min(_RUN, depth), stride=inner)
    context.launch(group, kernel, args, items, local, shape, nbytes=context.nbytes(x) + context.nbytes(target), part="[runs]")
    while runs > 1:
        source = target
        left = stored - (runs - 1) // 2 * 2 * kept  # elements of the last pair of runs, or of a single last run
        runs = -(-runs // 2)
        before = kept
        had = stored
        kept = min(2 * kept, k)
        stored = (runs - 1) * kept + min(kept, left)
        target = results(stored, runs)
        items = (had, columns)
        local = context.work_group(items)
        kernel = context.kernels.kernel(
            "selection/sort_merge", attributes=context.attributes(local), index=STORED[target.dtype], **values
        )
        pointers = [context.operand(x), context.tensor(source), context.tensor(target)]
        shape = KernelShape(rows=outer * had, columns=inner, depth=before.bit_length(), stride=inner)
        nbytes = context.nbytes(source) + context.nbytes(target)
        numbers = [columns, depth, inner, before, had, kept, stored]
        context.launch(group, kernel, [*pointers, *numbers], items, local, shape, nbytes=nbytes, part=f"[merge {runs}]")


@lowers("scan")
def lower_scan(context: LoweringContext, group: FusionGroup) -> None:
    """Lower CumSum or CumProd: a work-item for each column, or for each chunk of a column if columns are few and long."""
    node = group.main
    x, (outer, depth, inner) = node.input(0), _cut(node)
    # Neighbouring columns form one vector, as long as enough vectors remain.
    vector = context.vector_for(inner)
    while vector > 1 and (inner % vector or outer * inner // vector < _BUSY[context.descriptor.kind]):
        vector //= 2
    inner //= vector
    columns = outer * inner
    chunks = max(1, min(_BUSY[context.descriptor.kind] // columns, depth // _CHUNK, _CHUNKS))
    chunk = -(-depth // chunks)
    chunks = -(-depth // chunk)
    items = (columns, chunks)
    local = context.work_group(items)
    parts = context.tensor(Value(f"{group.output.name}.chunks", (chunks, columns * vector), x.dtype)) if chunks > 1 else None
    for is_first in (True, False)[parts is None :]:
        kernel = context.kernels.kernel(
            "selection/scan",
            attributes=context.attributes(local),
            stored=context.stored(x),
            made=context.stored(group.output),
            summed=STORED[x.dtype],
            vector=vector,
            vec=Vector(vector).named(STORED[x.dtype]),
            symbol="+" if node.op == "CumSum" else "*",
            neutral=0 if node.op == "CumSum" else 1,
            exclusive=node.attributes["exclusive"],
            reverse=node.attributes["reverse"],
            parts=parts is not None,
            totals=is_first,
        )
        pointers = [context.operand(x), *([parts] if parts is not None else [])]
        if not is_first:
            pointers.append(context.tensor(group.output))
        shape = KernelShape(rows=chunks, columns=columns * vector, depth=chunk, stride=inner * vector, vector=vector)
        numbers = [columns, depth, inner, chunk, chunks]
        context.launch(group, kernel, [*pointers, *numbers], items, local, shape, part="[chunks]" if is_first else "")
