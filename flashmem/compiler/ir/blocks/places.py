"""Where the bits of a block's numbers are in a row of blocks as tables have it: in the order of a packed panel, by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.format import GROUP, BlockFormat, Plane


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
    """The places of the numbers in `BlockFormat.rows` of a kind, the bits of a plane side by side in a byte."""
    found = [_of_codes(kind, plane) for plane in kind.code_rows(1)]
    found += [_of_factors(kind, plane) for plane in kind.factor_rows()]
    return BitPlaces(np.concatenate(found).astype(np.uint16), 0, 2)


def _of_codes(kind: BlockFormat, plane: Plane) -> NDArray[np.intp]:
    at = np.arange(kind.weights)
    if plane.bits == 8:
        return 8 * (plane.at + at)
    shared = 4 // plane.bits  # weights in four bits
    return 8 * plane.at + 4 * (at // (GROUP * shared) * GROUP + at % GROUP) + at // GROUP % shared * plane.bits


def _of_factors(kind: BlockFormat, plane: Plane) -> NDArray[np.intp]:
    at = np.arange(kind.factors)
    return 8 * (plane.at + at % plane.rows) + at // plane.rows * plane.bits
