"""Values given as inputs: tensors of other libraries, numbers, lists, sizes of zero."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.program.tensors import Port, numpy_dtype
from flashmem.runtime.engine.given_arrays import arrays_by_name
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.compared import by_runtime

Array = NDArray[Any]
FLOATS, INTEGERS = ("float16", "float32", "float64"), ("int8", "uint8", "int32", "int64", "uint64")


class Exported:
    """A tensor of another library, which only exports its memory (DLPack)."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self._array, self._device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        if self._device[0] != 1:
            raise BufferError("it is on a GPU")
        return self._array.__dlpack__(**options)


class Converted:
    """A tensor of another library, which numpy converts."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._array


def taken(value: Any, dtype: str) -> Array:
    return arrays_by_name({"x": value}, [Port("x", (), dtype, "t")])["x"]


@pytest.mark.parametrize("kind", [Exported, Converted])
def test_a_tensor_is_read_in_its_own_memory_and_never_cast(kind: type[Exported]) -> None:
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    got = taken(kind(array), "float32")
    assert got.dtype == np.float64 and np.shares_memory(got, array)


def test_a_tensor_that_cannot_be_read_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"input 'x' is an Exported that numpy cannot read \(.*\); give a numpy"):
        taken(Exported(np.zeros(3), device=(2, 0)), "float32")


@given(st.sampled_from(FLOATS), st.lists(st.floats(width=16, allow_nan=True), max_size=5))
def test_lists_of_floats_become_the_models_type(dtype: str, values: list[float]) -> None:
    got = taken(values, dtype)
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, np.array(values, dtype))


@given(st.sampled_from((*FLOATS, *INTEGERS, "bool", "bfloat16")), st.integers(-(2**63), 2**64 - 1), st.booleans())
def test_integers_are_cast_where_that_is_exact(dtype: str, value: int, near: bool) -> None:
    value = value % 300 - 20 if near else value
    target = numpy_dtype(dtype)
    if target.kind in "iu":
        exact = np.iinfo(target).min <= value <= np.iinfo(target).max
    elif target.kind == "b":
        exact = value in (0, 1)
    else:
        with np.errstate(over="ignore"):
            rounded = float(np.array(value).astype(target).astype(np.float64))
        exact = np.isfinite(rounded) and int(rounded) == value
    if exact:
        got = taken([value], dtype)
        assert got.dtype == target and int(got[0]) == value
    else:
        with pytest.raises(ValueError, match=f"input 'x' holds {value}, which is no {dtype}"):
            taken([value], dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        ([0.5], "int64", "input 'x' holds 0.5, which is no int64"),
        ([1e39], "float32", r"input 'x' holds 1e\+39, which is no float32"),
        ([[1], [2, 3]], "float32", "input 'x' is a list whose rows have different lengths"),
        (["a"], "float32", "input 'x' is a list that does not hold numbers"),
        ([2**70], "int64", "input 'x' is a list that does not hold numbers of at most 64 bits"),
        ("1", "int64", "input 'x' is a str; give a numpy array"),
    ],
)
def test_what_is_not_exact_is_refused(value: Any, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        taken(value, dtype)


@pytest.mark.parametrize(
    ("value", "dtype", "becomes"),
    [
        (np.float64(0.5), "float32", "float32"),
        (np.float64(0.1), "float32", "float64"),  # not exact: refused by its type
        (np.int32(3), "int64", "int64"),
        (np.int64(300), "uint8", "int64"),
        (3, "float32", "float32"),
        (True, "bool", "bool"),
        ([], "int64", "int64"),
        (range(3), "int32", "int32"),
    ],
)
def test_scalars(value: Any, dtype: str, becomes: str) -> None:
    got = taken(value, dtype)
    assert got.dtype == np.dtype(becomes)
    np.testing.assert_array_equal(got, np.asarray(value))


def two_inputs() -> onnx.ModelProto:
    """y = x + n, s = the sum of y; the first dimension of x is open."""
    x, n = (helper.make_tensor_value_info(*each) for each in (("x", TensorProto.FLOAT, ["b", 3]), ("n", TensorProto.INT64, [])))
    y, s = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "s"))
    nodes = [
        helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["s"], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "g", [x, n], [y, s])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """`two_inputs` for 2 rows and for none."""
    place = tmp_path_factory.mktemp("given") / "m.flashmem"
    return flashmem.compile(two_inputs(), place, shapes=[{"x": (2, 3)}, {"x": (0, 3)}], build=False)


@pytest.fixture(params=range(len(list_devices())))
def session(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(bundle, device=str(request.param)) as opened:
        yield opened


def test_sessions_and_runtimes_take_them(session: Session, bundle: Bundle) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    forms: list[dict[str, Any]] = [
        {"x": x.tolist(), "n": 4},
        {"x": Exported(x), "n": np.int32(4)},
        {"x": Converted(x), "n": Exported(np.array(4))},
    ]
    with Runtime() as runtime, runtime.open(bundle) as model:
        for feed in forms:
            for run in (session.run, model.run):
                np.testing.assert_array_equal(run(["y"], feed)[0], x + 4)
    with pytest.raises(ValueError, match="input 'x' is float64; the model takes float32: convert it with astype"):
        session.run(None, {"x": Exported(x.astype(np.float64)), "n": 4})


def test_a_size_of_zero_is_a_size(session: Session) -> None:
    feeds = {"x": np.zeros((0, 3), np.float32), "n": np.array(4)}
    for count in (0, 2, 0):
        feeds["x"] = np.ones((count, 3), np.float32)
        for got, wanted in zip(session.run(None, feeds), by_runtime(two_inputs(), feeds), strict=True):
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(got, wanted)


def test_states_take_lists(tmp_path: Path) -> None:
    h, after = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("h", "after"))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y"))
    nodes = [helper.make_node("Add", ["h", "x"], ["after"]), helper.make_node("Identity", ["after"], ["y"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x, h], [y, after]), opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", states={"h": "after"}, build=False)
    with Session(bundle) as session:
        session.set_states({"h": [1, 2]})
        np.testing.assert_array_equal(session.run(None, {"x": [1, 1]})[0], [2, 3])
