"""ONNX-ML's Scaler, which scikit-learn's exporters write, compared with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import flashmem
from flashmem.base.errors import UnsupportedModelError
from tests.support.compared import DEVICES


def model(dtype: str, shape: tuple[int, ...], **attributes: list[float]) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", **attributes),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("y", "s")],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("dtype", "offset", "scale"),
    [
        ("float32", [1.5, -2.0, 0.25], [3.0, 0.5, -1.0]),
        ("int64", [2.5], [0.1]),
        ("int32", [0.0], [7.0]),
        ("float64", [-1.0, 4.0, 9.0], [1.0]),
    ],
)
def test_scaled_columns(dtype: str, offset: list[float], scale: list[float], tmp_path: Path) -> None:
    widened = (
        [offset * (3 // len(offset)), scale * (3 // len(scale))] if len({len(offset), len(scale)}) > 1 else [offset, scale]
    )
    proto = model(dtype, (5, 3), offset=widened[0], scale=widened[1])
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(2).uniform(-20, 30, (5, 3)).astype(dtype)
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    compiled = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device=DEVICES[0][0])
    with flashmem.Session(compiled, device=DEVICES[0][0]) as session:
        for answer, wanted in zip(session.run(None, {"x": x}), expected, strict=True):
            np.testing.assert_allclose(answer, wanted, rtol=1e-6)


def test_numbers_that_fit_no_column_are_refused(tmp_path: Path) -> None:
    onnx.save(model("float32", (5, 3), offset=[1.0, 2.0], scale=[1.0]), tmp_path / "m.onnx")
    with pytest.raises(
        UnsupportedModelError, match=r"ai.onnx.ml.Scaler with 2 numbers as offset, of a tensor of shape \(5, 3\)"
    ):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device="generic-cpu")
