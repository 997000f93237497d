"""Fusion: each layer is one main operator and the elementwise operators that finish it.

The *tail* of a layer is any acyclic piece of elementwise operators that hangs on the main operator's output, works at its
shape, and leaves only one value behind: so bias, activation (GELU and SiLU with their several uses of one value) and
residual sums run in registers, in the producer's epilogue.

A product whose result the model gives back with its columns first, as images are in ONNX, stores it so, element by element: a
Transpose behind it would need the memory of the result twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from flashmem.compiler.ir.broadcast import place
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import Factor, StridedView, merged
from flashmem.compiler.operators import REGISTRY, is_elementwise

MAX_TAIL = 24
"""Operators in one tail: beyond this a kernel's registers, not its memory traffic, are what runs out."""

MAX_OPERANDS = 8
"""Tensors a tail reads beside the main operator's own."""


def fuse(graph: Graph, cuts: Collection[Node] = ()) -> list[FusionGroup]:
    """The layers of `graph` in execution order. Reshapes are no layers: they move no data. Nor is a Slice that moves none
    launched (`compiler.memory.aliases`), which depends on what its source is stored in.

    `cuts`: operators that join no tail; an elementwise one begins a layer of its own, with a tail of its own.
    """
    consumers = graph.consumers()
    outputs = {port.value for port in graph.outputs}
    position = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    cut = set(cuts)
    layers: list[FusionGroup] = []
    # From the last to the first, so that a sum of two branches ends the one that is computed later.
    for node in reversed(graph.nodes):
        if node in taken or node.op == "Reshape" or is_elementwise(node):
            continue
        layers.append(_grow(FusionGroup(node), position, consumers, outputs, taken | cut))
        taken.update(layers[-1].nodes)
    for node in graph.nodes:
        if is_elementwise(node) and node not in taken:
            layers.append(_grow(FusionGroup(node), position, consumers, outputs, taken | cut))
            taken.update(layers[-1].nodes)
    return _stored_moved(sorted(layers, key=lambda layer: position[layer.nodes[-1]]), consumers, outputs)


def _stored_moved(layers: list[FusionGroup], consumers: dict[Value, list[Node]], outputs: set[Value]) -> list[FusionGroup]:
    """`layers`, those that give outputs of the model with columns first without the Transposes behind them."""
    by_output = {layer.output: layer for layer in layers}
    gone: set[FusionGroup] = set()
    for layer in layers:
        if layer.main.op != "Transpose" or not _is_given(layer.output, consumers, outputs):
            continue
        chain, value = [layer.main], layer.main.input(0)
        while value not in by_output and value.producer is not None and value.producer.op == "Reshape":
            chain.append(value.producer)
            value = value.producer.input(0)
        made = by_output.get(value)
        if made is None or made.moved is not None or not _scatters(made.main):
            continue
        if any(each.input(0) in outputs or consumers[each.input(0)] != [each] for each in chain):
            continue
        view = StridedView.of(value)
        for node in reversed(chain):
            seen = view.reshaped(node.outputs[0].shape) if node.op == "Reshape" else view.transposed(node.attributes["perm"])
            if seen is None:
                break
            view = seen
        else:
            places = _places(merged(view.factors), value.shape[-1])
            if places:
                made.moved, made.places = layer.main, places
                gone.add(layer)
    return [layer for layer in layers if layer not in gone]


def _places(factors: Sequence[Factor], columns: int) -> int:
    """How many rows of `columns` the matrices have whose columns come first, by the factors of all; 0 if it is not so."""
    batch, across, down = ((1, 0), *factors)[-3:] if len(factors) in (2, 3) else ((0, 0),) * 3
    is_batch = batch[0] == 1 or batch[1] == down[0] * columns
    return down[0] if is_batch and across == (columns, 1) and down[1] == columns else 0


def _is_given(value: Value, consumers: dict[Value, list[Node]], outputs: set[Value]) -> bool:
    """Whether `value` is an output of the model, or a part of one, in whatever shape."""
    reshaped = (node for node in consumers.get(value, ()) if node.op in ("Concat", "Reshape"))
    return value in outputs or any(_is_given(node.outputs[0], consumers, outputs) for node in reshaped)


def _scatters(node: Node) -> bool:
    """Whether the kernel of `node` is a product with packed weights, which can store columns first."""
    if node.op not in ("Conv", "MatMul") or node.outputs[0].dtype != "float32":
        return False
    weight = node.input(1)
    if weight.constant is None or weight.dtype not in ("float32", "int8", "uint8"):
        return False
    return bool(node.attributes["group"] == 1) if node.op == "Conv" else math.prod(weight.shape[:-2]) == 1


def _grow(
    layer: FusionGroup, position: dict[Node, int], consumers: dict[Value, list[Node]], outputs: set[Value], taken: set[Node]
) -> FusionGroup:
    """The longest tail without `taken` nodes after which one value is all that the rest of the graph sees."""
    operator = REGISTRY[layer.main.op]
    if operator.expression is None and operator.columns is None:
        return layer
    domain = layer.main.outputs[0]
    columns = None if operator.columns is None else operator.columns(layer.main)
    only_floats = columns is not None and not operator.retypes
    inside: dict[Value, None] = {domain: None}
    trial: list[Node] = []
    best: list[Node] = []
    frontier = list(consumers.get(domain, ()))
    while frontier and len(trial) < MAX_TAIL:
        frontier.sort(key=position.__getitem__)
        node = frontier.pop(0)
        if node in trial or node in taken or not _joins(node, domain, columns, only_floats=only_floats):
            continue
        trial.append(node)
        inside[node.outputs[0]] = None
        frontier += consumers.get(node.outputs[0], ())
        escaping = [
            value
            for value in inside
            if value in outputs or not consumers.get(value) or any(user not in trial for user in consumers[value])
        ]
        if escaping == [node.outputs[0]] and len(FusionGroup(layer.main, trial).operands()) <= MAX_OPERANDS:
            best = list(trial)
    layer.tail = best
    return layer


def _joins(node: Node, domain: Value, columns: int | None, *, only_floats: bool) -> bool:
    """Elementwise over the same shape. In a kernel's epilogue also: with operands that lie under its outputs as the kernel
    walks along them, from dimension `columns` on, and in float32 throughout if it writes `only_floats`.
    """
    if not is_elementwise(node) or node.outputs[0].shape != domain.shape:
        return False
    if columns is None:
        return True
    if only_floats and not node.outputs[0].dtype == domain.dtype == "float32":
        return False
    return all(value is None or place(value, domain.shape, columns) is not None for value in node.inputs)
