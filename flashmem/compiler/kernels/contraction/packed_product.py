"""Lowering of products with packed weights: MatMul and implicit convolutions, one launch for each slice of the weights.

`lower_packed` chooses a config, packs the weights for it, binds a kernel to its arguments, and launches it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashmem.base.types import ITEMSIZE, MemoryPath
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.kernels.contraction.configs import Contraction, SlicedContraction, plain_tile
from flashmem.compiler.kernels.contraction.dot_products import DotProduct, dot_product
from flashmem.compiler.kernels.contraction.packed_weights import packed_at_run_time, placed
from flashmem.compiler.kernels.contraction.quantisation import WeightBinding, read_weights
from flashmem.compiler.kernels.contraction.tile import ContractionTile, Layout, MainLoop, Operands
from flashmem.compiler.kernels.contraction.tile_choice import (
    config_for,
    depth_vector,
    layout_of,
    operands_of,
    pieces_of,
    quantised_config,
    shares_epilogue,
    unscaled_sums,
)
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.weights.packing import PackedSlice, Packing, phases_of, weight_matrix
from flashmem.program.launches import Arg, KernelShape

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


@dataclass(frozen=True)
class PackedProduct:
    """A product with packed weights, or a convolution as an implicit one, for a kernel of `family`.

    `run`: steps of depth that are read contiguously. `dims`: the kernel's sizes. `sampled`: pointers to the offsets and the
    mask of the taps. `stageable`: whether configs with a K-block can compute it. `winograd`: see
    `compiler.selection.selector.KernelRequest`; another config was chosen. `row`: elements of a row of taps, if they are
    contiguous in the image and taps are short; otherwise 0. `volume`: the image has three dimensions. `values`: further
    template values.
    """

    group: FusionGroup
    family: str
    rows: int
    run: int
    dims: Sequence[int]
    groups: int = 1
    sampled: Sequence[Arg] = ()
    stageable: bool = True
    winograd: bool = False
    row: int = 0
    volume: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        """The MatMul or convolution."""
        return self.group.main

    @property
    def depth(self) -> int:
        """Steps of depth of one group."""
        return weight_matrix(self.node)[0]

    @property
    def columns(self) -> int:
        """Columns of all groups."""
        return weight_matrix(self.node)[1]

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.node.op == "ConvTranspose"


@dataclass(frozen=True)
class _Choice:
    """How a product is computed. `panel`: columns of a panel of its packed weights. `reached`: `MainLoop.depth_vector` of a
    left operand whose taps are contiguous.
    """

    workload: Workload
    binding: WeightBinding
    dots: DotProduct | None
    config: Contraction
    panel: int
    operands: Operands
    loop: MainLoop
    reached: int

    @property
    def step(self) -> int:
        """Steps of depth of one step of the loop. Zero points and scales of a block are loaded between two, so none spans two
        blocks.
        """
        block = self.binding.block
        return max(n for n in range(1, DEPTH_BLOCK + 1) if block % n == 0) if block else DEPTH_BLOCK


@dataclass(frozen=True)
class _Packed:
    """The packed weights of a product, and the tile that reads them. `in_heads`: blocks begin with their scales."""

    packing: Packing
    parts: Sequence[PackedSlice]
    in_heads: bool
    tile: ContractionTile


@dataclass(frozen=True)
class _Bound:
    """A kernel and its arguments: for all launches, and the weights and what scales them for each one.

    `outside`: what is read outside of an image. `operands`: those of taps and the epilogue.
    """

    kernel: str
    left: Arg
    result: Arg
    outside: Sequence[Arg]
    weights: Sequence[Arg]
    scales: Sequence[Sequence[Arg]]
    operands: Sequence[Arg]
    dims: Sequence[int]


def lower_packed(context: LoweringContext, product: PackedProduct) -> None:
    """Pack the weights of `product` and launch a kernel of its family once for each slice."""
    choice = _choose(context, product)
    packed = _pack(context, product, choice)
    bound = _bind(context, product, choice, packed)
    for i in range(len(packed.parts)):
        _launch(context, product, packed, bound, i)


# -- choose


def _choose(context: LoweringContext, product: PackedProduct) -> _Choice:
    """The config and the operands of `product`."""
    group = product.group
    node = product.node
    run = product.run
    binding = read_weights(context, node)
    path: MemoryPath = "buffer" if _in_buffers(binding) else context.memory_path
    workload = Workload(
        product.family, path, product.rows, product.depth, product.columns // product.groups, product.groups,
        _storage(context, product, binding), taps=product.depth // run, stride=max(node.attributes.get("strides", (1,))),
    )  # fmt: skip
    given, panel = quantised_config(context, workload, binding)
    if given is None and _needs_plain(product, binding):
        given = plain_tile(context.descriptor, product.family)
    is_packed = binding.codes is not None
    config = config_for(context, group, workload, packed=is_packed, given=given, winograd=product.winograd)
    panel = panel or config.panel
    dots = dot_product(context, node, binding, product.depth, run)
    operands = operands_of(context, group, workload.weights, binding, dots.left if dots else "")
    strands, words = unscaled_sums(context, config, panel, operands) if product.family == "matmul" else (0, 0)
    reached = dots.words if dots else depth_vector(context, group, workload, config, run)
    scattered_taps = product.family == "deform_conv" or product.transposed or product.volume
    loop = MainLoop(
        1 if scattered_taps else reached,
        strands,
        words,
        pieces_of(context, config, context.stored(node.input(0))),
        shares_epilogue(context.descriptor, config),
    )
    return _Choice(workload, binding, dots, config, panel, operands, loop, reached)


def _in_buffers(binding: WeightBinding) -> bool:
    """Whether weights are in buffers on the texture path too: no image has channels of their type."""
    return binding.format is not None or binding.storage == "bfloat16"


def _needs_plain(product: PackedProduct, binding: WeightBinding) -> bool:
    """Whether only the plain config computes the product, if none is for its quantised weights."""
    return binding.codes is None or binding.zero is not None or binding.scale is not None or not product.stageable


def _storage(context: LoweringContext, product: PackedProduct, binding: WeightBinding) -> str:
    """`Workload.storage` of a product with these weights: `TF32` if it is asked for, and both operands are floats."""
    floats = binding.storage == "float32" and context.stored(product.node.input(0)) == "float"
    return TF32 if context.tf32 and floats and product.stageable and binding.codes is not None else binding.storage


# -- pack


def _pack(context: LoweringContext, product: PackedProduct, choice: _Choice) -> _Packed:
    """The packing of the weights, their slices, and the tile that reads them."""
    binding = choice.binding
    config = choice.config
    panel = choice.panel
    depth = product.depth
    by_block = binding.by_block
    path = context.memory_path
    in_heads = product.family == "matmul" and path == "buffer" and bool(by_block) and choice.operands.element in _BYTES
    in_buffers = choice.dots is not None or _in_buffers(binding)
    packing = Packing(
        depth, product.columns // product.groups, product.groups, panel, binding.storage, "buffer" if in_buffers else path,
        _fold_unit(product, choice), context.descriptor, phases_of(product.node), block=binding.block,
        heads=tuple(each.storage for each in by_block) if in_heads else (), words=choice.dots is not None,
        format=binding.format,
    )  # fmt: skip
    if binding.codes is None:
        parts = [PackedSlice(0, packing.panels, 4 * packing.panels * depth * panel)]
    else:
        parts = context.parts(product.node, packing, config.items_down(product.rows))
    if (
        not config.staged_depth and config.columns // panel > 1 and max(part.panels for part in parts) == 1
    ):  # none has a neighbour
        config = replace(config, columns=panel)
    tile = ContractionTile(config, choice.operands, _layout(product, choice, packing, parts), choice.loop)
    return _Packed(packing, parts, in_heads, tile)


def _layout(product: PackedProduct, choice: _Choice, packing: Packing, parts: Sequence[PackedSlice]) -> Layout:
    """The layout of a product whose weights are packed in `parts`."""
    texture = parts[0].width > 0
    step = choice.step
    plain = layout_of(choice.workload, choice.config, product.run)
    whole_steps = bool(choice.loop.strands) and not texture and product.depth % step == 0 and step % 8 == 0
    return replace(
        plain,
        panel=choice.panel,
        texture=texture,
        folded=texture and parts[0].height < product.depth,
        head_bytes=choice.panel * (packing.format.head if packing.format else packing.head_bytes),
        whole=plain.whole or whole_steps,  # steps of a literal number, if all are alike
        scattered=product.group.moved is not None,
    )


def _fold_unit(product: PackedProduct, choice: _Choice) -> int:
    """The unit of folding: a texture may be folded after any multiple of that many rows, with the same results.

    Where products of several steps are summed in half, the unit is the length of such a sum, which no fold may split.
    """
    half = choice.config.half_run
    step = choice.step
    family = product.family
    steps = choice.config.steps if isinstance(choice.config, SlicedContraction) else 1
    if family == "deform_conv":
        return product.run
    if choice.binding.block:
        return step
    if half and not choice.config.staged_depth:
        return half if (step if family == "matmul" else product.run) % half == 0 else product.run if family == "conv" else step
    return max(choice.reached, choice.loop.strands, steps)


# -- bind


def _bind(context: LoweringContext, product: PackedProduct, choice: _Choice, packed: _Packed) -> _Bound:
    """The kernel, its arguments, and the slices of the weights, placed in the weight file."""
    group = product.group
    node = product.node
    tile = packed.tile
    epilogue = context.epilogue(group, tile.vector)
    whole = tile.split_k == 1
    kernel = context.kernels.kernel(
        "contraction/matmul_sliced" if tile.sliced else _TEMPLATES[product.family],
        t=tile,
        block=choice.step,
        transposed=product.transposed,
        attributes=context.attributes(tile.group),
        **_values(context, product, packed),
        **(context.epilogue_values(epilogue) if whole else _NO_EPILOGUE),
    )
    left = context.operand(node.input(0))
    result = context.tensor(group.output)
    outside = []
    if product.family != "matmul":
        channels = product.dims[3]
        outside = [choice.dots.outside(context, product.run) if choice.dots else context.zeros(channels)]
    weights, scales = _bind_weights(context, product, choice, packed)
    operands = [*product.sampled, *(context.operand_args(epilogue) if whole else [])]
    return _Bound(kernel, left, result, outside, weights, scales, operands, _dims(product, choice, packed))


def _bind_weights(
    context: LoweringContext, product: PackedProduct, choice: _Choice, packed: _Packed
) -> tuple[list[Arg], list[list[Arg]]]:
    """For each launch, the argument of its weights, and those of their zero points and scales."""
    binding = choice.binding
    packing = packed.packing
    parts = packed.parts
    if binding.codes is None:
        return [packed_at_run_time(context, product.group, product.groups, choice.panel)], [list(binding.args)]
    heads = [each.array for each in binding.by_block] if packed.in_heads else []
    names = placed(context, product.node, packing, parts, binding.codes, heads)
    blocks = replace(packing, depth=-(-product.depth // (binding.block or product.depth)), path="buffer")
    scales = [list(binding.args) for _ in parts]
    for by_block in () if packed.in_heads else binding.by_block:
        form = replace(blocks, storage=by_block.storage, of=by_block.of)
        pieces = [form.plain(part.first_panel, part.panels) for part in parts]
        for args, name in zip(scales, placed(context, product.node, form, pieces, by_block.array), strict=True):
            args.append(Arg("slice", name))
    return [Arg("slice", name) for name in names], scales


def _values(context: LoweringContext, product: PackedProduct, packed: _Packed) -> dict[str, Any]:
    """The values of the kernel's template, beside its tile."""
    if product.family != "conv":
        return dict(product.values)
    tile = packed.tile
    in_floats = tile.operands.scalar == tile.operands.activation == "float" and not tile.operands.integers
    in_place = not (tile.k_block or tile.layout.folded or product.volume)
    gathers = in_floats and in_place and context.descriptor.kind == "cpu" and product.node.op == "Conv"
    return {**product.values, "phased": packed.packing.phases != (1, 1), "gathered": product.row if gathers else 0}


def _dims(product: PackedProduct, choice: _Choice, packed: _Packed) -> list[int]:
    """The sizes among the kernel's arguments."""
    dims = choice.dots.dims(product.family, product.dims) if choice.dots else list(product.dims)
    return dims if product.family == "matmul" else [*dims[:9], packed.packing.group_panels, *dims[9:]]


# -- launch


def _launch(context: LoweringContext, product: PackedProduct, packed: _Packed, bound: _Bound, i: int) -> None:
    """Append the launch for slice `i`, and the one that adds the sums of groups that share the depth."""
    group = product.group
    tile = packed.tile
    part = packed.parts[i]
    rows = product.rows
    columns = part.panels * tile.panel
    phases = math.prod(packed.packing.phases)
    number = f"[{i}]" if len(packed.parts) > 1 else ""
    folds = [part.height, part.panels * packed.packing.panel_texels] if tile.layout.texture else []
    sums = None
    if tile.split_k > 1:
        sums = Value(f"{group.output.name}.sums{i}", (tile.split_k, rows, columns), "float32")
    result, places = (bound.result, _places(group)) if sums is None else (context.tensor(sums), [])
    deep = (tile.split_k,) if sums is not None else ()
    shape = KernelShape(
        product.family if tile.sliced else "",
        rows=rows,
        columns=min(columns, product.columns),
        depth=-(-product.depth // phases),
        run=product.run,
    )
    context.launch(
        group,
        bound.kernel,
        [
            bound.left, bound.weights[i], result, *bound.outside, *bound.scales[i], *bound.operands, *bound.dims,
            part.first_panel, part.panels, *folds, *places,
        ],
        (*_items(product, tile, part.panels, packed.packing.phases), *deep),
        (*tile.group, *(1 for _ in deep)),
        tile.described(shape),
        macs=rows * product.depth * shape.columns // phases,
        nbytes=context.nbytes(product.node.input(0)) + ITEMSIZE[context.storage(group.output)] * rows * columns,
        part=number,
    )  # fmt: skip
    if sums is not None:
        _launch_join(context, group, tile, sums, part, f"[{i}, join]" if number else "[join]")


def _places(group: FusionGroup) -> list[int]:
    """The size among the arguments of a kernel that stores columns first."""
    return [group.places] if group.moved is not None else []


def _items(product: PackedProduct, tile: ContractionTile, panels: int, phases: tuple[int, int]) -> tuple[int, int]:
    """Work-items in both directions; those of a transposed convolution phase by phase."""
    if phases == (1, 1):
        return tile.launched(product.rows, panels)
    *_, height, width, _ = product.node.outputs[0].shape
    places = math.prod(-(-size // phase) for size, phase in zip((height, width), phases, strict=True))
    down, across = tile.launched(product.rows // (height * width) * places, panels)
    return math.prod(phases) * down, across


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
    first = part.first_panel * tile.panel
    wide = min(width, columns - part.first_panel * tile.panel)
    args: list[Arg | int] = [context.tensor(sums), context.tensor(group.output), *context.operand_args(epilogue)]
    args += [split, rows, columns, first, width, *_places(group)]
    shape = KernelShape(rows=rows, columns=wide, depth=split, run=wide, vector=4)
    nbytes = context.nbytes(sums) + ITEMSIZE[context.storage(group.output)] * rows * wide
    context.launch(group, kernel, args, (-(-wide // 4), rows), _JOINING, shape, nbytes=nbytes, part=name)
