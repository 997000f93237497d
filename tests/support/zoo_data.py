"""The exports in tests/data: their recipes, and examples of their inputs."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.exports.models import find
from tests.support.paths import DATA

EXPORTS: dict[str, tuple[str, dict[str, Any]]] = runpy.run_path(str(DATA / "regenerate.py"))["EXPORTS"]


def examples(target: str, seed: int = 0, size: int | None = None) -> dict[str, NDArray[Any]]:
    """An example of every input of the export `target`."""
    return find(EXPORTS[target][0]).examples(np.random.default_rng(seed), size)
