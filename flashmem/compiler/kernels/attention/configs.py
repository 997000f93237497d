"""Kernel configs of attention, one class for each form of its kernel (`flashmem.compiler.kernels.attention.form`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from flashmem.compiler.configs.config import (
    LOCAL,
    POINTERS,
    READ,
    SPILLED,
    WAIT,
    CompiledCost,
    EstimatedDevice,
    KernelConfig,
)
from flashmem.compiler.configs.kinds import register, register_plain
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.target.descriptor import DeviceDescriptor

JOINED = 16
"""Channels of an attention output that are combined at a time, by work-items that share its keys."""

SUMMED = 8
"""The most queries for which a work-item of a chunk of keys sums values: four channels of each."""

LARGEST_HEAD = 512
"""The most channels of a head for which kernels keep their sums in registers."""

LEAST_BLOCK = (2, 4)
"""The least (work-items in the query direction of a block, queries of each), for any number of queries."""


@dataclass(frozen=True)
class AttentionConfig(KernelConfig):
    """A config of attention: a work-item computes scores of `queries` queries and `keys` keys at a time."""

    queries: int
    keys: int

    @property
    def families(self) -> tuple[str, ...]:
        """See `KernelConfig.families`."""
        return ("attention",)


def _cost(
    config: AttentionConfig, workload: Workload, device: EstimatedDevice, queries: int, outputs: float, steps: float
) -> float:
    """The cost of groups of `queries` queries that each take `steps` multiplications.

    Work-groups run in waves, as for contractions. Values are assumed to be as wide as heads.
    """
    groups = workload.batches * math.ceil(workload.rows / queries)
    at_once = device.at_once(outputs, config.items, config.registers)
    spilled = SPILLED if device.spills(config.registers) else 1.0
    return math.ceil(groups / at_once) * steps / math.sqrt(outputs) * spilled


def _fitting(workload: Workload) -> int:
    """The number of queries, rounded up to a power of two."""
    return 1 << (workload.rows - 1).bit_length()


@register
@dataclass(frozen=True)
class QueryRowsConfig(AttentionConfig):
    """Attention by rows of queries, in vectors of `vector`; `keys` keys are summed side by side.

    `lanes` work-items share the keys of at most `queries` queries; 1 has many queries.
    """

    kind: ClassVar[str] = "query-rows"

    vector: int
    lanes: int = 1

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{self.queries}-{self.keys}-{self.vector}-1x1-0-0-{self.lanes}"

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return self.lanes

    @property
    def local_bytes(self) -> int:
        """Bytes of the sums that its lanes exchange."""
        return 4 * self.vector * self.lanes * JOINED if self.lanes > 1 else 0

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: lanes that share keys have no room for more queries."""
        return self.lanes == 1 or workload.rows <= self.queries

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`: each query and key cost one multiplication for each channel of both products."""
        queries = min(self.queries, _fitting(workload))
        steps = 2 * workload.depth * queries * math.ceil(workload.columns / self.lanes) * (1 + READ / queries)
        return _cost(self, workload, device, queries, queries * self.keys, steps)


@register
@dataclass(frozen=True)
class KeyBlockConfig(AttentionConfig):
    """Attention by blocks of keys: a work-group has `local_size` (in the query, in the key direction) work-items.

    `channels` channels of queries, keys and values are in local memory at a time.
    """

    kind: ClassVar[str] = "key-blocks"

    local_size: tuple[int, int]
    channels: int = field(kw_only=True)

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        down, across = self.local_size
        return f"{self.queries}-{self.keys}-{self.keys}-{down}x{across}-{self.channels}-0-1"

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a work-group's scores."""
        return self.queries * self.local_size[0], self.keys * self.local_size[1]

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return math.prod(self.local_size)

    @property
    def local_bytes(self) -> int:
        """Bytes of queries, weights, keys or values, and of one number of each work-item for each query."""
        queries, keys = self.block
        return 4 * ((self.channels + keys) * (queries + 4) + self.channels * keys + queries * self.local_size[1])

    def fits(self, workload: Workload) -> bool:
        """Any attention."""
        return True

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. Stages of channels are whole, and the group waits for each."""
        block, keys = self.block
        queries = min(block, max(math.prod(LEAST_BLOCK), _fitting(workload)))
        rounds = math.ceil(workload.columns / keys)
        stages = 2 * math.ceil(workload.depth / self.channels)
        outputs = queries * keys / self.items
        reads = LOCAL * (1 / self.queries + 1 / self.keys) + 1 / queries + 1 / keys
        steps = rounds * stages * (self.channels * outputs * (1 + READ * reads) + WAIT)
        return _cost(self, workload, device, queries, outputs, steps)


@register
@dataclass(frozen=True)
class SharedWeightsConfig(AttentionConfig):
    """Attention whose work-groups share only weights through local memory.

    A work-group has `local_size` (in the query, in the key direction) work-items in each of `parts` parts, which share the keys
    of at most `queries` queries; 1 has many queries.
    """

    kind: ClassVar[str] = "shared-weights"

    local_size: tuple[int, int]
    parts: int = 1

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        down, across = self.local_size
        return f"{self.queries}-{self.keys}-{self.keys}-{down}x{across}-0-0-{self.parts}"

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return math.prod(self.local_size) * self.parts

    @property
    def registers(self) -> int:
        """Estimated registers: scores, operands, sums of four channels, a maximum and a sum for each query, and pointers."""
        return self.queries * self.keys + 4 * (self.queries + self.keys) + 6 * self.queries + POINTERS

    @property
    def local_bytes(self) -> int:
        """Bytes of weights, of a maximum of each work-item and of each query, and of the sums of all but one part."""
        lines = self.local_size[0] * self.parts
        across = self.local_size[1]
        numbers = lines * self.queries * (across * self.keys + across + 1)
        return 4 * (numbers + (4 * self.parts * across if self.parts > 1 else 0))

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: parts that share keys have no room for more queries."""
        return self.parts == 1 or workload.rows <= self.queries

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. Keys and values are read by vectors of four."""
        fitting = _fitting(workload)
        queries = min(self.queries * self.local_size[0], fitting)
        keys = self.keys * self.local_size[1]
        rounds = math.ceil(workload.columns / (keys * self.parts))
        outputs = queries * keys * self.parts / self.items
        reads = 1 / min(self.queries, fitting) + 1 / self.keys
        steps = rounds * (2 * workload.depth * outputs * (1 + READ * reads / 4) + 2 * WAIT)
        return _cost(self, workload, device, queries, outputs, steps)


@register
@dataclass(frozen=True)
class SplitKeysConfig(AttentionConfig):
    """Attention of few queries over many keys (flash-decoding): a work-group of `lanes` work-items has a chunk of `keys` keys.

    A second launch adds the chunks. A group has at most `queries` queries, and a matrix at most `most`. `queries`, `keys` and
    `lanes` are powers of two.
    """

    kind: ClassVar[str] = "split-keys"

    lanes: int
    most: int

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{self.queries}-{self.keys}-{self.keys}-{self.lanes}x1-0-{self.most}-{self.lanes}"

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return self.lanes

    @property
    def local_bytes(self) -> int:
        """Bytes of queries, weights, two numbers of each work-item, and its sums of four channels, for the widest head."""
        return 4 * (self.queries * (LARGEST_HEAD + self.keys) + 2 * self.lanes) + 16 * self.lanes * min(self.queries, SUMMED)

    def fits(self, workload: Workload) -> bool:
        """Whether there are few queries, more keys than one chunk, and a work-item for four channels of any head."""
        return workload.rows <= self.most and workload.columns > self.keys and 4 * self.lanes >= LARGEST_HEAD

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. Each chunk of keys is a group of its own."""
        queries = min(self.queries, _fitting(workload))
        chunks = math.ceil(workload.columns / self.keys)
        outputs = queries * self.keys / self.lanes
        steps = 2 * workload.depth * outputs * (1 + READ / queries) + 4 * WAIT
        whole = Workload(workload.family, workload.path, workload.rows, workload.depth, self.keys, workload.batches * chunks)
        return _cost(self, whole, device, queries, outputs, steps)


@register_plain("attention")
def _plain(descriptor: DeviceDescriptor, family: str) -> tuple[AttentionConfig, ...]:
    """On a CPU the plain tile: queries across, keys down. On a GPU two configs, or those listed that share weights.

    One of the two fits every GPU's local memory. In the other, work-items share the keys of few queries.
    """
    tile = descriptor.tile
    if descriptor.kind == "cpu":
        return (QueryRowsConfig("tile", tile.columns, tile.rows, tile.vector),)
    listed = listed_configs(descriptor)
    if shared := tuple(each for each in listed if isinstance(each, SharedWeightsConfig) and each.parts == 1):
        return shared
    block = KeyBlockConfig("tile", 8, 2, (8, 16), channels=32)
    return (
        block if block.local_bytes <= descriptor.local_bytes else replace(block, queries=4),
        QueryRowsConfig("few", 4, 4, 4, lanes=64),
    )
