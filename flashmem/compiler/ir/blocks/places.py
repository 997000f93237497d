"""Where the bits of a block's numbers are in a file, found by taking apart blocks of which one bit is set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.format import BlockFormat, Bytes


@dataclass(frozen=True)
class BitPlaces:
    """The places of a block's numbers.

    `numbers` has the bit, counted from the block's first byte, at which the bits of each number begin in each plane: of each
    plane of codes those of all weights, then of each plane of factors. `scale` and `minimum` are bytes.
    """

    numbers: NDArray[np.uint16]
    scale: int
    minimum: int


@cache
def bit_places(kind: BlockFormat) -> BitPlaces:
    """The places of the numbers in blocks of a kind, the bits of a plane side by side in a byte."""
    count = 8 * kind.nbytes
    parts = kind.parts(np.packbits(np.eye(count, dtype=np.uint8), axis=1, bitorder="little"))
    found = [_places(parts.codes, plane.below) for plane in kind.code_rows(1)]
    found += [_places(parts.factors, plane.below) for plane in kind.factor_rows() if parts.factors is not None]
    scale, minimum = (0 if each is None else int(each[:, 0].argmax()) // 8 for each in (parts.scale, parts.minimum))
    return BitPlaces(np.concatenate(found).astype(np.uint16), scale, minimum)


def _places(numbers: Bytes, bit: int) -> NDArray[np.intp]:
    """The bit of a block that is that bit of each number; `numbers` [bits of a block, numbers]."""
    places: NDArray[np.intp] = (numbers >> np.uint8(bit) & np.uint8(1)).argmax(axis=0)
    return places
