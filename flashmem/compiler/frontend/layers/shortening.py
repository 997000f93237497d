"""A model with few of its equal layers: the first, two to compare, and the last."""

from __future__ import annotations

import onnx

from flashmem.compiler.frontend.layers.equal_layers import EqualLayers

KEPT = 4
"""Layers of a shortened model."""


def shortened(model: onnx.ModelProto, layers: EqualLayers) -> onnx.ModelProto:
    """`model` without layers 3 to `count` - 2: the last one reads what layer 2 computes."""
    removed = range(layers.span(KEPT - 1).start, layers.span(layers.count - 1).start)
    gone = {name for layer in range(KEPT - 1, layers.count - 1) for name in (*layers.made[layer], *layers.owned[layer])}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    del graph.node[removed.start : removed.stop]
    for values in (graph.initializer, graph.input, graph.output, graph.value_info):
        for index in reversed(range(len(values))):
            if values[index].name in gone:
                del values[index]
    joint = dict(zip(layers.made[layers.count - 2], layers.made[KEPT - 2], strict=True))
    for node in graph.node[removed.start : removed.start + layers.period]:
        node.input[:] = [joint.get(name, name) for name in node.input]
    return made
