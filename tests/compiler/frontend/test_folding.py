"""What ONNX's reference computes wrongly is not folded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Session
from flashmem.runtime.opencl.discovery import list_devices

DEVICE = list_devices()[0].descriptor_name


def test_a_constant_that_is_normalised_over_channels(tmp_path: Path) -> None:
    """LRN of more channels than the batch has."""
    x = np.random.default_rng(5).standard_normal((1, 8, 3, 5), np.float32)
    nodes = [helper.make_node("LRN", ["x"], ["c"], size=3, alpha=0.5), helper.make_node("Add", ["c", "z"], ["y"])]
    z, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("z", [1]), ("y", x.shape)))
    graph = helper.make_graph(nodes, "g", [z], [y], [numpy_helper.from_array(x, "x")])
    file = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file)
    zero = {"z": np.zeros(1, np.float32)}
    expected = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(None, zero)[0]
    with Session(flashmem.compile(file, tmp_path / "m.flashmem", device=DEVICE), device=DEVICE) as session:
        np.testing.assert_allclose(session.run(None, zero)[0], expected, rtol=1e-5, atol=1e-6)
