"""MatMul and convolutions: packed weights in slices, one launch for each; products of two activations as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import broadcast_strides
from flashmem.compiler.lowering.context import Emitter
from flashmem.compiler.lowering.movement import move
from flashmem.compiler.lowering.quantisation import Kept, read_both, read_weights
from flashmem.compiler.lowering.tile import Tile
from flashmem.compiler.operators.vector import REGISTER, scalar_literal
from flashmem.compiler.passes.fusion import Layer
from flashmem.compiler.selection.configs import Product, cut
from flashmem.compiler.weights.packing import PackedSlice, Packing, weight_columns, weight_matrix
from flashmem.program.launches import Arg, KernelShape
from flashmem.target.descriptor import Variant

DEPTH_BLOCK = 64
"""Steps of depth between two of the stream lane, at most: those up to the end of a fold where a texture is folded."""


def _tile(
    emitter: Emitter,
    layer: Layer,
    product: Product,
    run: int,
    *,
    packed: bool = True,
    plain: bool = False,
    winograd: bool = False,
) -> Tile:
    """The variant for `product`, or the plain one, cut to the matrix, and its types. `run`: steps of depth without a seek.
    `winograd`: as in `compiler.selection.selector.Use`.
    """
    node, weights = layer.main, product.storage
    scalar, activation = REGISTER[node.outputs[0].dtype], emitter.stored(node.input(0))
    floats = scalar == "float" and activation in ("float", "half") and weights in ("float32", "float16")
    if plain or not floats:
        [variant] = emitter.descriptor.plain(product.family)
    else:
        variant = choice(emitter, layer, product, packed=packed, winograd=winograd)
    if activation != "half" or weights != "float16":
        variant = replace(variant, half=0)
    variant = cut(variant, product)
    return Tile.of(
        variant, texture=packed and emitter.memory_path == "texture", weights=weights, scalar=scalar, activation=activation,
        stored=emitter.stored(layer.output), aligned=product.depth % 4 == 0, aligned_columns=product.columns % 4 == 0,
        whole=bool(variant.stage) and run % variant.stage == 0,
        looped=emitter.descriptor.kind == "cpu" and not variant.stage and variant.rows * variant.columns > variant.vector,
    )  # fmt: skip


def choice(emitter: Emitter, layer: Layer, product: Product, *, packed: bool = True, winograd: bool = False) -> Variant:
    """The variant for `product`, asked for once: a weight is packed once, however many rows a patch has."""
    key = (layer.main.input(1), replace(product, rows=0), winograd)
    if not packed or key not in emitter.variants:
        widest = emitter.slicing.widest(product.depth * (2 if product.storage == "float16" else 4)) if packed else None
        forms = emitter.earlier.forms(layer.main) if packed else frozenset()
        emitter.variants[key] = emitter.choices.variant(product, [node.op for node in layer.tail], widest, winograd, forms)
    return emitter.variants[key]


def _with(tile: Tile, kept: Kept) -> Tile:
    """`tile` with the zero points and scales of its operands."""
    return replace(
        tile,
        zero=kept.zero,
        scale=kept.scale,
        weight_zero=kept.weight_zero,
        weight_scale=kept.weight_scale,
        block_depth=kept.block,
    )


def emit_matmul(emitter: Emitter, layer: Layer) -> None:
    """MatMul: with constant weights packed in slices, otherwise as a product of two activations."""
    weight = layer.main.input(1)
    is_packed = weight.constant is not None and weight.dtype in ("float32", "int8", "uint8")
    if not is_packed or math.prod(weight.shape[:-2]) != 1:
        _emit_dynamic(emitter, layer)
        return
    shape = layer.main.outputs[0].shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    depth = layer.main.input(0).shape[-1]
    emit_packed(emitter, layer, "matmul", rows, 1, depth, [rows, depth, columns])


def emit_deform_convolution(emitter: Emitter, layer: Layer) -> None:
    """DeformConv: an implicit product whose taps are sampled."""
    node = layer.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    _, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    group, offset_group, masked = node.attributes["group"], node.attributes["offset_group"], len(node.inputs) > 3
    dims = [
        y.size // columns, height, width, channels, channels // group, out_height, out_width, columns, columns // group,
        *weight.shape[2:], *node.attributes["strides"], *node.attributes["dilations"], *node.attributes["pads"][:2],
        offset_group, channels // offset_group,
    ]  # fmt: skip
    sampled = [emitter.operand(node.input(i)) for i in range(2, len(node.inputs))]
    emit_packed(
        emitter, layer, "deform_conv", dims[0], group, channels // group, dims, sampled=sampled, stageable=False, masked=masked
    )


def emit_packed(
    emitter: Emitter,
    layer: Layer,
    template: str,
    rows: int,
    groups: int,
    run: int,
    dims: list[int],
    *,
    sampled: Sequence[Arg] = (),
    stageable: bool = True,
    winograd: bool = False,
    row: int = 0,
    **context: Any,
) -> None:
    """Pack the weights and launch `template` once for each slice.

    `run`: steps of depth read without a seek. `sampled`: pointers to what moves the taps. `stageable`: whether variants that
    share what they read can compute it. `winograd`: see `compiler.selection.selector.Use`; another variant was chosen. `row`:
    elements of a row of taps, where they lie side by side in the image and taps are short; 0 elsewhere. `context`: what else
    it takes.
    """
    node = layer.main
    depth, columns = weight_matrix(node)
    kept = read_weights(emitter, node)
    product = Product(
        template, emitter.memory_path, rows, depth, columns // groups, groups, kept.storage,
        taps=depth // run, stride=max(node.attributes.get("strides", (1,))),
    )  # fmt: skip
    only_plain = kept.codes is None or kept.zero is not None or kept.scale is not None or not stageable
    tile = _with(_tile(emitter, layer, product, run, packed=kept.codes is not None, plain=only_plain, winograd=winograd), kept)
    # Zero points and scales of a block are loaded between steps of the loop, none of which spans two blocks.
    step = max(n for n in range(1, DEPTH_BLOCK + 1) if kept.block % n == 0) if kept.block else DEPTH_BLOCK
    packing = Packing(
        depth, columns // groups, groups, tile.panel, kept.storage, emitter.memory_path,
        _fold_unit(template, tile, run, step), emitter.descriptor,
    )  # fmt: skip
    if kept.codes is None:
        parts = [PackedSlice(0, packing.panels, 4 * packing.panels * depth * tile.panel)]
    else:
        parts = emitter.parts(node, packing, tile.launched(rows, 1)[0])
    texture, scattered = parts[0].width > 0, layer.moved is not None
    tile = replace(tile, texture=texture, folded=texture and parts[0].height < depth, scattered=scattered)
    if template == "conv":
        direct = tile.scalar == tile.activation == "float" and not (
            tile.stage or tile.integers or tile.folded or context["volume"]
        )
        context["gathered"] = row if direct and emitter.descriptor.kind == "cpu" and node.op == "Conv" else 0
    if template != "matmul":
        dims = [*dims[:9], packing.group_panels, *dims[9:]]
    tail = emitter.tail(layer, tile.vector)
    kernel = emitter.kernels.kernel(
        template,
        t=tile,
        block=step,
        transposed=node.op == "ConvTranspose",
        attributes=emitter.attributes(tile.group),
        **context,
        **emitter.tail_context(tail),
    )
    x, y = emitter.operand(node.input(0)), emitter.tensor(layer.output)
    zeros = [emitter.zeros(dims[3])] if template != "matmul" else []
    if kept.codes is None:
        sliced = [_packed_at_run_time(emitter, layer, groups, tile.panel)]
    else:
        sliced = [Arg("slice", name) for name in placed(emitter, node, packing, parts, kept.codes)]
    blocks = replace(packing, depth=-(-depth // (kept.block or depth)), path="buffer")
    scaling = [
        placed(emitter, node, each, [each.plain(part.first_panel, part.panels) for part in parts], by_block.array)
        for by_block in kept.by_block
        for each in (replace(blocks, storage=by_block.storage),)
    ]
    operands = [*sampled, *emitter.operand_args(tail)]
    for i, (packed, part) in enumerate(zip(sliced, parts, strict=True)):
        folds = [part.height, part.panels * packing.panel_texels] if tile.texture else []
        places = [layer.places] if layer.moved is not None else []
        scales = [*kept.args, *(Arg("slice", names[i]) for names in scaling)]
        emitter.launch(
            layer,
            kernel,
            [x, packed, y, *zeros, *scales, *operands, *dims, part.first_panel, part.panels, *folds, *places],
            tile.launched(rows, part.panels),
            tile.group,
            tile.described(
                KernelShape(rows=rows, columns=min(part.panels * tile.panel, columns), depth=depth, run=run),
            ),
            macs=rows * depth * min(part.panels * tile.panel, columns),
            nbytes=emitter.nbytes(node.input(0)) + ITEMSIZE[emitter.storage(layer.output)] * rows * part.panels * tile.panel,
            part=f"[{i}]" if len(sliced) > 1 else "",
        )


def _fold_unit(template: str, tile: Tile, run: int, step: int) -> int:
    """Rows of which a texture may be folded after any whole number, without a change of what the kernel computes.

    Where products of several steps are summed in half, their number is one of a sum that nothing splits.
    """
    if template == "deform_conv":
        return run
    if tile.block_depth:
        return step
    if tile.half and not tile.stage:
        return tile.half if (step if template == "matmul" else run) % tile.half == 0 else run if template == "conv" else step
    return 1


def _packed_at_run_time(emitter: Emitter, layer: Layer, groups: int, panel: int) -> Arg:
    """Weights of a convolution that are computed at run time, moved into panels: [groups, panels, taps, channels, panel]."""
    node = layer.main
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
    target = [math.prod(made.shape[i + 1 :]) for i in range(5)]
    full, rest = divmod(columns, panel)
    if rest:
        move(emitter, layer, None, made, made.shape, target, target, fill=scalar_literal("float32", 0), part="[zeros]")
    for first, count, width in ((0, full, panel), (full, 1, rest)):
        region = (groups, count, taps, channels, width)
        source = [strides[0], panel * strides[1], 1, strides[2], strides[1]]
        move(
            emitter, layer, weight, made, region, source, target,
            source_start=first * source[1], target_start=first * target[1], part=f"[packed {first}]",
        )  # fmt: skip
    return emitter.tensor(made)


def placed(
    emitter: Emitter, node: Node, packing: Packing, parts: Sequence[PackedSlice], read: Callable[[], NDArray[Any]]
) -> list[str]:
    """The slices of a weight, or of its scales or zero points: what `read` gives, placed once however many layers use it."""

    def pieces() -> Iterator[NDArray[Any]]:
        columns = weight_columns(node, read())
        return (packing.pack(part, columns) for part in parts)

    return [name for name, _ in emitter.place_packed(node, packing, parts, pieces)]


def emit_depthwise(emitter: Emitter, layer: Layer) -> None:
    """A convolution of each channel by itself."""
    node = layer.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    batch, height, width, columns = x.shape
    out_height, out_width = y.shape[1:3]
    rows = batch * out_height * out_width
    vector = emitter.vector_for(columns)
    kept = read_weights(emitter, node, blocks=False)
    stored, accumulator = emitter.stored(layer.output), REGISTER[y.dtype]
    storage = "float32" if kept.storage == "float16" else kept.storage.replace("int4", "int8")
    plain = Tile(
        "depthwise", ("depthwise",), 1, vector, vector, weights=storage, scalar=accumulator, activation=emitter.stored(x),
        stored=stored,
    )  # fmt: skip
    tile = _with(plain, replace(kept, block=0))
    tail = emitter.tail(layer, vector)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel("depthwise", t=tile, attributes=emitter.attributes(local), **emitter.tail_context(tail))
    read, dtype = kept.codes, np.dtype(storage)
    if read is None:
        packed = _packed_at_run_time(emitter, layer, 1, columns)
    else:
        packed = emitter.data(
            weight.name, dtype.itemsize * weight.size, lambda: np.ascontiguousarray(read().reshape(columns, -1).T, dtype)
        )
    zeros = emitter.zeros(columns)
    dims = [
        rows, height, width, columns, out_height, out_width, *weight.shape[2:], *node.attributes["strides"],
        *node.attributes["dilations"], *node.attributes["pads"][:2],
    ]  # fmt: skip
    args = [emitter.operand(x), packed, emitter.tensor(layer.output), zeros, *kept.args, *emitter.operand_args(tail), *dims]
    shape = KernelShape(rows=rows, columns=columns, depth=weight.size // columns, run=columns, vector=vector)
    emitter.launch(layer, kernel, args, items, local, shape, macs=rows * weight.size)


def _emit_dynamic(emitter: Emitter, layer: Layer) -> None:
    """Both operands are tensors (or a stack of constant matrices): attention's two products."""
    a, b, y = layer.main.input(0), layer.main.input(1), layer.main.outputs[0]
    batch, (rows, columns), depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
    batches = math.prod(batch)
    transposed = bool(layer.main.attributes["transposed"])
    right, kept = read_both(emitter, layer.main)
    product = Product("matmul_dynamic", "buffer", rows, depth, columns, batches, kept.storage)
    floats = kept.storage in ("float32", "float16") and kept.zero is kept.scale is kept.weight_zero is kept.weight_scale is None
    tile = _with(_tile(emitter, layer, product, depth, packed=False, plain=not floats), kept)
    tail = emitter.tail(layer, tile.vector)
    levels = _batch_levels(batch, a.shape, b.shape)
    kernel = emitter.kernels.kernel(
        "matmul_dynamic",
        t=tile,
        attributes=emitter.attributes(tile.group),
        levels=len(levels),
        transposed=transposed,
        **emitter.tail_context(tail),
    )
    args = [emitter.operand(a), right, emitter.tensor(layer.output), *kept.args, *emitter.operand_args(tail)]
    emitter.launch(
        layer,
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
    """Of each dimension of `batch`, innermost first: its size, and how far apart matrices of `a` and of `b` lie, 0 where one is
    broadcast. Neighbours that one distance covers in both are one dimension; there is at least one.
    """
    steps = [[stride * shape[-2] * shape[-1] for stride in reversed(broadcast_strides(shape[:-2], batch))] for shape in (a, b)]
    levels: list[tuple[int, int, int]] = []
    for size, *step in zip(reversed(batch), *steps, strict=True):
        if levels and step == [levels[-1][0] * last for last in levels[-1][1:]]:
            levels[-1] = (levels[-1][0] * size, *levels[-1][1:])
        elif size > 1:
            levels.append((size, *step))
    return levels or [(1, 0, 0)]
