"""Expansion of operators for caches of fixed length, which flashmem writes into decoders whose caches grow.

Positions are those of the S new tokens in the B rows of a batch, [B, S]. A cache has places for L tokens.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError


def _positions(e: Expansion) -> list[ir.Value]:
    """The positions of tokens [B, S]; input 1 is the number of tokens up to the last one in each row, [B], or a scalar."""
    batch, length = e.ranked(0, 2)
    total = e.cast(e.input(1), ir.DataType.INT64)
    before = e.op("Sub", total if batch == 1 else e.reshape(total, batch, 1), e.constant(length, dtype=np.int64))
    return [e.op("Add", before, e.constant(np.arange(length)[None].repeat(batch, 0), dtype=np.int64))]


def _write(e: Expansion) -> list[ir.Value]:
    """A cache [B, M, L, H] with new keys or values [B, M, S, H] at the positions in input 2."""
    batch, heads, length, _ = e.ranked(1, 4)
    shape = (batch, heads, length, 1)
    first = [np.broadcast_to(np.arange(n).reshape(-1, *[1] * (3 - axis)), shape) for axis, n in enumerate((batch, heads))]
    row = e.op("Expand", e.reshape(e.input(2), batch, 1, length, 1), e.integers(*shape))
    at = e.op("Concat", e.constant(np.concatenate(first, 3), dtype=np.int64), row, axis=3)
    return [e.op("ScatterND", e.input(0), at, e.input(1))]


def _mask(e: Expansion) -> list[ir.Value]:
    """Scores [B, N, S, L], the lowest number where a key comes after its query; input 1 has the queries' positions.

    In a batch of one, scores may have other dimensions before S.
    """
    scores, (batch, length) = e.shape(e.input(0)), e.ranked(1, 2)
    if batch > 1 and (len(scores) != 4 or scores[0] != batch):
        raise RefusedError(f"of scores of shape {scores} in a batch of {batch}")
    places = e.reshape(e.cast(e.input(1), ir.DataType.INT32), batch, 1, length, 1)
    keys = e.constant(np.arange(scores[-1])[None], dtype=np.int32)
    seen = e.op("Less", keys, e.op("Add", places, e.constant([1], dtype=np.int32)))
    return [e.op("Where", seen, e.input(0), e.constant(e.lowest(e.input(0)), e.input(0)))]


def _last_rows(e: Expansion) -> list[ir.Value]:
    """All rows of input 0 [B, S, H] if there are at most `few`, and the last one of more."""
    _, length, _ = e.ranked(0, 3)
    return [e.part(e.input(0), 1, 0 if length <= e.integer("few") else length - 1, length)]


OWN_EXPANSIONS: dict[str, Expand] = {
    "CacheMask": _mask,
    "CacheWrite": _write,
    "LastRows": _last_rows,
    "TokenPositions": _positions,
}
"""Expansions by operator name, of flashmem's own domain."""
