"""Small files that declare huge tensors or loops: each is refused at once, with a message that states the limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend import folding as onnx_folding
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.limits import CONSTANTS, DEPTH, ELEMENTS, FOLDED, NODES, RANK, TABLE
from tests.compiler.frontend.test_importer import assert_same_function, make

Nodes = list[onnx.NodeProto]
Constants = dict[str, np.ndarray]

node = helper.make_node


def refused(model: onnx.ModelProto, folder: Path) -> str:
    """The error message of the import of `model`, without the name of the file."""
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError) as caught:
        import_model(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and text.isprintable()
    return text.removeprefix(str(path))


LARGE_CONSTANTS: dict[str, tuple[onnx.NodeProto, Constants]] = {
    "Range": (
        node("Range", ["a", "b", "c"], ["r"], name="n"),
        {"a": np.float32(0), "b": np.float32(1e8), "c": np.float32(1)},
    ),
    "ConstantOfShape": (node("ConstantOfShape", ["s"], ["r"], name="n"), {"s": np.array([10**8])}),
    "HannWindow": (node("HannWindow", ["s"], ["r"], name="n"), {"s": np.array(10**8)}),
}


@pytest.mark.parametrize("op", LARGE_CONSTANTS)
def test_a_folded_constant_has_a_limit(op: str, tmp_path: Path) -> None:
    """A file of 195 bytes used 12 GiB."""
    large, constants = LARGE_CONSTANTS[op]
    model = make([large, node("Add", ["x", "r"], ["y"])], {"x": [1]}, ["y"], constants)
    assert refused(model, tmp_path) == f": {op} node 'n' makes a constant of 400000000 bytes, but at most {64 << 20} are folded"


@pytest.mark.parametrize(
    ("large", "constants"),
    [
        (node("Expand", ["x", "s"], ["y"]), {"s": np.array([10**6, 10**6])}),
        (node("Tile", ["x", "s"], ["y"]), {"s": np.array([10**6, 10**6])}),
        (node("Pad", ["x", "s"], ["y"]), {"s": np.array([0, 0, 10**6 - 1, 10**6 - 1])}),
        (node("Expand", ["c", "s"], ["y"]), {"c": np.float32([1]), "s": np.array([10**6, 10**6])}),
    ],
)
def test_an_activation_has_a_limit(large: onnx.NodeProto, constants: Constants, tmp_path: Path) -> None:
    text = refused(make([large], {"x": [1, 1]}, ["y"], constants), tmp_path)
    assert text == f": 'y' has 1000000000000 elements, but at most {ELEMENTS} are supported"


def test_a_tensor_that_only_rewrites_make_has_the_same_limit(tmp_path: Path) -> None:
    """An LSTM multiplies the inputs of all its gates at once: four times the elements of its result."""
    lstm = node("LSTM", ["x", "w", "r"], ["", "y"], name="n", hidden_size=8)
    weights = {"w": np.ones((1, 32, 1), np.float32), "r": np.ones((1, 32, 8), np.float32)}
    model = make([lstm], {"x": [1, 1 << 26, 1]}, ["y"], weights)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UserError, match=rf"has {1 << 31} elements, but at most {ELEMENTS} are supported") as found:
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl", build=False)
    assert "\n" not in str(found.value)


def test_an_input_has_limits(tmp_path: Path) -> None:
    relu = node("Relu", ["x"], ["y"])
    assert f"'x' has {2**40} elements, but at most {ELEMENTS}" in refused(make([relu], {"x": [2**20, 2**20]}, ["y"]), tmp_path)
    assert f"'x' has 17 dimensions, but at most {RANK}" in refused(make([relu], {"x": [1] * 17}, ["y"]), tmp_path)


def test_resize_has_a_limit(tmp_path: Path) -> None:
    resize = node("Resize", ["x", "", "s"], ["y"], name="n")
    model = make([resize], {"x": [1, 1, 2, 2]}, ["y"], {"s": np.float32([1, 1, 1e6, 1])})
    assert refused(model, tmp_path) == f": Resize node 'n' makes an axis of 2000000 elements, but at most {TABLE} are supported"


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_by_what_is_there_has_a_limit(mode: str, tmp_path: Path) -> None:
    model = make(
        [node("Pad", ["x", "p"], ["y"], name="n", mode=mode)], {"x": [4]}, ["y"], {"p": np.array([0, 10**7])}, opset=19
    )
    assert refused(model, tmp_path) == f": Pad node 'n' makes an axis of 10000004 elements, but at most {TABLE} are supported"


@pytest.mark.parametrize("axis", [2**63 - 1, -10, 10])
def test_axes_lie_inside(axis: int, tmp_path: Path) -> None:
    """onnx ends the process if an axis is out of range."""
    normal = node("LayerNormalization", ["x", "s"], ["y", "mean"], name="n", axis=axis)
    model = make([normal], {"x": [2, 3]}, ["y", "mean"], {"s": np.ones(3, np.float32)})
    assert refused(model, tmp_path) == f": LayerNormalization node 'n' has axis {axis}, but its input has 2 dimensions"


def test_a_shape_that_is_too_long_is_refused_before_it_is_followed(tmp_path: Path) -> None:
    """Shape inference makes a dimension for each element of a shape that it does not know."""
    nodes = [node("Cast", ["x"], ["s"], to=TensorProto.INT64), node("ConstantOfShape", ["s"], ["y"], name="n")]
    text = refused(make(nodes, {"x": [10**9]}, ["y"]), tmp_path)
    assert text == f": ConstantOfShape node 'n' makes a tensor of 1000000000 dimensions, but at most {RANK} are supported"


def test_split_makes_as_many_outputs_as_it_has(tmp_path: Path) -> None:
    """onnx ends the process if there are more outputs, and makes `num_outputs` if there are fewer."""
    for outputs, parts in ((4, 3), (2, 10**9)):
        split = node("Split", ["x"], [f"y{i}" for i in range(outputs)], name="n", num_outputs=parts)
        model = make([split], {"x": [6]}, list(split.output))
        assert refused(model, tmp_path) == f": Split node 'n' has {outputs} outputs, but its num_outputs is {parts}"


@pytest.mark.parametrize("start", ["x", "n"])
def test_joined_shapes_have_a_limit(start: str, tmp_path: Path) -> None:
    """The optimiser tracks each number of a shape, even unknown ones: 40 nodes would make 2 ** 40."""
    nodes = [node("NonZero", ["x"], ["n"]), node("Shape", [start], ["s0"])]
    nodes += [node("Concat", [f"s{i}", f"s{i}"], [f"s{i + 1}"], axis=0) for i in range(40)]
    nodes += [node("Cast", ["s40"], ["c"], to=TensorProto.FLOAT), node("Add", ["x", "c"], ["y"])]
    assert "numbers of shapes, but at most" in refused(make(nodes, {"x": [1]}, ["y"]), tmp_path)


def chain(count: int, keep: bool) -> onnx.ModelProto:
    """`count` different constants of 6 MB; each is used whole (`keep`), or only its largest number is."""
    nodes: Nodes = []
    constants: Constants = {"a": np.float32(0)}
    for i in range(count):
        constants |= {f"b{i}": np.float32(1.5e6 * (i + 1)), f"c{i}": np.float32(i + 1)}
        nodes.append(node("Range", ["a", f"b{i}", f"c{i}"], [f"r{i}"]))
        if not keep:
            nodes.append(node("ReduceMax", [f"r{i}"], [f"s{i}"]))
        nodes.append(node("Add", [f"y{i - 1}" if i else "x", f"{'r' if keep else 's'}{i}"], [f"y{i}"]))
    return make(nodes, {"x": [1]}, [f"y{count - 1}"], constants)


def test_all_constants_together_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert onnx_folding.COMPUTED_LIMIT < CONSTANTS < FOLDED
    monkeypatch.setattr(onnx_folding, "CONSTANTS", 20 << 20)
    monkeypatch.setattr(onnx_folding, "FOLDED", 40 << 20)
    kept = refused(chain(5, keep=True), tmp_path)
    assert kept == f": the constants that the model computes take more than {20 << 20} bytes, the most that are kept"
    made = refused(chain(8, keep=False), tmp_path)
    assert made == f": the model computes more than {40 << 20} bytes of constants, the most that are folded"


def doubled(depth: int) -> onnx.ModelProto:
    """A function that calls another twice, which calls another twice, and so on; the last one calls Neg twice."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("m", 1)]
    functions = []
    for level in range(depth):
        op, domain = (f"F{level - 1}", "m") if level else ("Neg", "")
        body = [node(op, ["a"], ["b"], domain=domain), node(op, ["b"], ["c"], domain=domain)]
        functions.append(helper.make_function("m", f"F{level}", ["a"], ["c"], body, imports))
    model = make([node(f"F{depth - 1}", ["x"], ["y"], domain="m")], {"x": [2]}, ["y"], functions=(functions[0],))
    model.functions.extend(functions[1:])
    return model


def test_nodes_are_counted_before_functions_are_inlined(tmp_path: Path) -> None:
    assert refused(doubled(16), tmp_path) == f" has 65536 nodes with its functions inlined, but at most {NODES} are read"
    path = tmp_path / "m.onnx"
    path.write_bytes(doubled(3).SerializeToString())
    assert len(import_model(path).nodes) == 8


def test_functions_have_a_depth(tmp_path: Path) -> None:
    text = refused(doubled(24), tmp_path)
    assert text == f": functions call each other more than {DEPTH} deep, the most that is read ('F7')"


def test_a_function_that_calls_itself(tmp_path: Path) -> None:
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("m", 1)]
    function = helper.make_function("m", "F", ["a"], ["b"], [node("F", ["a"], ["b"], domain="m")], imports)
    model = make([node("F", ["x"], ["y"], domain="m")], {"x": [2]}, ["y"], functions=(function,))
    assert refused(model, tmp_path) == ": function 'F' calls itself, which no ONNX model may"


def nested(depth: int) -> onnx.ModelProto:
    """Nested If nodes, each with a constant condition."""

    def branch(op: str, inner: onnx.GraphProto | None, level: int) -> onnx.GraphProto:
        other = f"z{level}"
        made = (
            node(op, ["x"], [other])
            if inner is None
            else node("If", ["c"], [other], then_branch=inner, else_branch=branch("Exp", None, 1000 + level), name=f"if{level}")
        )
        return helper.make_graph([made], "g", [], [helper.make_empty_tensor_value_info(other)])

    inner = branch("Neg", None, 0)
    for level in range(1, depth):
        inner = branch("If", inner, level)
    choice = node("If", ["c"], ["y"], then_branch=inner, else_branch=branch("Exp", None, 2000), name="top")
    return make([choice], {"x": [2]}, ["y"], {"c": np.array(True)})


def test_subgraphs_have_a_depth(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(nested(DEPTH).SerializeToString())
    graph = import_model(path)
    assert [made.op for made in graph.nodes] == ["Neg"]
    assert_same_function(path, graph)
    text = refused(nested(DEPTH + 1), tmp_path)
    assert text == f": subgraphs are nested more than {DEPTH} deep, the most that is read ('if1')"
