"""When outputs are read.

An output counts once. Where the arena is host memory it becomes the array that the run hands back, where it lies
(`Program.hands_over`). Elsewhere it is read as soon as the last layer that touches it has run, and its place in the arena is
free from then on. One that the host has to convert (a model's float16 that is stored as float32) is read when all have run: one
at a time, so that the host holds one more array for it, not as many as there are outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashmem.codegen.emitter import Emitter
from flashmem.program import Port, RowGather


def lifetimes_of(emitter: Emitter) -> dict[str, tuple[int, int]]:
    """The first and the last layer, from 1, that touch each tensor."""
    lifetimes: dict[str, tuple[int, int]] = {}
    for layer, launch in enumerate(emitter.launches, start=1):
        for arg in launch.args:
            if arg.kind == "tensor":
                first, _ = lifetimes.get(str(arg.value), (layer, layer))
                lifetimes[str(arg.value)] = (first, layer)
    return lifetimes


def read_early(emitter: Emitter, outputs: Sequence[Port], gathers: Sequence[RowGather]) -> list[Port]:
    """`outputs`, each with the layer after which it is read, where it can be before the end."""
    lifetimes = lifetimes_of(emitter)
    by_host = {gather.tensor for gather in gathers}
    return [
        replace(port, ready=lifetimes[port.tensor][1])
        if port.tensor in lifetimes and port.tensor not in by_host and emitter.tensors[port.tensor].dtype == port.dtype
        else port
        for port in outputs
    ]
