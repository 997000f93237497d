"""Pooling and resizing, channels-last."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flashmem.codegen.emitter import Emitter
from flashmem.graph.fusion import Layer
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
    """Resize, from tables of taps made here."""
    node = layer.main
    x, y = node.input(0), node.outputs[0]
    _, height, width, columns = x.shape
    rows = math.prod(y.shape[:3])
    scales = node.attributes["scales"][-2:]
    down = resize_taps(height, y.shape[1], scales[0], node.attributes)
    across = resize_taps(width, y.shape[2], scales[1], node.attributes)
    tables = [
        emitter.data(f"{node.name}.taps{i}", table.nbytes, partial(np.asarray, table))
        for i, table in enumerate([*down, *across])
    ]
    vector = emitter.vector_for(columns)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel(
        "resize", taps=across[0].shape[1], attributes=emitter.attributes(local), **emitter.vectors(vector)
    )
    args: list[Arg | int] = [emitter.operand(x), emitter.tensor(y), *tables, rows, height, width, columns, *y.shape[1:3]]
    shape = KernelShape(rows=rows, columns=columns, depth=across[0].shape[1] ** 2, run=columns, vector=vector)
    emitter.launch(layer, kernel, args, items, local, shape)


def resize_taps(
    size: int, out_size: int, scale: float, attributes: dict[str, object]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """For each output position along one axis, the input positions it reads and their weights, both [out_size, taps].

    Source: ONNX Resize, `coordinate_transformation_mode`, `nearest_mode`, `cubic_coeff_a`, `exclude_outside`.
    """
    place = np.arange(out_size, dtype=np.float64)
    rule = attributes.get("coordinate_transformation_mode", "half_pixel")
    length = scale * size
    if rule == "align_corners":
        at = place * (size - 1) / (length - 1) if length > 1 else np.zeros(out_size)
    elif rule == "asymmetric":
        at = place / scale
    elif rule == "pytorch_half_pixel":
        at = (place + 0.5) / scale - 0.5 if length > 1 else np.zeros(out_size)
    elif rule == "half_pixel_symmetric":
        adjustment = out_size / length
        at = size / 2 * (1 - adjustment) + (place + 0.5) / scale - 0.5
    else:
        at = (place + 0.5) / scale - 0.5
    mode = attributes.get("mode", "nearest")
    if mode == "nearest":
        roundings: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
            "round_prefer_floor": lambda v: np.ceil(v - 0.5),
            "round_prefer_ceil": lambda v: np.floor(v + 0.5),
            "floor": np.floor,
            "ceil": np.ceil,
        }
        chosen = roundings[str(attributes.get("nearest_mode", "round_prefer_floor"))](at).clip(0, size - 1)
        return chosen.astype(np.int32)[:, None], np.ones((out_size, 1), np.float32)
    base = np.floor(at)
    ratio = at - base
    if mode == "linear":
        taps = np.stack([base, base + 1], 1)
        weights = np.stack([1 - ratio, ratio], 1)
    else:
        a = float(str(attributes.get("cubic_coeff_a", -0.75)))
        taps = np.stack([base - 1, base, base + 1, base + 2], 1)
        far, near = ratio + 1, ratio
        weights = np.stack(
            [
                ((a * far - 5 * a) * far + 8 * a) * far - 4 * a,
                ((a + 2) * near - (a + 3)) * near**2 + 1,
                ((a + 2) * (1 - near) - (a + 3)) * (1 - near) ** 2 + 1,
                ((a * (2 - near) - 5 * a) * (2 - near) + 8 * a) * (2 - near) - 4 * a,
            ],
            1,
        )
    if attributes.get("exclude_outside", 0):
        weights = np.where((taps < 0) | (taps >= size), 0.0, weights)
        weights /= weights.sum(1, keepdims=True)
    return taps.clip(0, size - 1).astype(np.int32), weights.astype(np.float32)
