"""Bundles for timing the opening of sessions: they differ only in kernels, or only in layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashmem.base.types import TransferMode
from flashmem.bundle.writer import BundleWriter
from flashmem.compiler.adaptive.plan_graph import plan_program
from flashmem.compiler.ir.graph import Graph, GraphPort
from flashmem.compiler.options import Options
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.target.descriptor import DeviceDescriptor

from .sketch import Sketch
from .target import Openings

_KERNELS = 28
_LAYERS = 280


def make_openings(folder: Path, descriptor: DeviceDescriptor, mode: TransferMode) -> Openings:
    """Make the bundles in `folder`."""
    graphs = {"one": kernels_graph(1), "kernels": kernels_graph(_KERNELS), "layers": layers_graph(_LAYERS)}
    bundles = {key: folder / f"{key}.flashmem" for key in graphs}
    for key, path in bundles.items():
        _bundle(path, graphs[key], descriptor, mode)
    return Openings(bundles, _KERNELS, _LAYERS)


_ENDINGS = ("Relu", "Gelu", "Tanh", "Sigmoid", "Exp", "HardSwish")


def layers_graph(count: int) -> Graph:
    """A chain of `count` products with separate weights, all by one kernel."""
    g = Sketch()
    y = g.input(1, 8, 64)
    for _ in range(count):
        y = g.node("MatMul", [y, g.weight(64, 64)], y.shape)
    return g.finish(y)


def kernels_graph(count: int) -> Graph:
    """A graph of up to `count` kernels with different texts, of the kinds that models have."""
    g = Sketch()
    outputs = []
    for i in range(count):
        x = g.input(1, 8 + i, 64 + 16 * i)
        turn, kind = divmod(i, 4)
        endings = (_ENDINGS[turn % len(_ENDINGS)], _ENDINGS[(turn + turn // len(_ENDINGS) + 1) % len(_ENDINGS)])
        if kind == 2:
            y = g.node("Transpose", [x], (1, x.shape[2], x.shape[1]), perm=[0, 2, 1])
        else:
            y = x
            if kind == 0:
                y = g.node("MatMul", [x, g.weight(x.shape[2], 64)], (1, x.shape[1], 64))
            elif kind == 3:
                y = g.node("Softmax", [x], x.shape, axis=-1)
            for op in endings:
                y = g.node(op, [y], y.shape)
        outputs.append(GraphPort(f"y{i}", "float32", y))
    return Graph("kernels", g.inputs, outputs, g.nodes)


def _bundle(path: Path, graph: Graph, descriptor: DeviceDescriptor, mode: TransferMode) -> None:
    graph = prepare(graph)
    made = generate(fuse(graph), descriptor)
    # The rates are not measured yet and the model is not trained, so the plan must not use it.
    options = Options(replace(descriptor, capacity_model=""), mode)
    with BundleWriter(path) as writer:
        made.write(writer)
        writer.commit(made.program, made.source, plan_program(made.program, options), descriptor, {"mode": mode})
