"""Sampled cases: small graphs around one kernel each, drawn quasi-randomly. `models.py` has the launches of models.

Sizes are drawn from ranges that cover convolutional and transformer models, including the sizes of ResNet, ViT and GPT. The
sequence depends only on a seed, so an interrupted profile can resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashmem.base.types import TransferMode
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import Graph, Value
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.weights.slicing import Slicing
from flashmem.target.descriptor import DeviceDescriptor, PlainTile

from .dataset import SAMPLE
from .shapes import Attention
from .sketch import Sketch as Sketch
from .target import Draw as Draw
from .target import Openings
from .target import Target as Target

Precision = Literal["fp32", "fp16"]


Maker = Callable[[Draw], Graph]


def _epilogue(g: Sketch, draw: Draw, y: Value) -> Value:
    """Append a typical epilogue of a contraction: nothing, a bias, an activation, a residual sum."""
    kind = draw.pick(("none", "bias", "relu", "gelu", "residual"))
    if kind == "none":
        return y
    y = g.node("Add", [y, g.weight(y.shape[-1])], y.shape)
    if kind == "relu":
        y = g.node("Relu", [y], y.shape)
    elif kind == "gelu":
        y = g.node("Gelu", [y], y.shape)
    elif kind == "residual":
        y = g.node("Add", [y, g.input(*y.shape)], y.shape)
    return y


_WIDTHS = (64, 192, 256, 384, 512, 768, 1024, 1280, 2048, 2304, 3072, 4096)


def _matmul(draw: Draw) -> Graph:
    g = Sketch()
    rows = draw.pick((1, 16, 49, 64, 128, 128, 196, 197, 256, 512, 1024))
    depth = draw.pick(_WIDTHS) if draw.unit() < 0.6 else draw.size(48, 4096, 8)
    columns = draw.pick(_WIDTHS) if draw.unit() < 0.6 else draw.size(32, 8192, 8)
    x = g.input(1, rows, depth)
    return g.finish(_epilogue(g, draw, g.node("MatMul", [x, g.weight(depth, columns)], (1, rows, columns))))


def _convolution(draw: Draw) -> Graph:
    g = Sketch()
    side = draw.pick((7, 14, 14, 28, 28, 56, 112))
    kernel = draw.pick((1, 1, 3, 3, 3, 5, 7))
    stride = draw.pick((1, 1, 1, 2))
    limit = 64 if side > 56 else 512
    channels = draw.pick((3, 16, 32, 64, 128, 256, 512, 1024))
    channels = min(channels, limit)
    columns = min(draw.pick((16, 32, 64, 96, 128, 256, 512, 2048)), 4 * limit)
    x = g.input(1, channels, side, side)
    pad = kernel // 2
    out = (side + 2 * pad - kernel) // stride + 1
    shape = (1, columns, out, out)
    y = g.node(
        "Conv", [x, g.weight(columns, channels, kernel, kernel)], shape,
        kernel_shape=[kernel, kernel], strides=[stride, stride], pads=[pad] * 4,
    )  # fmt: skip
    kind = draw.pick(("none", "relu", "residual"))
    if kind != "none":
        y = g.node("Add", [y, g.weight(columns, 1, 1)], shape)
    if kind == "residual":
        y = g.node("Add", [y, g.node("Relu", [g.node("Conv", [x, g.weight(columns, channels, 1, 1)], shape,
            kernel_shape=[1, 1], strides=[stride, stride])], shape)], shape)  # fmt: skip
    if kind != "none":
        y = g.node("Relu", [y], shape)
    return g.finish(y)


def _depthwise(draw: Draw) -> Graph:
    g = Sketch()
    side = draw.pick((7, 14, 28, 56, 112))
    kernel = draw.pick((3, 3, 5))
    stride = draw.pick((1, 1, 2))
    channels = draw.size(32, 1024, 8)
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    shape = (1, channels, out, out)
    y = g.node(
        "Conv", [g.input(1, channels, side, side), g.weight(channels, 1, kernel, kernel)], shape,
        kernel_shape=[kernel, kernel], strides=[stride, stride], pads=[kernel // 2] * 4, group=channels,
    )  # fmt: skip
    return g.finish(g.node("Relu", [y], shape) if draw.unit() < 0.5 else y)


def _fused_attention(draw: Draw) -> Graph:
    """Attention of one query, of as many queries as keys, or over another tensor's keys."""
    heads = draw.pick((3, 8, 12, 16, 20))
    rows = draw.pick((1, 49, 64, 128, 197, 256, 1024))
    width = draw.pick((32, 40, 64, 80, 128))
    keys = draw.pick((0, 0, 77, 197, 512))
    return Attention(heads, rows, width, max(keys, 64) if rows == 1 else keys).graph()


def _attention(draw: Draw) -> Graph:
    """The two products of attention: scores (scaled, as in GPT and ViT) and values."""
    g = Sketch()
    heads = draw.pick((3, 6, 12, 12, 16, 32))
    rows = draw.pick((49, 64, 128, 128, 197, 256, 512))
    width = draw.pick((32, 64, 128))
    if draw.unit() < 0.5:
        a = g.input(1, heads, rows, width)
        b = g.input(1, heads, width, rows)
        y = g.node("MatMul", [a, b], (1, heads, rows, rows))
        return g.finish(g.node("Mul", [y, g.weight(1)], y.shape) if draw.unit() < 0.5 else y)
    a = g.input(1, heads, rows, rows)
    b = g.input(1, heads, rows, width)
    return g.finish(g.node("MatMul", [a, b], (1, heads, rows, width)))


def _matrix(g: Sketch, draw: Draw, most: int = 4 << 20) -> Value:
    """An activation [1, rows, columns], small to large."""
    columns = draw.pick((64, 128, 197, 256, 512, 768, 1000, 1024, 2048, 3072, 4096))
    rows = draw.size(1, max(2, most // columns))
    return g.input(1, rows, columns)


def _elementwise(draw: Draw) -> Graph:
    g = Sketch()
    x = _matrix(g, draw)
    op = draw.pick(("Relu", "Gelu", "Sigmoid", "Tanh", "Add", "Mul", "Div", "Exp", "Clip", "Bias", "HardSwish"))
    if op == "Bias":
        return g.finish(g.node("Add", [x, g.weight(x.shape[-1])], x.shape))
    if op == "Clip":
        return g.finish(g.node("Clip", [x, g.weight(), g.weight()], x.shape))
    inputs = [x, g.input(*x.shape)] if op in ("Add", "Mul", "Div") else [x]
    y = g.node(op, inputs, x.shape)
    return g.finish(g.node("Add", [y, g.input(*x.shape)], x.shape) if draw.unit() < 0.3 else y)


def _rows(draw: Draw) -> Graph:
    g = Sketch()
    x = _matrix(g, draw)
    op = draw.pick(("Softmax", "Softmax", "LayerNormalization", "LayerNormalization", "ReduceMean", "ReduceMax"))
    if op == "LayerNormalization":
        return g.finish(g.node(op, [x, g.weight(x.shape[-1]), g.weight(x.shape[-1])], x.shape, axis=-1))
    if op == "Softmax":
        return g.finish(g.node(op, [x], x.shape, axis=-1))
    return g.finish(g.node(op, [x], (*x.shape[:-1], 1), axes=[-1]))


def _reduced_columns(draw: Draw) -> Graph:
    g = Sketch()
    op = draw.pick(("ReduceMean", "ReduceMean", "ReduceMax", "ReduceSum", "Softmax"))
    x = g.input(draw.pick((1, 1, 4, 12)), draw.size(7, 3200), draw.pick((32, 64, 128, 256, 512, 768, 1024)))
    if op == "Softmax":
        return g.finish(g.node(op, [x], x.shape, axis=1))
    return g.finish(g.node(op, [x], (x.shape[0], 1, x.shape[2]), axes=[1]))


def _gather(draw: Draw) -> Graph:
    g = Sketch()
    rows = draw.size(64, 8192)
    columns = draw.size(8, 1024, 4)
    count = draw.size(16, 2048)
    at = np.random.default_rng(count).integers(0, rows, count)
    at[:3] = (0, 5, 1)  # not evenly spaced, because that would be a Slice
    return g.finish(g.node("Gather", [g.input(rows, columns), constant("at", at.astype(np.int64))], (count, columns), axis=0))


def _movement(draw: Draw) -> Graph:
    g = Sketch()
    op = draw.pick(("Heads", "Heads", "Transpose", "Slice", "Concat", "Pad", "Expand"))
    rows = draw.size(16, 1024)
    heads = draw.pick((3, 4, 8, 12, 16))
    width = draw.pick((16, 32, 64, 128))
    if op == "Heads":  # attention's [rows, heads, width] -> [heads, rows, width]
        return g.finish(g.node("Transpose", [g.input(1, rows, heads, width)], (1, heads, rows, width), perm=[0, 2, 1, 3]))
    columns = heads * width
    x = g.input(1, rows, columns)
    if op == "Transpose":
        return g.finish(g.node("Transpose", [x], (1, columns, rows), perm=[0, 2, 1]))
    if op == "Slice":
        third = columns // 3
        bounds = (np.array([third]), np.array([2 * third]), np.array([2]))
        limits = [constant(f"s{i}", bound) for i, bound in enumerate(bounds)]
        return g.finish(g.node("Slice", [x, *limits], (1, rows, third)))
    if op == "Concat":
        return g.finish(g.node("Concat", [x, g.input(1, rows, columns)], (1, rows, 2 * columns), axis=2))
    if op == "Pad":
        pads = constant("pads", np.array([0, 1, 0, 0, 1, 0]))
        return g.finish(g.node("Pad", [x, pads], (1, rows + 2, columns)))
    shape = (4, rows, columns)
    return g.finish(g.node("Expand", [x, constant("shape", np.array(shape))], shape))


def _pool(draw: Draw) -> Graph:
    g = Sketch()
    side = draw.pick((14, 28, 56, 112))
    kernel = draw.pick((2, 3, 3, 5))
    stride = draw.pick((1, 2, 2))
    channels = draw.size(16, 1024, 8)
    out = (side - kernel) // stride + 1
    return g.finish(g.node(
        draw.pick(("MaxPool", "AveragePool")), [g.input(1, channels, side, side)], (1, channels, out, out),
        kernel_shape=[kernel, kernel], strides=[stride, stride],
    ))  # fmt: skip


def _resize(draw: Draw) -> Graph:
    g = Sketch()
    side = draw.pick((7, 14, 28, 56))
    channels = draw.size(16, 512, 8)
    mode = draw.pick(("nearest", "linear"))
    scales = constant("scales", np.array([1, 1, 2, 2], np.float32))
    x = g.input(1, channels, side, side)
    return g.finish(g.node("Resize", [x, None, scales], (1, channels, 2 * side, 2 * side), mode=mode))


FAMILIES: dict[str, tuple[Maker, int]] = {
    "matmul": (_matmul, 5),
    "conv": (_convolution, 5),
    "elementwise": (_elementwise, 3),
    "reduce_rows": (_rows, 3),
    "movement": (_movement, 3),
    "matmul_dynamic": (_attention, 2),
    "depthwise": (_depthwise, 2),
    "reduce_columns": (_reduced_columns, 1),
    "pool": (_pool, 1),
    "gather": (_gather, 1),
    "resize": (_resize, 1),
    "attention": (_fused_attention, 2),
}
"""(function that draws a kernel, weight relative to the rarest) of each family."""

TILES: tuple[dict[str, Any], ...] = (
    {"rows": 4}, {"columns": 16, "vector": 8}, {"columns": 16}, {"vector": 8}, {"rows": 6, "columns": 32},
    {"rows": 8, "columns": 16},
)  # fmt: skip
LOCAL_SIZES = ((4, 4), (8, 4), (4, 8), (8, 8), (16, 4), (16, 8))


def targets_of(graph: Graph, descriptor: DeviceDescriptor, precision: Precision, origin: str, case: str) -> list[Target]:
    """Every launch of `graph`, compiled as in `flashmem compile`."""
    graph = prepare(graph)
    fused = fuse(graph)
    operators = {node.name: group.main.op for group in fused.groups for node in group.nodes}
    made = generate(fused, descriptor, precision=precision, slicing=Slicing(most=None))
    found = []
    for i, launch in enumerate(made.program.launches):
        operator = operators.get(launch.operators[0], "") if launch.operators else ""
        found.append(
            Target(origin, f"{case}.{i}", operator or launch.shape.family, launch, made.program, made.source, made.constants)
        )
    return found


def sampled_family(index: int) -> tuple[str, int]:
    """The family of sampled case `index` (important families are more frequent), and the case's number within the family."""
    order: list[str] = []
    for turn in range(max(weight for _, weight in FAMILIES.values())):
        order += [name for name, (_, weight) in FAMILIES.items() if weight > turn]
    turns, place = divmod(index, len(order))
    family = order[place]
    return family, turns * FAMILIES[family][1] + order[:place].count(family)


def sampled(index: int, seed: int, descriptor: DeviceDescriptor) -> Target | None:
    """Sampled case `index` on the descriptor's default path; None if the graph has no kernel of that family."""
    family, ordinal = sampled_family(index)
    maker, _ = FAMILIES[family]
    draw = Draw(ordinal, seed + list(FAMILIES).index(family))
    tile_unit = draw.unit()
    half_unit = draw.unit()
    choice = draw.unit()
    listed = configs_of(descriptor, family)
    if len(listed) > 1 and tile_unit < 0.25:
        descriptor = replace(descriptor, only=listed[int(choice * len(listed))].name)
    elif family in ("matmul", "conv", "matmul_dynamic") and tile_unit < 0.35:
        descriptor = replace(descriptor, tile=_other_config(descriptor, choice))
    precision: Precision = "fp16" if family in ("matmul", "conv") and half_unit < 0.2 else "fp32"
    found = targets_of(maker(draw), descriptor, precision, SAMPLE, f"{family}-{index}")
    kernels = (family, "matmul") if family == "conv" else (family,)  # a 1x1 convolution is a matmul
    wanted = [target for target in found if target.launch.shape.family in kernels]
    return wanted[-1] if wanted else None


def _other_config(descriptor: DeviceDescriptor, choice: float) -> PlainTile:
    """A kernel config with another tile and, if work-groups have several items, another work-group."""
    tile = replace(descriptor.tile, **TILES[int(choice * len(TILES))])
    if math.prod(tile.local_size) > 1:
        tile = replace(tile, local_size=LOCAL_SIZES[int(choice * 97) % len(LOCAL_SIZES)])
    usual = descriptor.tile
    columns = min(tile.columns, usual.columns)
    return replace(tile, rows=min(tile.rows, usual.rows), columns=columns, vector=min(tile.vector, usual.vector, columns))


def matmul_target(rows: int, depth: int, columns: int, descriptor: DeviceDescriptor) -> Target:
    """The first slice of a plain product [rows, depth] x [depth, columns]."""
    g = Sketch()
    product = g.node("MatMul", [g.input(1, rows, depth), g.weight(depth, columns)], (1, rows, columns))
    return targets_of(g.finish(product), descriptor, "fp32", "rates", f"gemm-{rows}x{depth}x{columns}")[0]


def elementwise_target(size: int, descriptor: DeviceDescriptor) -> Target:
    """A sum of two activations of `size` elements."""
    g = Sketch()
    total = g.node("Add", [g.input(1, size), g.input(1, size)], (1, size))
    return targets_of(g.finish(total), descriptor, "fp32", "rates", f"add-{size}")[0]


@dataclass(frozen=True)
class Made:
    """Compiles targets on request, on the descriptor's default path: the `target.Supply` where the compiler is available."""

    descriptor: DeviceDescriptor
    count: int | None = None

    def matmul(self, rows: int, depth: int, columns: int) -> Target:
        """See `matmul_target`."""
        return matmul_target(rows, depth, columns, self.descriptor)

    def elementwise(self, size: int) -> Target:
        """See `elementwise_target`."""
        return elementwise_target(size, self.descriptor)

    def sampled(self, index: int, seed: int) -> Target | None:
        """See `sampled`."""
        return sampled(index, seed, self.descriptor)

    def openings(self, folder: Path, mode: TransferMode) -> Openings:
        """See `openings.make_openings`."""
        from .openings import make_openings

        return make_openings(folder, self.descriptor, mode)
