"""Placement: which groups of a graph are launched, and the memory of every value that they read and write.

Not launched are groups whose result is a range of another value's memory, and those whose rows the host looks up. A launch more
copies a result of the model that has no memory of its own, and another one the next value of a state that is not computed in
its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashmem.base.types import Precision, StoredType
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.memory.buffers import BufferAssignment, assign_buffers
from flashmem.compiler.memory.constants import host_indices
from flashmem.compiler.memory.precision import stored_in_half
from flashmem.compiler.memory.states import GraphState, graph_states


@dataclass(frozen=True)
class PlacedGraph:
    """A graph in groups that are launched in this order, and where each value is.

    Attributes:
        fused: the graph and all of its groups.
        launched: the groups that are launched, with those that copy results and states.
        buffers: the memory of each activation.
        lookups: results that the host looks up, each with its Gather and the model's input with the indices.
        results: the model's outputs, each with a value of its own; states are none.
        states: the states, and the values that are written over them.
    """

    fused: FusedGraph
    precision: Precision
    launched: tuple[FusionGroup, ...]
    buffers: BufferAssignment
    lookups: Mapping[Value, tuple[Node, str]]
    results: tuple[GraphPort, ...]
    states: tuple[GraphState, ...]


def place(fused: FusedGraph, precision: Precision) -> PlacedGraph:
    """`fused` with the memory of its values. In fp16 most of them are stored in half (`compiler.memory.precision`)."""
    graph = fused.graph
    half = precision == "fp16"
    aliases = AliasAnalysis(graph, half=half)
    halves = stored_in_half(fused, aliases, activations=half)
    stored_as: dict[Value, Value] = {}  # the next values of states, which are stored as the present ones

    def storage(value: Value) -> StoredType:
        base = aliases.base(value)
        return "float16" if stored_as.get(base, base) in halves else value.dtype

    results, copies = _results(graph, aliases)
    lookups: dict[Value, tuple[Node, str]] = {}
    launched = []
    for group in (*fused.groups, *copies):
        indices = host_indices(group.main, graph)
        if indices is not None:
            lookups[group.main.outputs[0]] = (group.main, indices)
        elif not aliases.is_alias(group.main):
            launched.append(group)
    ends = [port.value for port in results if port.value.size]
    states, last = graph_states(graph, launched, ends, aliases, storage)
    launched += last
    stored_as |= {state.after: state.port.value for state in states}
    early = [*(port.value for port in graph.inputs), *lookups]
    buffers = assign_buffers(launched, early, [*ends, *stored_as], aliases, storage, stored_as)
    return PlacedGraph(fused, precision, tuple(launched), buffers, lookups, tuple(results), tuple(states))


def _results(graph: Graph, aliases: AliasAnalysis) -> tuple[list[GraphPort], list[FusionGroup]]:
    """The outputs, each with its own tensor: an output that is an input or a constant is copied by an extra launch.

    States are no outputs; one that becomes another input is copied too, before that input changes.
    """
    results = []
    copies = []
    seen = set()
    inputs = {port.value for port in graph.inputs}
    states = set(dict(graph.states).values())
    for port in graph.outputs:
        if port.name in states:
            continue
        base = aliases.base(port.value)
        value = port.value
        if value.size == 0:
            results.append(port)
            continue
        if base in inputs or base.constant is not None or base in seen:
            value = Value(f"{port.name}.copy", port.value.shape, port.value.dtype)
            copies.append(FusionGroup(Node("Copy", f"{port.name}.copy", [port.value], [value])))
        results.append(replace(port, value=value))
        seen.add(base)
    return results, copies
