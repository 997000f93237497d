"""The parser of mapped ONNX files, compared with protobuf's: same model, same bytes, no large data inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.external_data import resolve_external_data, tensors
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.frontend.mapped_file import LARGE, load_mapped
from tests.support.paths import DATA

MODELS = sorted(DATA.glob("*.onnx"))

in_any_folder = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def put_back(model: onnx.ModelProto, as_loaded: onnx.ModelProto) -> None:
    """Undo the parser's externalisation: copy external bytes into the field that holds them in `as_loaded`."""
    for tensor, original in zip(tensors(model), tensors(as_loaded), strict=True):
        if tensor.data_location == TensorProto.EXTERNAL and original.data_location != TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            with Path(entries["location"]).open("rb") as file:
                file.seek(int(entries["offset"]))
                data = file.read(int(entries["length"]))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            if original.HasField("raw_data"):
                tensor.raw_data = data
            elif original.float_data:
                tensor.float_data.extend(np.frombuffer(data, "<f4"))
            else:
                tensor.double_data.extend(np.frombuffer(data, "<f8"))


def assert_walked_right(path: Path) -> None:
    expected, walked = onnx.load(path, load_external_data=False), load_mapped(path)
    # Integer data that is not raw is stored as packed varints, which only a parser can read.
    assert all(t.ByteSize() < 2 * LARGE + 1024 or t.int32_data or t.int64_data for t in tensors(walked))
    own = [t for t in tensors(expected) if t.data_location != TensorProto.EXTERNAL]
    for tensor in (t for t in tensors(expected) if t not in own):
        tensor.ClearField("external_data")
    resolve_external_data(walked, path)
    put_back(walked, expected)
    for tensor in tensors(walked):
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.ClearField("external_data")
    assert walked.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_test_models_are_the_same_after_the_walk(path: Path) -> None:
    assert_walked_right(path)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_bytes_are_those_that_onnx_loads(path: Path) -> None:
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    model = load_mapped(path)
    resolve_external_data(model, path)
    external = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    assert {t.name for t in external} >= {name for name, array in expected.items() if array.nbytes >= LARGE}
    for tensor in external:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = Path(entries["location"]).read_bytes()[int(entries["offset"]) :][: int(entries["length"])]
        assert data == expected[tensor.name].tobytes()


@st.composite
def any_tensor(draw: st.DrawFn) -> TensorProto:
    """A tensor of about the size from which the parser externalises data, in every form of ONNX."""
    dtype = np.dtype(draw(st.sampled_from(["f4", "f8", "f2", "i8", "i4", "u1", "?"])))
    count = draw(st.sampled_from([0, 1, 5, LARGE // 8 - 1, LARGE // 8, LARGE // 4 - 1, LARGE // 4, LARGE, LARGE + 3]))
    array = np.frombuffer(np.random.default_rng(count).bytes(count * dtype.itemsize), dtype)
    name = draw(st.text(max_size=8))
    if draw(st.booleans()) or dtype == np.float16:
        return numpy_helper.from_array(array, name)
    return helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(dtype), array.shape, array.tolist())


@st.composite
def any_nodes(draw: st.DrawFn, depth: int = 0) -> list[onnx.NodeProto]:
    nodes = []
    for _ in range(draw(st.integers(0, 3))):
        node = helper.make_node(
            draw(st.sampled_from(["Constant", "If", "Loop"])), [], ["y"], doc_string=draw(st.text(max_size=20))
        )
        kind = draw(st.sampled_from(["t", "tensors", "g", "graphs"] if depth < 2 else ["t", "tensors"]))
        if kind == "t":
            node.attribute.append(helper.make_attribute("value", draw(any_tensor())))
        elif kind == "tensors":
            node.attribute.append(helper.make_attribute("values", draw(st.lists(any_tensor(), min_size=1, max_size=2))))
        elif kind == "g":
            node.attribute.append(helper.make_attribute("body", draw(any_graph(depth + 1))))
        else:
            node.attribute.append(helper.make_attribute("bodies", [draw(any_graph(depth + 1)), draw(any_graph(depth + 1))]))
        nodes.append(node)
    return nodes


@st.composite
def any_graph(draw: st.DrawFn, depth: int = 0) -> onnx.GraphProto:
    initializers = draw(st.lists(any_tensor(), max_size=3))
    return helper.make_graph(draw(any_nodes(depth)), draw(st.text(max_size=8)), [], [], initializers)


@st.composite
def any_model(draw: st.DrawFn) -> onnx.ModelProto:
    model = helper.make_model(draw(any_graph()), doc_string="d" * draw(st.sampled_from([0, 3, LARGE, 5 * LARGE])))
    if draw(st.booleans()):
        opset = [helper.make_opsetid("", 18)]
        model.functions.append(helper.make_function("mine", "F", [], ["y"], draw(any_nodes()), opset))
    return model


@in_any_folder
@given(model=any_model())
def test_any_model_is_the_same_after_the_walk(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "any.onnx"
    path.write_bytes(model.SerializeToString())
    assert_walked_right(path)


@pytest.mark.thorough
@in_any_folder
@given(start=st.integers(0, 30_000), junk=st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_an_error_or_a_model(start: int, junk: bytes, tmp_path: Path) -> None:
    """Never another exception, whatever byte is damaged."""
    whole = (DATA / "vit-tiny-opset23.onnx").read_bytes()
    # The structure is between the weights; damage it more often than at random.
    structure = [*range(start % 3, 16_000, 3), *range(len(whole) - 14_000, len(whole) - 8)]
    at = structure[start % len(structure)]
    path = tmp_path / "damaged.onnx"
    path.write_bytes(whole[:at] + junk + whole[at + len(junk) :])
    try:
        import_model(path)
    except UserError as error:
        assert "\n" not in str(error)
