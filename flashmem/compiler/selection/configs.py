"""Which of a device's configs computes a contraction."""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.selection.attention_form import LEAST_BLOCK
from flashmem.compiler.selection.tuning_database import Product as Product
from flashmem.compiler.selection.tuning_database import tuned_table
from flashmem.target.descriptor import DeviceDescriptor, KernelConfig


def choose(descriptor: DeviceDescriptor, product: Product) -> KernelConfig:
    """The config that computes `product` soonest: the first of them in the device's list."""
    times = seconds(descriptor, product)
    return min(times, key=lambda config: times[config])


def candidates(descriptor: DeviceDescriptor, product: Product) -> tuple[KernelConfig, ...]:
    """The device's configs that can compute `product`: `descriptor.only` alone, if that one can."""
    found = [each for each in descriptor.configs_of(product.family) if _fits(each, product)]
    return tuple(found) or candidates(replace(descriptor, only=""), product)


def _fits(config: KernelConfig, product: Product) -> bool:
    """Sums in half are of operands that are stored so; who shares the keys of few queries has no others; Winograd's are of 3x3
    taps one apart (how the 9 taps lie is known to who asks, see `choices.Use`), of floats and of one group. Of a grouped
    convolution a panel that work-items share holds the columns of one group: a wider one would be zeros, in every group.
    """
    if product.family == "conv" and product.batches > 1 and config.k_block and panel(config) > _filled(product.columns):
        return False
    if config.winograd:
        return (product.taps, product.stride, product.batches, product.storage) == (9, 1, 1, "float32")
    if product.family == "attention":
        return bool(config.k_block) or config.slice_k == 1 or product.rows <= config.rows
    return not config.half or product.storage == "float16"


def _filled(columns: int) -> int:
    """`columns` rounded up to a power of two: how wide a panel may be that is to be more columns than zeros."""
    return 1 << (columns - 1).bit_length()


def transformed(product: Product, tiles: int | None = None) -> Product:
    """What Winograd's F(2x2, 3x3) multiplies: tiles of 4 outputs, at least, and 16 matrices of weights for 9 taps."""
    return replace(product, rows=tiles or -(-product.rows // 4), depth=product.depth // product.taps * 16)


def cut(config: KernelConfig, product: Product) -> KernelConfig:
    """`config` cut to `product`: a number of rows that wastes few, panels no wider. Staged ones stay as they are."""
    if config.k_block:
        return config
    least = 8 if product.storage.endswith("int4") else 4
    columns = max(least, min(config.columns, _filled(product.columns)))
    most = min(config.rows, product.rows)
    whole = {height: -(-product.rows // height) * height for height in range(most, most // 2, -1)}
    rows = next(height for height, size in whole.items() if size <= _IDLE_ROWS * min(whole.values()))
    return replace(config, rows=rows, columns=columns, vector=min(config.vector, columns))


def panel(config: KernelConfig) -> int:
    """Columns of a panel of packed weights: those of a work-item, or of a work-group that shares what it reads."""
    return config.block[1] if config.k_block else config.columns


def seconds(descriptor: DeviceDescriptor, product: Product) -> dict[KernelConfig, float]:
    """What the device's configs take for `product`: as measured on the nearest product of the tuned table, else estimated.

    Where something near was measured, configs that were not, or failed, are left out. What Winograd's gain depends on caches
    that no estimate knows: they are taken where they were measured.

    Raises:
        UserError: the tuned table that the descriptor names is missing or damaged.
    """
    configs = candidates(descriptor, product)
    if len(configs) > 1:
        table = tuned_table(descriptor)
        measured = table.seconds(product, configs) if table else {}
        if measured:
            return measured
        configs = tuple(each for each in configs if not each.winograd) or configs
    step = descriptor.parallelism * 2 / descriptor.rates.flops_of(product.family)  # of all work-items at once
    return {config: step * estimate(descriptor, product, config) for config in configs}


def estimate(descriptor: DeviceDescriptor, product: Product, config: KernelConfig) -> float:
    """What `config` costs where nothing was measured, in multiplications of a full device."""
    if product.family == "reduce_rows":
        return _rows(descriptor, product, config)
    return (_attention if product.family == "attention" else _contraction)(descriptor, product, config)


def _contraction(descriptor: DeviceDescriptor, product: Product, config: KernelConfig) -> float:
    """See `estimate`.

    Work-groups run in waves of as many as the device holds. A work-item with many sums hides latency by itself, so fewer fill
    the device: by the square root of its outputs, it is assumed. A step of depth costs the multiplications and what is read
    for them: each operand once a block where the group shares it, once an item where it does not. Transforms cost nothing here.
    """
    product = transformed(product) if config.winograd else product
    down, across = config.block
    outputs = config.rows * config.columns
    groups = product.batches * math.ceil(product.rows / down) * math.ceil(product.columns / across)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * config.items))
    reads: float = config.rows + config.columns
    if config.k_block:
        reads = reads * _LOCAL + (down + across) * config.slice_k / config.items
    multiplication = 0.5 + _FOLD / config.half if config.half else 1.0
    reads *= 0.5 if config.half else 1.0  # which need no conversion
    steps = math.ceil(groups / at_once) * math.ceil(product.depth / config.slice_k)
    return steps * math.sqrt(outputs) * (multiplication + _READ * reads / outputs)


def _attention(descriptor: DeviceDescriptor, product: Product, config: KernelConfig) -> float:
    """See `estimate`. As for contractions: for each query and key a multiplication for each channel of both products, and the
    reads that come with it. Values are taken to be as wide as heads. Where channels pass through local memory, a stage is
    whole, and the group waits for it.
    """
    fitting = 1 << (product.rows - 1).bit_length()
    if config.k_block:
        block, keys = config.block
        queries, items = min(block, max(math.prod(LEAST_BLOCK), fitting)), config.items
        rounds = math.ceil(product.columns / keys)
        stages = 2 * math.ceil(product.depth / config.k_block)
        outputs = queries * keys / items
        reads = _LOCAL * (1 / config.rows + 1 / config.columns) + 1 / queries + 1 / keys
        steps = rounds * stages * (config.k_block * outputs * (1 + _READ * reads) + _WAIT)
    else:
        queries, items = min(config.rows, fitting), config.slice_k
        outputs = queries * config.columns
        steps = 2 * product.depth * queries * math.ceil(product.columns / items) * (1 + _READ / queries)
    groups = product.batches * math.ceil(product.rows / queries)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * items))
    return math.ceil(groups / at_once) * steps / math.sqrt(outputs)


def _rows(descriptor: DeviceDescriptor, product: Product, config: KernelConfig) -> float:
    """See `estimate`. A row is read three times, as a normalization does, and twice its parts are joined two by two: in local
    memory, where the group waits each time, or by shuffles.
    """
    reads = 3 * math.ceil(product.depth / (config.slice_k * config.vector))
    joins = 2 * math.log2(config.slice_k)
    at_once = max(1, descriptor.parallelism / config.slice_k)
    return math.ceil(product.rows / at_once) * (_READ * reads + joins * (_SHUFFLE if config.subgroups else _WAIT))


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
