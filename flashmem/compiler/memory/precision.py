"""Mixed precision: the activations that `--precision fp16` stores in half.

Arithmetic is in float32, whatever the operands are stored in. Only a kernel config with `KernelConfig.half` sums the products
of a few steps of depth in half.

What a layer leaves in memory is stored in half, but for

- inputs and outputs that the user gives and takes as float32: the first kernel and the last convert as they load and store,
  which costs nothing, where the host would spend time and an array as large on it;
- tensors so small that they would take as much memory: scales, statistics of a few rows;
- what positions are made of (`Operator.whole`: sampling grids, rectangles; operands of a cast to integers);
- what a kernel adds to in memory, and the state that a recurrence hands on from step to step.

The choice is of the graph alone: a layer that adaptive unfusion splits keeps what lies between its pieces in float32, as it
would be in registers, so that answers do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashmem.base.types import SLACK, TENSOR_ALIGNMENT
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis
from flashmem.compiler.operators import REGISTRY, is_elementwise
from flashmem.compiler.operators.registry import INTEGERS
from flashmem.compiler.passes.fusion import fuse

SMALL = (TENSOR_ALIGNMENT - SLACK) // 4
"""Elements of float32 that fit where a tensor starts, whatever they are stored in."""


def stored_in_half(graph: Graph, aliases: AliasAnalysis) -> frozenset[Value]:
    """The activations of `graph` that are stored in half: those that have memory of their own, or share it (`aliases`)."""
    layers = fuse(graph)
    inputs = [port for port in graph.inputs if port.dtype == "float16"]
    found = {aliases.base(value) for value in (*(port.value for port in inputs), *(layer.output for layer in layers))}
    whole = {aliases.base(port.value) for port in (*graph.inputs, *graph.outputs) if port.dtype != "float16"}
    whole |= {aliases.base(value) for layer in layers for value in _whole(layer)}
    return frozenset(value for value in found - whole if value.dtype == "float32" and value.size > SMALL)


def _whole(layer: FusionGroup) -> Iterator[Value]:
    """The tensors of a layer that have to be stored in their own type."""
    for node in layer.nodes:
        yield from (value for value in REGISTRY[node.op].whole(node) if value is not None)
    if any(node.op in ("BitCast", "Cast") and _to_integers(node) for node in layer.nodes):
        yield from (value for node in layer.nodes if is_elementwise(node) for value in node.inputs if value is not None)


def _to_integers(node: Node) -> bool:
    return node.input(0).dtype == "float32" and node.outputs[0].dtype in INTEGERS
