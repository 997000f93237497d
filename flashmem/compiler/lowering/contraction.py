"""Lowering of contractions: MatMul and convolutions with one launch for each slice of their packed weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import row_major
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.dot_products import dot_product
from flashmem.compiler.lowering.dynamic_matmul import lower_dynamic
from flashmem.compiler.lowering.movement import copy_region
from flashmem.compiler.lowering.quantisation import WeightBinding, read_weights
from flashmem.compiler.lowering.tile import ContractionTile
from flashmem.compiler.lowering.tile_choice import pieces_of, quantised_config, tile_for, with_binding, with_unscaled_sums
from flashmem.compiler.operators.vector import scalar_literal
from flashmem.compiler.weights.packing import PackedSlice, Packing, phases_of, weight_columns, weight_matrix
from flashmem.program.launches import Arg, KernelShape
from flashmem.target.kernel_configs.workload import TF32, Workload

_TEMPLATES = {
    "matmul": "contraction/matmul",
    "conv": "convolution/conv",
    "deform_conv": "contraction/deform_conv",
}
"""Templates of products with packed weights, by kernel family."""

_BYTES = ("char", "uchar")
"""Types of packed elements, counted in bytes."""

DEPTH_BLOCK = 64
"""The most steps of depth between two steps of the copy stream. A folded texture also ends a step at the end of a fold."""


def lower_matmul(context: LoweringContext, group: FusionGroup) -> None:
    """Lower MatMul: constant weights are packed in slices; other operands are a product of two activations."""
    weight = group.main.input(1)
    is_packed = weight.constant is not None and weight.dtype in ("float32", "int8", "uint8")
    if not is_packed or math.prod(weight.shape[:-2]) != 1:
        lower_dynamic(context, group)
        return
    shape = group.main.outputs[0].shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    depth = group.main.input(0).shape[-1]
    lower_packed(context, group, "matmul", rows, 1, depth, [rows, depth, columns])


def lower_deform_convolution(context: LoweringContext, group: FusionGroup) -> None:
    """Lower DeformConv: an implicit product whose taps are sampled."""
    node = group.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    _, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    groups, offset_group, masked = node.attributes["group"], node.attributes["offset_group"], len(node.inputs) > 3
    dims = [
        y.size // columns, height, width, channels, channels // groups, out_height, out_width, columns, columns // groups,
        *weight.shape[2:], *node.attributes["strides"], *node.attributes["dilations"], *node.attributes["pads"][:2],
        offset_group, channels // offset_group,
    ]  # fmt: skip
    sampled = [context.operand(node.input(i)) for i in range(2, len(node.inputs))]
    lower_packed(
        context, group, "deform_conv", dims[0], groups, channels // groups, dims,
        sampled=sampled, stageable=False, masked=masked,
    )  # fmt: skip


def lower_packed(
    context: LoweringContext,
    group: FusionGroup,
    family: str,
    rows: int,
    groups: int,
    run: int,
    dims: list[int],
    *,
    sampled: Sequence[Arg] = (),
    stageable: bool = True,
    winograd: bool = False,
    row: int = 0,
    **values: Any,
) -> None:
    """Pack the weights and launch a kernel of `family` once for each slice.

    `run`: steps of depth that are read contiguously. `sampled`: pointers to the offsets and the mask of the taps. `stageable`:
    whether configs with a K-block can compute it. `winograd`: see `compiler.selection.selector.KernelRequest`; another config
    was chosen. `row`: elements of a row of taps, if they are contiguous in the image and taps are short; otherwise 0. `values`:
    further template values.
    """
    node = group.main
    depth, columns = weight_matrix(node)
    binding = read_weights(context, node)
    workload = Workload(
        family, context.memory_path, rows, depth, columns // groups, groups, _storage(context, node, binding, stageable),
        taps=depth // run, stride=max(node.attributes.get("strides", (1,))),
    )  # fmt: skip
    given, packed_panel = quantised_config(context, workload, binding)
    dots = dot_product(context, node, binding, depth, run)
    if given is None and (binding.codes is None or binding.zero is not None or binding.scale is not None or not stageable):
        given = context.descriptor.tile.config(family)
    tile = with_binding(
        tile_for(context, group, workload, run, packed=binding.codes is not None, given=given, winograd=winograd), binding
    )
    tile = replace(tile, packed_panel=packed_panel, pieces=pieces_of(context, tile))
    if dots is not None:
        tile, dims = dots.tile(tile), dots.dims(family, dims)
    if family == "matmul" and context.descriptor.kind == "cpu" and tile.rows == 1:
        tile = with_unscaled_sums(tile, context.descriptor)
    # Zero points and scales of a block are loaded between steps of the loop, so no step may span two blocks.
    step = max(n for n in range(1, DEPTH_BLOCK + 1) if binding.block % n == 0) if binding.block else DEPTH_BLOCK
    in_heads = family == "matmul" and context.memory_path == "buffer" and bool(binding.by_block) and tile.element in _BYTES
    packing = Packing(
        depth, columns // groups, groups, tile.panel, binding.storage, "buffer" if dots else context.memory_path,
        _fold_unit(family, tile, run, step), context.descriptor, phases_of(node), block=binding.block,
        heads=tuple(each.storage for each in binding.by_block) if in_heads else (), words=dots is not None,
    )  # fmt: skip
    tile = replace(tile, head_bytes=tile.panel * packing.head_bytes)
    phases = math.prod(packing.phases)
    if binding.codes is None:
        parts = [PackedSlice(0, packing.panels, 4 * packing.panels * depth * tile.panel)]
    else:
        parts = context.parts(node, packing, tile.launched(rows, 1)[0])
    if tile.panels > 1 and not tile.k_block and max(part.panels for part in parts) == 1:  # none has a neighbour
        tile = replace(tile, config=replace(tile.config, columns=tile.panel))
    texture, scattered = parts[0].width > 0, group.moved is not None
    tile = replace(tile, texture=texture, folded=texture and parts[0].height < depth, scattered=scattered)
    if tile.strands and not texture:  # steps of a literal number, if all are alike
        tile = replace(tile, whole=depth % step == 0 and step % 8 == 0)
    if family == "deform_conv" or node.op == "ConvTranspose" or values.get("volume"):
        tile = replace(tile, depth_vector=1)
    if family == "conv":
        values["phased"] = phases > 1
        direct = tile.scalar == tile.activation == "float" and not (
            tile.k_block or tile.integers or tile.folded or values["volume"]
        )
        values["gathered"] = row if direct and context.descriptor.kind == "cpu" and node.op == "Conv" else 0
    if family != "matmul":
        dims = [*dims[:9], packing.group_panels, *dims[9:]]
    epilogue = context.epilogue(group, tile.vector)
    split = tile.split_k
    kernel = context.kernels.kernel(
        "contraction/matmul_sliced" if tile.sliced else _TEMPLATES[family],
        t=tile,
        block=step,
        transposed=node.op == "ConvTranspose",
        attributes=context.attributes(tile.group),
        **values,
        **(context.epilogue_values(epilogue) if split == 1 else _NO_EPILOGUE),
    )
    x, y = context.operand(node.input(0)), context.tensor(group.output)
    zeros = [dots.outside(context, run) if dots else context.zeros(dims[3])] if family != "matmul" else []
    if binding.codes is None:
        sliced = [packed_at_run_time(context, group, groups, tile.panel)]
    else:
        heads = [each.array for each in binding.by_block] if in_heads else []
        sliced = [Arg("slice", name) for name in placed(context, node, packing, parts, binding.codes, heads)]
    blocks = replace(packing, depth=-(-depth // (binding.block or depth)), path="buffer")
    scaling = [
        placed(context, node, each, [each.plain(part.first_panel, part.panels) for part in parts], by_block.array)
        for by_block in ([] if in_heads else binding.by_block)
        for each in (replace(blocks, storage=by_block.storage, of=by_block.of),)
    ]
    operands = [*sampled, *(context.operand_args(epilogue) if split == 1 else [])]
    deep: tuple[int, ...] = ()
    for i, (packed, part) in enumerate(zip(sliced, parts, strict=True)):
        folds = [part.height, part.panels * packing.panel_texels] if tile.texture else []
        places = [group.places] if group.moved is not None else []
        scales = [*binding.args, *(Arg("slice", names[i]) for names in scaling)]
        if split > 1:
            sums = Value(f"{group.output.name}.sums{i}", (split, rows, part.panels * tile.panel), "float32")
            y, places, deep = context.tensor(sums), [], (split,)
        context.launch(
            group,
            kernel,
            [x, packed, y, *zeros, *scales, *operands, *dims, part.first_panel, part.panels, *folds, *places],
            (*_launched(node, tile, rows, part.panels, packing.phases), *deep),
            (*tile.group, *(1 for _ in deep)),
            tile.described(
                KernelShape(
                    family if tile.sliced else "",
                    rows=rows,
                    columns=min(part.panels * tile.panel, columns),
                    depth=-(-depth // phases),
                    run=run,
                ),
            ),
            macs=rows * depth * min(part.panels * tile.panel, columns) // phases,
            nbytes=context.nbytes(node.input(0)) + ITEMSIZE[context.storage(group.output)] * rows * part.panels * tile.panel,
            part=f"[{i}]" if len(sliced) > 1 else "",
        )
        if split > 1:
            _launch_join(context, group, tile, sums, part, f"[{i}, join]" if len(sliced) > 1 else "[join]")


_NO_EPILOGUE = {"epilogue": "", "operands": "", "finish": "", "over": ""}
"""The values of a kernel that stores its sums as they are (`LoweringContext.epilogue_values`)."""

_JOINING = (64, 1)
"""The work-group that adds sums: quads of columns of a row."""


def _launch_join(
    context: LoweringContext, group: FusionGroup, tile: ContractionTile, sums: Value, part: PackedSlice, name: str
) -> None:
    """Append the launch that adds the `sums` of groups that share the depth, and applies the epilogue."""
    split, rows, width = sums.shape
    columns = group.main.outputs[0].shape[-1]
    epilogue = context.epilogue(group, 4)
    kernel = context.kernels.kernel(
        "contraction/join_sums",
        t=tile.joined(),
        attributes=context.attributes(_JOINING),
        **context.epilogue_values(epilogue),
    )
    first, wide = part.first_panel * tile.panel, min(width, columns - part.first_panel * tile.panel)
    args: list[Arg | int] = [context.tensor(sums), context.tensor(group.output), *context.operand_args(epilogue)]
    args += [split, rows, columns, first, width, *([group.places] if group.moved is not None else [])]
    shape = KernelShape(rows=rows, columns=wide, depth=split, run=wide, vector=4)
    nbytes = context.nbytes(sums) + ITEMSIZE[context.storage(group.output)] * rows * wide
    context.launch(group, kernel, args, (-(-wide // 4), rows), _JOINING, shape, nbytes=nbytes, part=name)


def _storage(context: LoweringContext, node: Node, binding: WeightBinding, stageable: bool) -> str:
    """`Workload.storage` of a product with these weights: `TF32` if it is asked for, and both operands are floats.

    `stageable`: see `lower_packed`.
    """
    floats = binding.storage == "float32" and context.stored(node.input(0)) == "float"
    return TF32 if context.tf32 and floats and stageable and binding.codes is not None else binding.storage


def _launched(node: Node, tile: ContractionTile, rows: int, panels: int, phases: tuple[int, int]) -> tuple[int, int]:
    """Work-items in both directions; those of a transposed convolution phase by phase."""
    if phases == (1, 1):
        return tile.launched(rows, panels)
    *_, height, width, _ = node.outputs[0].shape
    places = math.prod(-(-size // phase) for size, phase in zip((height, width), phases, strict=True))
    down, across = tile.launched(rows // (height * width) * places, panels)
    return math.prod(phases) * down, across


def _fold_unit(family: str, tile: ContractionTile, run: int, step: int) -> int:
    """The unit of folding: a texture may be folded after any multiple of that many rows, with the same results.

    Where products of several steps are summed in half, the unit is the length of such a sum, which no fold may split.
    """
    if family == "deform_conv":
        return run
    if tile.block_depth:
        return step
    if tile.half and not tile.k_block:
        return tile.half if (step if family == "matmul" else run) % tile.half == 0 else run if family == "conv" else step
    return max(tile.depth_vector, tile.strands, tile.steps)


def packed_at_run_time(context: LoweringContext, group: FusionGroup, groups: int, panel: int) -> Arg:
    """Weights of a convolution that are computed at run time, copied into panels: [groups, panels, taps, channels, panel]."""
    node = group.main
    weight = node.input(1)
    outer, inner, *kernel = weight.shape
    taps = math.prod(kernel)
    if node.op == "ConvTranspose":
        channels, columns = outer // groups, inner
        strides = (channels * columns * taps, taps, columns * taps)  # of a group, a column, a channel
    else:
        channels, columns = inner, outer // groups
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
