"""Fusion: each layer is one main operator and the elementwise operators that finish it.

The *tail* of a layer is any acyclic piece of elementwise operators that hangs on the main operator's output, works at its
shape, and leaves only one value behind: so bias, activation (GELU and SiLU with their several uses of one value) and
residual sums run in registers, in the producer's epilogue.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from flashmem.graph.ir import Graph, Node, Value
from flashmem.graph.operators import REGISTRY, is_elementwise
from flashmem.graph.placement import place

MAX_TAIL = 24
"""Operators in one tail: beyond this a kernel's registers, not its memory traffic, are what runs out."""

MAX_OPERANDS = 8
"""Tensors a tail reads beside the main operator's own."""


@dataclass(eq=False)
class Layer:
    """One main operator and its tail; `output` is the single value it leaves in memory."""

    main: Node
    tail: list[Node] = field(default_factory=list)

    @property
    def output(self) -> Value:
        """The one value the layer leaves in memory."""
        return (self.tail[-1] if self.tail else self.main).outputs[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Main operator and tail in execution order."""
        return (self.main, *self.tail)

    def operands(self) -> list[Value]:
        """Values from outside that the tail reads, each once."""
        inside = {node.outputs[0] for node in self.nodes}
        found: dict[Value, None] = {}
        for node in self.tail:
            for value in node.inputs:
                if value is not None and value not in inside:
                    found[value] = None
        return list(found)


def fuse(graph: Graph, cuts: Collection[Node] = ()) -> list[Layer]:
    """The layers of `graph` in execution order. Reshapes are no layers: they move no data. Nor is a Slice that moves none
    launched (`graph.ranges`), which depends on what its source is stored in.

    `cuts`: operators that join no tail; an elementwise one begins a layer of its own, with a tail of its own.
    """
    consumers = graph.consumers()
    outputs = {port.value for port in graph.outputs}
    position = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    cut = set(cuts)
    layers: list[Layer] = []
    # From the last to the first, so that a sum of two branches ends the one that is computed later.
    for node in reversed(graph.nodes):
        if node in taken or node.op == "Reshape" or is_elementwise(node):
            continue
        layers.append(_grow(Layer(node), position, consumers, outputs, taken | cut))
        taken.update(layers[-1].nodes)
    for node in graph.nodes:
        if is_elementwise(node) and node not in taken:
            layers.append(_grow(Layer(node), position, consumers, outputs, taken | cut))
            taken.update(layers[-1].nodes)
    return sorted(layers, key=lambda layer: position[layer.nodes[-1]])


def _grow(
    layer: Layer, position: dict[Node, int], consumers: dict[Value, list[Node]], outputs: set[Value], taken: set[Node]
) -> Layer:
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
        if escaping == [node.outputs[0]] and len(Layer(layer.main, trial).operands()) <= MAX_OPERANDS:
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
