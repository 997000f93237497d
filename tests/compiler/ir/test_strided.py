"""Strided views against numpy's reshape, transpose and slice."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashmem.compiler.ir.graph import Value
from flashmem.compiler.ir.strided import StridedView


def elements(view: StridedView, memory: np.ndarray) -> np.ndarray:
    """The elements of the tensor that the view describes."""
    at = np.full((1,), view.start)
    for dimension in view.dimensions:
        for size, stride in dimension:
            at = (at[:, None] + stride * np.arange(size)).reshape(-1)
    return memory[at].reshape(view.shape)


@pytest.mark.parametrize("seed", range(60))
def test_moves_lie_where_the_view_says(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shape = tuple(int(n) for n in generator.choice([1, 2, 3, 4, 6], int(generator.integers(1, 5))))
    memory = np.arange(math.prod(shape))
    view, array, moved = StridedView.of(Value("x", shape, "float32")), memory.reshape(shape), 0
    for _ in range(6):
        kind = generator.integers(4)
        found: StridedView | None
        if kind == 0:
            perm = generator.permutation(array.ndim).tolist()
            found, made = view.transposed(perm), array.transpose(perm)
            assert found.untransposed(perm) == view
        elif kind == 1:
            factors = [f for size in array.shape for f in ([2, size // 2] if size % 2 == 0 else [size])]
            cuts = sorted(generator.integers(0, len(factors) + 1, 2).tolist())
            wanted = [math.prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
            found, made = view.reshaped(wanted), array.reshape(wanted)
        elif kind == 2:
            starts = [int(generator.integers(0, size)) for size in array.shape]
            steps = [int(generator.integers(1, 3)) for _ in array.shape]
            made = array[tuple(slice(start, None, step) for start, step in zip(starts, steps, strict=True))]
            found = view.sliced(made.shape, starts, steps)
        else:
            target = (2, *(3 if size == 1 else size for size in array.shape))
            found, made = view.expanded(target), np.broadcast_to(array, target)
        if found is None or made.size > 5000:
            continue
        view, array, moved = found, made, moved + 1
        assert view.shape == array.shape
        np.testing.assert_array_equal(elements(view, memory), array)
    assert moved


def test_what_has_no_view() -> None:
    view = StridedView.of(Value("x", (4, 6), "float32")).transposed((1, 0))
    assert view.reshaped((8, 3)) is None  # 6 x 4 transposed: 8 ends inside the 6
    assert view.reshaped((24,)) is not None
    merged = view.reshaped((24,))
    assert merged is not None and merged.sliced((12,), (0,), (1,)) is None
