"""Random inputs for operators, including large, tiny, offset and positive ones, where rounding errors do not cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "around 1e3": lambda random, shape: 1e3 + random.standard_normal(shape),
    "around -1e4": lambda random, shape: -1e4 + 3 * random.standard_normal(shape),
    "around 1e6": lambda random, shape: 1e6 + 8 * random.standard_normal(shape),
    "large": lambda random, shape: 1e5 * random.standard_normal(shape),
    "tiny": lambda random, shape: 1e-12 * random.standard_normal(shape),
    "positive": lambda random, shape: random.uniform(0.1, 1.0, shape),
    "of many sizes": lambda random, shape: random.standard_normal(shape) * 10.0 ** random.uniform(-6, 6, shape),
}
"""The distribution of each kind of numbers."""


def floats(*shape: int, kind: str = "normal", seed: int = 7) -> NDArray[np.float32]:
    """float32 numbers of a kind of `KINDS`; the same for the same arguments."""
    return KINDS[kind](np.random.default_rng([seed, *shape]), shape).astype(np.float32)
