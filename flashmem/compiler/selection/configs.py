"""Kernel configs for a workload: the device's configs that can compute it, with measured or estimated seconds."""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.selection.attention_form import LEAST_BLOCK
from flashmem.compiler.selection.tuning_database import load_database
from flashmem.compiler.selection.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor, KernelConfig


def choose(descriptor: DeviceDescriptor, workload: Workload) -> KernelConfig:
    """The fastest config for `workload`; of equally fast ones, the first in the device's list."""
    times = seconds(descriptor, workload)
    return min(times, key=lambda config: times[config])


def candidates(descriptor: DeviceDescriptor, workload: Workload) -> tuple[KernelConfig, ...]:
    """The device's configs that can compute `workload`: `descriptor.only` alone, if that one can."""
    found = [each for each in descriptor.configs_of(workload.family) if _fits(each, workload)]
    return tuple(found) or candidates(replace(descriptor, only=""), workload)


def _fits(config: KernelConfig, workload: Workload) -> bool:
    """Whether `config` can compute `workload`.

    Sums in half need operands that are stored in half. A config that shares the keys of few queries has no room for more.
    Winograd needs floats, 3x3 taps, stride 1 and one group; the caller knows the dilation (`selector.KernelRequest`). For a
    grouped convolution, a panel that work-items share contains the columns of one group; a wider panel would contain zeros in
    every group.
    """
    if workload.family == "conv" and workload.batches > 1 and config.k_block and panel(config) > _filled(workload.columns):
        return False
    if config.winograd:
        return (workload.taps, workload.stride, workload.batches, workload.storage) == (9, 1, 1, "float32")
    if workload.family == "attention":
        return bool(config.k_block) or config.slice_k == 1 or workload.rows <= config.rows
    return not config.half or workload.storage == "float16"


def _filled(columns: int) -> int:
    """`columns` rounded up to a power of two: the widest panel with more columns than zeros."""
    return 1 << (columns - 1).bit_length()


def transformed(workload: Workload, tiles: int | None = None) -> Workload:
    """The product of Winograd's F(2x2, 3x3): at least rows / 4 tiles of 4 outputs, and 16 matrices of weights for 9 taps."""
    return replace(workload, rows=tiles or -(-workload.rows // 4), depth=workload.depth // workload.taps * 16)


def cut(config: KernelConfig, workload: Workload) -> KernelConfig:
    """Cut `config` to `workload`: a number of rows that wastes few, and panels no wider than needed. Staged configs stay."""
    if config.k_block:
        return config
    least = 8 if workload.storage.endswith("int4") else 4
    columns = max(least, min(config.columns, _filled(workload.columns)))
    most = min(config.rows, workload.rows)
    whole = {height: -(-workload.rows // height) * height for height in range(most, most // 2, -1)}
    rows = next(height for height, size in whole.items() if size <= _IDLE_ROWS * min(whole.values()))
    return replace(config, rows=rows, columns=columns, vector=min(config.vector, columns))


def panel(config: KernelConfig) -> int:
    """Columns of a panel of packed weights: those of a work-item, or of a work-group that shares its operands."""
    return config.block[1] if config.k_block else config.columns


def seconds(descriptor: DeviceDescriptor, workload: Workload) -> dict[KernelConfig, float]:
    """Seconds of the device's configs for `workload`: measured on the nearest workload of the tuning database, else estimated.

    If a near workload was measured, configs that were not measured, or failed, are excluded. The gain of Winograd depends on
    caches, which no estimate models, so Winograd is used only if it was measured.

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
    step = (
        descriptor.parallelism * 2 / descriptor.rates.flops_of(workload.family)
    )  # seconds for one multiplication on all work-items
    return {config: step * estimate(descriptor, workload, config) for config in configs}


def estimate(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """The estimated cost of `config`, without measurements, in multiplications of a full device."""
    if workload.family == "reduce_rows":
        return _rows(descriptor, workload, config)
    return (_attention if workload.family == "attention" else _contraction)(descriptor, workload, config)


def _contraction(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """Estimated cost of a contraction; see `estimate`.

    Work-groups run in waves that fill the device. A work-item with many sums hides latency itself, so fewer fill the device: by
    assumption, by the square root of its outputs. A step of depth costs its multiplications and the reads of its operands. Each
    operand is read once for a block if the group shares it, otherwise once for each item. Transforms are free here.
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
    reads *= 0.5 if config.half else 1.0  # half operands need no conversion
    steps = math.ceil(groups / at_once) * math.ceil(workload.depth / config.slice_k)
    return steps * math.sqrt(outputs) * (multiplication + _READ * reads / outputs)


def _attention(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """Estimated cost of attention; see `estimate`.

    As for contractions: each query and key cost one multiplication for each channel of both products, and the reads for them.
    Values are assumed to be as wide as heads. If channels pass through local memory, stages are whole, and the group waits for
    each.
    """
    fitting = 1 << (workload.rows - 1).bit_length()
    if config.shares_weights:
        block, keys = config.block
        queries, items = min(block, fitting), config.items
        rounds = math.ceil(workload.columns / (keys * config.slice_k))
        outputs = queries * keys * config.slice_k / items
        reads = 1 / min(config.rows, fitting) + 1 / config.columns
        steps = rounds * (2 * workload.depth * outputs * (1 + _READ * reads / 4) + 2 * _WAIT)
    elif config.k_block:
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
    """Estimated cost of a reduction over rows; see `estimate`.

    A row is read three times, as in a normalization. Twice its parts are combined pairwise: in local memory, where the group
    waits each time, or by shuffles.
    """
    reads = 3 * math.ceil(workload.depth / (config.slice_k * config.vector))
    joins = 2 * math.log2(config.slice_k)
    at_once = max(1, descriptor.parallelism / config.slice_k)
    return math.ceil(workload.rows / at_once) * (_READ * reads + joins * (_SHUFFLE if config.subgroups else _WAIT))


_SHUFFLE = 4.0
"""Cost of reading a register of another work-item of the subgroup, in multiplications: assumed."""

_WAIT = 64.0
"""Cost of a group's wait until local memory is filled, and until it is read, in multiplications: assumed."""

_READ = 8.0
"""Cost of a read from global memory or a texture, in multiplications: assumed."""

_FOLD = 2.0
"""Cost of adding a sum in half to one in float, in multiplications in float, two of which equal four in half: assumed."""

_IDLE_ROWS = 1.02
"""The tallest tile with at most 2 % more rows than the fewest is chosen, because each height is another kernel."""

_LOCAL = 0.25
"""Cost of a read from local memory, in reads from global memory: assumed."""
