"""Drawn and given inputs, written outputs, compared answers: the parts of `flashmem run` that need no device."""

from __future__ import annotations

import os
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import check_target
from flashmem.program.program import Program
from flashmem.program.tensors import HostEmbeddingLookup, Port, numpy_dtype
from flashmem.runtime.engine.inputs import check_input_file, complete_inputs, read_inputs, write_outputs
from flashmem.tools.verify import compare, reference
from tests.fuzz import inputs as fuzz_inputs


def program(*inputs: Port, rows: dict[str, int] | None = None) -> Program:
    gathers = tuple(HostEmbeddingLookup(name, "t", 0, count, 4, 16, 4, "float32") for name, count in (rows or {}).items())
    return Program("buffer", "fp32", inputs, (), (), (), (), gathers, 0, 0, 0, 0)


IMAGE = Port("image", (1, 3, 8, 8), "float32", "a")
HALF = Port("half", (64,), "float16", "b")
IDS = Port("ids", (1, 512), "int64", None)
MASK = Port("mask", (1, 512), "int64", "c")
FLAGS = Port("flags", (64,), "bool", "d")


def test_drawn_inputs_have_the_shape_the_type_and_the_range_of_their_port() -> None:
    ports = (IMAGE, HALF, IDS, MASK, FLAGS, Port("short", (9,), "bfloat16", "e"))
    drawn = complete_inputs(program(*ports, rows={"ids": 100}), {}, seed=0)
    for port in ports:
        assert (drawn[port.name].shape, drawn[port.name].dtype) == (port.shape, numpy_dtype(port.dtype))
    assert np.unique(drawn["short"]).size > 4
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
    arrays = {
        "image": np.asfortranarray(np.random.default_rng(0).standard_normal((3, 700, 800)), np.float32),  # larger than a piece
        "mask": np.array([[1, -2], [3, 4]])[:, ::-1],
        "empty": np.zeros((0, 4), bool),
        "scalar": np.array(2.5),
        "short": np.arange(3).astype(numpy_dtype("bfloat16")),
    }
    ports = [Port(name, array.shape, str(array.dtype), None) for name, array in arrays.items()]
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
        check_input_file(tmp_path / "x.npz")
        stored = read_inputs(tmp_path / "x.npz", ports)
        assert list(stored) == list(arrays)
        for name, array in arrays.items():
            assert stored[name].dtype == array.dtype
            np.testing.assert_array_equal(stored[name], array)


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
            check_input_file(path)
    with pytest.raises(MissingFileError, match="no such input file"):
        check_input_file(tmp_path / "none.npz")
    with pytest.raises(UserError, match="is a folder"):
        check_input_file(tmp_path)


def _claims(
    path: Path, header: str, content: bytes, *, version: bytes = b"\x01\x00", method: int = zipfile.ZIP_DEFLATED
) -> None:
    """Write an .npz file whose array `x` has the header `header`."""
    length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", b"\x93NUMPY" + version + length + header.encode() + content)


def _header(shape: str, descr: str = "<f4") -> str:
    return f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n"


@pytest.mark.parametrize(
    ("header", "content", "sentence"),
    [
        (_header("(4,)"), bytes(12), "4 bytes are missing"),
        (_header("(4,)"), bytes(17), "longer than its shape says"),
        (_header("(5,)"), bytes(20), r"input 'x' has shape \(5,\); the model was compiled for \(4,\)"),
        (_header("(4,)", ">f4"), bytes(16), "input 'x' is >f4; the model takes float32"),
        (_header("(4,)", "|O"), bytes(16), "not an array of numbers"),
        (_header("(4,)", "|S2000000000"), bytes(16), "not an array of numbers"),
        (_header("(-4,)"), bytes(16), "a shape of"),
        (_header("(1,) * 3"), bytes(16), "not readable"),
        (_header(f"({'1,' * 70})"), bytes(4), "not readable"),
        (_header("(4611686018427387904, 4611686018427387904)"), bytes(4), "not readable|has shape"),
        (_header("(99999999999999999999,)"), bytes(4), "not readable"),
        ("(" * 9000, b"", "not readable"),
        ("{'descr': ", b"", "not readable"),
        ("", b"", "not readable"),
    ],
)
def test_what_a_header_says_is_not_believed(header: str, content: bytes, sentence: str, tmp_path: Path) -> None:
    _claims(tmp_path / "x.npz", header, content)
    with pytest.raises(UserError, match=rf"x\.npz.*({sentence})") as caught:
        read_inputs(tmp_path / "x.npz", [Port("x", (4,), "float32", None)])
    assert len(str(caught.value)) < 600


def test_small_files_of_large_arrays_take_no_memory(tmp_path: Path) -> None:
    """64 MB of zeros, and a header of as many bytes: each is a file of 64 KB."""
    port, large = Port("x", (4,), "float32", None), 64 << 20
    shape, longer, header = (tmp_path / name for name in ("shape.npz", "longer.npz", "header.npz"))
    _claims(shape, _header(f"({large // 4},)"), bytes(large))
    _claims(longer, _header("(4,)"), bytes(large))
    _claims(header, " " * large, b"", version=b"\x02\x00")
    tracemalloc.start()
    try:
        for path in (shape, longer, header):
            with pytest.raises(UserError, match=path.name):
                read_inputs(path, [port])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_members_that_numpy_does_not_write(tmp_path: Path) -> None:
    _claims(tmp_path / "lzma.npz", _header("(4,)"), bytes(16), method=zipfile.ZIP_LZMA)
    with pytest.raises(UserError, match="compressed in a way"):
        check_input_file(tmp_path / "lzma.npz")
    with zipfile.ZipFile(tmp_path / "twice.npz", "w") as archive, warnings.catch_warnings(action="ignore"):
        for _ in range(2):
            archive.writestr("x.npy", "")
    with pytest.raises(UserError, match=r"twice\.npz"):
        check_input_file(tmp_path / "twice.npz")


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    assert sum(fuzz_inputs.fuzz(300, seed=0, folder=tmp_path).values()) == 300


def test_outputs_are_written_whatever_they_are_called(tmp_path: Path) -> None:
    names, arrays = ["file", "a/b", "allow_pickle"], [np.arange(3), np.float32(2.5), np.array([], bool)]
    write_outputs(tmp_path / "y.npz", names, arrays)  # type: ignore[arg-type]
    with np.load(tmp_path / "y.npz") as stored:
        assert stored.files == names
        for name, array in zip(names, arrays, strict=True):
            assert np.array_equal(stored[name], array)
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"]


def test_targets_that_cannot_become_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target, sentence in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a device or a pipe"),
        (tmp_path / "a/b", "no folder"),
    ):
        with pytest.raises(UserError, match=f"--output .*{sentence}"):
            check_target(target, "--output")
    check_target(tmp_path / "new", "--output")
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match="cannot be written"):
        check_target(tmp_path / "new", "--output")


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
    assert compare([expected + 3.9 * 2.0**-10], [expected], "tf32").ok
    assert not compare([expected + 4.2 * 2.0**-10], [expected], "tf32").ok


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


def test_what_onnx_runtime_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(UserError, match=r"ONNX Runtime cannot answer with .*text\.onnx \(.*\); name the bundle's original"):
        reference(tmp_path / "text.onnx", {}, [])


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
