"""Mixed precision: the activations that `--precision fp16` stores in half, and the states that `--state-precision fp16` does.

Arithmetic is in float32, for any stored type. Only a kernel config with `half` sums the products of a few steps of depth in
half. Tensor cores multiply halves, exactly, and sum in float32.

The results of groups are stored in half, except for

- inputs and outputs that are float32 for the user, apart from states. The first and the last kernel convert them at load and
  store, which costs nothing. The host would need time and an array of the same size;
- tensors so small that half saves no memory: scales, statistics of a few rows;
- values from which positions are computed (`Operator.keep_fp32`: sampling grids, rectangles; operands of a cast to integers);
- sums that a kernel updates in memory, and the state that a recurrence passes from step to step.

The choice depends on the graph only. If adaptive unfusion splits a group, the values between its parts stay float32, as in
registers, so that answers do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flashmem.base.types import SLACK, TENSOR_ALIGNMENT
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.operators import REGISTRY, is_elementwise
from flashmem.compiler.operators.registry import INTEGERS

SMALL = (TENSOR_ALIGNMENT - SLACK) // 4
"""Number of elements that need the same memory in float32 and in half, because of the alignment of tensors."""


def stored_in_half(fused: FusedGraph, aliases: AliasAnalysis, *, activations: bool) -> frozenset[Value]:
    """The states of `fused` that are stored in half, and its `activations`: those with separate memory, or that share it."""
    graph = fused.graph
    if not activations and not graph.states_in_half:
        return frozenset()
    names = {name for pair in graph.states for name in pair}
    states = {aliases.base(port.value) for port in (*graph.inputs, *graph.outputs) if port.name in names}
    kept = set(map(aliases.base, _kept(fused, names)))
    found = set(map(aliases.base, _made(fused, names))) - (kept if graph.states_in_half else kept | states)
    if not activations:
        found &= states
    return frozenset(value for value in found if value.dtype == "float32" and value.size > SMALL)


def _made(fused: FusedGraph, states: Collection[str]) -> Iterator[Value]:
    """What may be stored in half: all that groups write, and inputs that are `states`, or half in the model."""
    yield from (port.value for port in fused.graph.inputs if port.dtype == "float16" or port.name in states)
    for group in fused.uncut:
        yield from group.written


def _kept(fused: FusedGraph, states: Collection[str]) -> Iterator[Value]:
    """What is stored in its own type, besides states."""
    ports = (*fused.graph.inputs, *fused.graph.outputs)
    yield from (port.value for port in ports if port.dtype != "float16" and port.name not in states)
    for group in fused.uncut:
        yield from _keep_fp32(group)


def _keep_fp32(group: FusionGroup) -> Iterator[Value]:
    """The tensors of a group that must be stored in their own type."""
    for node in group.nodes:
        yield from (value for value in REGISTRY[node.op].keep_fp32(node) if value is not None)
    if any(node.op in ("BitCast", "Cast") and _to_integers(node) for node in group.nodes):
        yield from (value for node in group.nodes if is_elementwise(node) for value in node.inputs if value is not None)


def _to_integers(node: Node) -> bool:
    return node.input(0).dtype == "float32" and node.outputs[0].dtype in INTEGERS
