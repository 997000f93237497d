"""Drawn contents of a launch's memory, in which elements differ, so that a misplaced one shows."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = ("signed", "offset", "tiny")
"""Around zero; far from zero with one sign, so that sums grow and differences cancel; and small."""

_PERIOD = 1048573
"""A prime number of elements."""
_GOLDEN = np.uint32(2654435769)  # 2^32 over the golden ratio: multiples of it are spread evenly, and all differ (Knuth, 6.4)


def drawn_bytes(nbytes: int, element: str, draw: str, salt: str, *, weights: bool) -> NDArray[np.uint8]:
    """`nbytes` bytes of elements of an OpenCL type. `salt` distinguishes the arguments of a launch. `weights`: packed weights.

    Floats are in [0.5, 2) with either sign for "signed", in [32, 33) for "offset", and 2^-10 of the first for "tiny". Integers
    of one byte have all values; others are small, so that most are valid as indices. Bytes of packed weights may contain scales
    in any place: each pair or four of them is a float of moderate size.
    """
    spread = _spread(nbytes // ITEMSIZES[element] + 1, salt, draw)
    if element in ("float", "double"):
        made: NDArray[Any] = _floats(spread, draw).astype(_TYPES[element])
    elif element == "half":
        made = _floats(spread, draw if draw != "tiny" else "signed").astype(np.float16)
    elif weights and element in ("char", "uchar"):
        made = (spread >> np.uint32(24)).astype(np.uint8)
        made[1::2] = 0x38 + made[1::2] % 8
    elif element in ("char", "uchar"):
        made = (spread >> np.uint32(24)).astype(np.uint8)
    else:
        low, high = {"signed": (0, 4), "offset": (0, 64), "tiny": (0, 8)}[draw]
        made = (low + ((spread >> np.uint32(8)) % np.uint32(high - low)).astype(np.int64)).astype(_TYPES[element])
    return np.ascontiguousarray(made).view(np.uint8)[:nbytes]


def drawn_texels(width: int, height: int, channel: str, salt: str) -> NDArray[Any]:
    """Texels of shape [height, width, 4] in the channel's type."""
    element = {"float": "float", "half": "half", "uint8": "uchar", "uint16": "ushort"}[channel]
    count = width * height * 4
    if element == "ushort":
        flat: NDArray[Any] = (_spread(count, salt, "signed") >> np.uint32(16)).astype(np.uint16)
    else:
        flat = drawn_bytes(count * ITEMSIZES[element], element, "signed", salt, weights=True).view(_TYPES[element])
    return flat.reshape(height, width, 4)


def _spread(count: int, salt: str, draw: str) -> NDArray[np.uint32]:
    """`count` different numbers of 32 bits without order. Large memory repeats them, at a distance that no stride has."""
    if count > _PERIOD:
        return np.resize(_spread(_PERIOD, salt, draw), count)
    start = np.uint32(zlib.crc32(f"{salt} {draw}".encode()))
    places = np.arange(count, dtype=np.uint32)
    mixed = (places + start) * _GOLDEN
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x85EBCA6B)  # odd: one to one
    return mixed ^ (mixed >> np.uint32(13))


def _floats(spread: NDArray[np.uint32], draw: str) -> NDArray[np.float32]:
    share = (spread >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    if draw == "offset":
        return np.float32(32.0) + share
    signed = np.where(spread & np.uint32(1), share * 1.5 + 0.5, share * -1.5 - 0.5).astype(np.float32)
    return signed * np.float32(2.0**-10) if draw == "tiny" else signed


_TYPES = {
    "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16, "int": np.int32, "uint": np.uint32,
    "long": np.int64, "ulong": np.uint64, "float": np.float32, "half": np.float16, "double": np.float64,
}  # fmt: skip
ITEMSIZES = {name: np.dtype(kind).itemsize for name, kind in _TYPES.items()}
"""Bytes of OpenCL's scalar types."""
