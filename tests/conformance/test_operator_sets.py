"""Operators in the forms of the old operator sets 7 to 12: one model for each set, compared with ONNX Runtime.

The same model, converted by onnx to a current set, is a second reference for the importer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, version_converter

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.importer import OPSETS, import_model
from flashmem.runtime.opencl.discovery import list_devices

Array = NDArray[Any]
FLOAT = TensorProto.FLOAT

# First set, last set, operator, run-time inputs (shape, or shape and type), constant inputs after them, attributes, outputs.
Case = tuple[int, int, str, list[Any], list[Any], dict[str, Any], int]
X = (2, 3, 4, 5)
ONES, ZEROS = np.ones(3, np.float32), np.zeros(3, np.float32)
CASES: list[Case] = [
    (7, 9, "Slice", [X], [], {"starts": [0, -3], "ends": [1, 100], "axes": [1, 3]}, 1),
    (10, 12, "Slice", [X], [[3, 0], [-100, 2], [3, 1], [-2, 1]], {}, 1),
    (7, 10, "Pad", [X], [], {"pads": [0, 0, 1, 0, 0, 0, 0, 2], "value": 1.5}, 1),
    (7, 10, "Pad", [X], [], {"pads": [0, 0, 1, 1, 0, 0, 0, 2], "mode": "reflect"}, 1),
    (11, 12, "Pad", [X], [[0, 0, 1, 0, 0, 0, 0, 2], np.float32(2)], {}, 1),
    (7, 10, "Clip", [X], [], {"min": -0.5, "max": 0.25}, 1),
    (7, 10, "Clip", [X], [], {"max": 0.25}, 1),
    (7, 8, "Upsample", [X], [], {"scales": [1.0, 1.0, 2.0, 3.0], "mode": "nearest"}, 1),
    (9, 9, "Upsample", [X], [np.array([1, 1, 2, 1.4], np.float32)], {"mode": "linear"}, 1),
    (10, 10, "Resize", [X], [np.array([1, 1, 0.5, 2], np.float32)], {"mode": "nearest"}, 1),
    (7, 12, "BatchNormalization", [X], [ONES, ZEROS, ONES, 2 * ONES], {}, 1),
    (7, 12, "Gemm", [(3, 4), (5, 4), (5,)], [], {"transB": 1, "alpha": 0.5, "beta": 2.0}, 1),
    (7, 12, "Squeeze", [(1, 3, 1, 2)], [], {"axes": [0, 2]}, 1),
    (7, 12, "Unsqueeze", [(3, 2)], [], {"axes": [0, 3]}, 1),
    (7, 12, "ReduceSum", [X], [], {"axes": [1, 3], "keepdims": 0}, 1),
    (7, 12, "ReduceMax", [X], [], {"axes": [2]}, 1),
    (7, 12, "Softmax", [X], [], {"axis": 2}, 1),
    (7, 12, "Softmax", [X], [], {}, 1),
    (7, 12, "LogSoftmax", [X], [], {"axis": 3}, 1),
    (7, 12, "Cast", [X], [], {"to": TensorProto.INT32}, 1),
    (7, 12, "Concat", [X, X], [], {"axis": 1}, 1),
    (7, 12, "Split", [X], [], {"split": [1, 2], "axis": 1}, 2),
    (7, 12, "Equal", [(X, "int32"), ((1, 5), "int32")], [], {}, 1),
    (7, 12, "Greater", [X, (3, 1, 1)], [], {}, 1),
    (8, 12, "Max", [X, (4, 1)], [], {}, 1),
    (7, 7, "Min", [X, X], [], {}, 1),
    (8, 12, "Expand", [(3, 1)], [[2, 3, 4]], {}, 1),
    (9, 12, "Where", [(X, "bool"), X, (5,)], [], {}, 1),
    (7, 12, "MaxPool", [X], [], {"kernel_shape": [2, 3], "strides": [2, 1]}, 1),
    (7, 12, "AveragePool", [X], [], {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0], "count_include_pad": 1}, 1),
    (7, 12, "Gather", [X], [[0, 2]], {"axis": 3}, 1),
    (7, 12, "Flatten", [X], [], {"axis": 2}, 1),
    (7, 12, "Tile", [(2, 3)], [[2, 1]], {}, 1),
    (7, 12, "PRelu", [X], [np.full((3, 1, 1), 0.2, np.float32)], {}, 1),
    (7, 12, "Pow", [X], [np.float32(2)], {}, 1),
    (7, 12, "InstanceNormalization", [X], [ONES, ZEROS], {}, 1),
    (10, 12, "Mod", [(X, "int32"), ((1,), "positive")], [], {}, 1),
    (7, 12, "RNN", [(2, 1, 3)], [ONES.reshape(1, 1, 3), ONES[:1].reshape(1, 1, 1)], {"hidden_size": 1}, 1),
    (12, 12, "Einsum", [(3, 4), (4, 5)], [], {"equation": "ij,jk->ki"}, 1),
]  # fmt: skip


def drawn(opset: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of all nodes that the set has in one form, and its inputs."""
    random_ = np.random.default_rng(opset)
    feeds: dict[str, Array] = {}
    nodes, constants, outputs = [], [], []
    for index, (first, last, op, given, fixed, attributes, count) in enumerate(CASES):
        if not first <= opset <= last:
            continue
        names = []
        for shape in given:
            kind = shape[1] if isinstance(shape[0], tuple) else "float32"
            size = shape[0] if isinstance(shape[0], tuple) else shape
            names.append(f"x{index}_{len(names)}")
            data = random_.integers(1, 5, size) if kind == "positive" else random_.normal(0, 2, size)
            feeds[names[-1]] = data > 0 if kind == "bool" else data.astype("int32" if kind == "positive" else kind)
        for data in fixed:
            names.append(f"c{index}_{len(names)}")
            array = np.array(data, np.int64) if isinstance(data, list) else np.asarray(data)
            constants.append(numpy_helper.from_array(array, names[-1]))
        made = [f"y{index}_{i}" for i in range(count)]
        nodes.append(helper.make_node(op, names, made, name=f"{op}{index}", **attributes))
        kind_of = {"Cast": TensorProto.INT32, "Mod": TensorProto.INT32, "Equal": TensorProto.BOOL, "Greater": TensorProto.BOOL}
        outputs += [helper.make_tensor_value_info(name, kind_of.get(op, FLOAT), None) for name in made]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
        for name, data in feeds.items()
    ]
    graph = helper.make_graph(nodes, "old", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4), feeds


def answers_of(model: onnx.ModelProto, feeds: dict[str, Array], folder: Path) -> list[Array]:
    onnx.save(model, folder / "model.onnx")
    bundle = flashmem.compile(folder / "model.onnx", folder / "b.flashmem", device=list_devices()[0].descriptor_name)
    with flashmem.Session(bundle) as session:
        return list(session.run(None, feeds))


@pytest.mark.parametrize("opset", [7, 9, 10, 12])
def test_a_set_is_read_as_onnx_runtime_reads_it(opset: int, tmp_path: Path) -> None:
    """onnx converts all nodes, but rounds the size of an Upsample by a fraction differently."""
    model, feeds = drawn(opset)
    converted = version_converter.convert_version(model, 21)
    expected, again = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for each in (model, converted)
    )
    answers = answers_of(model, feeds, tmp_path)
    for node in model.graph.node:
        for name in node.output:
            at = [output.name for output in model.graph.output].index(name)
            for wanted in (expected[at], again[at])[: 1 if node.op_type == "Upsample" else 2]:
                assert (answers[at].dtype, answers[at].shape) == (wanted.dtype, wanted.shape), node.name
                np.testing.assert_allclose(answers[at], wanted, rtol=1e-4, atol=1e-5, err_msg=node.name)


def test_a_slice_of_constants_has_its_bounds_in_attributes_before_set_10(tmp_path: Path) -> None:
    """PaddlePaddle's exporter cuts the batch out of a shape so, to flatten before a classifier."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape"], ["batch"], axes=[0], starts=[0], ends=[1]),
        helper.make_node("Concat", ["batch", "rest"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["x", "wanted"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in (("x", X), ("y", None)))
    rest = numpy_helper.from_array(np.array([-1], np.int64), "rest")
    model = helper.make_model(
        helper.make_graph(nodes, "old", [x], [y], [rest]), opset_imports=[helper.make_opsetid("", 9)], ir_version=4
    )
    feeds = {"x": np.random.default_rng(9).uniform(-3, 5, X).astype(np.float32)}
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    (answer,) = answers_of(model, feeds, tmp_path)
    np.testing.assert_array_equal(answer, expected)
    assert answer.shape == (2, 60)


def test_every_set_is_read_that_the_installed_onnx_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert OPSETS[-1] <= onnx.defs.onnx_opset_version()
    node = helper.make_node("Relu", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", OPSETS[-1])])
    onnx.save(model, tmp_path / "model.onnx")
    assert import_model(tmp_path / "model.onnx").opset == OPSETS[-1]
    monkeypatch.setattr("flashmem.compiler.frontend.importer.OPSETS", range(7, OPSETS[-1]))
    with pytest.raises(UserError, match=f"are supported: install a newer onnx than {onnx.__version__}"):
        import_model(tmp_path / "model.onnx")
