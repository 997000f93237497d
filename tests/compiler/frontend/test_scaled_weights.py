"""Recognition of weights dequantised by Cast, Sub and Mul: they become DequantizeLinear, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data

from flashmem.compiler.frontend.scaled_weights import RecogniseDequantizePass


def model(
    scale: NDArray[np.float32], swapped: bool = False, dtype: type = np.int8, opset: int = 17, to: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """x @ (float(codes) * scale)."""
    codes = np.random.default_rng(0).integers(0, 100, (64, 96)).astype(dtype)
    operands = ["scale", "cast"] if swapped else ["cast", "scale"]
    nodes = [
        helper.make_node("Cast", ["codes"], ["cast"], to=to),
        helper.make_node("Mul", operands, ["weight"]),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", to, [2, 64])]
    outputs = [helper.make_tensor_value_info("y", to, [2, 96])]
    constants = [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(scale, "scale")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def recognised(proto: onnx.ModelProto, folder: Path) -> ir.Model:
    """The model with its weights in a file, after the pass."""
    path = folder / "m.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    convert_model_to_external_data(copy, location="m.data", size_threshold=4096)
    onnx.save(copy, path)
    made = ir.load(path)
    RecogniseDequantizePass()(made)
    return made


def answer(path: Path) -> NDArray[np.float32]:
    """ONNX Runtime's answer, without graph optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    return np.asarray(onnxruntime.InferenceSession(str(path), options).run(None, {"x": x})[0])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (96,), (1, 96), (64, 1)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_a_scale_along_one_axis(shape: tuple[int, ...], dtype: type, tmp_path: Path) -> None:
    scale = np.random.default_rng(2).uniform(0.1, 2, shape).astype(np.float32)
    proto = model(scale, swapped=len(shape) == 1, dtype=dtype)
    found = recognised(proto, tmp_path)
    assert [node.op_type for node in found.graph] == ["DequantizeLinear", "MatMul"]
    written = tmp_path / "after.onnx"
    ir.save(found, written)
    onnx.checker.check_model(written, full_check=True)
    np.testing.assert_array_equal(answer(written), answer(tmp_path / "m.onnx"))


@pytest.mark.parametrize(
    "proto",
    [
        pytest.param(model(np.ones((64, 96), np.float32)), id="a scale for each element"),
        pytest.param(model(np.ones((1, 64, 96), np.float32)), id="a scale of more dimensions"),
        pytest.param(model(np.ones(96, np.float32), dtype=np.int32), id="integers of 32 bits"),
        pytest.param(model(np.ones(96, np.float32), opset=11), id="an operator set without axes"),
        pytest.param(model(np.ones(96, np.float16), to=TensorProto.FLOAT16), id="half precision"),
    ],
)
def test_what_is_something_else_stays(proto: onnx.ModelProto, tmp_path: Path) -> None:
    assert [node.op_type for node in recognised(proto, tmp_path).graph] == ["Cast", "Mul", "MatMul"]
