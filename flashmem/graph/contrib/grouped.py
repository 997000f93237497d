"""Attention with fewer heads for keys than for queries, and rotary positions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from flashmem.graph.contrib.attention import Heads, attention_bias, head_count, lowest_where_ahead, merge, split_heads
from flashmem.graph.contrib.expansion import Expand, Expansion, RefusedError


def _group_query(e: Expansion) -> list[ir.Value | None]:
    """Causal attention, N heads of queries to M heads of keys and values; input 5 is how many keys there are, less 1."""
    e.refuse_input(12, 13, 14, 15)
    for name in ("kv_cache_bit_width", "qk_output", "sliding_window_cache"):
        if e.integer(name, 0):
            raise RefusedError(f"with {name}")
    if not e.integer("causal", 1):
        raise RefusedError("that is not causal")
    batch, length, width = e.ranked(0, 3)
    heads, groups = head_count(e), e.integer("kv_num_heads")
    packed = e.optional(1) is None
    count = heads + 2 * groups if packed else heads
    if groups < 1 or heads % groups or width % count or not width:
        raise RefusedError(f"with {heads} heads, {groups} for keys, and an input of {width} channels")
    size = width // count
    if packed:
        ends = np.cumsum([0, heads, groups, groups]) * size
        parts = [e.part(e.input(0), 2, int(a), int(b)) for a, b in zip(ends, ends[1:], strict=False)]
    else:
        e.expect(1, (batch, length, groups * size))
        e.expect(2, (batch, length, groups * size))
        parts = [e.input(0), e.input(1), e.input(2)]
    query = split_heads(e, parts[0], batch, length, heads, size)
    key, value = (split_heads(e, part, batch, length, groups, size) for part in parts[1:])
    past = _past(e, batch, groups, length, size)
    if e.integer("do_rotary", 0):
        positions = _positions(e, batch, length, past)
        interleaved = e.integer("rotary_interleaved", 0)
        query, key = (
            rotated(e, each, positions, e.input(7), e.input(8), size, interleaved, (batch, n, length))
            for each, n in ((query, heads), (key, groups))
        )
    if past:
        key, value = e.op("Concat", e.input(3), key, axis=2), e.op("Concat", e.input(4), value, axis=2)
    h = Heads(batch, heads, length, past, past + length, size, size, query, key, value, e.input(0))
    return [_attend_in_groups(e, h, groups), key, value]


def _past(e: Expansion, batch: int, groups: int, length: int, size: int) -> int:
    """How many keys come from earlier calls: all that input 3 holds, which the constant inputs 5 and 6 must say."""
    if e.optional(3) is None:
        return 0
    past = e.ranked(3, 4)[2]
    e.expect(3, (batch, groups, past, size))
    e.expect(4, (batch, groups, past, size))
    if past:
        for index, wanted in ((5, past + length - 1), (6, past + length)):
            known = e.known(e.input(index))
            if known is None or (known != wanted).any():
                raise RefusedError(
                    f"of {past} earlier keys, whose input {index} is not the constant {wanted} (a cache that is filled in part)"
                )
    return past


def _positions(e: Expansion, batch: int, length: int, past: int) -> ir.Value:
    given = e.optional(9)
    if given is not None:
        e.expect(9, (batch, length))
        return given
    return e.constant(np.broadcast_to(np.arange(past, past + length), (batch, length)), dtype=np.int64)


def _attend_in_groups(e: Expansion, h: Heads, groups: int) -> ir.Value:
    """The queries that share a key are rows of one product, so that no key is repeated."""
    each = h.heads // groups
    rows = h.query if each == 1 else e.reshape(h.query, h.batch, groups, each * h.length, h.size)
    scores = e.op("MatMul", rows, e.transpose(h.key, 0, 1, 3, 2))
    scores = e.scaled(scores, e.number("scale", 0.0) or 1 / math.sqrt(h.size), h.like)
    if each > 1:
        scores = e.reshape(scores, h.batch, h.heads, h.length, h.total)
    if softcap := e.number("softcap", 0.0):
        scores = e.scaled(e.op("Tanh", e.scaled(scores, 1 / softcap, h.like)), softcap, h.like)
    window = e.integer("local_window_size", -1)
    seen = np.tri(h.length, h.total, h.past, np.bool_)
    if window > 0:
        seen &= ~np.tri(h.length, h.total, h.past - window, np.bool_)
    lowest = e.constant(e.lowest(h.like), h.like)
    bias = attention_bias(e, 10, h.batch, h.heads, h.length, h.total)
    if bias is None:
        scores = e.op("Where", e.constant(seen, dtype=np.bool_), scores, lowest)
    else:
        ahead = lowest_where_ahead(e, e.constant(seen, dtype=np.bool_), None, h.like, lowest)
        scores = e.plus(scores, bias, ahead)
    weights = _softmax_with_sink(e, scores, h)
    if each > 1:
        weights = e.reshape(weights, h.batch, groups, each * h.length, h.total)
    answer = e.op("MatMul", weights, h.value)
    if each > 1:
        answer = e.reshape(answer, h.batch, h.heads, h.length, h.size)
    return merge(e, answer, h)


def _softmax_with_sink(e: Expansion, scores: ir.Value, h: Heads) -> ir.Value:
    """Softmax, in which each head may have one more score, which counts in the sum and weighs nothing."""
    sink = e.optional(11)
    if sink is None and e.integer("smooth_softmax", -1) < 1:
        return e.op("Softmax", scores, axis=-1)
    e.expect(11, (h.heads,))
    column = e.constant(np.zeros((1, 1, 1, 1)), h.like) if sink is None else e.reshape(sink, 1, h.heads, 1, 1)
    column = e.op("Expand", column, e.integers(h.batch, h.heads, h.length, 1))
    weights = e.op("Softmax", e.op("Concat", scores, column, axis=3), axis=-1)
    return e.part(weights, 3, 0, h.total)


def rotated(
    e: Expansion,
    value: ir.Value,
    positions: ir.Value,
    cosines: ir.Value,
    sines: ir.Value,
    size: int,
    interleaved: int,
    outer: tuple[int, int, int],
) -> ir.Value:
    """`value`, [B, N, S, `size`] with `outer` = (B, N, S), turned by the angles of `positions`, [B, S], in two tables.

    The first 2 * (columns of the tables) elements of each head turn, as pairs of neighbours if `interleaved`, else one of each
    half; the others stay.
    """
    tables = [e.shape(table) for table in (cosines, sines)]
    if any(len(table) != 2 for table in tables) or tables[0] != tables[1] or not 0 < 2 * tables[0][1] <= size:
        raise RefusedError(f"of heads of {size} elements with tables of shapes {tables[0]} and {tables[1]}")
    batch, _, length = outer
    half = tables[0][1]
    cos, sin = (e.reshape(e.op("Gather", table, positions), batch, 1, length, half) for table in (cosines, sines))
    turning = value if 2 * half == size else e.part(value, 3, 0, 2 * half)
    if interleaved:
        pairs = e.reshape(turning, *outer, half, 2)
        real, imaginary = (e.reshape(e.part(pairs, 4, i, i + 1), *outer, half) for i in (0, 1))
    else:
        real, imaginary = e.part(turning, 3, 0, half), e.part(turning, 3, half, 2 * half)
    turned = [
        e.op("Sub", e.op("Mul", real, cos), e.op("Mul", imaginary, sin)),
        e.op("Add", e.op("Mul", real, sin), e.op("Mul", imaginary, cos)),
    ]
    if interleaved:
        both = e.op("Concat", *(e.reshape(part, *outer, half, 1) for part in turned), axis=4)
        turned = [e.reshape(both, *outer, 2 * half)]
    if 2 * half < size:
        turned.append(e.part(value, 3, 2 * half, size))
    return turned[0] if len(turned) == 1 else e.op("Concat", *turned, axis=3)


def _rotary(e: Expansion) -> list[ir.Value | None]:
    """Positions are [B, S], or [1]: where the first word of each sentence stands."""
    if e.integer("is_packed_batching", 0) or e.number("scale", 1.0) not in (0.0, 1.0):
        raise RefusedError("with is_packed_batching or scale")
    x, shape = e.input(0), e.ranked(0, 3, 4)
    if len(shape) == 4:
        batch, heads, length, size = shape
        value = x
    else:
        batch, length, width = shape
        heads = e.integer("num_heads", 0) or width // max(1, 2 * e.ranked(2, 2)[1])
        if heads < 1 or width % heads:
            raise RefusedError(f"with {heads} heads of {width} channels")
        size = width // heads
        value = split_heads(e, x, batch, length, heads, size)
    positions = e.input(1)
    if e.shape(positions) == (1,):
        positions = e.op("Add", positions, e.constant(np.arange(length), positions))
        positions = e.op("Expand", e.reshape(positions, 1, length), e.integers(batch, length))
    elif e.shape(positions) != (batch, length):
        raise RefusedError(f"with positions of shape {e.shape(positions)} over {batch} x {length} words")
    value = rotated(
        e, value, positions, e.input(2), e.input(3), size, e.integer("interleaved", 0), (batch, heads, length)
    )
    if len(shape) == 3:
        value = e.reshape(e.transpose(value, 0, 2, 1, 3), *shape)
    return [value]


EXPANSIONS: dict[str, Expand] = {"GroupQueryAttention": _group_query, "RotaryEmbedding": _rotary}
"""Operators by name."""
