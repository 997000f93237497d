"""Exact element types: nodes that once silently gave wrong answers, each compared with ONNX Runtime on every device.

All nodes are outputs of one model, so that each device compiles once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import UnsupportedModelError
from flashmem.runtime.opencl.discovery import list_devices

DEVICES = [(device.descriptor_name, path) for device in list_devices() for path in ("buffer", "texture")]
Array = NDArray[Any]


@dataclass
class Model:
    """Nodes of a model under construction. Each is an output; inputs are run-time data, constants initializers."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, data: Any, dtype: str) -> str:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.array(data, dtype)
        return name

    def constant(self, data: Any, dtype: str) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(data, dtype), name))
        return name

    def node(self, title: str, op: str, *inputs: str, dtype: str = "", inner: bool = False, **attributes: Any) -> str:
        """A node called `title`, with output type `dtype`; not an output of the model if it is `inner`."""
        self.nodes.append(helper.make_node(op, list(inputs), [title], name=title, **attributes))
        if not inner:
            self.outputs.append(helper.make_tensor_value_info(title, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))
        return title

    def proto(self, opset: int = 18) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for name, data in self.feeds.items()
        ]
        graph = helper.make_graph(self.nodes, "exact", inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _integers(m: Model) -> None:
    small = m.input([[3, -7, 100], [-128, 127, 5]], "int32")
    big = m.input([2**20, 2**40 + 1, -(2**62), 5], "int64")
    m.node("sum of int32", "ReduceSum", small, m.constant([1], "int64"), dtype="int32")
    m.node(
        "mean over axes apart",
        "ReduceMean",
        m.input(np.arange(-40, 20).reshape(3, 4, 5), "int32"),
        m.constant([0, 2], "int64"),
        dtype="int32",
    )
    m.node("largest int32 over columns", "ReduceMax", small, m.constant([0], "int64"), dtype="int32")
    m.node("product of int32", "MatMul", small, m.constant([[1, 2], [3, -4], [5, 6]], "int32"), dtype="int32")
    m.node("square of int64", "Mul", big, big, dtype="int64")
    m.node("sum of int64", "ReduceSum", big, m.constant([0], "int64"), dtype="int64")
    m.node("int64 to uint8", "Cast", m.input([300, -1, 2**33 + 7], "int64"), dtype="uint8", to=TensorProto.UINT8)
    m.node("int32 to int16", "Cast", m.input([70000, -70000], "int32"), dtype="int16", to=TensorProto.INT16)
    m.node("wide constant", "Identity", m.constant([2**40, -(2**50)], "int64"), dtype="int64")
    m.node("quotient", "Div", m.input([7, -7, -128], "int8"), m.constant([2, 2, -1], "int8"), dtype="int8")
    m.node("sum of uint8", "Add", m.input([200, 255], "uint8"), m.constant([100, 1], "uint8"), dtype="uint8")
    m.node("modulo", "Mod", m.input([7, -7, 7, -7], "int32"), m.constant([3, 3, -3, -3], "int32"), dtype="int32")
    m.node("C's modulo", "Mod", m.input([7, -7], "int64"), m.constant([3, 3], "int64"), dtype="int64", fmod=1)
    m.node("power", "Pow", m.input([3, -2, 10], "int32"), m.constant([13, 9, 8], "int32"), dtype="int32")
    m.node("shift", "BitShift", m.input([1, 3], "uint32"), m.constant([31, 2], "uint32"), dtype="uint32", direction="LEFT")
    m.node("unsigned comparison", "Less", m.input([2**31 + 5, 1], "uint32"), m.constant([1, 2], "uint32"), dtype="bool")
    m.node("wide clip", "Clip", big, m.constant(-(2**61), "int64"), m.constant(2**39, "int64"), dtype="int64")


def _floats(m: Model) -> None:
    nan = m.input([[1.0, np.nan, -2.0, 0.5], [np.inf, -np.inf, 1e-4, -3e-5]], "float32")
    zeros = m.constant([0.0], "float32")
    m.node("larger", "Max", nan, zeros, dtype="float32")
    m.node("smaller", "Min", zeros, nan, dtype="float32")
    m.node("largest", "ReduceMax", nan, m.constant([1], "int64"), dtype="float32")
    m.node("smallest of columns", "ReduceMin", nan, m.constant([0], "int64"), dtype="float32")
    m.node("hard sigmoid", "HardSigmoid", nan, dtype="float32")
    m.node("sign", "Sign", nan, dtype="float32")
    m.node("tanh", "Tanh", nan, dtype="float32")
    m.node("erf", "Erf", nan, dtype="float32")
    rows = m.input([[-np.inf, -np.inf], [np.inf, 1.0], [1.0, 2.0]], "float32")
    m.node("log of sums", "ReduceLogSumExp", rows, m.constant([1], "int64"), dtype="float32")
    halves = m.input([0.1, 70000.0, 6.1e-5, -1e-8, 2049.0, np.nan], "float32")
    m.node("float16", "Cast", halves, dtype="float16", to=TensorProto.FLOAT16)
    m.node(
        "through float16", "Cast", m.node("inner", "Cast", halves, inner=True, to=TensorProto.FLOAT16), dtype="float32", to=1
    )


def _movement(m: Model) -> None:
    x = m.input(np.arange(12, dtype=np.float32).reshape(3, 4), "float32")
    bounds = [m.constant([n], "int64") for n in (-9, -20, 1, -1)]
    m.node("slice before the start", "Slice", x, *bounds, dtype="float32")
    m.node("reflected and cropped", "Pad", x, m.constant([0, 1, 0, -1], "int64"), dtype="float32", mode="reflect")
    m.node("rows", "Gather", x, m.input([2, -1, 0], "int64"), dtype="float32")
    m.node("booleans", "Gather", m.input([True, False, True], "bool"), m.input([1, 2], "int32"), dtype="bool")
    m.node("shape", "Shape", x, dtype="int64")


def _placed_operands(m: Model) -> None:
    """Operands in layouts that no epilogue can read, or computed at run time where a layout changes."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    image, scalar = m.input(draw(1, 3, 4, 5), "float32"), m.input(2.0, "float32")
    y = m.node("convolved", "Conv", image, m.constant(draw(2, 3, 1, 1), "float32"), dtype="float32")
    m.node("convolved, times a number", "Mul", y, scalar, dtype="float32")
    two = [m.constant(draw(3), "float32") for _ in range(2)]
    y = m.node("instances", "InstanceNormalization", image, *two, inner=True)
    m.node("instances, along the width", "Add", y, m.constant(draw(1, 1, 1, 5), "float32"), dtype="float32")
    y = m.node("softmax", "Softmax", m.input(draw(4, 5, 6), "float32"), inner=True, axis=0)
    m.node("softmax, across", "Mul", y, m.constant(draw(1, 5, 1), "float32"), dtype="float32")
    m.node("layers", "LayerNormalization", image, m.constant(draw(5), "float32"), dtype="float32", axis=1)
    m.node("mean", "Mean", image, m.input(draw(4, 1), "float32"), dtype="float32")


MODEL = Model()
for _part in (_integers, _floats, _movement, _placed_operands):
    _part(MODEL)
TITLES = [output.name for output in MODEL.outputs]


@pytest.fixture(scope="module")
def expected() -> dict[str, Array]:
    session = onnxruntime.InferenceSession(MODEL.proto().SerializeToString(), providers=["CPUExecutionProvider"])
    answers = dict(zip(TITLES, session.run(TITLES, MODEL.feeds), strict=True))
    # ONNX Runtime sums int64 in float64 and drops some NaN; numpy computes what ONNX specifies.
    wide, numbers = MODEL.feeds["x1"], next(data for data in MODEL.feeds.values() if np.isnan(data.astype(float)).any())
    return answers | {"sum of int64": wide.sum(keepdims=True), "largest": numbers.max(1, keepdims=True)}


@pytest.fixture(scope="module", params=DEVICES, ids="-".join)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Array]]:
    device, path = request.param
    folder = tmp_path_factory.mktemp("exact")
    onnx.save(MODEL.proto(), folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "m.flashmem", device=device, memory_path=path)
    with flashmem.Session(bundle, device=device) as session:
        yield dict(zip(TITLES, session.run(None, MODEL.feeds), strict=True))


@pytest.mark.parametrize("title", TITLES)
def test_as_onnx_runtime(title: str, answers: dict[str, Array], expected: dict[str, Array]) -> None:
    answer, wanted = answers[title], expected[title]
    assert answer.dtype == wanted.dtype and answer.shape == wanted.shape
    if answer.dtype.kind == "f":
        np.testing.assert_allclose(answer, wanted, rtol=2e-6, atol=1e-12 if title in ("tanh", "erf") else 2e-6)
    else:
        np.testing.assert_array_equal(answer, wanted)


@pytest.fixture(scope="module")
def gather(tmp_path_factory: pytest.TempPathFactory) -> Path:
    m = Model()
    m.node("y", "Gather", m.input(np.arange(5.0), "float32"), m.input([0], "int64"), dtype="float32")
    path = tmp_path_factory.mktemp("gather") / "m.onnx"
    onnx.save(m.proto(), path)
    return path


@pytest.mark.parametrize("device", sorted({device for device, _ in DEVICES}))
def test_an_index_outside_the_table_is_said_and_the_session_goes_on(device: str, gather: Path, tmp_path: Path) -> None:
    table = np.arange(5, dtype=np.float32)
    with flashmem.Session(flashmem.compile(gather, tmp_path / "b.flashmem", device=device), device=device) as session:
        for index in (5, -6, 2**40):
            with pytest.raises(ValueError, match="layer y was given an index outside"):
                session.run(None, {"x0": table, "x1": np.array([index])})
        assert session.run(None, {"x0": table, "x1": np.array([-5])})[0] == [0.0]


def _invalid(op: str, shapes: list[tuple[int, ...]], **attributes: Any) -> onnx.ModelProto:
    m = Model()
    x = m.input(np.zeros(shapes[0]), "float32")
    m.node("y", op, x, *(m.constant(np.ones(shape), "float32") for shape in shapes[1:]), dtype="float32", **attributes)
    return m.proto()


INVALID = {
    "channels": _invalid("Conv", [(1, 4, 5, 5), (2, 3, 1, 1)]),
    "bias": _invalid("Conv", [(1, 3, 5, 5), (2, 3, 1, 1), (3,)]),
    "kernel_shape": _invalid("Conv", [(1, 3, 5, 5), (2, 3, 1, 1)], kernel_shape=[3, 3]),
    "group": _invalid("Conv", [(1, 3, 5, 5), (2, 3, 1, 1)], group=2),
    "no group": _invalid("Conv", [(1, 3, 5, 5), (2, 3, 1, 1)], group=0),
    "C": _invalid("Gemm", [(2, 3), (3, 4), (3,)]),
    "scale": _invalid("LayerNormalization", [(2, 3), (4,)]),
    "rounding": _invalid("Resize", [(1, 1, 2, 2), (0,), (4,)], nearest_mode=""),
    "coordinates": _invalid("Resize", [(1, 1, 2, 2), (0,), (4,)], coordinate_transformation_mode="none"),
    "window": _invalid("MaxPool", [(1, 1, 3, 3)], kernel_shape=[4, 4]),
}


@pytest.mark.parametrize("what", INVALID)
def test_a_node_that_contradicts_itself_is_refused(what: str, tmp_path: Path) -> None:
    onnx.save(INVALID[what], tmp_path / "m.onnx")
    with pytest.raises(flashmem.base.errors.UserError) as refused:
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl")
    assert "\n" not in str(refused.value)


def test_a_constant_index_outside_the_table_is_refused(tmp_path: Path) -> None:
    m = Model()
    m.node("y", "Gather", m.input(np.arange(5.0), "float32"), m.constant([500_000_000], "int64"), dtype="float32")
    onnx.save(m.proto(), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match="Gather of index 500000000 from 5 elements"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl")
