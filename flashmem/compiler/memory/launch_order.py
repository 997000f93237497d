"""Launch order: the order of launches with the lowest peak of activations (`planning/sequence/order.py` solves it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flashmem.base.types import StoredType
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.memory.buffers import held_by
from flashmem.compiler.memory.constants import host_indices
from flashmem.compiler.memory.precision import stored_in_half
from flashmem.planning.sequence.order import Held, OrderProblem, lowest_order
from flashmem.program.launches import LaunchOrder


def in_lowest_order(fused: FusedGraph, *, half: bool = False) -> FusedGraph:
    """`fused`, whose groups are in a valid order, in the order with the lowest peak found, and the quality of that order.

    `half`: activations are stored in half where possible (`compiler.memory.precision`). Rows that the host gathers exist from
    the start. A group counts as one launch. Memory between the launches of one group, and overwritten operands, are ignored.
    """
    graph = fused.graph
    groups = fused.groups
    aliases = AliasAnalysis(graph, half=half)
    picked = [group for group in groups if host_indices(group.main, graph) is not None]
    aside = {id(group) for group in groups if aliases.is_alias(group.main)} | {id(group) for group in picked}
    launched = [group for group in groups if id(group) not in aside]
    found = lowest_order(_problem(fused, launched, picked, aliases, half=half))
    order = LaunchOrder(found.before, found.peak, found.bound, found.method)
    if found.layers == tuple(range(len(launched))):
        return replace(fused, order=order)
    return replace(fused, groups=(*picked, *(launched[at] for at in found.layers)), order=order)


def _problem(
    fused: FusedGraph, launched: Sequence[FusionGroup], picked: Sequence[FusionGroup], aliases: AliasAnalysis, *, half: bool
) -> OrderProblem:
    graph = fused.graph
    halves = stored_in_half(fused, aliases, activations=half)

    def storage(value: Value) -> StoredType:
        return "float16" if aliases.base(value) in halves else value.dtype

    made_by: dict[Node, int | None] = {node: at for at, group in enumerate(launched) for node in group.nodes}
    made_by.update((node, None) for group in picked for node in group.nodes)
    after = [tuple(sorted({source for value in group.read() for source in _sources(value, made_by)})) for group in launched]
    early = [*(port.value for port in graph.inputs), *(group.output for group in picked)]
    results = [port.value for port in graph.outputs if port.value.size]
    tensors = []
    end = len(launched) + 1
    for nbytes, touching in held_by(launched, early, results, aliases, storage):
        launches = tuple(launch - 1 for launch in touching if 0 < launch < end)
        tensors.append(Held(nbytes, launches, touching[0] == 0, touching[-1] == end))
    return OrderProblem(tuple(after), tuple(tensors))


def _sources(value: Value, made_by: Mapping[Node, int | None]) -> Iterator[int]:
    """The groups that must run before `value` exists, through nodes without launches, such as Reshape."""
    node = value.producer
    if node is None:
        return
    if node in made_by:
        group = made_by[node]
        if group is not None:
            yield group
        return
    for each in node.inputs:
        if each is not None:
            yield from _sources(each, made_by)
