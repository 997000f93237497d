"""Lowering of pooling, its inverse, and resizing, channels-last."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from flashmem.compiler.ir.broadcast import affine
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import row_major
from flashmem.compiler.kernels.movement.lowering import copy_region
from flashmem.compiler.kernels.spatial.resize import height_taps
from flashmem.compiler.kernels.spatial.resize_taps import Axis, Rule, resize_taps
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.registry import lowers
from flashmem.compiler.operators.vector import REGISTER, STORED, Vector, scalar_literal
from flashmem.program.launches import Arg, KernelShape


@lowers("pool")
def lower_pool(context: LoweringContext, group: FusionGroup) -> None:
    """Lower MaxPool with the positions of its maxima, AveragePool and LpPool. Images are volumes of depth 1."""
    node = group.main
    x = node.input(0)
    y = node.outputs[0]
    _, *sizes, columns = x.shape
    out_sizes = y.shape[1:-1]
    lifted = [1] * (3 - len(sizes))
    rows = y.size // columns
    vector = context.vector_for(columns)
    kinds = Vector(vector)
    places = node.op == "MaxPoolAt"
    # A maximum needs registers as wide as its elements; with positions, which are 32 bits wide, it needs those.
    vec = kinds.named(STORED[x.dtype])
    load = "at[0]" if vector == 1 else f"vload{vector}(0, at)"
    if places or context.storage(x) == "float16":
        vec = kinds.of(x.dtype)
        load = kinds.load(context.storage(x), "at", "0")
    neutral = "0.0f"
    if node.op.startswith("MaxPool"):
        neutral = "-INFINITY" if x.dtype == "float32" else str(np.iinfo(x.dtype).min)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    kernel = context.kernels.kernel(
        "spatial/pool",
        op=node.op,
        count_pads=bool(node.attributes.get("count_include_pad", 0)),
        column_major=bool(node.attributes.get("storage_order", 0)),
        p=node.attributes.get("p", 0),
        neutral=neutral,
        maximum="fm_max" if x.dtype == "float32" else "max",
        stored=context.stored(x),
        made=context.stored(group.output),
        kind=REGISTER[x.dtype],
        result="found" if places else "total",
        load=load,
        attributes=context.attributes(local),
        vector=vector,
        vec=vec,
        ivec=kinds.named("int"),
        lvec=kinds.named("long"),
    )
    pads = node.attributes["pads"]
    before = pads[: len(sizes)]
    after = pads[len(sizes) :]
    nothing = [0] * len(lifted)
    args: list[Arg | int] = [context.operand(x), context.tensor(y), rows, *lifted, *sizes, columns, *lifted, *out_sizes]
    for name in ("kernel", "strides", "dilations"):
        args += [*lifted, *node.attributes[name]]
    args += [*nothing, *before, *nothing, *after]
    taps = math.prod(node.attributes["kernel"])
    shape = KernelShape(rows=rows, columns=columns, depth=taps, run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape)


@lowers("unpool")
def lower_unpool(context: LoweringContext, group: FusionGroup) -> None:
    """Lower MaxUnpool: zeros, then each element at its index. Where several have one index, the last one counts, as in order.

    Indices count in the shape without the requested output shape.
    """
    node = group.main
    x = node.input(0)
    indices = node.input(1)
    y = node.outputs[0]
    unpooled = node.attributes["unpooled"]
    strides = row_major(y.shape)
    claims = None if _meets_no_place_twice(indices) else Value(f"{y.name}.claims", y.shape, "int32")
    for value, part in ((y, "[zeros]"), (claims, "[no claims]")):
        if value is not None:
            copy_region(context, group, None, value, y.shape, strides, strides, fill=scalar_literal(value.dtype, 0), part=part)
    local = context.work_group((x.size,))
    stored, made = context.copied(x, y)
    for phase in ("claim", "write") if claims is not None else ("",):
        kernel = context.kernels.kernel(
            "spatial/unpool",
            attributes=context.attributes(local),
            stored=stored,
            made=made,
            index=STORED[indices.dtype],
            target=affine(unpooled, strides, "at"),
            phase=phase,
        )
        writes = phase != "claim"
        args: list[Arg | int] = [context.operand(x)] if writes else []
        args += [context.operand(indices)]
        args += [context.tensor(y)] if writes else []
        args += [context.tensor(claims)] if claims is not None else []
        args += [context.status(), x.size, math.prod(unpooled), len(context.launches) + 1]
        part = "" if writes else "[claims]"
        context.launch(group, kernel, args, (x.size,), local, KernelShape(columns=x.size), nbytes=16 * x.size, part=part)


def _meets_no_place_twice(indices: Value) -> bool:
    """Whether `indices` are the positions of the maxima of windows that do not overlap."""
    pool = indices.producer
    while pool is not None and pool.op in ("Reshape", "Transpose"):
        pool = pool.input(0).producer
    if pool is None or pool.op != "MaxPoolAt":
        return False
    given = pool.attributes
    windows = zip(given["kernel"], given["strides"], given["dilations"], strict=True)
    return all(stride > (size - 1) * dilation for size, stride, dilation in windows)


@lowers("resize")
def lower_resize(context: LoweringContext, group: FusionGroup) -> None:
    """Lower Resize over height and width, with tables of taps that are computed here."""
    node = group.main
    x = node.input(0)
    y = node.outputs[0]
    _, height, width, columns = x.shape
    rows = math.prod(y.shape[:3])
    rule, (_, _, left, right) = Rule.of(node.attributes), node.attributes["regions"]
    down = height_taps(node)
    across = resize_taps(Axis(width, y.shape[2], node.attributes["scales"][1], (left, right)), rule)
    copies = rule.mode == "nearest"
    arrays = [down.at, across.at] if copies else [down.at, down.weights, across.at, across.weights]
    tables = [context.data(f"{node.name}.taps{i}", array.nbytes, partial(np.asarray, array)) for i, array in enumerate(arrays)]
    vector = context.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = context.work_group(items)
    taps = (down.at.shape[1], across.at.shape[1])
    kernel = context.kernels.kernel(
        "spatial/resize",
        taps=taps,
        copies=copies,
        crops=rule.coordinates == "tf_crop_and_resize",
        outside=scalar_literal(x.dtype, node.attributes["extrapolation_value"]),
        attributes=context.attributes(local),
        vector=vector,
        stored=context.stored(x),
        made=context.stored(group.output),
        vec=Vector(vector).named(STORED[x.dtype]),
    )
    args: list[Arg | int] = [context.operand(x), context.tensor(y), *tables, rows, height, width, columns, *y.shape[1:3]]
    shape = KernelShape(rows=rows, columns=columns, depth=math.prod(taps), run=columns, vector=vector)
    context.launch(group, kernel, args, items, local, shape)
