"""Expansion of grouped-query attention (fewer heads for keys than for queries) and of rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from flashmem.compiler.frontend.contrib.attention import (
    Heads,
    attention_bias,
    head_count,
    lowest_where_ahead,
    merge,
    split_heads,
)
from flashmem.compiler.frontend.contrib.expansion import STATE, Expand, Expansion, RefusedError


def _group_query(e: Expansion) -> list[ir.Value | None]:
    """Causal attention of N heads of queries over M heads of keys and values; input 5 is the number of keys minus 1."""
    e.refuse_input(12, 13, 14, 15)
    for name in ("kv_cache_bit_width", "qk_output", "sliding_window_cache"):
        if e.integer(name, 0):
            raise RefusedError(f"with {name}")
    if not e.integer("causal", 1):
        raise RefusedError("that is not causal")
    batch, length, width = e.ranked(0, 3)
    heads = head_count(e)
    groups = e.integer("kv_num_heads")
    packed = e.optional(1) is None
    count = heads + 2 * groups if packed else heads
    if groups < 1 or heads % groups or width % count or not width:
        raise RefusedError(f"with {heads} heads, {groups} for keys, and an input of {width} channels")
    size = width // count
    if packed:  # queries and keys turn together
        ends = np.cumsum([0, heads + groups, groups]) * size
        parts = [e.part(e.input(0), 2, int(a), int(b)) for a, b in pairwise(ends)]
        counts = [heads + groups, groups]
    else:
        e.expect(1, (batch, length, groups * size))
        e.expect(2, (batch, length, groups * size))
        parts = [e.input(0), e.input(1), e.input(2)]
        counts = [heads, groups, groups]
    *turning, value = (split_heads(e, part, batch, length, n, size) for part, n in zip(parts, counts, strict=True))
    cache = _cache(e, batch, groups, length, size)
    if e.integer("do_rotary", 0):
        tables = (e.input(7), e.input(8))
        interleaved = e.integer("rotary_interleaved", 0)
        turning = [
            rotated(e, each, cache.positions, *tables, size, interleaved, (batch, n, length))
            for each, n in zip(turning, counts, strict=False)
        ]
    if packed:
        turning = [e.part(turning[0], 1, 0, heads), e.part(turning[0], 1, heads, heads + groups)]
    query, key = turning
    key = _cached(e, cache, 3, key)
    value = _cached(e, cache, 4, value)
    h = Heads(batch, heads, length, cache.past, cache.total, size, size, query, key, value, e.input(0))
    return [_attend_in_groups(e, h, groups, cache.seen), key, value]


@dataclass
class _Cache:
    """Keys and values of earlier calls: `past` of them; `total` with those of this call.

    `seen` is the mask of keys that a query sees, and `positions` the positions of the queries, [B, S]. `rows` are the indices
    of all keys, for every head, in the concatenation of the earlier and the new ones, [B, M, T]; None if that is their order.
    `filled` is the mask of keys that exist, [B, 1, T, 1]. `places` is set instead if the cache is a state: the indices of the
    new keys in it, [B, M, S, 3].
    """

    past: int
    total: int
    seen: ir.Value
    positions: ir.Value
    rows: ir.Value | None = None
    filled: ir.Value | None = None
    places: ir.Value | None = None


def _cache(e: Expansion, batch: int, groups: int, length: int, size: int) -> _Cache:
    """The cache that inputs 3 to 6 and 9 describe."""
    past = 0 if e.optional(3) is None else e.ranked(3, 4)[2]
    if past:
        e.expect(3, (batch, groups, past, size))
        e.expect(4, (batch, groups, past, size))
    e.expect(5, (batch,), (batch, 1))
    e.expect(9, (batch, length))
    filled = e.known(e.input(5))
    if not past or (filled is not None and (filled == past + length - 1).all()):
        places = np.arange(past, past + length)
        seen = e.constant(_visible(e, places[:, None], np.arange(past + length)), dtype=np.bool_)
        positions = e.constant(np.broadcast_to(places, (batch, length)), dtype=np.int64)
        return _Cache(past, past + length, seen, e.optional(9) or positions)
    if STATE in e.node.metadata_props:
        return _state(e, batch, groups, length, past)
    wanted = e.known(e.input(6))
    if wanted is None or wanted.size != 1:
        raise RefusedError(
            "of earlier keys, whose total_sequence_length (input 6) is computed at run time, with a cache that is no state "
            "(compile with --state auto)"
        )
    return _filled_in_part(e, batch, groups, length, past, int(wanted.reshape(-1)[0]))


def _visible(e: Expansion, places: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of `keys` that queries at `places` see: those up to their own place, or the last few of them with a window."""
    window = e.integer("local_window_size", -1)
    seen: NDArray[np.bool_] = keys <= places
    return seen & (keys > places - window) if window > 0 else seen


def _filled_in_part(e: Expansion, batch: int, groups: int, length: int, past: int, wanted: int) -> _Cache:
    """A cache that each sentence has filled to its own length: new keys follow that part, and the rest is 0."""
    total = max(wanted, past)
    if wanted < length:
        raise RefusedError(f"of {length} words with a total_sequence_length of {wanted}")

    whole = partial(_whole, e)
    is_first_call = wanted == length
    earlier = e.constant(np.zeros((batch, 1)), dtype=np.int32) if is_first_call else _earlier(e, batch, length)
    keys = e.constant(np.arange(total)[None], dtype=np.int32)
    new = e.op("Add", e.op("Sub", keys, earlier), whole(past))
    there = e.op("Less", keys, e.op("Add", earlier, whole(length)))
    rows = e.op("Where", e.op("Less", keys, earlier), keys, e.op("Where", there, new, whole(0)))
    first = e.constant(np.arange(batch * groups).reshape(batch, groups, 1) * (past + length), dtype=np.int32)
    rows = e.op("Add", e.reshape(rows, batch, 1, total), first)
    places = e.op("Add", earlier, e.constant(np.arange(length)[None], dtype=np.int32))
    positions = e.optional(9) or e.cast(places, ir.DataType.INT64)
    seen = _seen(e, places, keys, (batch, length))
    return _Cache(past, total, seen, positions, rows, e.reshape(there, batch, 1, total, 1))


def _state(e: Expansion, batch: int, groups: int, length: int, past: int) -> _Cache:
    """A cache of fixed length in which new keys replace those at their places, so that it can be written in place.

    Input 6, the number of keys at the end of the longest sentence, may be computed at run time.
    """
    earlier = _earlier(e, batch, length)
    if length > 1:  # in a first call, sentences begin at 0 and may end before the longest
        is_first = e.op("Equal", e.reshape(e.input(6), 1, 1), _whole(e, length))
        earlier = e.op("Where", is_first, _whole(e, 0), earlier)
    places = e.op("Add", earlier, e.constant(np.arange(length)[None], dtype=np.int32))
    positions = e.optional(9) or e.cast(places, ir.DataType.INT64)
    shape = (batch, groups, length, 1)
    first = [np.broadcast_to(np.arange(n).reshape(-1, *[1] * (3 - axis)), shape) for axis, n in enumerate((batch, groups))]
    row = e.op("Expand", e.reshape(e.cast(places, ir.DataType.INT64), batch, 1, length, 1), e.integers(*shape))
    at = e.op("Concat", e.constant(np.concatenate(first, 3), dtype=np.int64), row, axis=3)
    keys = e.constant(np.arange(past)[None], dtype=np.int32)
    return _Cache(past, past, _seen(e, places, keys, (batch, length)), positions, places=at)


def _earlier(e: Expansion, batch: int, length: int) -> ir.Value:
    """The number of earlier keys of each sentence, [B, 1]."""
    return e.op("Add", e.reshape(e.input(5), batch, 1), _whole(e, 1 - length))


def _whole(e: Expansion, *numbers: int) -> ir.Value:
    return e.constant(numbers, dtype=np.int32)


def _seen(e: Expansion, places: ir.Value, keys: ir.Value, shape: tuple[int, int]) -> ir.Value:
    """The mask of keys that the queries at `places`, of `shape` (B, S), see."""
    ends = e.reshape(places, shape[0], 1, shape[1], 1)
    seen = e.op("Less", keys, e.op("Add", ends, _whole(e, 1)))
    if (window := e.integer("local_window_size", -1)) > 0:
        seen = e.op("And", seen, e.op("Less", e.op("Sub", ends, _whole(e, window)), keys))
    return seen


def _cached(e: Expansion, cache: _Cache, index: int, new: ir.Value) -> ir.Value:
    """Keys or values, [B, M, T, H]: the cache in input `index` and the new ones."""
    if not cache.past:
        return new
    if cache.places is not None:
        return e.op("ScatterND", e.input(index), cache.places, new)
    joined = e.op("Concat", e.input(index), new, axis=2)
    if cache.rows is None or cache.filled is None:
        return joined
    size = e.shape(e.input(index))[3]
    made = e.op("Gather", e.op("Reshape", joined, e.integers(-1, size)), cache.rows, axis=0)
    return e.op("Where", cache.filled, made, e.constant(0, e.input(0)))


def _attend_in_groups(e: Expansion, h: Heads, groups: int, seen: ir.Value) -> ir.Value:
    """Attention in groups: queries that share a key are rows of one product, so that no key is repeated."""
    each = h.heads // groups
    rows = h.query if each == 1 else e.reshape(h.query, h.batch, groups, each * h.length, h.size)
    scores = e.op("MatMul", rows, e.transpose(h.key, 0, 1, 3, 2))
    scores = e.scaled(scores, e.number("scale", 0.0) or 1 / math.sqrt(h.size), h.like)
    if each > 1:
        scores = e.reshape(scores, h.batch, h.heads, h.length, h.total)
    if softcap := e.number("softcap", 0.0):
        scores = e.scaled(e.op("Tanh", e.scaled(scores, 1 / softcap, h.like)), softcap, h.like)
    lowest = e.constant(e.lowest(h.like), h.like)
    bias = attention_bias(e, 10, h.batch, h.heads, h.length, h.total)
    if bias is None:
        scores = e.op("Where", seen, scores, lowest)
    else:
        ahead = lowest_where_ahead(e, seen, None, h.like, lowest)
        scores = e.plus(scores, bias, ahead)
    weights = _softmax_with_sink(e, scores, h)
    if each > 1:
        weights = e.reshape(weights, h.batch, groups, each * h.length, h.total)
    answer = e.op("MatMul", weights, h.value)
    if each > 1:
        answer = e.reshape(answer, h.batch, h.heads, h.length, h.size)
    return merge(e, answer, h)


def _softmax_with_sink(e: Expansion, scores: ir.Value, h: Heads) -> ir.Value:
    """Softmax with an optional further score for each head, which counts in the sum and has no value."""
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
    """Rotate `value`, [B, N, S, `size`] with `outer` = (B, N, S), by the angles of `positions`, [B, S], in two tables.

    The first 2 * (columns of the tables) elements of each head rotate, in pairs: neighbours if `interleaved`, else one of each
    half. The others stay.
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
        real = e.part(turning, 3, 0, half)
        imaginary = e.part(turning, 3, half, 2 * half)
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
    """Rotary embedding. Positions are [B, S], or [1]: the position of the first word of each sentence."""
    if e.integer("is_packed_batching", 0) or e.number("scale", 1.0) not in (0.0, 1.0):
        raise RefusedError("with is_packed_batching or scale")
    x = e.input(0)
    shape = e.ranked(0, 3, 4)
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
    value = rotated(e, value, positions, e.input(2), e.input(3), size, e.integer("interleaved", 0), (batch, heads, length))
    if len(shape) == 3:
        value = e.reshape(e.transpose(value, 0, 2, 1, 3), *shape)
    return [value]


EXPANSIONS: dict[str, Expand] = {"GroupQueryAttention": _group_query, "RotaryEmbedding": _rotary}
"""Expansions by operator name."""
