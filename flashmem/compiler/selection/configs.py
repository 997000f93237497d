"""Kernel configs for a workload: which of a device's configs can compute it, and the seconds of each, measured or estimated."""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.selection.attention_form import LEAST_BLOCK
from flashmem.compiler.selection.tuning_database import load_database
from flashmem.compiler.selection.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor, KernelConfig


def choose(descriptor: DeviceDescriptor, workload: Workload) -> KernelConfig:
    """The fastest config for `workload`; the first in the device's list of equally fast ones."""
    times = seconds(descriptor, workload)
    return min(times, key=lambda config: times[config])


def candidates(descriptor: DeviceDescriptor, workload: Workload) -> tuple[KernelConfig, ...]:
    """The device's configs that can compute `workload`: `descriptor.only` alone, if that one can."""
    found = [each for each in descriptor.configs_of(workload.family) if _fits(each, workload)]
    return tuple(found) or candidates(replace(descriptor, only=""), workload)


def _fits(config: KernelConfig, workload: Workload) -> bool:
    """Whether `config` can compute `workload`.

    Sums in half need operands that are stored in half. A config that shares the keys of few queries has no room for more.
    Winograd needs floats, 3x3 taps, stride 1 and one group; the caller knows the dilation (`selector.KernelRequest`). Of a
    grouped convolution a panel that work-items share holds the columns of one group: a wider one would be zeros, in every
    group.
    """
    if workload.family == "conv" and workload.batches > 1 and config.k_block and panel(config) > _filled(workload.columns):
        return False
    if config.winograd:
        return (workload.taps, workload.stride, workload.batches, workload.storage) == (9, 1, 1, "float32")
    if workload.family == "attention":
        return bool(config.k_block) or config.slice_k == 1 or workload.rows <= config.rows
    return not config.half or workload.storage == "float16"


def _filled(columns: int) -> int:
    """`columns` rounded up to a power of two: how wide a panel may be that is to be more columns than zeros."""
    return 1 << (columns - 1).bit_length()


def transformed(workload: Workload, tiles: int | None = None) -> Workload:
    """What Winograd's F(2x2, 3x3) multiplies: tiles of 4 outputs, at least, and 16 matrices of weights for 9 taps."""
    return replace(workload, rows=tiles or -(-workload.rows // 4), depth=workload.depth // workload.taps * 16)


def cut(config: KernelConfig, workload: Workload) -> KernelConfig:
    """`config` cut to `workload`: a number of rows that wastes few, panels no wider. Staged ones stay as they are."""
    if config.k_block:
        return config
    least = 8 if workload.storage.endswith("int4") else 4
    columns = max(least, min(config.columns, _filled(workload.columns)))
    most = min(config.rows, workload.rows)
    whole = {height: -(-workload.rows // height) * height for height in range(most, most // 2, -1)}
    rows = next(height for height, size in whole.items() if size <= _IDLE_ROWS * min(whole.values()))
    return replace(config, rows=rows, columns=columns, vector=min(config.vector, columns))


def panel(config: KernelConfig) -> int:
    """Columns of a panel of packed weights: those of a work-item, or of a work-group that shares what it reads."""
    return config.block[1] if config.k_block else config.columns


def seconds(descriptor: DeviceDescriptor, workload: Workload) -> dict[KernelConfig, float]:
    """Seconds of the device's configs for `workload`: measured on the nearest workload of the tuning database, else estimated.

    Where something near was measured, configs that were not, or failed, are left out. What Winograd's gain depends on caches
    that no estimate knows: they are taken where they were measured.

    Raises:
        UserError: the tuning database that the descriptor names is missing or damaged.
    """
    configs = candidates(descriptor, workload)
    if len(configs) > 1:
        database = load_database(descriptor)
        measured = database.seconds(workload, configs) if database else {}
        if measured:
            return measured
        configs = tuple(each for each in configs if not each.winograd) or configs
    step = descriptor.parallelism * 2 / descriptor.rates.flops_of(workload.family)  # of all work-items at once
    return {config: step * estimate(descriptor, workload, config) for config in configs}


def estimate(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """The estimated cost of `config` where nothing was measured, in multiplications of a full device."""
    if workload.family == "reduce_rows":
        return _rows(descriptor, workload, config)
    return (_attention if workload.family == "attention" else _contraction)(descriptor, workload, config)


def _contraction(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """See `estimate`.

    Work-groups run in waves of as many as the device holds. A work-item with many sums hides latency by itself, so fewer fill
    the device: by the square root of its outputs, it is assumed. A step of depth costs the multiplications and what is read
    for them: each operand once a block where the group shares it, once an item where it does not. Transforms cost nothing here.
    """
    workload = transformed(workload) if config.winograd else workload
    down, across = config.block
    outputs = config.rows * config.columns
    groups = workload.batches * math.ceil(workload.rows / down) * math.ceil(workload.columns / across)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * config.items))
    reads: float = config.rows + config.columns
    if config.k_block:
        reads = reads * _LOCAL + (down + across) * config.slice_k / config.items
    multiplication = 0.5 + _FOLD / config.half if config.half else 1.0
    reads *= 0.5 if config.half else 1.0  # which need no conversion
    steps = math.ceil(groups / at_once) * math.ceil(workload.depth / config.slice_k)
    return steps * math.sqrt(outputs) * (multiplication + _READ * reads / outputs)


def _attention(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """See `estimate`. As for contractions: for each query and key a multiplication for each channel of both products, and the
    reads that come with it. Values are taken to be as wide as heads. Where channels pass through local memory, a stage is
    whole, and the group waits for it.
    """
    fitting = 1 << (workload.rows - 1).bit_length()
    if config.k_block:
        block, keys = config.block
        queries, items = min(block, max(math.prod(LEAST_BLOCK), fitting)), config.items
        rounds = math.ceil(workload.columns / keys)
        stages = 2 * math.ceil(workload.depth / config.k_block)
        outputs = queries * keys / items
        reads = _LOCAL * (1 / config.rows + 1 / config.columns) + 1 / queries + 1 / keys
        steps = rounds * stages * (config.k_block * outputs * (1 + _READ * reads) + _WAIT)
    else:
        queries, items = min(config.rows, fitting), config.slice_k
        outputs = queries * config.columns
        steps = 2 * workload.depth * queries * math.ceil(workload.columns / items) * (1 + _READ / queries)
    groups = workload.batches * math.ceil(workload.rows / queries)
    at_once = max(1, descriptor.parallelism / (math.sqrt(outputs) * items))
    return math.ceil(groups / at_once) * steps / math.sqrt(outputs)


def _rows(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """See `estimate`. A row is read three times, as a normalization does, and twice its parts are joined two by two: in local
    memory, where the group waits each time, or by shuffles.
    """
    reads = 3 * math.ceil(workload.depth / (config.slice_k * config.vector))
    joins = 2 * math.log2(config.slice_k)
    at_once = max(1, descriptor.parallelism / config.slice_k)
    return math.ceil(workload.rows / at_once) * (_READ * reads + joins * (_SHUFFLE if config.subgroups else _WAIT))


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
