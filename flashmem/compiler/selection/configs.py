"""Which of a device's variants computes a contraction."""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.selection.attention_form import LEAST_BLOCK
from flashmem.compiler.selection.tuning_database import Product as Product
from flashmem.compiler.selection.tuning_database import tuned_table
from flashmem.target.descriptor import DeviceDescriptor, Variant


def choose(descriptor: DeviceDescriptor, product: Product) -> Variant:
    """The variant that computes `product` soonest: the first of them in the device's list."""
    times = seconds(descriptor, product)
    return min(times, key=lambda variant: times[variant])


def candidates(descriptor: DeviceDescriptor, product: Product) -> tuple[Variant, ...]:
    """The device's variants that can compute `product`: `descriptor.only` alone, if that one can."""
    found = [each for each in descriptor.variants_of(product.family) if _fits(each, product)]
    return tuple(found) or candidates(replace(descriptor, only=""), product)


def _fits(variant: Variant, product: Product) -> bool:
    """Sums in half are of operands that are stored so; who shares the keys of few queries has no others; Winograd's are of 3x3
    taps one apart (how the 9 taps lie is known to who asks, see `choices.Use`), of floats and of one group. Of a grouped
    convolution a panel that work-items share holds the columns of one group: a wider one would be zeros, in every group.
    """
    if product.family == "conv" and product.batches > 1 and variant.stage and panel(variant) > _filled(product.columns):
        return False
    if variant.winograd:
        return (product.taps, product.stride, product.batches, product.storage) == (9, 1, 1, "float32")
    if product.family == "attention":
        return bool(variant.stage) or variant.split == 1 or product.rows <= variant.rows
    return not variant.half or product.storage == "float16"


def _filled(columns: int) -> int:
    """`columns` rounded up to a power of two: how wide a panel may be that is to be more columns than zeros."""
    return 1 << (columns - 1).bit_length()


def transformed(product: Product, tiles: int | None = None) -> Product:
    """What Winograd's F(2x2, 3x3) multiplies: tiles of 4 outputs, at least, and 16 matrices of weights for 9 taps."""
    return replace(product, rows=tiles or -(-product.rows // 4), depth=product.depth // product.taps * 16)


def cut(variant: Variant, product: Product) -> Variant:
    """`variant` cut to `product`: a number of rows that wastes few, panels no wider. Staged ones stay as they are."""
    if variant.stage:
        return variant
    least = 8 if product.storage.endswith("int4") else 4
    columns = max(least, min(variant.columns, _filled(product.columns)))
    most = min(variant.rows, product.rows)
    whole = {height: -(-product.rows // height) * height for height in range(most, most // 2, -1)}
    rows = next(height for height, size in whole.items() if size <= _IDLE_ROWS * min(whole.values()))
    return replace(variant, rows=rows, columns=columns, vector=min(variant.vector, columns))


def panel(variant: Variant) -> int:
    """Columns of a panel of packed weights: those of a work-item, or of a work-group that shares what it reads."""
    return variant.block[1] if variant.stage else variant.columns


def seconds(descriptor: DeviceDescriptor, product: Product) -> dict[Variant, float]:
    """What the device's variants take for `product`: as measured on the nearest product of the tuned table, else estimated.

    Where something near was measured, variants that were not, or failed, are left out. What Winograd's gain depends on caches
    that no estimate knows: they are taken where they were measured.

    Raises:
        UserError: the tuned table that the descriptor names is missing or damaged.
    """
    variants = candidates(descriptor, product)
    if len(variants) > 1:
        table = tuned_table(descriptor)
        measured = table.seconds(product, variants) if table else {}
        if measured:
            return measured
        variants = tuple(each for each in variants if not each.winograd) or variants
    step = descriptor.parallelism * 2 / descriptor.rates.flops_of(product.family)  # of all work-items at once
    return {variant: step * estimate(descriptor, product, variant) for variant in variants}


def estimate(descriptor: DeviceDescriptor, product: Product, variant: Variant) -> float:
    """What `variant` costs where nothing was measured, in multiplications of a full device."""
    if product.family == "reduce_rows":
        return _rows(descriptor, product, variant)
    return (_attention if product.family == "attention" else _contraction)(descriptor, product, variant)


def _contraction(descriptor: DeviceDescriptor, product: Product, variant: Variant) -> float:
    """See `estimate`.

    Work-groups run in waves of as many as the device holds. A work-item with many sums hides latency by itself, so fewer fill
    the device: by the square root of its outputs, it is assumed. A step of depth costs the multiplications and what is read
    for them: each operand once a block where the group shares it, once an item where it does not. Transforms cost nothing here.
    """
    product = transformed(product) if variant.winograd else product
    down, across = variant.block
    outputs = variant.rows * variant.columns
    groups = product.batches * math.ceil(product.rows / down) * math.ceil(product.columns / across)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * variant.items))
    reads: float = variant.rows + variant.columns
    if variant.stage:
        reads = reads * _LOCAL + (down + across) * variant.split / variant.items
    multiplication = 0.5 + _FOLD / variant.half if variant.half else 1.0
    reads *= 0.5 if variant.half else 1.0  # which need no conversion
    steps = math.ceil(groups / at_once) * math.ceil(product.depth / variant.split)
    return steps * math.sqrt(outputs) * (multiplication + _READ * reads / outputs)


def _attention(descriptor: DeviceDescriptor, product: Product, variant: Variant) -> float:
    """See `estimate`. As for contractions: for each query and key a multiplication for each channel of both products, and the
    reads that come with it. Values are taken to be as wide as heads. Where channels pass through local memory, a stage is
    whole, and the group waits for it.
    """
    fitting = 1 << (product.rows - 1).bit_length()
    if variant.stage:
        block, keys = variant.block
        queries, items = min(block, max(math.prod(LEAST_BLOCK), fitting)), variant.items
        rounds = math.ceil(product.columns / keys)
        stages = 2 * math.ceil(product.depth / variant.stage)
        outputs = queries * keys / items
        reads = _LOCAL * (1 / variant.rows + 1 / variant.columns) + 1 / queries + 1 / keys
        steps = rounds * stages * (variant.stage * outputs * (1 + _READ * reads) + _WAIT)
    else:
        queries, items = min(variant.rows, fitting), variant.split
        outputs = queries * variant.columns
        steps = 2 * product.depth * queries * math.ceil(product.columns / items) * (1 + _READ / queries)
    groups = product.batches * math.ceil(product.rows / queries)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * items))
    return math.ceil(groups / at_once) * steps / math.sqrt(outputs)


def _rows(descriptor: DeviceDescriptor, product: Product, variant: Variant) -> float:
    """See `estimate`. A row is read three times, as a normalization does, and twice its parts are joined two by two: in local
    memory, where the group waits each time, or by shuffles.
    """
    reads = 3 * math.ceil(product.depth / (variant.split * variant.vector))
    joins = 2 * math.log2(variant.split)
    at_once = max(1, descriptor.parallelism / variant.split)
    return math.ceil(product.rows / at_once) * (_READ * reads + joins * (_SHUFFLE if variant.subgroups else _WAIT))


_SHUFFLE = 4.0
"""A work-item's number read by another one of its subgroup, in multiplications: assumed."""

_WAIT = 64.0
"""A group that waits for local memory to be filled, and to be read, in multiplications: assumed."""

_READ = 8.0
"""A read from global memory or a texture, in multiplications: assumed."""

_FOLD = 2.0
"""Adding a sum in half to one in float, in multiplications in float, two of which are four in half: assumed."""

_IDLE_ROWS = 1.02
"""The tallest tile is taken whose rows are no more than 2 % above the fewest: other heights are other kernels."""

_LOCAL = 0.25
"""A read from local memory, in reads from global memory: assumed."""
