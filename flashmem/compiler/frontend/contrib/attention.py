"""Expansion of attention over heads: packed or separate projections, masks, and keys and values of earlier calls.

B is the batch and S the length of the queries. T is the number of keys, P of them from earlier calls. N is the number of heads
and H the size of a head. A projection from a packed weight is one product, whose result is sliced: the weight stays in its
file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError


@dataclass
class Heads:
    """Queries, keys and values: `query` is [B, N, S, H], the others [B, N, T, H]; heads of `value` have size `value_size`.

    `length` is S, `past` is P, `total` is T; constants have the element type of the input `like`.
    """

    batch: int
    heads: int
    length: int
    past: int
    total: int
    size: int
    value_size: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    like: ir.Value


def attend(e: Expansion, h: Heads, padding: ir.Value | None, bias: ir.Value | None) -> tuple[ir.Value, ir.Value]:
    """The answer of attention, [B, S, N * H], and the scores before softmax.

    `padding` and `bias` are added to the scores; the attributes scale and unidirectional are the node's.
    """
    if not h.size:
        raise RefusedError("of heads without elements")
    scores = e.op("MatMul", h.query, e.transpose(h.key, 0, 1, 3, 2))
    scores = e.scaled(scores, e.number("scale", 0.0) or 1 / math.sqrt(h.size), h.like)
    if e.integer("unidirectional", 0) and h.length > 1:
        lowest = e.constant(e.lowest(h.like), h.like)
        seen = e.constant(np.tri(h.length, h.total, h.past, np.bool_), dtype=np.bool_)
        if padding is None and bias is None:
            scores = e.op("Where", seen, scores, lowest)
        else:  # the keys ahead of a query are masked in any case
            padding = lowest_where_ahead(e, seen, padding, h.like, lowest)
    scores = e.plus(scores, bias, padding)  # this order rounds rows that are all padding like ONNX Runtime
    return merge(e, e.op("MatMul", e.op("Softmax", scores, axis=-1), h.value), h), scores


def lowest_where_ahead(e: Expansion, seen: ir.Value, padding: ir.Value | None, like: ir.Value, lowest: ir.Value) -> ir.Value:
    """The addend of scores: `padding`, or zero, where a key is seen, and the lowest number elsewhere."""
    return e.op("Where", seen, e.constant(0, like) if padding is None else padding, lowest)


def merge(e: Expansion, value: ir.Value, h: Heads) -> ir.Value:
    """[B, N, S, H] -> [B, S, N * H]."""
    return e.reshape(e.transpose(value, 0, 2, 1, 3), h.batch, h.length, h.heads * h.value_size)


def split_heads(e: Expansion, value: ir.Value, batch: int, length: int, heads: int, size: int) -> ir.Value:
    """[B, S, N * H] -> [B, N, S, H]."""
    return e.transpose(e.reshape(value, batch, length, heads, size), 0, 2, 1, 3)


def padding_mask(e: Expansion, index: int, batch: int, length: int, total: int) -> ir.Value | None:
    """The addend of scores for input `index`, a mask of keys in one of its forms; broadcasts to [B, N, S, T].

    Masks are [B, T] or [B, S, T], not above 0 for padding. Other forms are [B], the lengths of the sentences, and [2 * B], the
    ends and then the starts of the sentences.
    """
    mask = e.optional(index)
    if mask is None:
        return None
    shape = e.shape(mask)
    if shape in ((batch, total), (batch, length, total)):
        kept = e.op("Greater", mask, e.constant(0, mask))
        kept = e.reshape(kept, batch, 1, 1 if len(shape) == 2 else length, total)
    elif shape in ((batch,), (2 * batch,)):
        ends = mask if shape == (batch,) else e.part(mask, 0, 0, batch)
        places = e.constant(np.arange(total).reshape(1, 1, 1, total), mask)
        kept = e.op("Less", places, e.reshape(ends, batch, 1, 1, 1))
        if shape != (batch,):
            starts = e.reshape(e.part(mask, 0, batch, 2 * batch), batch, 1, 1, 1)
            kept = e.op("And", kept, e.op("Not", e.op("Less", places, starts)))
    else:
        raise RefusedError(f"with a mask of shape {shape} over {batch} x {length} queries and {total} keys")
    like = e.input(0)
    filler = e.constant(e.number("mask_filter_value", -10000.0), dtype=float_type(e, like))
    return e.op("Where", kept, e.constant(0, dtype=float_type(e, like)), filler)


def float_type(e: Expansion, like: ir.Value) -> np.dtype[np.generic]:
    """The element type of `like`, or float32 if it is quantised."""
    dtype = e.dtype(like)
    return np.dtype(np.float32) if dtype in (np.uint8, np.int8) else dtype


def attention_bias(e: Expansion, index: int, batch: int, heads: int, length: int, total: int) -> ir.Value | None:
    """Input `index`, an addend of scores."""
    shapes = [(b, n, length, total) for b in (batch, 1) for n in (heads, 1)]
    e.expect(index, *shapes)
    return e.optional(index)


def join(e: Expansion, past: ir.Value | None, new: ir.Value) -> ir.Value:
    """Concatenate keys or values [B, N, P, H] of earlier calls and the new ones."""
    return new if past is None else e.op("Concat", past, new, axis=2)


def projected_columns(e: Expansion) -> int:
    """Columns of the projection weight, input 1, of input 0; the bias, input 2, has as many."""
    width = e.ranked(0, 3)[2]
    depth, columns = e.ranked(1, 2)
    if depth != width:
        raise RefusedError(f"with weights of shape {(depth, columns)} over an input of {width} channels")
    e.expect(2, (columns,))
    return columns


def _attention(e: Expansion) -> list[ir.Value | None]:
    """Self attention: one weight [D, 3 * N * H] projects the input to queries, keys and values."""
    columns = projected_columns(e)
    projected = e.plus(e.op("MatMul", e.input(0), e.input(1)), e.optional(2))
    return project_and_attend(e, projected, columns, mask=3, past=4, bias=5)


def project_and_attend(
    e: Expansion, projected: ir.Value, columns: int, mask: int, past: int, bias: int | None
) -> list[ir.Value | None]:
    """Self attention over `projected`, [B, S, `columns`]: queries, keys and values. The other arguments are input indices."""
    batch, length, _ = e.ranked(0, 3)
    heads = head_count(e)
    for name in ("past_present_share_buffer", "do_rotary"):
        if e.integer(name, 0):
            raise RefusedError(f"with {name}")
    sizes = [int(size) for size in e.numbers("qkv_hidden_sizes")] or [columns // 3] * 3
    if len(sizes) != 3 or sum(sizes) != columns or sizes[0] != sizes[1] or any(size < 1 or size % heads for size in sizes):
        raise RefusedError(f"with {heads} heads and hidden sizes {sizes} over weights of {columns} columns")
    size = sizes[0] // heads
    value_size = sizes[2] // heads
    starts = (0, sizes[0], 2 * sizes[0])
    query, key, value = (
        split_heads(e, e.part(projected, 2, start, start + wide), batch, length, heads, wide // heads)
        for start, wide in zip(starts, sizes, strict=True)
    )
    earlier = e.optional(past)
    before = 0
    if earlier is not None:
        before = e.ranked(past, 5)[3]
        e.expect(past, (2, batch, heads, before, size))
        if value_size != size:
            raise RefusedError("with past state and values of another size")
        old = [e.reshape(e.part(earlier, 0, i, i + 1), batch, heads, before, size) for i in (0, 1)]
        key = join(e, old[0], key)
        value = join(e, old[1], value)
    total = before + length
    present = None
    if e.wants(1):
        if value_size != size:
            raise RefusedError("with present state and values of another size")
        both = (e.reshape(each, 1, batch, heads, total, size) for each in (key, value))
        present = e.op("Concat", *both, axis=0)
    dtype = float_type(e, e.input(0))
    like = e.input(0) if e.dtype(e.input(0)) == dtype else e.constant(0, dtype=dtype)
    h = Heads(batch, heads, length, before, total, size, value_size, query, key, value, like)
    padding = padding_mask(e, mask, batch, length, total)
    added = None if bias is None else attention_bias(e, bias, batch, heads, length, total)
    answer, _ = attend(e, h, padding, added)
    return [answer, present]


def head_count(e: Expansion) -> int:
    """Number of heads (attribute num_heads)."""
    heads = e.integer("num_heads")
    if heads < 1:
        raise RefusedError(f"with {heads} heads")
    return heads


def _multi_head(e: Expansion) -> list[ir.Value | None]:
    """Attention of projected queries, keys and values, in one of four packings."""
    e.refuse_input(8, 9)
    heads = head_count(e)
    shape = e.ranked(0, 3, 5)
    if len(shape) == 5:
        query, key, value, batch, length, sizes = _packed(e, 0, 3, heads)
        new, (size, value_size) = length, sizes
    else:
        batch, length, width = shape
        size = _head_size(width, heads)
        query = _biased(e, e.input(0), 0, width)
        query = split_heads(e, query, batch, length, heads, size)
        key, value, new, value_size = _keys(e, heads, batch, size, width)
    past = 0
    if (earlier := e.optional(6)) is not None:
        past = e.ranked(6, 4)[2]
        e.expect(6, (batch, heads, past, size))
        e.expect(7, (batch, heads, past, value_size))
        key = join(e, earlier, key)
        value = join(e, e.input(7), value)
    total = past + new
    if e.integer("unidirectional", 0) and new != length:
        raise RefusedError(f"that is unidirectional, of {length} queries and {new} keys,")
    h = Heads(batch, heads, length, past, total, size, value_size, query, key, value, e.input(0))
    padding = padding_mask(e, 4, batch, length, total)
    answer, scores = attend(e, h, padding, attention_bias(e, 5, batch, heads, length, total))
    return [answer, key, value, scores]


def _head_size(width: int, heads: int) -> int:
    if width % heads or not width:
        raise RefusedError(f"with {heads} heads of {width} channels")
    return width // heads


def _biased(e: Expansion, value: ir.Value, start: int, width: int) -> ir.Value:
    """`value` plus its part of the packed bias, input 3."""
    bias = e.optional(3)
    return value if bias is None else e.op("Add", value, e.part(bias, 0, start, start + width))


def _packed(e: Expansion, index: int, parts: int, heads: int) -> tuple[ir.Value, ir.Value, ir.Value, int, int, tuple[int, int]]:
    """Unpack input `index`, [B, S, N, parts, H]: its parts as [B, N, S, H] (the first twice, of two), B, S and sizes."""
    e.refuse_input(*range(index + 1, 3))
    batch, length, count, packed, size = e.ranked(index, 5)
    if (count, packed) != (heads, parts):
        raise RefusedError(f"with {heads} heads and input {index} of shape {e.shape(e.input(index))}")
    made = []
    for i in range(parts):
        part = e.reshape(e.part(e.input(index), 3, i, i + 1), batch, length, heads, size)
        start = (i + 3 - parts) * heads * size
        if (bias := e.optional(3)) is not None:
            part = e.op("Add", part, e.reshape(e.part(bias, 0, start, start + heads * size), heads, size))
        made.append(e.transpose(part, 0, 2, 1, 3))
    return made[0], made[-2], made[-1], batch, length, (size, size)


def _keys(e: Expansion, heads: int, batch: int, size: int, width: int) -> tuple[ir.Value, ir.Value, int, int]:
    """Keys and values as [B, N, L, H], L, and the head size of values."""
    shape = e.ranked(1, 3, 4, 5)
    if len(shape) == 5:
        _, key, value, _, new, _ = _packed(e, 1, 2, heads)
        e.expect(1, (batch, new, heads, 2, size))
        return key, value, new, size
    if len(shape) == 4:  # they already have the form of past state, and no bias
        e.refuse_input(3)
        new = shape[2]
        value_size = e.ranked(2, 4)[3]
        e.expect(1, (batch, heads, new, size))
        e.expect(2, (batch, heads, new, value_size))
        return e.input(1), e.input(2), new, value_size
    new = shape[1]
    value_width = e.ranked(2, 3)[2]
    value_size = _head_size(value_width, heads)
    e.expect(1, (batch, new, width))
    e.expect(2, (batch, new, value_width))
    e.expect(3, (2 * width + value_width,))
    key = _biased(e, e.input(1), width, width)
    value = _biased(e, e.input(2), 2 * width, value_width)
    return split_heads(e, key, batch, new, heads, size), split_heads(e, value, batch, new, heads, value_size), new, value_size


EXPANSIONS: dict[str, Expand] = {"Attention": _attention, "MultiHeadAttention": _multi_head}
"""Expansions by operator name."""
