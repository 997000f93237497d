"""Slices of fixed length at a position computed at run time, compared with ONNX Runtime where the slice is inside its axis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import flashmem
from flashmem.base.errors import UnsupportedModelError
from flashmem.base.types import MemoryPath
from tests.support.compared import DEVICES

MODEL = """
<ir_version: 10, opset_import: ["" : 17]>
window (float[7, 10] x, int64[1] at, int32 place, float[7, 10] table) => (
    float[3, 10] rows, float[7, 4] columns, float[3, 4] both, float[5, 1] step, float[2, 10] before)
<int64[1] three = {3}, int64[1] four = {4}, int64[1] zero = {0}, int64[1] one = {1}, int64 wide = {1}, int32 unit = {1},
 int64[2] axes = {-1, 0}, int64[2] ones = {1, 1}, int64[1] two = {2}, int64[1] five = {5}>
{
    until = Add (three, at)
    rows = Slice (x, at, until)
    final = Add (at, four)
    columns = Slice (x, at, final, one, one)
    starts = Concat <axis = 0> (at, at)
    ends = Concat <axis = 0> (final, until)
    both = Slice (x, starts, ends, axes, ones)
    next = Add (place, unit)
    left = Unsqueeze (place, zero)
    right = Unsqueeze (next, zero)
    wide_left = Cast <to = 7> (left)
    wide_right = Cast <to = 7> (right)
    low = Concat <axis = 0> (zero, wide_left)
    high = Concat <axis = 0> (five, wide_right)
    step = Slice (table, low, high)
    since = Sub (at, two)
    before = Slice (x, since, at)
}
"""


@pytest.mark.parametrize(("device", "path"), DEVICES, ids=str)
def test_a_slice_moves(device: str, path: MemoryPath, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    runtime = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    compiled = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device=device, memory_path=path)
    random = np.random.default_rng(1)
    with flashmem.Session(compiled, device=device) as session:
        for at, place in ((2, 0), (4, 9), (3, 4), (-5, -2), (-5, -9)):  # negative positions count from the end
            x, table = (random.uniform(low, 4, (7, 10)).astype(np.float32) for low in (-9, 2))
            feeds = {"x": x, "table": table, "at": np.array([at]), "place": np.array(place, np.int32)}
            for answer, wanted in zip(session.run(None, feeds), runtime.run(None, feeds), strict=True):
                np.testing.assert_array_equal(answer, wanted)
        for outside in (5, 2**40, -2, -8):  # ONNX's answers have fewer rows there
            wrong = feeds | {"at": np.array([outside])}
            with pytest.raises(ValueError, match="was given an index outside the tensor"):
                session.run(["rows"], wrong)
        np.testing.assert_array_equal(session.run(["rows"], feeds)[0], runtime.run(["rows"], feeds)[0])


@pytest.mark.parametrize(
    "text",
    [
        "end = Add (at, at)  y = Slice (x, at, end)",
        "end = Mul (at, two)  y = Slice (x, at, end)",
        "y = Slice (x, at, two)",
        "end = Add (other, two)  y = Slice (x, at, end)",
        "end = Sub (at, two)  y = Slice (x, at, end)",
        "end = Add (at, nine)  y = Slice (x, at, end)",
        "end = Add (at, two)  y = Slice (x, at, end, zero, two)",
    ],
)
def test_a_length_that_is_not_proven_is_refused(text: str, tmp_path: Path) -> None:
    model = f"""
    <ir_version: 10, opset_import: ["" : 17]>
    window (float[7, 3] x, int64[1] at, int64[1] other) => (y)
    <int64[1] two = {{2}}, int64[1] nine = {{9}}, int64[1] zero = {{0}}> {{ {text} }}
    """
    onnx.save(parser.parse_model(model), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="Slice"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device="generic-cpu")
