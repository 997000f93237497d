"""Operators of domain ai.onnx.ml against ONNX Runtime: skl2onnx puts a Scaler before a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import UnsupportedModelError
from tests.support.compared import DEVICES


def scaler(shape: list[int | str], kind: int = TensorProto.FLOAT, **attributes: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", **attributes),
        helper.make_node("Tanh", ["scaled"], ["y"]),
    ]
    x, y = helper.make_tensor_value_info("x", kind, shape), helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize(
    ("shape", "kind", "attributes"),
    [
        ([5, 4], "float32", {"offset": [9.0, 8.0, 10.5, -3.0], "scale": [0.2, 0.1, 3.0, 0.5]}),
        ([5, 4], "float32", {"offset": [9.0], "scale": [0.2]}),
        ([4], "float32", {"offset": [9.0, 8.0, 10.5, -3.0], "scale": [0.2, 0.1, 3.0, 0.5]}),
        ([5, 4], "int64", {"offset": [9.0, 1.0, 0.5, 2.0], "scale": [0.25, 0.1, 0.5, 0.5]}),
    ],
)
def test_a_scaler_is_onnx_runtime_s(
    shape: list[int | str], kind: str, attributes: dict[str, Any], place: tuple[str, str], tmp_path: Path
) -> None:
    model = scaler(shape, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), **attributes)
    x = np.random.default_rng(3).uniform(-5, 20, [int(size) for size in shape]).astype(kind)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )
    device, memory_path = place
    given: Any = {"device": device, "memory_path": memory_path}
    with flashmem.Session(flashmem.compile(model, tmp_path / "m.flashmem", **given), device=device) as session:
        (answer,) = session.run(None, {"x": x})
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"offset": [1.0, 2.0], "scale": [1.0]}, "ai.onnx.ml.Scaler with 2 numbers as offset for 4 columns is not implemented"),
        ({"offset": [1.0]}, "with 0 numbers as scale for 4 columns"),
    ],
)
def test_a_scaler_without_its_numbers_is_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        flashmem.compile(scaler([5, 4], **attributes), device="generic-cpu")


def test_a_scaler_of_an_open_size_needs_a_shape() -> None:
    with pytest.raises(ValueError, match=r"--shape|shapes"):
        flashmem.compile(scaler(["n", 4], offset=[1.0], scale=[2.0]), device="generic-cpu")
