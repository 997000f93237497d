"""Quantised caches: a state that only attention reads, a cache of keys or values, is stored in int8 (`--state-precision int8`).

Each row of a head has int8 codes and one scale (`compiler.kernels.indexing.quantised_rows`). New rows are quantised by the
launch that writes them, and attention multiplies scores by the scales of keys, and weights by those of values, so that no cache
of floats exists. A state is such a cache if

- a run writes rows into it (`ScatterAt`), and nothing else reads it before that;
- attention alone reads the result, as keys or values, by whole rows;
- int8 needs fewer bytes than half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.ir.strided import Dimension
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.kernels.attention.operators import Access
from flashmem.compiler.kernels.indexing.quantised_rows import row_bytes, scale_offset

_READ_AS = {1: "key", 2: "value"}
"""The attribute of a FusedAttention with the access to an input that may be a cache."""


@dataclass(frozen=True)
class _Cache:
    """A cache before (`past`) and after (`present`) a run, both in int8, and the node that writes rows of floats into it."""

    past: Value
    present: Value
    node: Node


def quantise_caches(graph: Graph) -> Graph:
    """`graph` (attention folded) with its caches of keys and values in int8, if its states are to be so."""
    if graph.state_precision != "int8":
        return graph
    readers = Readers(graph)
    ports = {port.name: port for port in (*graph.inputs, *graph.outputs)}
    read_outside = [port.value for port in graph.outputs]
    caches: dict[Node, _Cache] = {}
    for past, present in graph.states:
        before = ports[past].value
        after = ports[present].value
        if read_outside.count(after) == 1 and (node := _written_rows(before, after, readers)) is not None:
            shape = (*before.shape[:-1], row_bytes(before.shape[-1]))
            caches[node] = _Cache(Value(before.name, shape, "int8"), Value(after.name, shape, "int8"), node)
    changed = {cache.node.input(0): cache.past for cache in caches.values()}
    changed |= {cache.node.outputs[0]: cache.present for cache in caches.values()}
    nodes = [_scatter(caches[node]) if node in caches else _reading(node, changed) for node in graph.nodes]
    inputs, outputs = ([_port(port, changed) for port in given] for given in (graph.inputs, graph.outputs))
    return replace(graph, nodes=nodes, inputs=inputs, outputs=outputs)


def quantised_states(graph: Graph) -> tuple[str, ...]:
    """The names of the states of `graph` that are stored as quantised rows, after `quantise_caches`."""
    made = {port.value: port.name for port in graph.inputs if port.name in dict(graph.states)}
    return tuple(made[node.input(0)] for node in graph.nodes if node.op == "ScatterQuantised")


def _written_rows(past: Value, present: Value, readers: Readers) -> Node | None:
    """The node that makes `present` of `past` by writing rows, if both are a cache of floats; else None."""
    node = present.producer
    size = past.shape[-1] if past.shape else 0
    if node is None or node.op != "ScatterAt" or node.input(0) is not past or past.dtype != "float32":
        return None
    given = node.attributes
    inner = [given[name][-1] for name in ("items", "index", "update", "target")]
    outer = (given["stride"], *given["target"][:-1])
    if given["reduction"] != "none" or given["fill"] is not None or inner != [size, 0, 1, 1]:
        return None
    if any(each % size for each in outer) or row_bytes(size) >= 2 * size:
        return None
    if readers.single(past) is not node:
        return None
    attentions = readers.of(present)
    return node if attentions and all(_attends(each, present, size) for each in attentions) else None


def _attends(node: Node, cache: Value, size: int) -> bool:
    """Whether `node` is attention that reads whole rows of `cache`, as keys, as values or as both."""
    if node.op != "FusedAttention" or any(value is cache for at, value in enumerate(node.inputs) if at not in _READ_AS):
        return False
    read: list[Access] = [node.attributes[name] for at, name in _READ_AS.items() if node.input(at) is cache]
    return all(
        (access.channel, access.channels) == (1, size)
        and not any(each % size for each in (access.start, *(stride for _, stride in (*access.batch, *access.row))))
        for access in read
    )


def _scatter(cache: _Cache) -> Node:
    """The node that quantises rows and writes them into `cache`."""
    given = cache.node.attributes
    size = given["items"][-1]
    of_rows = {name: given[name][:-1] for name in ("items", "index", "update", "target")}
    of_rows["target"] = tuple(_in_bytes(stride, size) for stride in of_rows["target"])
    attributes = {**given, **of_rows, "stride": _in_bytes(given["stride"], size), "size": size}
    node = Node("ScatterQuantised", cache.node.name, [cache.past, *cache.node.inputs[1:]], [cache.present], attributes)
    cache.present.producer = node
    return node


def _reading(node: Node, changed: Mapping[Value, Value]) -> Node:
    """`node`, which reads the values that replace those of `changed`; its outputs stay."""
    if not any(value in changed for value in node.inputs):
        return node
    attributes = dict(node.attributes)
    for at, name in _READ_AS.items():
        if node.input(at) in changed:
            attributes[name] = _quantised(attributes[name])
    inputs = [None if value is None else changed.get(value, value) for value in node.inputs]
    made = Node(node.op, node.name, inputs, node.outputs, attributes)
    for output in made.outputs:
        output.producer = made
    return made


def _quantised(access: Access) -> Access:
    """The same access to rows in int8, in bytes."""
    size = access.channels

    def moved(dimension: Dimension) -> Dimension:
        return tuple((count, _in_bytes(stride, size)) for count, stride in dimension)

    return replace(
        access,
        start=_in_bytes(access.start, size),
        batch=moved(access.batch),
        row=moved(access.row),
        scale=scale_offset(size),
    )


def _in_bytes(elements: int, size: int) -> int:
    """The distance of whole rows of `size` floats, given in elements, between quantised rows."""
    return elements // size * row_bytes(size)


def _port(port: GraphPort, changed: Mapping[Value, Value]) -> GraphPort:
    return replace(port, dtype="int8", value=changed[port.value]) if port.value in changed else port
