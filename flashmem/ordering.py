"""The layers of a graph in the order that takes the least memory for activations (`planning/order.py` states the problem)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashmem.codegen.row_gather import host_indices
from flashmem.codegen.storage import root_of, stored_in_half
from flashmem.graph.fusion import Layer
from flashmem.graph.ir import Graph, Node, Value
from flashmem.planning.order import Held, OrderProblem, lowest_order
from flashmem.program import ITEMSIZE, SLACK, TENSOR_ALIGNMENT, LaunchOrder


def in_lowest_order(graph: Graph, layers: Sequence[Layer], *, half: bool = False) -> tuple[list[Layer], LaunchOrder]:
    """`layers`, which are given in an order that works, in the one of the lowest peak that was found, and how good that is.

    `half`: activations are stored in half, where that can be (`codegen.storage`). Layers whose rows the host picks are no
    launches: their results are there from the start. A layer counts as one launch: what lies between the launches of one is not seen.
    """
    picked = [layer for layer in layers if host_indices(layer.main, graph) is not None]
    launched = [layer for layer in layers if layer not in picked]
    found = lowest_order(_problem(graph, launched, picked, stored_in_half(graph) if half else frozenset()))
    order = LaunchOrder(found.before, found.peak, found.bound, found.method)
    if found.layers == tuple(range(len(launched))):
        return list(layers), order
    return [*picked, *(launched[at] for at in found.layers)], order


def _problem(graph: Graph, launched: Sequence[Layer], picked: Sequence[Layer], halves: frozenset[Value]) -> OrderProblem:
    made_by: dict[Node, int | None] = {node: at for at, layer in enumerate(launched) for node in layer.nodes}
    made_by.update((node, None) for layer in picked for node in layer.nodes)
    touching: dict[Value, dict[int, None]] = {}
    after: list[tuple[int, ...]] = []
    for at, layer in enumerate(launched):
        inside = {value for node in layer.nodes for value in node.outputs}
        read = [v for node in layer.nodes for v in node.inputs if v is not None and v not in inside]
        written = layer.main.outputs if not layer.tail else [layer.output]
        for value in (*read, *written):
            root = root_of(value)
            if root.constant is None:
                touching.setdefault(root, {})[at] = None
        after.append(tuple(sorted({source for value in read for source in _sources(value, made_by)})))
    early = {root_of(port.value) for port in graph.inputs} | {layer.output for layer in picked}
    late = {root_of(port.value) for port in graph.outputs}
    tensors = [
        Held(_tensor_bytes(root, halves), tuple(layers), root in early, root in late) for root, layers in touching.items()
    ]
    return OrderProblem(tuple(after), tuple(tensors))


def _sources(value: Value, made_by: dict[Node, int | None]) -> Iterator[int]:
    """The layers that must have run for `value` to be there: through nodes that are no layers, such as Reshape."""
    node = value.producer
    if node is None:
        return
    if node in made_by:
        layer = made_by[node]
        if layer is not None:
            yield layer
        return
    for each in node.inputs:
        if each is not None:
            yield from _sources(each, made_by)


def _tensor_bytes(root: Value, halves: frozenset[Value]) -> int:
    """Bytes in the arena, as `Emitter.tensor_bytes` has them."""
    nbytes = ITEMSIZE["float16" if root in halves else root.dtype] * root.size + SLACK
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
