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
    """What `variant` costs where nothing was measured, in loads and multiplications of one work-item after the other.

    Work-groups run in waves of as many as the device holds at once. A step of depth costs a work-item its multiplications and
    what it reads: each operand once a block where the group shares it, once an item where it does not.
    """
    down, across = variant.block
    groups = product.batches * math.ceil(product.rows / down) * math.ceil(product.columns / across)
    waves = math.ceil(groups * variant.group_items / descriptor.parallelism)
    macs = variant.rows * variant.columns
    reads: float = variant.rows + variant.columns
    if variant.stage:
        reads = reads * _LOCAL + (down + across) / variant.group_items
    return waves * math.ceil(product.depth / variant.split) * (macs + _READ * reads)


_READ = 4.0
"""A read from global memory or a texture, in multiplications: assumed."""

_LOCAL = 0.25
"""A read from local memory, in reads from global memory: assumed."""
