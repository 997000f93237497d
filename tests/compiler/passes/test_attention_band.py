"""Bands of attention: which constant masks are one, compared with a search over all bands."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem.compiler.operators.attention import Band
from flashmem.compiler.passes.attention_band import band_of


def searched(seen: NDArray[np.bool_]) -> bool:
    """Whether any band gives this mask, hides a key and leaves every query one."""
    rows, keys = seen.shape
    limits = [None, *range(-rows, keys)]
    distance = np.arange(keys) - np.arange(rows)[:, None]
    for low, high in product(limits, limits):
        made = (np.full_like(distance, True) if low is None else distance >= low) & (True if high is None else distance <= high)
        if np.array_equal(made, seen):
            return bool(seen.any(axis=1).all() and not seen.all())
    return False


@pytest.mark.parametrize(("rows", "keys"), [(1, 5), (3, 3), (2, 4), (4, 2)])
def test_every_mask(rows: int, keys: int) -> None:
    for bits in product((False, True), repeat=rows * keys):
        seen = np.array(bits).reshape(rows, keys)
        band = band_of(seen)
        assert (band is not None) == searched(seen), seen
        if band is not None:
            np.testing.assert_array_equal(band.seen(rows, keys), seen)
            assert band.pairs(rows, keys) == seen.sum()
            for start in range(rows):
                np.testing.assert_array_equal(band.moved(start).seen(rows - start, keys), seen[start:])


def test_limits() -> None:
    assert Band(None, 3).limits == [3]
    assert Band(-2, 0).limits == [-2, 0]
    assert Band(None, None).limits == []
