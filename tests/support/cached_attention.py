"""Attention over caches that are states: a model of several of them, and the same attention over given keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.attention_cases import LOWEST, Model
from tests.support.inputs import KINDS
from tests.support.quantised_rows import dequantised

Array = NDArray[Any]


@dataclass(frozen=True)
class CachedAttention:
    """Attention of `heads` heads over caches of `key_heads` heads with `length` places; `filled` are in use after a run.

    A run writes keys and values of `rows` tokens, by TensorScatter, or by ScatterND (`by_index`).
    """

    batch: int
    heads: int
    key_heads: int
    rows: int
    length: int
    size: int
    value_size: int
    filled: int
    by_index: bool = False

    @property
    def first(self) -> int:
        """The place of the first new row."""
        return self.filled - self.rows

    def cache_shape(self, *, value: bool) -> tuple[int, int, int, int]:
        """The shape of the cache of keys, or of values, in floats."""
        return self.batch, self.key_heads, self.length, self.value_size if value else self.size

    def ends(self) -> Array:
        """For each query, the number of keys that it sees."""
        ends = self.first + 1 + np.arange(self.rows, dtype=np.int32).reshape(1, 1, -1, 1)
        return np.repeat(ends, self.batch, 0)

    def indices(self) -> Array:
        """Where new rows are written: the first place of each batch, or all places [batch, key heads, rows, 3]."""
        if not self.by_index:
            return np.full(self.batch, self.first, np.int64)
        places = np.indices((self.batch, self.key_heads, self.rows)) + np.array([0, 0, self.first]).reshape(-1, 1, 1, 1)
        return np.moveaxis(places, 0, -1).astype(np.int64)

    def add(self, m: Model) -> tuple[dict[str, str], list[str]]:
        """Add it to `m`: its states, past to present, keys first; and the inputs with new rows of keys and of values."""
        query = m.input(self.batch, self.heads, self.rows, self.size)
        at = m.given(self.indices())
        states: dict[str, str] = {}
        new = []
        for value in (False, True):
            shape = self.cache_shape(value=value)
            past = m.given(np.zeros(shape, np.float32))
            rows = m.given(_unlike(m, (*shape[:2], self.rows, shape[3])))
            if self.by_index:
                states[past] = m.op("ScatterND", past, at, rows)
            else:
                states[past] = m.op("TensorScatter", past, rows, at, axis=2)
            new.append(rows)
        self._attend(m, query, *states.values())
        return states, new

    def reference(self, m: Model, query: Array, stored: tuple[Array, Array]) -> None:
        """Add the same attention over the floats that the quantised rows `stored` stand for."""
        given = [dequantised(each, size) for each, size in zip(stored, (self.size, self.value_size), strict=True)]
        self._attend(m, m.given(query), *map(m.given, given))

    def _attend(self, m: Model, query: str, key: str, value: str) -> None:
        each = self.heads // self.key_heads
        rows = m.op("Reshape", query, m.shape(self.batch, self.key_heads, each * self.rows, self.size))
        scores = m.op("Mul", m.op("MatMul", rows, m.turned(key)), m.constant(self.size**-0.5))
        scores = m.op("Reshape", scores, m.shape(self.batch, self.heads, self.rows, self.length))
        seen = m.op("Less", m.constant(np.arange(self.length)[None], np.int32), m.given(self.ends()))
        weights = m.op("Softmax", m.op("Where", seen, scores, m.constant(LOWEST)), axis=-1)
        weights = m.op("Reshape", weights, m.shape(self.batch, self.key_heads, each * self.rows, self.length))
        answer = m.op("MatMul", weights, value)
        m.answer(m.op("Reshape", answer, m.shape(self.batch, self.heads, self.rows, self.value_size)))


def _unlike(m: Model, shape: tuple[int, ...]) -> Array:
    """Rows of the model's kind of numbers: with outliers in one channel, and a row of zeros in each head."""
    rows = KINDS[m.kind](m.generator, shape)
    rows[..., shape[-1] // 2] *= 20
    rows[:, :, 0] *= np.arange(shape[1]).reshape(1, -1, 1) > 0
    return rows.astype(np.float32)


def earlier_rows(case: CachedAttention, m: Model, *, value: bool) -> Array:
    """Floats of a cache that is full, as earlier runs may have left it."""
    return _unlike(m, case.cache_shape(value=value))


CASES: dict[str, CachedAttention] = {
    "one query": CachedAttention(1, 4, 2, 1, 1024, 64, 64, 37, by_index=True),
    "three queries": CachedAttention(1, 2, 2, 3, 257, 20, 36, 257),
    "no multiple of four": CachedAttention(2, 3, 1, 5, 60, 10, 9, 23, by_index=True),
    "twelve queries": CachedAttention(1, 6, 3, 12, 150, 16, 16, 140, by_index=True),
    "many queries": CachedAttention(2, 2, 1, 40, 130, 80, 80, 101),
}
"""Forms of kernels for one query and for more, heads that share keys, and heads of sizes that vectors do not fill."""
