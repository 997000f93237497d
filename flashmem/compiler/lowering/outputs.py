"""The launch after which each output is copied to the host.

Where the arena is host memory, the run returns an output in place (`Program.hands_over`). Elsewhere an output is read as soon
as the last launch that uses it has run; then its memory in the arena is free. The host converts some outputs (float16 in the
model, stored as float32). These are read after the last launch, one at a time, so that the host holds at most one extra array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flashmem.compiler.lowering.context import StoredTensor
from flashmem.program.tensors import HostEmbeddingLookup, Port


def read_early(
    tensors: Mapping[str, StoredTensor],
    touched: Mapping[str, tuple[int, int]],
    outputs: Sequence[Port],
    gathers: Sequence[HostEmbeddingLookup],
) -> list[Port]:
    """`outputs`, each with the launch after which it is read, if that can be before the end.

    `touched`: the first and the last launch that uses each of `tensors`.
    """
    by_host = {gather.tensor for gather in gathers}
    ready: dict[str, int] = {}
    for port in outputs:
        if port.tensor is None or port.tensor not in touched or tensors[port.tensor].dtype != port.dtype:
            continue
        same = [name for name in touched if _overlap(tensors[name], tensors[port.tensor])]
        if by_host.isdisjoint(same):
            ready[port.name] = max(touched[name][1] for name in same)  # a part of it may be written as a separate tensor
    return [replace(port, ready=ready.get(port.name)) for port in outputs]


def _overlap(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors share bytes."""
    first = one.place
    second = other.place
    return (
        first.root is second.root and first.offset < second.offset + other.nbytes and second.offset < first.offset + one.nbytes
    )
