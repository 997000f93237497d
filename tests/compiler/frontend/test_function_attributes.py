"""Attributes of a model's own functions: values of calls, defaults of every type, and references without a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from flashmem.base.errors import UserError
from flashmem.compiler.frontend import function_attributes
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.frontend.mapped_file import LARGE
from flashmem.compiler.ir.graph import FileConstant
from tests.compiler.frontend.test_importer import assert_same_function

DOMAIN = "mine"
FLOAT, INT, STRING, TENSOR, GRAPH = (
    AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING, AttributeProto.TENSOR, AttributeProto.GRAPH,
)  # fmt: skip
INTS, FLOATS, STRINGS = AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.STRINGS


def referring(node: onnx.NodeProto, kind: int, **references: str) -> onnx.NodeProto:
    """`node` with attributes that refer to attributes of its function."""
    for name, of in references.items():
        node.attribute.append(AttributeProto(name=name, ref_attr_name=of, type=kind))  # type: ignore[arg-type]
    return node


def function(
    name: str, nodes: list[onnx.NodeProto], *, required: tuple[str, ...] = (), overload: str = "", **defaults: Any
) -> onnx.FunctionProto:
    """A function of x and perhaps c that computes y."""
    inputs = ["x", "c"] if any("c" in node.input for node in nodes) else ["x"]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    protos = [helper.make_attribute(key, value) for key, value in defaults.items()]
    made = helper.make_function(DOMAIN, name, inputs, ["y"], nodes, imports, list(required), protos)
    made.overload = overload
    return made


def call(name: str, *inputs: str, output: str = "y", overload: str = "", **attributes: Any) -> onnx.NodeProto:
    node = helper.make_node(name, list(inputs) or ["x"], [output], domain=DOMAIN, **attributes)
    node.overload = overload
    return node


def leaky(reference: str = "alpha") -> onnx.NodeProto:
    return referring(helper.make_node("LeakyRelu", ["x"], ["y"]), FLOAT, alpha=reference)


def saved(path: Path, nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto]) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None) for node in nodes]
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", [x], outputs)
    onnx.save(helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10), path)
    return path


def branch(op: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(op, TensorProto.FLOAT, None)
    return helper.make_graph([helper.make_node(op, ["x"], [op])], op, [], [output])


def choosing(then: onnx.GraphProto | None = None) -> list[onnx.NodeProto]:
    """A condition that is true, and an If whose branch for it is `then`, or attribute `then` of the function."""
    node = helper.make_node("If", ["true"], ["y"], else_branch=branch("Abs"), **({"then_branch": then} if then else {}))
    true = helper.make_node("Constant", [], ["true"], value=numpy_helper.from_array(np.array(True)))
    return [true, node if then else referring(node, GRAPH, then_branch="then")]


def recurrent() -> list[onnx.NodeProto]:
    """An RNN whose activations are attribute `kinds`, and whose weights are attribute `weights`."""
    weights = referring(helper.make_node("Constant", [], ["w"]), TENSOR, value="weights")
    rnn = referring(helper.make_node("RNN", ["x", "w", "w"], ["y"], hidden_size=4), STRINGS, activations="kinds")
    return [weights, rnn]


WEIGHTS = numpy_helper.from_array(np.linspace(-1, 1, 16, dtype=np.float32).reshape(1, 4, 4), "weights")
DEFAULTS: dict[str, onnx.FunctionProto] = {
    "float": function("F", [leaky()], alpha=0.25),
    "int": function("F", [referring(helper.make_node("Softmax", ["x"], ["y"]), INT, axis="axis")], axis=1),
    "string": function("F", [referring(helper.make_node("Gelu", ["x"], ["y"]), STRING, approximate="how")], how="tanh"),
    "ints": function("F", [referring(helper.make_node("Transpose", ["x"], ["y"]), INTS, perm="order")], order=[1, 0, 2]),
    "floats": function(
        "F",
        [
            referring(helper.make_node("Constant", [], ["k"]), FLOATS, value_floats="numbers"),
            helper.make_node("Mul", ["x", "k"], ["y"]),
        ],
        numbers=[0.5, 2.0, -1.0, 4.0],
    ),
    "strings and a tensor": function("F", recurrent(), kinds=["Relu"], weights=WEIGHTS),
    "a graph": function("F", choosing(), then=branch("Neg")),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_count(kind: str, tmp_path: Path) -> None:
    assert_same_function(path := saved(tmp_path / "m.onnx", [call("F")], [DEFAULTS[kind]]), import_model(path))


def test_calls_in_calls(tmp_path: Path) -> None:
    """A value, a default, none at all; also through two functions, in a branch, and in overloads of one name."""
    functions = [
        function("Leaky", [leaky()], alpha=0.25),
        function("Leaky", [leaky("slope")], overload="other", slope=0.75),
        function("Open", [leaky()], required=("alpha",)),
        function("Outer", [referring(call("Leaky"), FLOAT, alpha="a")], required=("a",)),
        function("Steep", [referring(call("Leaky"), FLOAT, alpha="a")], a=0.5),
        function("Branch", choosing(helper.make_graph([leaky("a")], "b", [], branch("y").output)), a=0.125),
    ]  # fmt: skip
    functions[-1].node[1].attribute[1].g.node[0].output[0] = functions[-1].node[1].attribute[1].g.output[0].name = "inner"
    names = ("Leaky", "Open", "Outer", "Steep", "Branch")
    nodes = [call(name, output=name) for name in names]
    nodes += [call("Leaky", output="given", alpha=2.0), call("Open", output="open given", alpha=3.0)]
    nodes += [call(name, output=f"{name} given", a=4.0) for name in ("Outer", "Steep", "Branch")]
    nodes += [call("Leaky", output="other", overload="other")]
    nodes += [call("Leaky", output="other given", overload="other", slope=5.0)]
    path = saved(tmp_path / "m.onnx", nodes, functions)
    graph = import_model(path)
    assert_same_function(path, graph)
    slopes = {node.attributes["alpha"] for node in graph.nodes if node.op == "LeakyRelu" and node.attributes}
    assert slopes == {0.125, 0.25, 0.5, 0.75, 2.0, 3.0, 4.0, 5.0}


def test_an_overload_is_called_in_a_function(tmp_path: Path) -> None:
    """ONNX Runtime calls the other one."""
    functions = [
        function("Leaky", [leaky()], alpha=0.25),
        function("Leaky", [leaky()], overload="other", alpha=0.75),
        function("Outer", [call("Leaky", overload="other")]),
    ]
    (node,) = import_model(saved(tmp_path / "m.onnx", [call("Outer")], functions)).nodes
    assert node.attributes == {"alpha": 0.75}


def test_a_large_tensor_among_the_defaults_stays_in_the_file(tmp_path: Path) -> None:
    weights = np.arange(LARGE, dtype=np.float32).reshape(4, -1)
    constant = referring(helper.make_node("Constant", [], ["w"]), TENSOR, value="weights")
    body = [constant, helper.make_node("MatMul", ["x", "w"], ["y"])]
    made = function("F", body, weights=numpy_helper.from_array(weights))
    graph = import_model(saved(tmp_path / "m.onnx", [call("F")], [made]))
    (found,) = graph.constants()
    assert isinstance(found.constant, FileConstant)
    np.testing.assert_array_equal(found.constant.array(), weights)


def test_graphs_among_the_attributes_count_for_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_attributes, "NODES", 6)
    functions = [function("F", choosing(), then=branch("Neg"))]
    import_model(saved(tmp_path / "m.onnx", [call("F")], functions))
    with pytest.raises(UserError, match="more than 6 nodes with its functions inlined"):
        import_model(saved(tmp_path / "m.onnx", [call("F"), call("F", output="z", then=branch("Exp"))], functions))


def test_a_random_node_of_a_function_draws_other_numbers_in_each_call(tmp_path: Path) -> None:
    """Nodes without a seed; equal nodes would be merged."""
    drawn = function("F", [helper.make_node("Bernoulli", ["x"], ["y"])])
    graph = import_model(saved(tmp_path / "m.onnx", [call("F"), call("F", output="z")], [drawn]))
    seeds = [node.attributes["seed"] for node in graph.nodes if node.op == "Bernoulli"]
    assert len({*seeds}) == 2
