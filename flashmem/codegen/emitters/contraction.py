"""MatMul and convolutions: packed weights in slices, one launch for each; products of two activations as one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.codegen.emitter import Emitter
from flashmem.codegen.emitters.movement import _move as move
from flashmem.codegen.packing import PackedSlice, Packing, weight_columns, weight_matrix
from flashmem.graph.fusion import Layer
from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.vector import REGISTER, Vector, scalar_literal
from flashmem.graph.placement import affine, broadcast_strides
from flashmem.program import Arg, KernelShape, Slice

DEPTH_BLOCK = 64
"""Steps of depth between two of the stream lane (a power of two, so that folds of a texture fall between blocks)."""


@dataclass(frozen=True)
class _Tile:
    """One work-item's tile, as the templates see it (`t`)."""

    rows: int
    columns: int
    vector: int
    texture: bool
    storage: str
    local: tuple[int, int]
    scalar: str = "float"

    @property
    def vectors(self) -> int:
        return self.columns // self.vector

    @property
    def vec(self) -> str:
        return Vector(self.vector).named(self.scalar)


def _tile(emitter: Emitter, rows: int, columns: int, *, packed: bool) -> _Tile:
    """The device's tile, cut to the matrix: the number of rows that wastes least, panels no wider than the matrix."""
    wanted = emitter.descriptor.tile
    width = max(4, min(wanted.columns, 1 << (columns - 1).bit_length()))
    most = min(wanted.rows, rows)
    height = min(range(most, max(1, most // 2 + 1) - 1, -1), key=lambda r: -(-rows // r) * r)
    texture = packed and emitter.memory_path == "texture"
    storage = "half" if packed and emitter.half else "float"
    return _Tile(height, width, min(wanted.vector, width), texture, storage, wanted.local_size)


def emit_matmul(emitter: Emitter, layer: Layer) -> None:
    """MatMul: with constant weights packed in slices, otherwise as a product of two activations."""
    weight = layer.main.input(1)
    if weight.constant is None or math.prod(weight.shape[:-2]) != 1 or weight.dtype != "float32":
        _emit_dynamic(emitter, layer)
        return
    shape = layer.main.outputs[0].shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tile = _tile(emitter, rows, columns, packed=True)
    depth = layer.main.input(0).shape[-1]
    _emit_packed(emitter, layer, "matmul", tile, rows, 1, DEPTH_BLOCK, [rows, depth, columns], {"block": DEPTH_BLOCK})


def emit_convolution(emitter: Emitter, layer: Layer) -> None:
    """Conv and ConvTranspose as implicit products; a 1x1 convolution is a MatMul, a depthwise one has its own kernel."""
    node = layer.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    *_, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    group, volume = int(node.attributes["group"]), len(x.shape) == 5
    *front, kernel_h, kernel_w = zip(
        weight.shape[2:], node.attributes["strides"], node.attributes["dilations"], node.attributes["pads"], strict=False
    )
    rows = y.size // columns
    transposed = node.op == "ConvTranspose"
    if group == channels == columns and not transposed and not volume and group > 1:
        _emit_depthwise(emitter, layer)
        return
    packed = weight.constant is not None
    pointwise = group == 1 and not any(node.attributes["pads"]) and {*weight.shape[2:], *node.attributes["strides"]} == {1}
    if pointwise and not transposed:
        tile = _tile(emitter, rows, columns, packed=packed)
        dims = [rows, channels, columns]
        _emit_packed(emitter, layer, "matmul", tile, rows, 1, DEPTH_BLOCK, dims, {"block": DEPTH_BLOCK})
        return
    tile = _tile(emitter, rows, columns // group, packed=packed)
    group_panels = -(-(columns // group) // tile.columns)
    dims = [
        rows, height, width, channels, channels // group, out_height, out_width, columns, columns // group, group_panels,
        *(number for pair in zip(kernel_h, kernel_w, strict=True) for number in pair),
    ]  # fmt: skip
    dims += [x.shape[1], y.shape[1], *front[0]] if volume else []
    context = {"transposed": transposed, "volume": volume}
    _emit_packed(emitter, layer, "conv", tile, rows, group, channels // group, dims, context)


def emit_deform_convolution(emitter: Emitter, layer: Layer) -> None:
    """DeformConv: an implicit product whose taps are sampled."""
    node = layer.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    _, height, width, channels = x.shape
    *_, out_height, out_width, columns = y.shape
    group, offset_group, masked = node.attributes["group"], node.attributes["offset_group"], len(node.inputs) > 3
    rows = y.size // columns
    tile = _tile(emitter, rows, columns // group, packed=weight.constant is not None)
    dims = [
        rows, height, width, channels, channels // group, out_height, out_width, columns, columns // group,
        -(-(columns // group) // tile.columns), *weight.shape[2:], *node.attributes["strides"], *node.attributes["dilations"],
        *node.attributes["pads"][:2], offset_group, channels // offset_group,
    ]  # fmt: skip
    extra = [emitter.zeros(channels), *(emitter.operand(node.input(i)) for i in range(2, len(node.inputs)))]
    _emit_packed(emitter, layer, "deform_conv", tile, rows, group, channels // group, dims, {"masked": masked}, extra)


def _emit_packed(
    emitter: Emitter,
    layer: Layer,
    template: str,
    tile: _Tile,
    rows: int,
    groups: int,
    fold_unit: int,
    dims: list[int],
    context: dict[str, Any],
    extra: Sequence[Arg] = (),
) -> None:
    """Pack the weights and launch `template` once for each slice. `extra`: pointers that it takes before those of the tail."""
    depth, columns = weight_matrix(layer.main)
    packing = Packing(
        depth, columns // groups, groups, tile.columns, emitter.half, emitter.memory_path, fold_unit, emitter.descriptor
    )
    tail = emitter.tail(layer, tile.vector)
    kernel = emitter.kernels.kernel(
        template, t=tile, attributes=emitter.attributes(tile.local), **context, **emitter.tail_context(tail)
    )
    x, y = emitter.operand(layer.main.input(0)), emitter.tensor(layer.output)
    zeros = [emitter.zeros(dims[3])] if template == "conv" else []
    if layer.main.input(1).constant is None:
        whole = PackedSlice(0, packing.panels, 4 * packing.panels * depth * tile.columns)
        sliced = [(_packed_at_run_time(emitter, layer, groups, tile.columns), whole)]
    else:
        sliced = [(Arg("slice", name), part) for name, part in _placed(emitter, layer.main, packing)]
    operands = [*extra, *emitter.operand_args(tail)]
    for i, (packed, part) in enumerate(sliced):
        folds = [packing.fold_rows, part.panels * tile.columns // 4] if tile.texture else []
        emitter.launch(
            layer,
            kernel,
            [x, packed, y, *zeros, *operands, *dims, part.first_panel, part.panels, *folds],
            (-(-rows // tile.rows), part.panels),
            tile.local,
            KernelShape(
                rows=rows,
                columns=min(part.panels * tile.columns, columns),
                depth=depth,
                run=fold_unit if template == "conv" else depth,
                vector=tile.vector,
            ),
            macs=rows * depth * min(part.panels * tile.columns, columns),
            nbytes=4 * (layer.main.input(0).size + rows * part.panels * tile.columns),
            part=f"[{i}]" if len(sliced) > 1 else "",
        )


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


def _placed(emitter: Emitter, node: Node, packing: Packing) -> list[tuple[str, PackedSlice]]:
    """The slices of a weight, placed once however many layers use it."""
    weight = node.input(1)
    key = (weight, packing)
    if key not in emitter.packed:
        taken = any(each.name == f"{weight.name}[0]" for each in emitter.slices)
        name = f"{weight.name}#{len(emitter.packed)}" if taken else weight.name
        parts = packing.slices(emitter.slice_bytes)

        def pieces() -> Iterator[NDArray[np.floating]]:
            columns = weight_columns(node)
            return (packing.pack(part, columns) for part in parts)

        channel: Literal["float", "half"] = "half" if packing.half else "float"
        offsets = emitter.weights.place(weight.name, [part.nbytes for part in parts], pieces)
        for i, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            image = (part.width, part.height, part.row_pitch)
            emitter.slices.append(Slice(f"{name}[{i}]", weight.name, offset, part.nbytes, *image, channel))
        emitter.packed[key] = [(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    return emitter.packed[key]


def _emit_depthwise(emitter: Emitter, layer: Layer) -> None:
    node = layer.main
    x, weight, y = node.input(0), node.input(1), node.outputs[0]
    batch, height, width, columns = x.shape
    out_height, out_width = y.shape[1:3]
    rows = batch * out_height * out_width
    vector = emitter.vector_for(columns)
    tile = _Tile(1, vector, vector, False, "float", (1, 1))
    tail = emitter.tail(layer, vector)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel("depthwise", t=tile, attributes=emitter.attributes(local), **emitter.tail_context(tail))
    if weight.constant is None:
        packed = _packed_at_run_time(emitter, layer, 1, columns)
    else:
        read = weight.constant.array
        packed = emitter.data(
            weight.name, 4 * weight.size, lambda: np.ascontiguousarray(read().reshape(columns, -1).T, np.float32)
        )
    zeros = emitter.zeros(columns)
    dims = [
        rows, height, width, columns, out_height, out_width, *weight.shape[2:], *node.attributes["strides"],
        *node.attributes["dilations"], *node.attributes["pads"][:2],
    ]  # fmt: skip
    args = [emitter.operand(x), packed, emitter.tensor(layer.output), zeros, *emitter.operand_args(tail), *dims]
    shape = KernelShape(rows=rows, columns=columns, depth=weight.size // columns, run=columns, vector=vector)
    emitter.launch(layer, kernel, args, items, local, shape, macs=rows * weight.size)


def _emit_dynamic(emitter: Emitter, layer: Layer) -> None:
    """Both operands are tensors (or a stack of constant matrices): attention's two products."""
    a, b, y = layer.main.input(0), layer.main.input(1), layer.main.outputs[0]
    batch, (rows, columns), depth = y.shape[:-2], y.shape[-2:], a.shape[-1]
    batches = math.prod(batch)
    transposed = bool(layer.main.attributes["transposed"])
    tile = replace(_tile(emitter, rows, columns, packed=False), scalar=REGISTER[y.dtype])
    tail = emitter.tail(layer, tile.vector)
    local = tile.local if math.prod(tile.local) > 1 else (1, 1)
    kernel = emitter.kernels.kernel(
        "matmul_dynamic",
        t=tile,
        attributes=emitter.attributes(local),
        a_batch=_batch_start(a.shape, batch),
        b_batch=_batch_start(b.shape, batch),
        a_row=depth,
        a_col=1,
        b_row=1 if transposed else columns,
        b_col=depth if transposed else 1,
        **emitter.tail_context(tail),
    )
    args = [emitter.operand(a), emitter.operand(b), emitter.tensor(layer.output), *emitter.operand_args(tail)]
    emitter.launch(
        layer,
        kernel,
        [*args, batches, rows, depth, columns],
        (-(-rows // tile.rows), -(-columns // tile.columns), batches),
        (*local, 1),
        KernelShape(
            rows=batches * rows, columns=columns, depth=depth, run=depth, stride=depth if transposed else 1, vector=tile.vector
        ),
        macs=batches * rows * columns * depth,
    )


def _batch_start(shape: tuple[int, ...], batch: tuple[int, ...]) -> str:
    """Where matrix `batch` of a stack of `shape` starts, as an expression; broadcast dimensions count 0."""
    size = shape[-2] * shape[-1]
    strides = [stride * size for stride in broadcast_strides(shape[:-2], batch)]
    return affine(batch, strides, "batch")
