"""Rows of int8 codes, each with a float32 scale: how a cache of keys and values in 8 bits is stored.

A row of `size` floats x becomes `row_bytes(size)` bytes: the codes, zeros up to a multiple of 4, and the scale, at
`scale_offset(size)`. The scale is max |x| * (1 / 127), and a code is x * (127 / max |x|), rounded to the nearest, ties to even;
each factor is rounded to float32. A row whose largest element is below `LEAST` has scale 0 and codes 0. If an element is NaN or
infinite, the scale is so too.

`ScatterQuantised` writes quantised rows into a copy of such a tensor, as `ScatterAt` writes floats
(`compiler.kernels.indexing.operators`); only `compiler.passes.quantised_caches` produces it. Row (item, step) of the updates
has `size` elements from the place on that `ScatterAt` defines. The other attributes are `ScatterAt`'s; `target` and `stride`
are in bytes. If several steps of an item reach one row, the last one remains.
"""

from __future__ import annotations

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.operators.registry import FLOAT, INDEX, Operator, Types, register

_BYTES: Types = frozenset({"int8"})

LARGEST_CODE = 127
"""The code of an element that is as large as the largest of its row."""

LEAST = LARGEST_CODE * 2.0**-80
"""The least largest element of a row that is not stored as zeros, 1.05e-22. Above it, denormal numbers, which devices may take
for 0, have code 0 all the same.
"""


def scale_offset(size: int) -> int:
    """Bytes from a row of `size` codes to its scale: a multiple of 4, so that it can be read as one number."""
    return -(-size // ITEMSIZE["float32"]) * ITEMSIZE["float32"]


def row_bytes(size: int) -> int:
    """Bytes of a row of `size` codes and its scale."""
    return scale_offset(size) + ITEMSIZE["float32"]


register(
    __name__,
    Operator("ScatterQuantised", (_BYTES, INDEX, FLOAT), kernel="scatter_quantised", onnx=False),
)
