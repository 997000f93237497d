"""Graphs whose activations take no more than a limit: chains of operators in bands (`graph.bands`), for a device and a precision."""

from __future__ import annotations

from typing import Literal

from flashmem.codegen.places import least_alive
from flashmem.codegen.row_gather import host_indices
from flashmem.codegen.slicing import LEAST_BYTES
from flashmem.codegen.storage import stored_in_half
from flashmem.device import DeviceDescriptor
from flashmem.graph.band_choice import Memory, choose
from flashmem.graph.bands import Chain
from flashmem.graph.fusion import fuse
from flashmem.graph.ir import Graph, Value
from flashmem.graph.quantized import QuantizedConstant
from flashmem.graph.ranges import Ranges
from flashmem.program import ITEMSIZE, StoredType

LEAST_BAND_BYTES = {"cpu": 1 << 20, "gpu": 4 << 20}
"""The largest result inside a band is no smaller: a launch of less leaves a device idle."""


def choose_bands(
    graph: Graph, descriptor: DeviceDescriptor, precision: Literal["fp32", "fp16"], limit: int
) -> tuple[list[Chain], int]:
    """Chains of `graph` to compute in bands so that `limit` bytes of activations are enough, or as few as can be; and how many."""
    half = precision == "fp16"
    ranges = Ranges(graph, half=half)
    halves = stored_in_half(graph, ranges) if half else frozenset()
    layers = fuse(graph)

    def storage(value: Value) -> StoredType:
        return "float16" if ranges.base(value) in halves else value.dtype

    def nbytes(value: Value) -> int:
        return ITEMSIZE[storage(value)] * value.size

    def weight_bytes(value: Value) -> int:
        if isinstance(value.constant, QuantizedConstant):
            return value.size * value.constant.bits // 8
        return (2 if half else 4) * value.size

    gathered = [layer.main.outputs[0] for layer in layers if host_indices(layer.main, graph) is not None]
    launched = [layer for layer in layers if layer.main.outputs[0] not in gathered and not ranges.moves_nothing(layer.main)]
    early = [*(port.value for port in graph.inputs), *gathered]
    needed = iter(least_alive(launched, early, [port.value for port in graph.outputs if port.value.size], ranges, storage))
    known = {layer: next(needed) for layer in launched}
    alive: list[int] = []
    for layer in layers:
        alive.append(known.get(layer, alive[-1] if alive else 0))
    memory = Memory(alive, nbytes, weight_bytes, 2 * LEAST_BYTES, LEAST_BAND_BYTES[descriptor.kind])
    return choose(graph, layers, ranges, memory, limit)
