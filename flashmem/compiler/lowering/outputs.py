"""When outputs are read.

An output counts once. Where the arena is host memory it becomes the array that the run hands back, where it lies
(`Program.hands_over`). Elsewhere it is read as soon as the last layer that touches it has run, and its place in the arena is
free from then on. One that the host has to convert (a model's float16 that is stored as float32) is read when all have run: one
at a time, so that the host holds one more array for it, not as many as there are outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashmem.compiler.lowering.context import Held
from flashmem.program.tensors import HostEmbeddingLookup, Port


def read_early(
    tensors: Mapping[str, Held],
    touched: Mapping[str, tuple[int, int]],
    outputs: Sequence[Port],
    gathers: Sequence[HostEmbeddingLookup],
) -> list[Port]:
    """`outputs`, each with the layer after which it is read, where it can be before the end.

    `touched`: the first and the last layer that has each of `tensors`.
    """
    by_host = {gather.tensor for gather in gathers}
    ready: dict[str, int] = {}
    for port in outputs:
        if port.tensor is None or port.tensor not in touched or tensors[port.tensor].dtype != port.dtype:
            continue
        same = [name for name in touched if _overlap(tensors[name], tensors[port.tensor])]
        if by_host.isdisjoint(same):
            ready[port.name] = max(touched[name][1] for name in same)  # a part of it may be written as a tensor of its own
    return [replace(port, ready=ready.get(port.name)) for port in outputs]


def _overlap(one: Held, other: Held) -> bool:
    """Whether two tensors share bytes."""
    first, second = one.place, other.place
    return (
        first.root is second.root and first.offset < second.offset + other.nbytes and second.offset < first.offset + one.nbytes
    )
