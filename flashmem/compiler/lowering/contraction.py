"""Lowering of contractions: MatMul and convolutions with one launch for each slice of their packed weights.

A product of two activations is one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import broadcast_strides, row_major
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.lowering.dot_products import dot_product
from flashmem.compiler.lowering.movement import copy_region
from flashmem.compiler.lowering.quantisation import WeightBinding, read_both, read_weights
from flashmem.compiler.lowering.tile import ContractionTile
from flashmem.compiler.operators.vector import REGISTER, scalar_literal
from flashmem.compiler.selection.configs import estimates, measured_seconds, seconds
from flashmem.compiler.weights.packing import PackedSlice, Packing, phases_of, weight_columns, weight_matrix
from flashmem.program.launches import Arg, KernelShape
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.target.instruction_set import PANEL
from flashmem.target.kernel_configs.config import KernelConfig
from flashmem.target.kernel_configs.contraction import (
    CODES,
    Contraction,
    PlainContraction,
    SlicedContraction,
    StagedContraction,
)
from flashmem.target.kernel_configs.tensor_cores import CODES_PANEL, CodesContraction
from flashmem.target.kernel_configs.workload import TF32, Workload

_TEMPLATES = {
    "matmul": "contraction/matmul",
    "conv": "convolution/conv",
    "deform_conv": "contraction/deform_conv",
}
"""Templates of products with packed weights, by kernel family."""

_BYTES = ("char", "uchar")
"""Types of packed elements, counted in bytes."""

NARROWEST = 8
"""Columns of the narrowest panel that a budget may require: rows of packed codes of 4 bits are whole, and loads are vectors."""

DEPTH_BLOCK = 64
"""The most steps of depth between two steps of the copy stream. A folded texture also ends a step at the end of a fold."""

ROW_PIXELS, MOST_TAPS = 4, 11
"""Depthwise convolution on phones: the most outputs of a row that a work-item computes, and the most taps across."""


def _tile(
    context: LoweringContext,
    group: FusionGroup,
    workload: Workload,
    run: int,
    *,
    packed: bool = True,
    given: Contraction | None = None,
    winograd: bool = False,
) -> ContractionTile:
    """The contraction tile: config `given`, or the one for `workload`, cut to the matrix, with the types of its operands.

    `run`: steps of depth that are read contiguously. `winograd`: as in `compiler.selection.selector.KernelRequest`.
    """
    node, weights = group.main, workload.weights
    scalar, activation = REGISTER[node.outputs[0].dtype], context.stored(node.input(0))
    floats = scalar == "float" and activation in ("float", "half") and weights in ("float32", "float16")
    plain = None if floats else context.descriptor.tile.config(workload.family)
    config = given or plain or choice(context, group, workload, packed=packed, winograd=winograd)
    if workload.storage != TF32 and (activation != "half" or weights != "float16"):
        config = config.in_float()
    if isinstance(config, PlainContraction) and not packed:
        config = replace(config, panel_columns=0)
    config = config.cut(workload)
    staged = config.staged_depth
    vectors = context.descriptor.code.vector_loads and floats and not staged and run % 4 == 0
    offsets = 4 * max(workload.depth * workload.columns, group.main.input(0).size)  # in bytes, of 32 bits
    return ContractionTile(
        config, texture=packed and context.memory_path == "texture", weights=weights, scalar=scalar, activation=activation,
        stored=context.stored(group.output), aligned=workload.depth % 4 == 0, aligned_columns=workload.columns % 4 == 0,
        whole=bool(staged) and run % staged == 0,
        looped=context.descriptor.kind == "cpu" and not staged and config.rows * config.columns > config.vector,
        depth_vector=4 if vectors and offsets < MOST_OFFSET else 1,
    )  # fmt: skip


def choice(
    context: LoweringContext, group: FusionGroup, workload: Workload, *, packed: bool = True, winograd: bool = False
) -> Contraction:
    """The config for `workload`, selected once for each weight, because all patches read the weight in one packing."""
    key = (group.main.input(1), replace(workload, rows=0), winograd)
    if not packed or key not in context.configs:
        widest = context.slicing.widest(workload.depth * (2 if workload.storage == "float16" else 4)) if packed else None
        forms = context.before.forms(group.main.input(1)) or context.earlier.forms(group.main) if packed else frozenset()
        halves = workload.storage == "float16" and context.stored(group.main.input(0)) == "half"
        config = context.selector.config(workload, [node.op for node in group.epilogue], widest, winograd, forms, halves)
        assert isinstance(config, Contraction)
        stored = [columns for columns, depth in forms if depth == workload.depth]
        context.configs[key] = _narrowed(config, max(stored)) if stored else _narrowed(config, widest)
    return context.configs[key]


def _narrowed(config: Contraction, widest: int | None) -> Contraction:
    """`config` with panels of at most `widest` columns, or `NARROWEST`: a slice has at least one panel. None: any width."""
    if not isinstance(config, PlainContraction) or widest is None or config.panel <= widest:
        return config
    columns = max(NARROWEST, 1 << max(1, widest).bit_length() - 1)
    return replace(config, columns=min(columns, config.columns), vector=min(config.vector, columns))


def _with(tile: ContractionTile, binding: WeightBinding) -> ContractionTile:
    """`tile` with the zero points and scales of its operands."""
    return replace(
        tile,
        zero=binding.zero,
        scale=binding.scale,
        weight_zero=binding.weight_zero,
        weight_scale=binding.weight_scale,
        weight_minimum=binding.weight_minimum,
        block_depth=binding.block,
    )


def lower_matmul(context: LoweringContext, group: FusionGroup) -> None:
    """Lower MatMul: constant weights are packed in slices; other operands are a product of two activations."""
    weight = group.main.input(1)
    is_packed = weight.constant is not None and weight.dtype in ("float32", "int8", "uint8")
    if not is_packed or math.prod(weight.shape[:-2]) != 1:
        _lower_dynamic(context, group)
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
    given, packed_panel = _quantised(context, workload, binding)
    dots = dot_product(context, node, binding, depth, run)
    if given is None and (binding.codes is None or binding.zero is not None or binding.scale is not None or not stageable):
        given = context.descriptor.tile.config(family)
    tile = _with(
        _tile(context, group, workload, run, packed=binding.codes is not None, given=given, winograd=winograd), binding
    )
    tile = replace(tile, packed_panel=packed_panel, pieces=_pieces(context, tile))
    if dots is not None:
        tile, dims = dots.tile(tile), dots.dims(family, dims)
    if family == "matmul" and context.descriptor.kind == "cpu" and tile.rows == 1 and _sums_unscaled(tile):
        in_words = tile.nibbles and not tile.texture and tile.vector == tile.panel == PANEL
        words = context.descriptor.vector_floats if in_words else 0
        tile = replace(tile, words=words, strands=1 if words else max(1, min(_MOST_STRANDS, _SUMMED_COLUMNS // tile.columns)))
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
        sliced = [_packed_at_run_time(context, group, groups, tile.panel)]
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


def _pieces(context: LoweringContext, tile: ContractionTile) -> int:
    """`ContractionTile.pieces`: a half has 11 bits, as TF32, a float 24; bfloat16 has 8."""
    if not isinstance(tile.config, CodesContraction):
        return 0
    return 2 if context.tf32 or tile.activation == "half" else 3


_SUMMED_COLUMNS, _MOST_STRANDS = 64, 4
"""Floats of sums that hide the latency of a multiply-add: four steps of two units of eight floats."""


def _sums_unscaled(tile: ContractionTile) -> bool:
    """Whether products with weights of `tile` can be summed before they are scaled: floats times quantised weights."""
    floats = tile.scalar == "float" and tile.activation in ("float", "half") and tile.zero is tile.scale is None
    return floats and tile.integers and tile.weight_scale is not None and not tile.k_block


def _quantised(context: LoweringContext, workload: Workload, binding: WeightBinding) -> tuple[Contraction | None, int]:
    """The config by which a GPU multiplies floats by quantised weights, if it has one, and the width of packed panels, if its
    block spans several.

    Panels are those of the plain config for every number of rows, because all shapes of a model share its packed weights. For
    few rows, work-items share the depth of a panel; for few and more, tensor cores multiply codes. On devices without them, and
    for other blocks, the config with a K-block that is fastest for floats dequantises weights once for a block of rows.
    """
    scaled = binding.weight_scale is not None and binding.zero is binding.scale is None
    if workload.family != "matmul" or workload.storage not in CODES or not scaled:
        return None, 0
    descriptor = context.descriptor
    listed = descriptor.configs_of(workload.family)
    panel = descriptor.tile.config(workload.family).cut(workload).panel
    rivals = [each for each in listed if _multiplies(context, each, workload, binding, panel)]
    if rivals:
        times = measured_seconds(descriptor, workload, rivals)
        few = [each for each in rivals if isinstance(each, SlicedContraction)]
        if not times:
            times = dict.fromkeys(few[:1], 0.0) or estimates(descriptor, workload, rivals)
        fastest = min(times, key=lambda each: times[each])
        assert isinstance(fastest, Contraction)
        return fastest, 0 if isinstance(fastest, SlicedContraction) else panel
    staged = [each for each in listed if isinstance(each, StagedContraction) and each.panel % panel == 0 and each.split_k == 1]
    times = seconds(descriptor, replace(workload, storage="float32")) if staged else {}
    known = [each for each in staged if each in times]
    return (min(known, key=lambda each: times[each]), panel) if known else (None, 0)


def _multiplies(context: LoweringContext, config: KernelConfig, workload: Workload, binding: WeightBinding, panel: int) -> bool:
    """Whether `config` is for quantised weights alone, and can multiply these: no step of it may span two blocks."""
    if isinstance(config, SlicedContraction):
        return config.fits(workload) and binding.block % config.steps == 0
    if not isinstance(config, CodesContraction) or not config.fits(workload) or panel != CODES_PANEL:
        return False
    by_column = bool(binding.block) == bool(binding.by_block)  # not one scale for all columns of a block
    return by_column and binding.block % config.step == 0 and not (context.selector.limited and config.split_k > 1)


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


def _packed_at_run_time(context: LoweringContext, group: FusionGroup, groups: int, panel: int) -> Arg:
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


def lower_depthwise(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a depthwise convolution: each output channel reads one input channel, which several may share."""
    node = group.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    batch, height, width, channels = x.shape
    out_height, out_width, columns = y.shape[1:]
    rows = batch * out_height * out_width
    vector = context.vector_for(columns)
    binding = read_weights(context, node, blocks=False)
    stored, accumulator = context.stored(group.output), REGISTER[y.dtype]
    storage = "float32" if binding.storage == "float16" else binding.storage.replace("int4", "int8")
    kernel_h, kernel_w = weight.shape[2:]
    stride_h, stride_w = node.attributes["strides"]
    dilation_h, dilation_w = node.attributes["dilations"]
    pads = node.attributes["pads"][:2]
    activation = context.stored(x)
    floats = (accumulator, storage) == ("float", "float32") and activation in ("float", "half") and binding.scale is None
    whole = min(vector, columns & -columns)  # the widest vector of which a pixel's channels are a multiple
    vectors = whole == 4 if context.descriptor.code.vector_loads else whole >= 4 and context.descriptor.kind == "cpu"
    in_rows = vectors and floats and columns == channels and kernel_w <= MOST_TAPS and 4 * x.size < MOST_OFFSET
    vector = whole if in_rows else vector
    pixels = _row_pixels(context.descriptor, kernel_w, stride_w, dilation_w) if in_rows else 1
    config = PlainContraction("depthwise", pixels, vector, vector, families=("depthwise",))
    plain = ContractionTile(
        config, weights=storage, scalar=accumulator, activation=activation, stored=stored, aligned_columns=columns % 4 == 0
    )
    tile = _with(plain, replace(binding, block=0))
    values: dict[str, Any]
    if in_rows:
        template, lines = "contraction/depthwise_row", batch * out_height * -(-out_width // pixels)
        values = {"taps": kernel_w, "stride": stride_w, "reads": _reads(pixels, kernel_w, stride_w, dilation_w)}
        of_kernel = [kernel_h, stride_h, dilation_h]
    else:
        template, lines, values = "contraction/depthwise", rows, {"multiplier": columns // channels}
        of_kernel = [kernel_h, kernel_w, stride_h, stride_w, dilation_h, dilation_w]
    dims = [rows, height, width, columns, out_height, out_width, *of_kernel, *pads]
    epilogue = context.epilogue(group, vector)
    items = (-(-columns // vector), lines)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        template, t=tile, attributes=context.attributes(local), **values, **context.epilogue_values(epilogue)
    )
    read, dtype = binding.codes, np.dtype(storage)
    if read is None:
        packed = _packed_at_run_time(context, group, 1, columns)
    else:
        packed = context.data(
            weight.name, dtype.itemsize * weight.size, lambda: np.ascontiguousarray(read().reshape(columns, -1).T, dtype)
        )
    zeros = context.zeros(columns)
    args = [
        context.operand(x),
        packed,
        context.tensor(group.output),
        zeros,
        *binding.args,
        *context.operand_args(epilogue),
        *dims,
    ]
    shape = KernelShape("depthwise", rows, columns, weight.size // columns, run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape, macs=rows * weight.size)


def _row_pixels(descriptor: DeviceDescriptor, taps: int, stride: int, dilation: int) -> int:
    """Outputs of a row for each work-item of a depthwise convolution: as many as fit in registers, at least one.

    A work-item has the place of each pixel that it reads and whether that is inside the image; vectors of four floats for each
    sum, each tap and one pixel; and 20 registers more (as Mali's compiler reports: docs/research/phone-compilers.md).
    """
    pixels, most = ROW_PIXELS, descriptor.registers.most if descriptor.registers else math.inf
    while pixels > 1 and 2 * len(_reads(pixels, taps, stride, dilation)) + 4 * (pixels + taps + 1) + 20 > most:
        pixels //= 2
    return pixels


def _reads(pixels: int, taps: int, stride: int, dilation: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """The pixels of an image's row that this many outputs read, from the first on, and the (output, tap) pairs of each."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for pixel in range(pixels):
        for tap in range(taps):
            uses.setdefault(pixel * stride + tap * dilation, []).append((pixel, tap))
    return sorted(uses.items())


def _lower_dynamic(context: LoweringContext, group: FusionGroup) -> None:
    """Lower a product of two tensors (or of a tensor and a stack of constant matrices), such as attention's two products."""
    a, b, y = group.main.input(0), group.main.input(1), group.main.outputs[0]
    batch, (rows, columns), depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
    batches = math.prod(batch)
    transposed = bool(group.main.attributes["transposed"])
    right, binding = read_both(context, group.main)
    workload = Workload("matmul_dynamic", "buffer", rows, depth, columns, batches, binding.storage)
    floats = (
        binding.storage in ("float32", "float16")
        and binding.zero is binding.scale is binding.weight_zero is binding.weight_scale is None
    )
    given = None if floats else context.descriptor.tile.config(workload.family)
    tile = _with(_tile(context, group, workload, depth, packed=False, given=given), binding)
    epilogue = context.epilogue(group, tile.vector)
    levels = _batch_levels(batch, a.shape, b.shape)
    kernel = context.kernels.kernel(
        "contraction/matmul_dynamic",
        t=tile,
        attributes=context.attributes(tile.group),
        levels=len(levels),
        transposed=transposed,
        **context.epilogue_values(epilogue),
    )
    args = [context.operand(a), right, context.tensor(group.output), *binding.args, *context.operand_args(epilogue)]
    context.launch(
        group,
        kernel,
        [*args, batches, rows, depth, columns, *(number for level in levels for number in level)],
        (*tile.launched(rows, -(-columns // tile.panel)), batches),
        (*tile.group, 1),
        tile.described(
            KernelShape(rows=batches * rows, columns=columns, depth=depth, run=depth, stride=depth if transposed else 1)
        ),
        macs=batches * rows * columns * depth,
    )


def _batch_levels(batch: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Size and strides of each dimension of `batch`, innermost first: (size, stride of `a`, stride of `b`) of matrices.

    A stride is 0 where the operand is broadcast. Neighbours that one stride covers in both operands are merged; at least one
    dimension remains.
    """
    steps = [[stride * shape[-2] * shape[-1] for stride in reversed(broadcast_strides(shape[:-2], batch))] for shape in (a, b)]
    levels: list[tuple[int, int, int]] = []
    for size, *step in zip(reversed(batch), *steps, strict=True):
        if levels and step == [levels[-1][0] * last for last in levels[-1][1:]]:
            levels[-1] = (levels[-1][0] * size, *levels[-1][1:])
        elif size > 1:
            levels.append((size, *step))
    return levels or [(1, 0, 0)]
