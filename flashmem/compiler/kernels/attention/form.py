"""Attention form: a kernel config fitted to the sizes of one attention; templates name it `f`.

docs/reference/internals/kernels.md explains the configs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashmem.compiler.kernels.attention.configs import (
    JOINED,
    LEAST_BLOCK,
    SUMMED,
    AttentionConfig,
    KeyBlockConfig,
    QueryRowsConfig,
    SharedWeightsConfig,
    SplitKeysConfig,
)
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.compiler.operators.vector import Vector
from flashmem.program.launches import KernelShape

PRIVATE_BYTES = 24 << 10
"""The most bytes of queries and sums that a work-item of several vectors keeps.

More vectors share a load, but must fit the nearest cache.
"""

WIDE = 8
FEW_QUERIES = 8
"""Where vectors have so many elements, a work-item has one of at most so many queries, in vectors of channels.

Queries side by side would load keys and values one element at a time.
"""

WIDE_HEAD = 128
"""The largest head, in channels, for which a work-item of a block has many queries: their sums must fit its registers."""

MIDDLE_HEAD = 64
"""Channels of the head for which configs that share weights are written: wider heads have fewer queries of a work-item."""


@dataclass(frozen=True)
class QueryRows:
    """Attention form of rows of queries: a work-item has `vectors` vectors of `vector` queries.

    `lanes` work-items share the keys, `keys` at a time. `unroll` keys or channels are summed side by side; `joined` channels at
    a time are combined over lanes. A single query reads vectors of `wide` channels.
    """

    vector: int
    vectors: int
    lanes: int
    keys: int
    unroll: int
    wide: int
    joined: int = JOINED
    form: str = "rows"

    @property
    def rows(self) -> int:
        """Queries of a work-item."""
        return self.vector * self.vectors

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.lanes, 1)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(shape, vector=self.vector, tile_rows=self.rows, tile_columns=self.unroll, slice_k=self.lanes)


@dataclass(frozen=True)
class KeyBlock:
    """Attention form of key blocks: a work-group of `across` x `down` work-items, each with `each` queries and `vector` keys.

    `staged` channels are in local memory at a time.
    """

    across: int
    down: int
    each: int
    vector: int
    staged: int
    form: str = "block"

    @property
    def rows(self) -> int:
        """Queries of a work-group."""
        return self.down * self.each

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.across * self.vector

    @property
    def ivec(self) -> str:
        """The integer type that matches a vector of scores."""
        return Vector(self.vector).named("int")

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.across, self.down, 1)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(shape, vector=self.vector, tile_rows=self.each, tile_columns=self.vector, k_block=self.staged)


@dataclass(frozen=True)
class SharedWeights:
    """Attention form of shared weights: a work-group of `across` x (`down` or `parts`) work-items, each with `each` queries.

    Each has `vector` keys of a block, and four channels of every `4 * across`. Only weights are in local memory. `parts` parts
    of the group share the keys.
    """

    across: int
    down: int
    each: int
    vector: int
    parts: int
    form: str = "shared"

    @property
    def rows(self) -> int:
        """Queries of a work-group."""
        return self.down * self.each

    @property
    def ivec(self) -> str:
        """The integer type that matches a vector of scores."""
        return Vector(self.vector).named("int")

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.across, self.down * self.parts, 1)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(shape, vector=self.vector, tile_rows=self.each, tile_columns=self.vector, slice_k=self.parts)


@dataclass(frozen=True)
class SplitKeys:
    """Attention form of split keys: a work-group of `lanes` work-items has `rows` queries and a chunk of `keys` keys.

    `sharing` work-items have the same key, each with some of the queries. `quads` are fours of channels of a value. A work-item
    sums one of them for one of `query_groups` parts of the queries, over one of `parts` parts of the keys. When chunks are
    joined, a work-group has one query, in `joining` parts of the chunks.
    """

    lanes: int
    rows: int
    keys: int
    sharing: int
    quads: int
    query_groups: int
    parts: int
    joining: int

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.lanes, 1, 1)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(shape, vector=4, tile_rows=self.rows // self.query_groups, tile_columns=4, slice_k=self.parts)


def split_form(config: SplitKeysConfig, rows: int, channels: int) -> SplitKeys:
    """Fit `config` to `rows` queries of a matrix and values of `channels` channels, at most four for each work-item."""
    lanes = config.lanes
    quads = -(-channels // 4)
    each = min(config.queries, 1 << (rows - 1).bit_length(), SUMMED * (1 << (lanes // quads).bit_length() - 1))
    sharing = min(each, max(1, lanes // config.keys))
    groups = max(1, each // SUMMED)
    return SplitKeys(lanes, each, config.keys, sharing, quads, groups, lanes // (quads * groups), lanes // quads)


@dataclass(frozen=True)
class TensorForm:
    """Attention form of tensor cores: a work-group of `items` work-items has `rows` queries, in `parts` parts of `part_items`.

    Heads have `depth` channels, values `channels`, and a warp has `tiles` tiles of 16 queries. `stages` blocks of `keys` keys
    are in local memory. Keys are `key_pitch` and values `value_pitch` chunks of 8 halves apart there. `skips`: blocks that a
    mask hides are found and left out.
    """

    items: int
    parts: int
    tiles: int
    rows: int
    keys: int
    stages: int
    depth: int
    channels: int
    key_pitch: int
    value_pitch: int
    local_bytes: int
    skips: bool

    @property
    def part_items(self) -> int:
        """Work-items of a part."""
        return self.items // self.parts

    @property
    def part_keys(self) -> int:
        """Keys of a block that a part has."""
        return self.keys // self.parts

    @property
    def stage_bytes(self) -> int:
        """Bytes of a block of keys and values."""
        return 16 * self.keys * (self.key_pitch + self.value_pitch)

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.items, 1)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(shape, vector=4, tile_rows=self.tiles, tile_columns=4, k_block=self.keys, slice_k=self.parts)


def tensor_form(config: TensorAttention, depth: int, channels: int, *, skips: bool) -> TensorForm:
    """Fit `config` to heads of `depth` channels and values of `channels`."""
    pitches = config.stage_pitches(depth, channels)
    return TensorForm(
        config.items, config.parts, config.tiles, config.queries, config.keys, config.pipeline, depth, channels, *pitches,
        config.bytes_for(depth, channels), skips,
    )  # fmt: skip


AttentionForm = QueryRows | KeyBlock | SharedWeights


def form_of(config: AttentionConfig, rows: int, depth: int, channels: int, wide: int) -> AttentionForm:
    """Fit `config` to `rows` queries of a matrix, with heads of `depth` channels and values of `channels`.

    `wide` channels of a value are contiguous.

    Raises:
        TypeError: no form has such configs.
    """
    fitting = 1 << (rows - 1).bit_length()
    match config:
        case KeyBlockConfig(local_size=(most, across)):
            least, few = LEAST_BLOCK
            down = min(most, max(least, fitting // few))
            many = rows > few * down and max(depth, channels) <= WIDE_HEAD
            return KeyBlock(across, down, config.queries if many else min(few, config.queries), config.keys, config.channels)
        case SharedWeightsConfig(local_size=(down, across)):
            each = min(config.queries, fitting)
            most = config.queries * -(-MIDDLE_HEAD // (4 * across))
            while each > 1 and each * -(-channels // (4 * across)) > most:
                each //= 2
            return SharedWeights(across, min(down, max(1, fitting // each)), each, config.keys, config.parts)
        case QueryRowsConfig():
            vector = 1 if config.lanes == 1 and wide >= WIDE and rows <= FEW_QUERIES else min(config.vector, fitting)
            if config.lanes > 1:
                return QueryRows(vector, 1, config.lanes, 2 * config.keys, config.keys, wide)
            most = PRIVATE_BYTES // (4 * vector * (depth + channels))
            vectors = max(1, min(config.queries // config.vector, -(-rows // vector), most)) if vector > 1 else 1
            return QueryRows(vector, vectors, 1, 8 * config.keys, config.keys, wide)
    raise TypeError(f"{config} has no form")
