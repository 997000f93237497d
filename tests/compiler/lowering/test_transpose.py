"""Transposes by tiles: every element in its place, for all sizes of elements, runs shorter than a tile, and remainders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.program.kernel_text import kernel_texts
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import DEVICES, OF_A_GPU, Nodes, answers_of

SHAPES = (
    ((64, 48), (1, 0)), ((129, 257), (1, 0)), ((17, 1031), (1, 0)), ((300, 9), (1, 0)), ((5, 513), (1, 0)), ((513, 3), (1, 0)),
    ((2, 3, 40, 33), (0, 2, 3, 1)), ((2, 40, 33, 3), (0, 3, 1, 2)), ((9, 16, 31), (2, 1, 0)), ((70, 8, 12), (0, 2, 1)),
    ((3, 5, 7, 2, 11), (4, 2, 0, 3, 1)), ((7, 5, 6, 4), (3, 2, 1, 0)), ((2, 260, 130), (0, 2, 1)),
)  # fmt: skip
"""Whole tiles and blocks of them, remainders, one short side or the other, both, and several other dimensions."""

PLACES = [(*place, "") for place in DEVICES] + OF_A_GPU


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    """Data without two equal neighbours; floats include NaN and infinity."""
    count = np.arange(np.prod(shape)) * 7919 % 65521
    if dtype == "bool":
        return (count % 3 == 0).reshape(shape)
    data = (count - 30000).astype(dtype)
    if dtype == "float32":
        data[::97], data[1::89], data[2::83] = np.nan, np.inf, -0.0
    return data.reshape(shape)


@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int16", "int64"])
def test_every_element_is_in_its_place(device: str, path: str, compiled_for: str, dtype: str, tmp_path: Path) -> None:
    nodes = Nodes()
    exact = []
    for shape, perm in SHAPES if dtype == "float32" else SHAPES[1::4]:
        data = numbers(shape, dtype)
        nodes.node("Transpose", nodes.input(data), dtypes=(dtype,), perm=list(perm))
        exact.append(data.transpose(perm))
    for answer, right in zip(
        answers_of(nodes.proto(), nodes.feeds, (device, path), tmp_path, compiled_for), exact, strict=True
    ):
        assert answer.dtype == right.dtype
        assert answer.tobytes() == np.ascontiguousarray(right).tobytes()


@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
def test_regions_of_other_tensors(device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    """Reversed and strided slices, and parts of a result: both sides with steps and starts."""
    data = numbers((50, 70), "float32")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, data.shape)
    constants = {"starts": [49, 3], "ends": [-51, 69], "axes": [0, 1], "steps": [-1, 2]}
    nodes = [
        helper.make_node("Slice", ["x", *constants], ["part"]),
        helper.make_node("Transpose", ["part"], ["turned"], perm=[1, 0]),
        helper.make_node("Transpose", ["x"], ["whole"], perm=[1, 0]),
        helper.make_node("Concat", ["turned", "whole"], ["y"], axis=0),
    ]
    graph = helper.make_graph(
        nodes, "parts", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, (103, 50))],
        [helper.make_tensor(name, TensorProto.INT64, (2,), value) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    [answer] = answers_of(model, {"x": data}, (device, path), tmp_path, compiled_for)
    right = np.concatenate([data[::-1, 3:69:2].T, data.T])
    assert answer.tobytes() == np.ascontiguousarray(right).tobytes()


@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
def test_halves(device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    """With --precision fp16, the bits of halves are copied between two halves, and converted for an output in float."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0]),
        helper.make_node("MatMul", ["b", "one"], ["y"]),
        helper.make_node("MatMul", ["a", "other"], ["c"]),
        helper.make_node("Transpose", ["c"], ["z"], perm=[1, 0]),
    ]
    shapes = {"x": (70, 41), "y": (41, 70), "z": (41, 70)}
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    weights = [numpy_helper.from_array(np.eye(n, dtype=np.float32), name) for name, n in (("one", 70), ("other", 41))]
    graph = helper.make_graph(nodes, "halves", info[:1], info[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    data = np.random.default_rng(3).uniform(0, 1000, (70, 41)).astype(np.float32)
    wanted: Any = {"device": compiled_for or device, "memory_path": path, "precision": "fp16"}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", **wanted)
    with flashmem.Session(bundle, device=device) as session:
        answers = session.run(None, {"x": data})
    right = np.ascontiguousarray(data.astype(np.float16).astype(np.float32).T)
    assert [answer.tobytes() for answer in answers] == [right.tobytes()] * 2


def generated(shape: tuple[int, ...], perm: tuple[int, ...], device: str, folder: Path) -> Generated:
    """The program of one Transpose."""
    nodes = Nodes()
    nodes.node("Transpose", nodes.input(np.zeros(shape, np.float32)), perm=list(perm))
    onnx.save(nodes.proto(), folder / "m.onnx")
    graph = read_graph(folder / "m.onnx", resolve(BundleRequest(device=device)))
    return generate(fuse(graph), load_descriptor(device))


@pytest.mark.parametrize("device", ["pocl", "nvidia", "adreno750", "mali-g715"])
def test_both_sides_are_accessed_in_runs(device: str, tmp_path: Path) -> None:
    for shape in ((1024, 4096), (100, 60)):
        made = generated(shape, (1, 0), device, tmp_path)
        [launch] = made.program.launches
        text = kernel_texts(made.source.plain)[launch.kernel]
        assert launch.kernel.startswith("transpose_")
        if device == "pocl":
            assert text.count("vload16") == text.count("vstore16") == 16
        else:
            assert "__local float tile" in text
