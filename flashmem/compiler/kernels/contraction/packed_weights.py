"""Packed weights of a program: placed in the weight file, or packed by launches if they are computed at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import row_major
from flashmem.compiler.kernels.movement.lowering import copy_region
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.operators.vector import scalar_literal
from flashmem.compiler.weights.packing import PackedSlice, Packing, weight_columns
from flashmem.program.launches import Arg


def packed_at_run_time(context: LoweringContext, group: FusionGroup, groups: int, panel: int) -> Arg:
    """Weights of a convolution that are computed at run time, copied into panels: [groups, panels, taps, channels, panel]."""
    node = group.main
    weight = node.input(1)
    outer, inner, *kernel = weight.shape
    taps = math.prod(kernel)
    if node.op == "ConvTranspose":
        channels = outer // groups
        columns = inner
        strides = (channels * columns * taps, taps, columns * taps)  # of a group, a column, a channel
    else:
        channels = inner
        columns = outer // groups
        strides = (columns * channels * taps, channels * taps, taps)
    panels = -(-columns // panel)
    made = Value(f"{weight.name}.packed", (groups, panels, taps, channels, panel), weight.dtype)
    target = row_major(made.shape)
    full, rest = divmod(columns, panel)
    if rest:
        copy_region(context, group, None, made, made.shape, target, target, fill=scalar_literal("float32", 0), part="[zeros]")
    for first, count, width in ((0, full, panel), (full, 1, rest)):
        region = (groups, count, taps, channels, width)
        source = [strides[0], panel * strides[1], 1, strides[2], strides[1]]
        copy_region(
            context, group, weight, made, region, source, target,
            source_start=first * source[1], target_start=first * target[1], part=f"[packed {first}]",
        )  # fmt: skip
    return context.tensor(made)


def placed(
    context: LoweringContext,
    node: Node,
    packing: Packing,
    parts: Sequence[PackedSlice],
    read: Callable[[], NDArray[Any]],
    heads: Sequence[Callable[[], NDArray[Any]]] = (),
) -> list[str]:
    """The slices of a weight, or of its scales or zero points: the array that `read` returns, placed once for all groups.

    `heads`: arrays for the heads of its blocks.
    """

    def pieces() -> Iterator[NDArray[Any]]:
        columns, *others = (weight_columns(node, each()) for each in (read, *heads))
        return (packing.pack(part, columns, others) for part in parts)

    return [name for name, _ in context.place_packed(node, packing, parts, pieces)]
