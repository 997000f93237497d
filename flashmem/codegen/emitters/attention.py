"""Attention as one launch: which form of its kernel, and with which numbers, a device gets."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.codegen.emitter import Emitter
from flashmem.codegen.expression import Expression
from flashmem.device import DeviceDescriptor
from flashmem.graph.fusion import Layer
from flashmem.graph.operators.attention import Access, Scores
from flashmem.graph.operators.vector import Vector, scalar_literal
from flashmem.graph.placement import affine
from flashmem.graph.views import Dimension
from flashmem.program import ITEMSIZE, Arg, KernelShape

FEW_ROWS = 4
"""Queries up to which a GPU's work-group deals out keys rather than queries."""

PRIVATE_BYTES = 24 << 10
"""Of queries and sums that a work-item of a CPU keeps: more of them share a load, but the nearest cache has to hold them."""

LOCAL_BYTES = {"nvidia": 48 << 10}
"""Local memory of a work-group, by descriptor, where it is more than `LEAST_LOCAL_BYTES`."""

LEAST_LOCAL_BYTES = 32 << 10
"""Local memory that every GPU has."""


@dataclass(frozen=True)
class Rows:
    """A work-item has `vectors` vectors of `vector` queries. `lanes` of them share the keys, `keys` at a time; `unroll` keys or
    channels are summed up side by side; `joined` channels at a time are joined over lanes. One query alone reads vectors of
    `wide` channels.
    """

    vector: int
    vectors: int
    lanes: int
    keys: int
    unroll: int
    wide: int
    joined: int = 16
    form: str = "rows"

    @property
    def rows(self) -> int:
        """Queries of a work-item."""
        return self.vector * self.vectors

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.lanes, 1)


@dataclass(frozen=True)
class Block:
    """A work-group of `across` x `down` work-items, each with `each` queries and `vector` keys of the block; `staged` channels
    are in local memory at a time.
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
    def local_bytes(self) -> int:
        """Local memory that it takes: queries, weights, keys or values, and a number of each work-item for each query."""
        pitch = self.rows + 4
        return 4 * (self.staged * pitch + self.keys * pitch + self.staged * self.keys + self.rows * self.across)

    @property
    def ivec(self) -> str:
        """Integers beside a vector of scores."""
        return Vector(self.vector).named("int")

    @property
    def local(self) -> tuple[int, ...]:
        """The work-group."""
        return (self.across, self.down, 1)


def choose_form(descriptor: DeviceDescriptor, rows: int, depth: int, channels: int, *, neighbours: bool) -> Rows | Block:
    """The form for `rows` queries of a matrix, with heads of `depth` channels and values of `channels`. `neighbours`: whether
    channels of keys and of values lie side by side.
    """
    least = min(depth, channels)
    wide = min(descriptor.tile.vector, 1 << (least.bit_length() - 1)) if neighbours else 1
    fitting = 1 << (rows - 1).bit_length()
    if descriptor.kind == "cpu":
        vector = min(descriptor.tile.vector, fitting)
        vectors = 2 if rows > vector and 8 * vector * (depth + channels) <= PRIVATE_BYTES else 1
        return Rows(vector, vectors, 1, 64, 8, wide)
    if rows <= FEW_ROWS:
        return Rows(fitting, 1, 64, 8, 4, wide)
    down = min(8, max(2, fitting // 4))
    each = 8 if rows > 4 * down and max(depth, channels) <= 128 else 4
    room = LOCAL_BYTES.get(descriptor.name, LEAST_LOCAL_BYTES)
    wider, narrow = (Block(16, down, each, 2, staged) for staged in (64, 32))
    return wider if least > 32 and wider.local_bytes <= room else narrow


def emit_attention(emitter: Emitter, layer: Layer) -> None:
    """FusedAttention: one launch."""
    node, given = layer.main, layer.main.attributes
    query, key, value, answer = (given[name] for name in ("query", "key", "value", "answer"))
    batches, rows, keys = given["batches"], given["rows"], given["keys"]
    neighbours = key.channel == value.channel == 1
    form = choose_form(emitter.descriptor, rows, query.channels, value.channels, neighbours=neighbours)
    scores: Scores = given["scores"]
    seed, nodes = scores.nodes([node.input(i) for i in range(3, len(node.inputs))])
    down = form.form == "rows" and form.vector > 1
    tail = Expression(nodes, seed, scores.shape, len(scores.shape) - 1, form.vector, emitter.storage, down)
    strides: list[int] = []
    tensors = (node.input(0), node.input(1), node.input(2), layer.output)
    places = zip((query, key, value, answer), ("query", "key", "key", "query"), map(emitter.stored, tensors), strict=True)
    q, k, v, y = (_context(access, row, stored, strides) for access, row, stored in places)
    kernel = emitter.kernels.kernel(
        "attention",
        f=form,
        q=q,
        k=k,
        v=v,
        y=y,
        strides=range(len(strides)),
        depth=query.channels,
        channels=value.channels,
        scale=scalar_literal("float32", given["scale"]),
        value_scale=scalar_literal("float32", given["value_scale"]),
        guarded=scores.guarded,
        attributes=emitter.attributes(form.local),
        **{**emitter.vectors(form.vector), **emitter.tail_context(tail)},
    )
    pointers = [emitter.operand(node.input(i)) for i in range(3)]
    blocks = -(-rows // form.rows)
    items = (form.lanes * blocks, batches) if isinstance(form, Rows) else (form.across, form.down * blocks, batches)
    sizes = [ITEMSIZE[emitter.storage(each)] for each in tensors]
    counts = [rows * query.channels, keys * query.channels, keys * value.channels, rows * value.channels]
    nbytes = batches * sum(size * count for size, count in zip(sizes, counts, strict=True))
    numbers = [batches, rows, keys, batches * rows, query.start, key.start, value.start, *strides]
    args: list[Arg | int] = [*pointers, emitter.tensor(layer.output), *emitter.operand_args(tail), *numbers]
    emitter.launch(
        layer,
        kernel,
        args,
        items,
        form.local,
        KernelShape(
            rows=batches * rows, columns=value.channels, depth=keys, run=query.channels, stride=key.channel, vector=form.vector
        ),
        macs=batches * rows * keys * (query.channels + value.channels),
        nbytes=nbytes + sum(emitter.nbytes(operand.value) for operand in tail.operands),
    )


def _context(access: Access, row: str, stored: str, strides: list[int]) -> dict[str, object]:
    """Where a matrix and a row are, as expressions in `batch` and in `row`, and how far channels are apart.

    `stored` is what an element is in memory. Strides that the expressions name are added to `strides`: they are arguments, so
    that kernels differ in little but heads.
    """

    def argument(stride: int) -> str:
        strides.append(stride)
        return f"stride{len(strides) - 1}"

    def offset(dimension: Dimension, index: str) -> str:
        return affine([size for size, _ in dimension], [stride for _, stride in dimension], index, stride_as=argument)

    return {
        "batch": offset(access.batch, "batch"),
        "row": offset(access.row, row),
        "channel": access.channel,
        "stored": stored,
    }
