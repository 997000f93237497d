"""Inputs drawn and read, outputs written, answers compared: the parts of `flashmem run` that need no device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flashmem.commands.verify import compare, reference
from flashmem.errors import MissingFileError, UserError
from flashmem.inputs import complete_inputs, read_inputs, write_outputs
from flashmem.program import Port, Program, RowGather


def program(*inputs: Port, rows: dict[str, int] | None = None) -> Program:
    gathers = tuple(RowGather(name, "t", 0, count, 4, 16, 4, "float32") for name, count in (rows or {}).items())
    return Program("buffer", "fp32", inputs, (), (), (), (), gathers, 0, 0, 0, 0)


IMAGE = Port("image", (1, 3, 8, 8), "float32", "a")
HALF = Port("half", (64,), "float16", "b")
IDS = Port("ids", (1, 512), "int64", None)
MASK = Port("mask", (1, 512), "int64", "c")
FLAGS = Port("flags", (64,), "bool", "d")


def test_drawn_inputs_have_the_shape_the_type_and_the_range_of_their_port() -> None:
    ports = (IMAGE, HALF, IDS, MASK, FLAGS)
    drawn = complete_inputs(program(*ports, rows={"ids": 100}), {}, seed=0)
    for port in ports:
        assert (drawn[port.name].shape, drawn[port.name].dtype) == (port.shape, np.dtype(port.dtype))
    assert 0.5 < drawn["image"].std() < 1.5
    assert (drawn["ids"].min(), drawn["ids"].max() >= 90, drawn["ids"].max() < 100) == (0, True, True)
    assert set(np.unique(drawn["mask"])) == {0, 1}
    assert set(np.unique(drawn["flags"])) == {False, True}


def test_the_seed_decides_and_a_given_input_changes_no_other() -> None:
    model = program(IMAGE, HALF)
    first, again, other = (complete_inputs(model, {}, seed) for seed in (1, 1, 2))
    assert np.array_equal(first["image"], again["image"])
    assert not np.array_equal(first["image"], other["image"])
    given_one = complete_inputs(model, {"image": np.zeros(IMAGE.shape, np.float32)}, 1)
    assert np.array_equal(given_one["half"], first["half"])
    assert not given_one["image"].any()


def test_an_unknown_input_is_named_with_those_there_are() -> None:
    with pytest.raises(UserError, match="no input 'imgae'; its inputs are: image, half"):
        complete_inputs(program(IMAGE, HALF), {"imgae": np.zeros(1)}, 0)


def test_inputs_are_read_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.arange(4), mask=np.ones(2))
    stored = read_inputs(tmp_path / "x.npz")
    assert set(stored) == {"image", "mask"}
    assert stored["image"].tolist() == [0, 1, 2, 3]


def test_files_that_are_not_inputs(tmp_path: Path) -> None:
    text, nameless, pickled, cut = (tmp_path / name for name in ("text.npz", "nameless.npz", "pickled.npz", "cut.npz"))
    text.write_text("no arrays here")
    with nameless.open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(pickled, image=np.array([{}], dtype=object), allow_pickle=True)
    np.savez(cut, image=np.zeros(1000))
    cut.write_bytes(cut.read_bytes()[:500])
    for path in (text, nameless, pickled, cut):
        with pytest.raises(UserError, match=rf"{path.name}.*numpy\.savez"):
            read_inputs(path)
    with pytest.raises(MissingFileError, match="no such input file"):
        read_inputs(tmp_path / "none.npz")


def test_outputs_are_written_whatever_they_are_called(tmp_path: Path) -> None:
    names, arrays = ["file", "a/b", "allow_pickle"], [np.arange(3), np.float32(2.5), np.array([], bool)]
    write_outputs(tmp_path / "y.npz", names, arrays)  # type: ignore[arg-type]
    with np.load(tmp_path / "y.npz") as stored:
        assert stored.files == names
        for name, array in zip(names, arrays, strict=True):
            assert np.array_equal(stored[name], array)
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"]


def test_outputs_that_cannot_be_written_leave_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "y.npz"
    target.write_bytes(b"before")
    with pytest.raises(ValueError, match="pickle"):
        write_outputs(target, ["good", "bad"], [np.zeros(3), np.array([{}], dtype=object)])
    assert target.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"]


@given(scale=st.floats(1e-3, 1e3), error=st.floats(1e-6, 1.0))
def test_errors_are_measured_against_the_range(scale: float, error: float) -> None:
    expected = np.linspace(0, scale, 11)
    result = compare([expected + error * scale], [expected], "fp32")
    assert result.relative_error == pytest.approx(error, rel=1e-6)
    assert result.max_abs_error == pytest.approx(error * scale, rel=1e-6)


def test_tolerances() -> None:
    expected = np.linspace(0, 1, 11)
    assert compare([expected + 0.9e-3], [expected], "fp32").ok
    assert not compare([expected + 1.1e-3], [expected], "fp32").ok
    assert compare([expected + 0.9e-2], [expected], "fp16").ok
    assert not compare([expected + 1.1e-2], [expected], "fp16").ok


def test_the_worst_output_counts() -> None:
    expected = np.linspace(0, 1, 11)
    assert not compare([expected, expected + 0.1], [expected, expected], "fp16").ok


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("answer", "expected", "ok"),
    [
        ([1, NAN, INF], [1, NAN, INF], True),
        ([1, NAN, 2], [1, 2, 2], False),
        ([1, 2, 2], [1, NAN, 2], False),
        ([1, -INF, 2], [1, INF, 2], False),
        ([[1, 2]], [1, 2], False),
        ([0, 0], [0, 0], True),
        ([0, 1e-4], [0, 0], True),
        ([5.0, 5.1], [5.0, 5.0], False),
        ([True, False], [True, False], True),
        ([True, True], [True, False], False),
        ([], [], True),
    ],
)
def test_comparing_what_is_not_ordinary(answer: list[Any], expected: list[Any], ok: bool) -> None:
    result = compare([np.array(answer)], [np.array(expected)], "fp32")
    assert result.ok is ok
    assert all(value is None or value == value for value in result.to_json().values()), "JSON has no NaN"


def test_the_original_model_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"gone\.onnx.*--model"):
        reference(tmp_path / "gone.onnx", {}, [])


def test_the_reference_is_onnx_runtime(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["y"])],
        "square",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "square.onnx")
    x: NDArray[np.float32] = np.array([1, 2, 3], np.float32)
    (y,) = reference(tmp_path / "square.onnx", {"x": x}, ["y"])
    assert y.tolist() == [1, 4, 9]
