"""Bands of attention: which constant masks are one, compared with a search over all bands."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem.compiler.kernels.attention.operators import Band
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
                moved = band.moved(start, rows)
                assert moved is not None
                np.testing.assert_array_equal(moved.seen(rows - start, keys), seen[start:])


def test_numbers() -> None:
    assert Band(None, 3).numbers == [3]
    assert Band(-2, 0, 4).numbers == [-2, 0, 4]
    assert Band(None, None).numbers == []


def test_parts_of_a_band_of_several_heads() -> None:
    """Within a period, or from the start of one; otherwise there is none."""
    band, keys = Band(-1, 2, 4), 9
    seen = band.seen(12, keys)
    assert band.pairs(12, keys) == seen.sum()
    np.testing.assert_array_equal(seen[4:8], Band(-1, 2).seen(4, keys))
    for start, stop in combinations(range(13), 2):
        moved = band.moved(start, stop)
        assert (moved is None) == (start % 4 != 0 and start // 4 != (stop - 1) // 4)
        if moved is not None:
            np.testing.assert_array_equal(moved.seen(stop - start, keys), seen[start:stop])
