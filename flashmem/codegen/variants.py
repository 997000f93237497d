"""Which of a device's variants computes a contraction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashmem.device import DeviceDescriptor, Variant
from flashmem.program import MemoryPath


@dataclass(frozen=True)
class Product:
    """A contraction as kernels see it: `batches` products of [rows, depth] and [depth, columns]."""

    family: str
    path: MemoryPath
    rows: int
    depth: int
    columns: int
    batches: int = 1


def choose(descriptor: DeviceDescriptor, product: Product) -> Variant:
    """The variant for `product`, by `estimate`."""
    return min(descriptor.variants_of(product.family), key=lambda variant: estimate(descriptor, product, variant))


def estimate(descriptor: DeviceDescriptor, product: Product, variant: Variant) -> float:
    """What `variant` costs where nothing was measured, in multiplications of a full device.

    Work-groups run in waves of as many as the device holds. A work-item with many sums hides latency by itself, so fewer fill
    the device: by the square root of its outputs, it is assumed. A step of depth costs the multiplications and what is read
    for them: each operand once a block where the group shares it, once an item where it does not.
    """
    down, across = variant.block
    outputs = variant.rows * variant.columns
    groups = product.batches * math.ceil(product.rows / down) * math.ceil(product.columns / across)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * variant.group_items))
    reads: float = variant.rows + variant.columns
    if variant.stage:
        reads = reads * _LOCAL + (down + across) * variant.split / variant.group_items
    steps = math.ceil(groups / at_once) * math.ceil(product.depth / variant.split)
    return steps * math.sqrt(outputs) * (1 + _READ * reads / outputs)


_READ = 8.0
"""A read from global memory or a texture, in multiplications: assumed."""

_LOCAL = 0.25
"""A read from local memory, in reads from global memory: assumed."""
