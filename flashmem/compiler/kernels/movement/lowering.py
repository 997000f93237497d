"""Lowering of data movement (Transpose, Slice, Pad, Concat, ...): a region with an affine source and an affine target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import broadcast_strides, row_major
from flashmem.compiler.lowering.context import WORK_GROUP, LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.memory.buffers import parts_in_place
from flashmem.compiler.operators.vector import STORED, scalar_literal
from flashmem.program.launches import Arg, KernelShape


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _inner_run(region: Sequence[int], strides: Sequence[int]) -> int:
    """The number of innermost elements that are contiguous."""
    run = 1
    for size, stride in zip(reversed(region), reversed(strides), strict=True):
        if size != 1:
            if stride != run:
                break
            run *= size
    return run


def _jump(region: Sequence[int], strides: Sequence[int]) -> int:
    """The stride of the innermost dimension that does not continue the run (see `_inner_run`); 1 if everything is one run."""
    run = 1
    for size, stride in zip(reversed(region), reversed(strides), strict=True):
        if size != 1:
            if stride != run:
                return abs(stride)
            run *= size
    return 1


def copy_region(
    context: LoweringContext,
    group: FusionGroup,
    source: Value | None,
    target: Value,
    region: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
    *,
    source_start: int = 0,
    target_start: int = 0,
    fill: str = "",
    part: str = "",
) -> None:
    """Launch the copy of `region`, or its fill if `source` is None. Strides and starts are in elements."""
    if 0 in region:
        return
    source_strides = target_strides if source is None else source_strides
    run = math.gcd(_inner_run(region, target_strides), _inner_run(region, source_strides))
    vector = min(context.descriptor.tile.vector, run & -run) if source is not None else 1
    grid = _grid(region, source_strides, target_strides)
    if source is not None and (form := _tiles(context, source, target, grid)) is not None:
        _move_tiles(context, group, source, target, form, [source_start, target_start], part)
        return
    block = 1
    step = 0
    scatters = False
    if vector > 1:
        grid[0] = (grid[0][0] // vector, vector, vector)
    elif source is not None:
        grid, block, step, scatters = _in_blocks(grid, context.descriptor.tile.vector)
    (columns, _, _), (rows, _, _), *outer = grid
    items = (columns, rows, math.prod(size for size, _, _ in outer))
    local = context.work_group(items)
    stored, made = context.copied(source, target) if source is not None else ("", context.stored(target))
    kernel = context.kernels.kernel(
        "movement/movement",
        attributes=context.attributes(local),
        stored=stored,
        made=made,
        vector=vector,
        block=block,
        scatters=scatters,
        reads=source is not None,
        directions=len(grid),
        fill=fill,
    )
    pointers: list[Arg | int] = [context.operand(source)] if source is not None else []
    starts = [source_start, target_start] if source is not None else [target_start]
    steps = [number for _, *each in grid for number in (each if source is not None else each[1:])]
    longest = _inner_run(region, source_strides)
    context.launch(
        group,
        kernel,
        [*pointers, context.tensor(target), *starts, *(size for size, _, _ in grid), *steps, *([step] if block > 1 else [])],
        items,
        local,
        KernelShape(columns=math.prod(region), run=longest, stride=_jump(region, source_strides), vector=vector),
        nbytes=2 * ITEMSIZE[context.storage(target)] * math.prod(region),
        part=part,
    )


Dimension = tuple[int, int, int]
"""(size, stride in the source, stride in the target) of a dimension of a copy."""


def _grid(region: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Dimension]:
    """The dimensions of a copy, innermost first, at least three. Neighbours that one stride covers on both sides are merged."""
    merged: list[Dimension] = []
    for size, near, far in zip(reversed(region), reversed(source), reversed(target), strict=True):
        if size == 1:
            continue
        if merged and (near, far) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = (merged[-1][0] * size, *merged[-1][1:])
        else:
            merged.append((size, near, far))
    return merged + [(1, 0, 0)] * (3 - len(merged))


@dataclass(frozen=True)
class _Tiles:
    """A copy by tiles: its dimensions (innermost in the source, innermost in the target, others), and the form of a tile.

    A tile has `down` x `across` elements. `shared`: it passes through local memory. `scalar`: the side whose runs are as short
    as a tile and are accessed element by element, or "".
    """

    grid: list[Dimension]
    down: int
    across: int
    shared: bool = False
    scalar: Literal["", "source", "target"] = ""

    def blocks(self) -> tuple[int, int]:
        """Blocks of tiles across and down, each a work-item of a CPU: large ones, if they are many enough."""
        places = math.prod(size for size, _, _ in self.grid[2:])
        counts = (0, 0)
        for tiles in _BLOCKS[bool(self.scalar)]:
            counts = (-(-self.grid[0][0] // (self.across * tiles)), -(-self.grid[1][0] // (self.down * tiles)))
            if counts[0] * counts[1] * places >= _FEWEST_ITEMS:
                break
        return counts


_RUN_BYTES = 64
"""Bytes of a run of a tile in registers: a line of a CPU's caches."""

_LEAST_TILE = 8
"""Shorter runs of a tile are accessed element by element."""

_BLOCKS = {False: (8, 4), True: (64, 16, 4)}
"""Tiles of a block in each direction, the most first; those of a short dimension are one tile. With fewer than three, the last
tile of the last block would begin in the block before it."""

_FEWEST_ITEMS = 16
"""Work-items that keep the cores of a CPU busy to the end."""

_SHARED_ITEMS = {32: 128, 16: 64}
"""Work-items of a group that copies a tile through local memory, by the length of its runs."""


def _tiles(context: LoweringContext, source: Value, target: Value, grid: Sequence[Dimension]) -> _Tiles | None:
    """The form of a copy whose innermost dimension changes; None if it does not change, or if runs are short on both sides."""
    read = next((i for i, (size, near, _) in enumerate(grid) if near == 1 and size > 1), None)
    written = next((i for i, (size, _, far) in enumerate(grid) if far == 1 and size > 1), None)
    if read is None or written is None or read == written:
        return None
    ordered = [grid[read], grid[written], *(each for i, each in enumerate(grid) if i not in (read, written))]
    ordered += [(1, 0, 0)] * (3 - len(ordered))
    shortest, longest = sorted((grid[read][0], grid[written][0]))
    item = max(ITEMSIZE[context.storage(value)] for value in (source, target))
    if context.descriptor.kind == "gpu":
        # A tile in local memory has a column more, so that a column's elements are in different banks.
        size = 32 if shortest > 16 and 32 * 33 * item <= context.descriptor.local_bytes else 16
        return _Tiles(ordered, size, size, shared=True) if shortest >= _LEAST_TILE else None
    widest = min(16, _RUN_BYTES // item)
    if shortest >= _LEAST_TILE:
        size = min(widest, 1 << (shortest.bit_length() - 1))
        return _Tiles(ordered, size, size)
    if longest < _LEAST_TILE:
        return None
    run = min(widest, 1 << (longest.bit_length() - 1))
    if grid[read][0] == shortest:
        return _Tiles(ordered, run, shortest, scalar="source")
    return _Tiles(ordered, shortest, run, scalar="target")


def _move_tiles(
    context: LoweringContext, group: FusionGroup, source: Value, target: Value, form: _Tiles, starts: Sequence[int], part: str
) -> None:
    """Launch a copy by tiles."""
    (across, _, far), (down, near, _), *outer = form.grid
    places = math.prod(size for size, _, _ in outer)
    blocks = form.blocks()
    items: tuple[int, ...]
    local: tuple[int, ...]
    lines = 0
    if form.shared:
        lines = _SHARED_ITEMS[form.across] // form.across
        items = (-(-across // form.across) * form.across, -(-down // form.down) * lines, places)
        local = (form.across, lines, 1)
    else:
        items = (*blocks, places)
        local = (1, 1, WORK_GROUP if places >= WORK_GROUP * _FEWEST_ITEMS else 1)
    stored, made = context.copied(source, target)
    kernel = context.kernels.kernel(
        "movement/transpose",
        attributes=context.attributes(local),
        stored=stored,
        made=made,
        directions=len(form.grid),
        down=form.down,
        across=form.across,
        shared=form.shared,
        lines=lines,
        scalar=form.scalar,
    )
    sizes = [size for size, _, _ in form.grid]
    steps = [near, far, *(number for _, *each in outer for number in each)]
    context.launch(
        group,
        kernel,
        [context.operand(source), context.tensor(target), *starts, *sizes, *steps, *(() if form.shared else blocks)],
        items,
        local,
        KernelShape("movement", columns=math.prod(sizes), run=form.across, stride=abs(near), vector=form.across),
        nbytes=2 * ITEMSIZE[context.storage(target)] * math.prod(sizes),
        part=part,
    )


def _in_blocks(grid: list[Dimension], widest: int) -> tuple[list[Dimension], int, int, bool]:
    """Block a copy that transposes, so that whole vectors are read, or written, on the side with long strides.

    The second dimension becomes blocks that are contiguous on one side. Returns the dimensions, the size of a block, its stride
    on the other side, and whether a block is contiguous in the source. If it is, its elements are scattered in the target.
    """
    read = next((i for i, (size, near, _) in enumerate(grid) if near == 1 and size > 1), None)
    written = next((i for i, (size, _, far) in enumerate(grid) if far == 1 and size > 1), None)
    if read is None or written is None or read == written:
        return grid, 1, 0, False
    long_reads = grid[written][1] >= grid[read][2]
    for scatters in (long_reads, not long_reads):
        blocked, other = (read, written) if scatters else (written, read)
        size, near, far = grid[blocked]
        block = min(widest, size & -size)
        if block >= _LEAST_BLOCK:
            rest = [each for i, each in enumerate(grid) if i not in (read, written)]
            whole = (size // block, near * block, far * block)
            return [grid[other], whole, *rest], block, far if scatters else near, scatters
    return grid, 1, 0, False


_LEAST_BLOCK = 4


@lowers("transpose")
def lower_transpose(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Transpose: the source is read with permuted strides."""
    x = group.main.input(0)
    y = group.output
    perm = group.main.attributes["perm"]
    strides = row_major(x.shape)
    copy_region(context, group, x, y, y.shape, [strides[axis] for axis in perm], row_major(y.shape))


@lowers("slice")
def lower_slice(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Slice: a start and a step in each dimension, which may be negative."""
    x = group.main.input(0)
    y = group.output
    strides = row_major(x.shape)
    start = _dot(strides, group.main.attributes["starts"])
    stepped = [stride * step for stride, step in zip(strides, group.main.attributes["steps"], strict=True)]
    copy_region(context, group, x, y, y.shape, stepped, row_major(y.shape), source_start=start)


@lowers("expand")
def lower_expand(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Expand: broadcast dimensions have stride 0."""
    x = group.main.input(0)
    y = group.output
    copy_region(context, group, x, y, y.shape, broadcast_strides(x.shape, y.shape), row_major(y.shape))


@lowers("tile")
def lower_tile(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Tile: each dimension becomes (repeats, size); the source has stride 0 along the repeats."""
    x = group.main.input(0)
    y = group.output
    region = []
    source = []
    for size, stride, repeat in zip(x.shape, row_major(x.shape), group.main.attributes["repeats"], strict=True):
        region += [repeat, size]
        source += [0, stride]
    copy_region(context, group, x, y, region, source, row_major(region))


@lowers("concat")
def lower_concat(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Concat: one copy for each input that is not already in its place in the output."""
    y = group.output
    axis = group.main.attributes["axis"]
    target = row_major(y.shape)
    start = 0
    there = {i for i, (x, at) in enumerate(parts_in_place(group.main)) if context.buffers.holds(y, x, at)}
    for i, x in enumerate(value for value in group.main.inputs if value is not None):
        if i not in there:
            copy_region(
                context, group, x, y, x.shape, row_major(x.shape), target, target_start=start * target[axis], part=f"[{i}]"
            )
        start += x.shape[axis]


@lowers("pad")
def lower_pad(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Pad with a constant: fill, then copy."""
    x = group.main.input(0)
    y = group.output
    before = group.main.attributes["before"]
    fill = scalar_literal(y.dtype, group.main.attributes["value"])
    copy_region(context, group, None, y, y.shape, row_major(y.shape), row_major(y.shape), fill=fill, part="[fill]")
    # A negative pad crops: the region starts inside the source.
    firsts = [max(0, -b) for b in before]
    starts = [max(0, b) for b in before]
    region = [
        max(0, min(size - first, out - start)) for size, first, out, start in zip(x.shape, firsts, y.shape, starts, strict=True)
    ]
    source = row_major(x.shape)
    target = row_major(y.shape)
    copy_region(
        context, group, x, y, region, source, target,
        source_start=_dot(firsts, source), target_start=_dot(starts, target), part="[copy]",
    )  # fmt: skip


@lowers("frames")
def lower_frames(context: LoweringContext, group: FusionGroup) -> None:
    """Lower the frames of a signal, which overlap: in the source, the next frame starts `step` elements later."""
    x = group.main.input(0)
    y = group.output
    step = group.main.attributes["step"]
    _, length, components = x.shape
    batch, frames, size, _ = y.shape
    region = (batch, frames, size * components)
    copy_region(context, group, x, y, region, [length * components, step * components, 1], row_major(region))


@lowers("gather")
def lower_gather(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Gather. An index out of range writes the launch's number to the status tensor; no read leaves the table."""
    data = group.main.input(0)
    indices = group.main.input(1)
    axis = group.main.attributes["axis"]
    outer = math.prod(data.shape[:axis])
    inner = math.prod(data.shape[axis + 1 :])
    count = indices.size
    items = (inner, outer * count)
    local = context.work_group(items)
    stored, made = context.copied(data, group.output)
    kernel = context.kernels.kernel(
        "movement/gather", attributes=context.attributes(local), stored=stored, made=made, index=STORED[indices.dtype]
    )
    args = [context.operand(data), context.operand(indices), context.tensor(group.output), context.status()]
    dims = [outer * count, count, data.shape[axis], inner, len(context.launches) + 1]
    shape = KernelShape(rows=outer * count, columns=inner, run=inner, stride=inner)
    context.launch(group, kernel, [*args, *dims], items, local, shape, nbytes=2 * context.nbytes(group.output))
