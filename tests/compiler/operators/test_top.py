"""TopK by partial selection: the order, ties and NaN of every position, on any axis, and the number of launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import DEVICES, OF_A_GPU, Nodes, answers_of

PLACES = [(*place, "") for place in DEVICES] + OF_A_GPU

CASES: tuple[tuple[tuple[int, ...], int, int, bool, str], ...] = (
    ((1, 1), 1, 1, True, "float32"), ((3, 40), 1, 40, False, "float32"), ((2, 5000), 1, 7, True, "float32"),
    ((5000,), 0, 1100, True, "float32"), ((1, 9001), 1, 40, False, "float32"), ((2, 2500, 3), 1, 30, True, "float32"),
    ((20, 300), 0, 20, False, "float32"), ((70, 30, 19), 1, 4, True, "float32"), ((1, 20000), 1, 1500, True, "float32"),
    ((2, 3), 1, 2, True, "float32"), ((3, 17), 1, 3, True, "float32"), ((4, 9), 0, 3, False, "float32"),
    ((1, 6000), 1, 25, True, "int32"), ((3, 3000), 1, 25, False, "int64"), ((1, 4100), 1, 300, True, "uint8"),
)  # fmt: skip
"""Shape, axis, k, largest, type: one chunk and several, all of a column, more than a heap keeps, and a sort by merges."""


def numbers(shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    """Few different numbers, so that most are tied; or in ascending order, so that each displaces another; or large."""
    random = np.random.default_rng(len(kind))
    count = int(np.prod(shape))
    if dtype != "float32":
        return random.integers(0, 200, count).astype(dtype).reshape(shape)
    if kind == "ascending":
        return np.sort(random.uniform(-3, 7, count)).astype(np.float32).reshape(shape)
    data = random.integers(-9, 9, count).astype(np.float32) + 1e3
    data[random.integers(0, count, count // 5)] = np.nan
    data[random.integers(0, count, count // 50)] = np.inf
    data[random.integers(0, count, count // 50)] = -np.inf
    return data.reshape(shape)


def selected(data: Any, axis: int, k: int, largest: bool) -> tuple[Any, Any]:
    """Values and positions by a stable sort of everything, in which NaN is the largest number; ties by position."""
    moved = np.moveaxis(data, axis, -1)
    key = moved.astype(np.float64) if moved.dtype.kind == "f" else moved.astype(np.int64)
    order = np.lexsort((-key if largest else key, ~np.isnan(key) if largest else np.isnan(key)), axis=-1)[..., :k]
    return tuple(np.moveaxis(each, -1, axis) for each in (np.take_along_axis(moved, order, -1), order))  # type: ignore[return-value]


@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
@pytest.mark.parametrize("kind", ["tied", "ascending"])
def test_every_position(kind: str, device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    nodes, exact = Nodes(), []
    for shape, axis, k, largest, dtype in CASES:
        data = numbers(shape, dtype, kind)
        counted = nodes.constant(np.array([k]))
        nodes.node("TopK", nodes.input(data), counted, dtypes=(dtype, "int64"), axis=axis, largest=int(largest))
        exact += selected(data, axis, k, largest)
    for answer, right in zip(
        answers_of(nodes.proto(), nodes.feeds, (device, path), tmp_path, compiled_for), exact, strict=True
    ):
        assert answer.tobytes() == np.ascontiguousarray(right).tobytes()


@pytest.mark.parametrize("device", ["pocl", "nvidia", "adreno750"])
@pytest.mark.parametrize(("shape", "k", "launches"), [((1, 50257), 40, 3), ((64, 1000), 5, 2), ((1, 8400), 8400, 3)])
def test_launches(device: str, shape: tuple[int, ...], k: int, launches: int, tmp_path: Path) -> None:
    """At most three: the best of chunks, their ranks, and the values at these positions."""
    nodes = Nodes()
    nodes.node("TopK", nodes.input(np.zeros(shape, np.float32)), nodes.constant(np.array([k])), dtypes=("float32", "int64"))
    onnx.save(nodes.proto(), tmp_path / "m.onnx")
    graph = read_graph(tmp_path / "m.onnx", resolve(BundleRequest(device=device)))
    made = generate(fuse(graph), load_descriptor(device))
    assert len(made.program.launches) <= (launches if device == "pocl" else 3)
