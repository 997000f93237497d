"""Pooling and resizing, channels-last."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from flashmem.codegen.emitter import Emitter
from flashmem.codegen.resize_taps import Axis, Rule, resize_taps
from flashmem.graph.fusion import Layer
from flashmem.graph.operators.vector import STORED, Vector, scalar_literal
from flashmem.program import Arg, KernelShape


def emit_pool(emitter: Emitter, layer: Layer) -> None:
    """MaxPool and AveragePool."""
    node = layer.main
    x, y = node.input(0), node.outputs[0]
    _, height, width, columns = x.shape
    rows = math.prod(y.shape[:3])
    vector = emitter.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel(
        "pool",
        op=node.op,
        count_pads=bool(node.attributes["count_include_pad"]),
        attributes=emitter.attributes(local),
        **emitter.vectors(vector),
    )
    window = [*node.attributes["kernel"], *node.attributes["strides"], *node.attributes["dilations"], *node.attributes["pads"]]
    args: list[Arg | int] = [emitter.operand(x), emitter.tensor(y), rows, height, width, columns, *y.shape[1:3], *window]
    taps = math.prod(node.attributes["kernel"])
    shape = KernelShape(rows=rows, columns=columns, depth=taps, run=columns, vector=vector)
    emitter.launch(layer, kernel, args, items, local, shape)


def emit_resize(emitter: Emitter, layer: Layer) -> None:
    """Resize over height and width, from tables of taps made here."""
    node = layer.main
    x, y = node.input(0), node.outputs[0]
    _, height, width, columns = x.shape
    rows = math.prod(y.shape[:3])
    rule, (top, bottom, left, right) = Rule.of(node.attributes), node.attributes["regions"]
    down = resize_taps(Axis(height, y.shape[1], node.attributes["scales"][0], (top, bottom)), rule)
    across = resize_taps(Axis(width, y.shape[2], node.attributes["scales"][1], (left, right)), rule)
    copies = rule.mode == "nearest"
    arrays = [down.at, across.at] if copies else [down.at, down.weights, across.at, across.weights]
    tables = [emitter.data(f"{node.name}.taps{i}", array.nbytes, partial(np.asarray, array)) for i, array in enumerate(arrays)]
    vector = emitter.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    taps = (down.at.shape[1], across.at.shape[1])
    kernel = emitter.kernels.kernel(
        "resize",
        taps=taps,
        copies=copies,
        crops=rule.coordinates == "tf_crop_and_resize",
        outside=scalar_literal(x.dtype, node.attributes["extrapolation_value"]),
        attributes=emitter.attributes(local),
        vector=vector,
        stored=STORED[x.dtype],
        vec=Vector(vector).named(STORED[x.dtype]),
    )
    args: list[Arg | int] = [emitter.operand(x), emitter.tensor(y), *tables, rows, height, width, columns, *y.shape[1:3]]
    shape = KernelShape(rows=rows, columns=columns, depth=math.prod(taps), run=columns, vector=vector)
    emitter.launch(layer, kernel, args, items, local, shape)
