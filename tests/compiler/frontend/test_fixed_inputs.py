"""Inputs that are fixed when a model is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.importer import import_model
from tests.support.command_line import Command, command_line
from tests.support.inputs import floats


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = x * scale + shift if `adds`, else x - scale, for each of `count` rows of x; `rows` has an open size."""

    def branch(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, None)])

    added = [helper.make_node("Mul", ["x", "scale"], ["m"]), helper.make_node("Add", ["m", "shift"], ["added.y"])]
    then, other = branch("added", added), branch("less", [helper.make_node("Sub", ["x", "scale"], ["less.y"])])
    nodes = [
        helper.make_node("If", ["adds"], ["z"], then_branch=then, else_branch=other),
        helper.make_node("Cast", ["count"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["z", "c"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3]),
        helper.make_tensor_value_info("adds", TensorProto.BOOL, []),
        helper.make_tensor_value_info("scale", TensorProto.FLOAT, [3]),
        helper.make_tensor_value_info("shift", TensorProto.FLOAT, ["rows", 1]),
        helper.make_tensor_value_info("count", TensorProto.UINT8, [1]),
    ]
    graph = helper.make_graph(nodes, "fixed", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])])
    path = tmp_path / "fixed.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


X = {"x": (4, 3), "shift": (4, 1)}


@pytest.mark.parametrize("adds", [True, False, 1])
@pytest.mark.parametrize("scale", [0.5, [1, 2.5, -3], np.array([1e6, 1, 0], np.float32)])
def test_the_answer_is_that_of_the_whole_model(adds: Any, scale: Any, model: Path, tmp_path: Path) -> None:
    constants = {"adds": adds, "scale": scale, "count": [7]}
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", constants=constants, shapes=X)
    assert [port.name for port in bundle.program.inputs] == ["x", "shift"]
    given = {"x": floats(4, 3, kind="around 1e3"), "shift": floats(4, 1)}
    scales = np.broadcast_to(np.asarray(scale, np.float32), 3)
    fixed = {"adds": np.array(bool(adds)), "scale": scales, "count": np.array([7], np.uint8)}
    [wanted] = onnxruntime.InferenceSession(model).run(None, {**given, **fixed})
    with flashmem.Session(bundle) as session:
        np.testing.assert_allclose(session.run(None, given)[0], wanted, rtol=3e-7)


def test_an_input_with_a_default_may_be_given(model: Path) -> None:
    """ONNX Runtime takes another value in each run; here it is fixed. Without one, the default is the value."""
    proto = onnx.load(model)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2, 3, 4], np.float32), "scale"))
    onnx.save(proto, model)
    rest = {"adds": True, "count": 2, "shift": [[1], [2]]}
    for scale, more in ([2, 3, 4], {}), ([5, -6, 7], {"scale": [5, -6, 7]}):
        graph = import_model(model, {"x": (2, 3)}, constants={**rest, **more})
        assert [port.name for port in graph.inputs] == ["x"]
        values = [value for node in graph.nodes for value in node.inputs if value is not None]
        held = [value.constant.array().ravel().tolist() for value in values if value.constant is not None]
        assert [float(number) for number in scale] in held and (not more or [2.0, 3.0, 4.0] not in held)
    with pytest.raises(UserError, match=r"its inputs are x, adds, shift, count$"):
        import_model(model, {"x": (2, 3)}, constants={"absent": 1})


def test_an_open_size_is_that_of_the_constant(model: Path) -> None:
    rest = {"adds": True, "scale": 1.0, "count": 2}
    graph = import_model(model, {"x": (2, 3)}, constants={**rest, "shift": [[1], [2]]})
    assert [port.name for port in graph.inputs] == ["x"]
    graph = import_model(model, {"x": (4, 3), "shift": (4, 1)}, constants={**rest, "shift": 1})
    assert [port.value.shape for port in graph.inputs] == [(4, 3)]


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"sr": 1}, r"no input 'sr' to make a constant of: its inputs are x, adds, scale, shift, count$"),
        ({"count": 1.5}, r"'count' has a value that uint8 cannot hold"),
        ({"count": 300}, r"'count' has a value that uint8 cannot hold"),
        ({"count": -1}, r"'count' has a value that uint8 cannot hold"),
        ({"adds": 2}, r"'adds' has a value that bool cannot hold"),
        ({"scale": 1e60}, r"'scale' has a value that float32 cannot hold"),
        ({"scale": "wide"}, r"'scale' (is no array of numbers|has a value that float32 cannot hold)"),
        ({"scale": [1, 2]}, r"'scale' has shape \(2,\), and the input has \(3,\)$"),
        ({"scale": [[1, 2], [3]]}, r"has rows of different lengths"),
        ({"shift": 1}, r"'shift' has shape \(\), and the input 2 dimensions, some of them open; give its shape too"),
    ],
)
def test_constants_that_do_not_fit_are_refused(constants: Any, message: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        flashmem.compile(model, tmp_path / "m.flashmem", constants=constants, shapes={"x": (4, 3)})


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_the_command_line_fixes_inputs(command: Command, model: Path, tmp_path: Path) -> None:
    fixed = ("--constant", "adds=false", "--constant", "scale=1,2,3", "--constant", "count=2")
    made = command("compile", model, "-o", tmp_path / "m.flashmem", *fixed, "--shape", "x=4x3")
    assert made.code == 0, made.err
    ran = command("run", tmp_path / "m.flashmem", "--json", "--verify")
    assert ran.code == 0 and list(ran.json["shapes"]) == ["x", "shift"] and ran.json["verify"]["ok"]
    for text, message in (("adds", "is not understood"), ("scale=1,x", "is not understood"), ("=1", "is not understood")):
        refused = command("compile", model, "--constant", text)
        assert refused.code == 2 and message in refused.err
    twice = command("compile", model, "--constant", "count=1", "--constant", "count=2")
    assert twice.code == 2 and "is given twice" in twice.err
