"""Validation of ONNX files: violations are refused with a message that names the node; unusual valid files are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Value
from tests.compiler.frontend.test_importer import assert_same_function, make
from tests.support.graph_to_onnx import run

node = helper.make_node


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.onnx"


def cast(to: object) -> list[onnx.NodeProto]:
    return [node("Cast", ["x"], ["y"], name="n", to=to)]


WRONG_NODES: list[tuple[list[onnx.NodeProto], str]] = [
    (cast("float"), "Cast node 'n': Mismatched attribute type in 'n : to'. Expected: 'INT', actual: 'STRING'"),
    ([node("Cast", ["x"], ["y"], name="n")], "Cast node 'n': Required attribute 'to' is missing"),
    ([node("Relu", ["x"], ["y"], name="n", slope=1.0)], "Relu node 'n': Unrecognized attribute: slope for operator Relu"),
    ([node("Relu", ["x", "x"], ["y"], name="n")], "has input size 2 not in range [min=1, max=1]"),
    ([node("Add", ["x"], ["y"], name="n")], "has input size 1 not in range [min=2, max=2]"),
    ([node("Constant", [], ["c"], name="n"), node("Add", ["x", "c"], ["y"])], "Constant node 'n' needs one value, but has 0"),
    ([node("Upsample", ["x", "x"], ["y"], name="n")], "Upsample node 'n': Op registered for Upsample is deprecated"),
    ([node("Gelu", ["x"], ["y"], name="n")], "Gelu node 'n': No Op registered for Gelu with domain_version of 18"),
    (
        [node("Neg", ["b"], ["a"]), node("Neg", ["a"], ["b"]), node("Add", ["x", "a"], ["y"])],
        "Neg node 'Neg_a' reads 'b', which nothing computes before it",
    ),
    ([node("Neg*\x0f", ["b"], ["y"], name="n")], r"'Neg*\x0f' node 'n' reads 'b', which nothing computes before it"),
    ([node("Neg", ["x"], ["y"]), node("Exp", ["x"], ["y"])], "'y' has been used as output names multiple times"),
    ([node("Neg", ["x"], ["x"]), node("Exp", ["x"], ["y"])], "'x' has been used as output names multiple times"),
    ([node("Neg", ["x"], ["a"])], "Graph output 'y' is not an output of any node in graph"),
    (
        [node("Not", ["x"], ["y"], name="n")],
        "Not node 'n': X typestr: T, has unsupported type: tensor(float)",
    ),
    (
        [node("Size", ["x"], ["s"]), node("Add", ["x", "s"], ["y"], name="n")],
        "Add node 'n': B has inconsistent type tensor(int64)",
    ),
    ([node("Flatten", ["x"], ["y"], name="n", axis=7)], "Flatten node 'n' has axis 7, but its input has 2 dimensions"),
    (
        [node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "x"], ["y"], name="n")],
        "MatMul node 'n': Incompatible dimensions for matrix multiplication",
    ),
    (
        [node("Unsqueeze", ["x", "x"], ["y"], name="n")],
        "Unsqueeze node 'n': axes typestr: tensor(int64), has unsupported type: tensor(float)",
    ),
]


@pytest.mark.parametrize(("nodes", "message"), WRONG_NODES)
def test_nodes_that_contradict_their_operator(nodes: list[onnx.NodeProto], message: str, path: Path) -> None:
    path.write_bytes(make(nodes, {"x": [2, 3]}, ["y"]).SerializeToString())
    with pytest.raises(UserError) as caught:
        import_model(path)
    assert message in str(caught.value) and str(caught.value).isprintable()


def test_types_are_held_where_constants_meet(path: Path) -> None:
    """NumPy would add integers to floats; ONNX does not."""
    nodes = [node("Add", ["i", "f"], ["c"], name="n"), node("Mul", ["x", "c"], ["y"])]
    path.write_bytes(make(nodes, {"x": [2]}, ["y"], {"i": np.array([1]), "f": np.float32([1])}).SerializeToString())
    with pytest.raises(UserError, match=r"Add node 'n': B has inconsistent type tensor\(float\)"):
        import_model(path)


WRONG_GRAPHS: list[tuple[Callable[[onnx.GraphProto], object], str]] = [
    (lambda graph: graph.input[0].ClearField("type"), "Field 'type' of 'value_info' is required but missing"),
    (lambda graph: graph.input.append(graph.input[0]), "'x' has been used as graph input names multiple times"),
    (lambda graph: graph.initializer.append(graph.initializer[0]), "c initializer name is not unique"),
    (
        lambda graph: setattr(graph.output[0].type.tensor_type, "elem_type", TensorProto.INT64),
        "output 'y' is declared as int64, but Add node 'Add_y' makes float",
    ),
]


@pytest.mark.parametrize(("damage", "message"), WRONG_GRAPHS)
def test_graphs_that_contradict_themselves(damage: Callable[[onnx.GraphProto], object], message: str, path: Path) -> None:
    model = make([node("Add", ["x", "c"], ["y"])], {"x": [2]}, ["y"], {"c": np.float32([1, 2])})
    damage(model.graph)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError) as caught:
        import_model(path)
    assert message in str(caught.value) and str(caught.value).isprintable()


# Unusual but valid files


def test_nodes_out_of_order_are_put_in_order(path: Path) -> None:
    nodes = [node("Add", ["b", "x"], ["y"]), node("Exp", ["a"], ["b"]), node("Neg", ["x"], ["a"])]
    path.write_bytes(make(nodes, {"x": [2]}, ["y"]).SerializeToString())
    graph = import_model(path)
    assert [made.op for made in graph.nodes] == ["Neg", "Exp", "Add"]
    assert_same_function(path, graph)


@pytest.mark.parametrize("version", [3, 4, 8, 13, 99])
def test_ir_versions(version: int, path: Path) -> None:
    """Before version 4 weights were also listed as inputs."""
    model = make([node("Add", ["x", "c"], ["y"])], {"x": [2], "c": [2]}, ["y"], {"c": np.float32([1, 2])})
    model.ir_version = version
    path.write_bytes(model.SerializeToString())
    assert [port.name for port in import_model(path).inputs] == ["x"]


def test_the_other_name_of_onnx_and_domains_nobody_declared(path: Path) -> None:
    nodes = [node("Neg", ["x"], ["a"], domain="ai.onnx"), node("Exp", ["a"], ["y"])]
    model = make(nodes, {"x": [2]}, ["y"])
    path.write_bytes(model.SerializeToString())
    assert [made.op for made in import_model(path).nodes] == ["Neg", "Exp"]
    model.graph.node.append(node("FusedMatMul", ["x", "x"], ["z"], domain="mine"))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"mine\.FusedMatMul is not an ONNX operator"):
        import_model(path)


def test_outputs_may_leave_out_their_type(path: Path) -> None:
    model = make([node("Neg", ["x"], ["y"])], {"x": [2]}, ["y"])
    model.graph.output[0].ClearField("type")
    path.write_bytes(model.SerializeToString())
    assert import_model(path).outputs[0].value.shape == (2,)


# Declared shapes that contradict inference


def branch(op: str, result: str, stale: list[int]) -> onnx.GraphProto:
    """A branch that declares wrong shapes for its results."""
    values = [helper.make_tensor_value_info(f"{result}_in", TensorProto.FLOAT, stale)]
    outputs = [helper.make_tensor_value_info(result, TensorProto.FLOAT, stale)]
    nodes = [node(op, ["x"], [f"{result}_in"]), node("Neg", [f"{result}_in"], [result])]
    return helper.make_graph(nodes, "branch", [], outputs, value_info=values)


@pytest.mark.parametrize("choice", [True, False])
def test_stale_shapes_inside_a_branch_are_not_believed(choice: bool, path: Path) -> None:
    nodes = [
        node("If", ["c"], ["a"], then_branch=branch("Exp", "t", [5, 1]), else_branch=branch("Sqrt", "e", [7])),
        node("ReduceSum", ["a"], ["y"], keepdims=0),
        node("Shape", ["a"], ["s"]),
    ]
    model = make(nodes, {"x": [2, 3]}, ["y", "s"], {"c": np.array(choice)})
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT64
    path.write_bytes(model.SerializeToString())
    graph = import_model(path)
    assert [made.op for made in graph.nodes] == ["Exp" if choice else "Sqrt", "Neg", "ReduceSum"]
    assert all(made.outputs[0].shape == (2, 3) for made in graph.nodes[:2])
    assert graph.outputs[1].value.constant is not None
    assert graph.outputs[1].value.constant.array().tolist() == [2, 3]


def test_stale_shapes_inside_a_function_are_not_believed(path: Path) -> None:
    imports = [helper.make_opsetid("", 18)]
    function = helper.make_function("m", "F", ["a"], ["c"], [node("Exp", ["a"], ["b"]), node("Neg", ["b"], ["c"])], imports)
    function.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [9, 9]))
    model = make([node("F", ["x"], ["y"], domain="m")], {"x": [2]}, ["y"], functions=(function,))
    path.write_bytes(model.SerializeToString())
    assert {made.outputs[0].shape for made in import_model(path).nodes} == {(2,)}


def test_a_branch_that_returns_a_constant_of_its_own(path: Path) -> None:
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("k", "l")]
    constant = numpy_helper.from_array(np.float32([5, 6]), "k")
    then = helper.make_graph([node("Neg", ["x"], ["l"])], "then", [], outputs, [constant])
    nodes = [node("Not", ["d"], ["c"]), node("If", ["c"], ["a", "b"], then_branch=then, else_branch=then)]
    path.write_bytes(make(nodes, {"x": [2]}, ["a", "b"], {"d": np.array([False])}).SerializeToString())
    graph = import_model(path)
    assert [port.name for port in graph.outputs] == ["a", "b"]
    a, b = (port.value for port in graph.outputs)
    assert a.constant is not None and a.constant.array().tolist() == [5, 6]
    assert b.producer is not None and b.producer.op == "Neg"


# Outputs


OUTPUTS: list[tuple[list[onnx.NodeProto], list[str]]] = [
    ([node("Exp", ["x"], ["y"]), node("Exp", ["x"], ["z"])], ["y", "z"]),
    ([node("Exp", ["x"], ["y"]), node("Identity", ["y"], ["z"])], ["y", "z"]),
    ([node("Exp", ["x"], ["a"]), node("Identity", ["a"], ["y"]), node("Identity", ["a"], ["z"])], ["z", "a", "y"]),
    ([node("Identity", ["x"], ["y"]), node("Identity", ["x"], ["z"])], ["y", "z"]),
    ([node("Exp", ["x"], ["y"])], ["x", "y"]),
    ([node("Exp", ["x"], ["y"])], ["y", "c"]),
    ([node("Identity", ["c"], ["y"]), node("Add", ["c", "c"], ["z"]), node("Mul", ["two", "c"], ["w"])], ["y", "c", "w", "z"]),
    ([node("Mul", ["x", "one"], ["y"]), node("Exp", ["y"], ["z"])], ["y", "z"]),
    ([node("Identity", ["x"], ["a"]), node("Exp", ["a"], ["b"]), node("Exp", ["x"], ["y"])], ["b", "y", "a"]),
]


@pytest.mark.parametrize(("nodes", "outputs"), OUTPUTS)
def test_every_output_keeps_its_name_and_its_answer(nodes: list[onnx.NodeProto], outputs: list[str], path: Path) -> None:
    constants = {"c": np.float32([1, 2]), "two": np.float32([2, 2]), "one": np.float32([1, 1])}
    model = make(nodes, {"x": [2]}, outputs, constants)
    path.write_bytes(model.SerializeToString())
    graph = import_model(path)
    assert [port.name for port in graph.outputs] == outputs
    assert [port.name for port in graph.inputs] == ["x"]
    x = np.float32([0.5, -1])
    expected = run(str(path), {"x": x})
    for port in graph.outputs:
        np.testing.assert_allclose(evaluate(port.value, {"x": x}), expected[port.name], rtol=1e-6)


def evaluate(value: Value, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The value of a graph of Exp, Mul and Identity."""
    if value.constant is not None:
        return value.constant.array()
    if value.producer is None:
        return feeds[value.name]
    inputs = [evaluate(read, feeds) for read in value.producer.inputs]
    return {"Exp": np.exp, "Mul": np.multiply, "Identity": np.copy}[value.producer.op](*inputs)


@pytest.mark.parametrize("opset", [11, 18, 26])
def test_shape_and_size_can_be_outputs(opset: int, path: Path) -> None:
    nodes = [node("Shape", ["x"], ["y"]), node("Size", ["x"], ["z"]), node("Shape", ["x"], ["again"])]
    nodes.append(node("Expand", ["x", "y"], ["large"], name="reads a shape that is an output"))
    model = make(nodes, {"x": [2, 3]}, ["y", "z", "again", "large"], opset=opset)
    for output in model.graph.output[:3]:
        output.type.tensor_type.elem_type = TensorProto.INT64
    path.write_bytes(model.SerializeToString())
    found = {port.name: port.value.constant for port in import_model(path).outputs}
    assert {name: constant.array().tolist() for name, constant in found.items() if constant} == {
        "y": [2, 3],
        "z": 6,
        "again": [2, 3],
    }


def test_operators_that_are_only_defined_by_others_have_shapes(path: Path) -> None:
    constants = {"s": np.float32([1, 2, 3, 4]), "b": np.float32([0, 0, 1, 1])}
    nodes = [node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)]
    path.write_bytes(make(nodes, {"x": [3, 4, 2, 2]}, ["y"], constants, opset=21).SerializeToString())
    (made,) = import_model(path).nodes
    assert (made.op, made.outputs[0].shape) == ("GroupNormalization", (3, 4, 2, 2))
