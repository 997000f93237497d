"""Attention in one kernel: softmax(f(Q K^T)) V, matched by `compiler.passes.attention`; no score is written to memory.

Inputs of `FusedAttention` are the tensors with queries, keys and values, then the operands of `scores`. With attribute
`dropped` the next input is a boolean for each query, whose answer is 0 where it is true. With attribute `filled` the last input
has integers, such that no query sees a key from their maximum on, unless one of them is less than 1: a cache is filled so far.
`filled` is "queries" if query r sees no key from the end r on, modulo the number of ends, and "all" otherwise.

Attributes are `query`, `key`, `value` and `answer` (each an `Access`), `batches`, `rows` (queries of a batch), `keys`, and
`scores`. `scale` multiplies each product of a query and a key, `value_scale` each value. `stacks` are the shapes of the stacks
of scores and of answers, until `compiler.passes.attention_views` has run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.strided import Dimension, StridedView, merged
from flashmem.compiler.operators.registry import FLOAT, Operator, Types, register
from flashmem.compiler.operators.tiling_interface import AxisRange, TiledNode, aligned, outermost

_STORED: Types = FLOAT | {"int8"}
"""Types of keys and values: floats, or quantised rows."""


@dataclass(frozen=True)
class Access:
    """Memory access of a stack of matrices: element (batch, row, channel) is at `start` plus an offset of each, in elements.

    `scale`: rows are quantised (`compiler.kernels.indexing.quantised_rows`); the scale of a row is that many bytes after its
    start.
    """

    start: int
    batch: Dimension
    row: Dimension
    channel: int
    channels: int
    scale: int | None = None


def access(view: StridedView) -> Access:
    """The access of `view`, a stack of matrices whose last dimension has one stride."""
    *outer, row, channel = view.dimensions
    batch = merged([factor for dimension in outer for factor in dimension])
    [(channels, stride)] = channel or ((1, 1),)
    return Access(view.start, batch, row, stride, channels)


def stack(view: StridedView, batch: Sequence[int], *, swap: bool = False) -> StridedView:
    """`view`, whose last two dimensions are matrices, broadcast to a stack of shape `batch`.

    With `swap`, rows and columns are exchanged.
    """
    rank = len(batch)
    made = view.expanded((*batch, *view.shape[-2:]))
    return made.transposed([*range(rank), rank + 1, rank]) if swap else made


@dataclass(frozen=True)
class ScoreStep:
    """An elementwise operator on a vector of scores.

    Its operands are register numbers: first the score itself, then the operands in the node's order, then the results of
    earlier steps.
    """

    op: str
    inputs: tuple[int | None, ...]
    dtype: DType
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Band:
    """The keys that queries see: query r of a matrix sees those from r + `since` to r + `until`. None: no limit.

    With `period`, r is a query's number modulo `period`: the rows of a matrix are those of several heads. Every query sees at
    least one key.
    """

    since: int | None
    until: int | None
    period: int | None = None

    @property
    def numbers(self) -> list[int]:
        """The numbers that there are, in this order."""
        return [each for each in (self.since, self.until, self.period) if each is not None]

    def moved(self, start: int, stop: int) -> Band | None:
        """The band of the queries from `start` to `stop`; None if they begin within a period and end behind it."""
        if self.period is None or start // self.period == (stop - 1) // self.period:
            first = start if self.period is None else start % self.period
            since, until = (None if each is None else each + first for each in (self.since, self.until))
            return Band(since, until)
        return self if start % self.period == 0 else None

    def _rows(self, rows: int) -> NDArray[np.int64]:
        return np.arange(rows) % (self.period or rows)

    def seen(self, rows: int, keys: int) -> NDArray[np.bool_]:
        """The mask of the keys that each of `rows` queries sees, [rows, keys]."""
        distance = np.arange(keys) - self._rows(rows)[:, None]
        every = np.ones((rows, keys), bool)
        return every & (self.since is None or distance >= self.since) & (self.until is None or distance <= self.until)

    def pairs(self, rows: int, keys: int) -> int:
        """The number of pairs of a query and a key that it sees."""
        numbers = self._rows(rows)
        first = np.zeros(rows, int) if self.since is None else np.clip(numbers + self.since, 0, keys)
        end = np.full(rows, keys) if self.until is None else np.clip(numbers + self.until + 1, 0, keys)
        return int(np.maximum(end - first, 0).sum())


@dataclass(frozen=True)
class Scores:
    """The operators on scores between product and softmax: `steps` over `shape`, scores of all queries.

    `guarded`: NaN weights, those of a query that sees no key, count as 0. `band`: the keys that a query sees after all steps.
    """

    shape: tuple[int, ...]
    steps: tuple[ScoreStep, ...]
    guarded: bool = False
    band: Band | None = None

    def nodes(self, operands: list[Value]) -> tuple[Value, tuple[Node, ...]]:
        """The score after the product, and the steps as nodes on it and `operands`."""
        score = Value("score", self.shape, "float32")
        registers = [score, *operands]
        nodes = []
        for i, step in enumerate(self.steps):
            inputs = [None if at is None else registers[at] for at in step.inputs]
            made = Value(f"score.{i}", self.shape, step.dtype)
            nodes.append(Node(step.op, made.name, inputs, [made], step.attributes))
            registers.append(made)
        return score, tuple(nodes)


def is_attended(node: Node, value: Value) -> bool:
    """Whether `node` is attention that reads `value` as queries, keys or values."""
    return node.op == "FusedAttention" and value in node.inputs[:3]


@dataclass(frozen=True)
class _Range:
    """Batches, or rows of every batch, from `start` to `stop`."""

    kind: Literal["batch", "row"]
    start: int
    stop: int


def attention_tile(node: Node, span: AxisRange) -> TiledNode | None:
    """Tile attention: a range of the answer along its outermost axis is a range of queries, or of the matrices of a stack.

    A range of queries reads all keys and values. A range of matrices reads its own ones, if they are separate in memory.
    """
    given = node.attributes
    output = node.outputs[0]
    if math.prod(output.shape[: span.axis]) != 1:
        return None
    inner = math.prod(output.shape[span.axis + 1 :])
    chosen = _chosen(given["answer"], output.size, span.start * inner, span.stop * inner)
    answer = None if chosen is None else _restricted(given["answer"], chosen)
    if chosen is None or answer is None:
        return None
    operands = [value for value in node.inputs[3:] if value is not None]
    filled = [None] if given["filled"] and operands.pop() else []
    needs: list[AxisRange | None] = []
    accesses: list[Access] = []
    for name, value in zip(("query", "key", "value"), node.inputs, strict=False):
        assert value is not None
        access: Access = given[name]
        if chosen.kind == "row" and name != "query":
            needs.append(None)
            accesses.append(access)
            continue
        made = _restricted(access, chosen)
        if made is None:
            return None
        span_of = _memory(access, chosen, value)
        needs.append(span_of)
        accesses.append(made if span_of is None else replace(made, start=access.start))
    query, key, stored = accesses
    scores = _scores(given["scores"], chosen, given["rows"], operands)
    if scores is None:
        return None
    count = chosen.stop - chosen.start
    counts: dict[str, Any] = {"batches": count} if chosen.kind == "batch" else {"rows": count}
    if chosen.kind == "row" and given["filled"]:
        counts = {**counts, "filled": "all"}
    changed = {"query": query, "key": key, "value": stored, "answer": replace(answer, start=0), "scores": scores[0], **counts}
    return TiledNode((*needs, *scores[1], *filled), {**given, **changed})


def _chosen(answer: Access, size: int, first: int, last: int) -> _Range | None:
    """The batches or rows whose answers are elements `first` to `last` of all `size` elements."""
    kinds: tuple[tuple[Literal["batch", "row"], Dimension], ...] = (("batch", answer.batch), ("row", answer.row))
    for kind, dimension in kinds:
        if dimension and dimension[0][0] * dimension[0][1] == size:
            stride = dimension[0][1]
            each = math.prod(count for count, _ in dimension[1:])
            if first % stride or last % stride:
                return None
            return _Range(kind, first // stride * each, last // stride * each)
    return None


def _restricted(access: Access, chosen: _Range) -> Access | None:
    """The access to the matrices or rows of `chosen` only."""
    dimension = access.batch if chosen.kind == "batch" else access.row
    (_, stride), *others = dimension or ((1, 0),)
    each = math.prod(count for count, _ in others)
    if chosen.start % each or chosen.stop % each:
        return None
    left = merged([((chosen.stop - chosen.start) // each, stride), *others])
    start = access.start + chosen.start // each * stride
    return replace(access, start=start, batch=left) if chosen.kind == "batch" else replace(access, start=start, row=left)


def _memory(access: Access, chosen: _Range, value: Value) -> AxisRange | None:
    """The range of `value` along its outermost axis that `chosen` reads, if nothing else reads it; None: all of it."""
    dimension, other = (access.batch, access.row) if chosen.kind == "batch" else (access.row, access.batch)
    if not dimension:
        return None
    (count, stride), *others = dimension
    rest = [*others, *other, (access.channels, access.channel)]
    if count * stride != value.size or access.start + sum((n - 1) * step for n, step in rest) >= stride:
        return None
    each = math.prod(n for n, _ in others)
    axis = outermost(value.shape)
    first, last = (at // each * stride for at in (chosen.start, chosen.stop))
    place = math.prod(value.shape[axis + 1 :])
    return None if first % place or last % place else AxisRange(axis, first // place, last // place)


def _scores(
    scores: Scores, chosen: _Range, rows: int, operands: Sequence[Value]
) -> tuple[Scores, list[AxisRange | None]] | None:
    """The steps on the scores of `chosen`, and the ranges of their operands."""
    if scores.band is not None and chosen.kind == "row":
        band = scores.band.moved(chosen.start, chosen.stop)
        if band is None:
            return None
        scores = replace(scores, band=band)
    shape = scores.shape
    queries = math.prod(shape[:-1])
    if not operands:
        each = queries // rows if chosen.kind == "row" else rows
        return replace(scores, shape=((chosen.stop - chosen.start) * each, shape[-1])), []
    inner, total = (rows, queries) if chosen.kind == "batch" else (1, rows)
    before = 1
    for axis, size in enumerate(shape[:-1]):
        if before * total == queries and size > 1:
            each = math.prod(shape[axis + 1 : -1])
            first = chosen.start * inner
            last = chosen.stop * inner
            if first % each or last % each:
                return None
            span = AxisRange(axis, first // each, last // each)
            return replace(scores, shape=span.of(shape)), [aligned(value.shape, len(shape), span) for value in operands]
        before *= size
    return None


register(
    __name__,
    Operator(
        "FusedAttention", (FLOAT, _STORED, _STORED, FLOAT), kernel="attention", operator_class="hierarchical", onnx=False,
        tiling=attention_tile,
    ),
)  # fmt: skip
