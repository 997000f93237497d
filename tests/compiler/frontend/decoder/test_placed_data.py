"""Matrices are written some rows at a time, at the places that they were given before."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
from onnx.external_data_helper import ExternalDataInfo

from flashmem.compiler.frontend.decoder.placed_data import PlacedData
from flashmem.compiler.frontend.decoder.weights import BlockedMatrix, FileTensor, matrix


def test_memory_does_not_grow_with_a_matrix(tmp_path: Path) -> None:
    """10 MB of weights in blocks."""
    rows, depth, random = 1 << 14, 1 << 10, np.random.default_rng(1)
    data = np.tile(random.integers(0, 256, (16, depth // 32 * 20), np.uint8), (rows // 16, 1))
    data[:, 1::20] = data[:, 3::20] = 0x20  # finite scales
    tensor = FileTensor("t", "Q4_1", (rows, depth), data)
    placed = PlacedData(tmp_path / "data")
    small = placed.array("first", np.arange(5000.0))
    tracemalloc.start()
    try:
        _, proto = placed.matrix("t", [tensor], matrix)
        placed.write()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    assert proto.name == "t" and [*proto.dims] == [*data.shape]
    written, at = np.fromfile(tmp_path / "data", np.uint8), 8000 + 16 * 7
    assert len(written) == placed.nbytes
    wanted = matrix(tensor, slice(at, at + 2))
    assert isinstance(wanted, BlockedMatrix) and wanted.kind == "Q4_1"
    np.testing.assert_array_equal(wanted.blocks, data[at : at + 2])
    place, row = int(ExternalDataInfo(proto).offset or 0), data.shape[1]
    assert written[place + at * row : place + (at + 2) * row].tobytes() == wanted.blocks.tobytes()
    first = int(ExternalDataInfo(small).offset or 0)
    np.testing.assert_array_equal(written[first : first + 40_000].view(np.float64), np.arange(5000.0))
