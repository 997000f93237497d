"""Functions of single elements, where vectors of them are computed at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compared import DEVICES, Nodes, compare


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_sines_of_small_numbers_beside_huge_ones(place: tuple[str, str], tmp_path: Path) -> None:
    """PoCL's own are wrong there (docs/opencl-notes.md)."""
    angles = np.random.default_rng(0).normal(0, 0.5, (64, 16)).astype(np.float32)
    angles[:, -1] = np.resize(np.array([1e9, 1e30, -3e7, 2e6, 100.0], np.float32), 64)
    n = Nodes()
    x = n.input(angles)
    for op in ("Sin", "Cos", "Tan"):
        n.node(op, x)
    functions = (np.sin, np.cos, np.tan)
    compare(n, place, tmp_path, lambda model, feeds: [f(feeds[x].astype(np.float64)).astype(np.float32) for f in functions])
