"""A whole random graph: 5 to 20 nodes, its inputs, and the expected outputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .drawing import Drawing
from .operators import FAMILIES, Family
from .values import RejectedNodeError, Value

Array = NDArray[Any]

OPSETS = (21, 22, 23)
_ATTEMPTS = 12  # draws for each requested node

rejections: Counter[str] = Counter()
"""How often a drawn node was rejected, by operator and the first words of the reason."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A random graph: `values` by name has the expected tensors, outputs in the model's order."""

    model: onnx.ModelProto
    values: dict[str, Value]

    @property
    def feeds(self) -> dict[str, Array]:
        """An array for each input."""
        return {port.name: np.asarray(self.values[port.name].own) for port in self.model.graph.input}

    @property
    def outputs(self) -> list[Value]:
        """The expected outputs."""
        return [self.values[port.name] for port in self.model.graph.output]

    def only(self, node: onnx.NodeProto) -> Drawn:
        """The graph of this one node alone; the results of other nodes become inputs."""
        return Drawn(
            _assemble([node], [self.values[name] for name in node.output], self.values, _opset(self.model)), self.values
        )


def draw(
    rng: random.Random, nodes: int, listed: Callable[[str], bool] = lambda op: True, pool: Sequence[Family] = FAMILIES
) -> Drawn:
    """A graph of about `nodes` nodes of `pool`, of operators for which `listed` is true; with fewer nodes it is a part of this
    graph.
    """
    drawing = Drawing(rng, rng.choice(OPSETS))
    families = [(weight, how, known) for weight, how, ops in pool if (known := _known(ops, drawing.opset, listed))]
    weights = [weight for weight, *_ in families]
    for _ in range(_ATTEMPTS * nodes):
        if len(drawing.nodes) >= nodes:
            break
        _, how, ops = rng.choices(families, weights)[0]
        op = rng.choice(ops)
        try:
            how(drawing, op)
        except RejectedNodeError as reason:
            rejections[f"{op}: {str(reason)[:60]}"] += 1
    values = {value.name: value for value in drawing.values}
    return Drawn(_assemble(drawing.nodes, _chosen_outputs(drawing), values, drawing.opset), values)


def _known(ops: Collection[str], opset: int, listed: Callable[[str], bool]) -> list[str]:
    known = []
    for op in ops:
        try:
            onnx.defs.get_schema(op, opset)
        except onnx.defs.SchemaError:
            continue
        if listed(op):
            known.append(op)
    return known


def _chosen_outputs(drawing: Drawing) -> list[Value]:
    """All values that nobody reads, some that are read too, and sometimes an unchanged input or constant."""
    read = {name for node in drawing.nodes for name in node.input}
    made = [value for value in drawing.values if value.leaf is None]
    chosen = [value for value in made if value.name not in read or drawing.maybe(0.15)]
    if drawing.maybe(0.08):
        chosen += [value for value in drawing.values if value.leaf == "input"][:1]
    drawing.rng.shuffle(chosen)
    return chosen


def _assemble(nodes: list[onnx.NodeProto], outputs: list[Value], values: dict[str, Value], opset: int) -> onnx.ModelProto:
    made = {name for node in nodes for name in node.output}
    read = dict.fromkeys([name for node in nodes for name in node.input if name] + [value.name for value in outputs])
    leaves = [values[name] for name in read if name not in made]
    graph = helper.make_graph(
        nodes,
        "random",
        [_port(value) for value in leaves if value.leaf != "constant"],
        [_port(value) for value in outputs],
        [numpy_helper.from_array(value.own, value.name) for value in leaves if value.leaf == "constant"],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _port(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, helper.np_dtype_to_tensor_dtype(value.own.dtype), value.shape)


def _opset(model: onnx.ModelProto) -> int:
    return int(model.opset_import[0].version)
