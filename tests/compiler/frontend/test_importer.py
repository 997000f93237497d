"""The importer: imported graphs against ONNX Runtime on the original files, and malformed files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from flashmem.base.errors import DefectError, MissingFileError, UnsupportedModelError, UserError
from flashmem.compiler.frontend import external_data, importer
from flashmem.compiler.frontend.importer import REASONS, collect_unsupported, import_model
from flashmem.compiler.ir.graph import ArrayConstant, FileConstant, Graph
from flashmem.compiler.ir.quantised import QuantizedConstant
from flashmem.tools.zoo.graph_file import graph_to_onnx
from tests.support.graph_to_onnx import draw, run
from tests.support.zoo_data import DATA, EXPORTS, examples

TINY = sorted(EXPORTS)
OPEN_SHAPES = {"gptneo-tiny-dynamic": {"input_ids": (1, 16)}, "gptneo-tiny-dynamic-legacy": {"input_ids": (2, 11)}}


def tiny(name: str) -> Graph:
    return import_model(DATA / f"{name}.onnx", OPEN_SHAPES.get(name, {}))


def packaged(package: str, pattern: str) -> Path:
    """A model that is part of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob(pattern)
    return path


def assert_same_function(path: Path, graph: Graph, feeds_of: Callable[[int], dict[str, Any]] | None = None) -> None:
    """Check that `graph` computes the results of ONNX Runtime on the file, and that its answer depends on the input."""
    answers = []
    for seed in (0, 1):
        feeds = draw(graph, seed, 255) if feeds_of is None else feeds_of(seed)
        expected, found = run(str(path), feeds), run(graph_to_onnx(graph), feeds)
        assert list(expected) == list(found) == [port.name for port in graph.outputs]
        for port in graph.outputs:
            assert found[port.name].shape == port.value.shape
            span = np.ptp(expected[port.name]) or np.abs(expected[port.name]).max()  # for a single number, its magnitude
            np.testing.assert_allclose(found[port.name], expected[port.name], rtol=0, atol=1e-5 * span)
        answers.append(np.concatenate([array.ravel() for array in expected.values()]))
    assert np.abs(answers[0] - answers[1]).max() > 0


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_compute_the_same(name: str) -> None:
    if name in OPEN_SHAPES:
        assert_same_function(DATA / f"{name}.onnx", tiny(name))
    else:
        assert_same_function(DATA / f"{name}.onnx", tiny(name), lambda seed: examples(name, seed))


@pytest.mark.parametrize(
    ("pattern", "shape"),
    [
        ("models/*_det_*.onnx", (1, 3, 96, 160)),
        ("models/*_rec_*.onnx", (1, 3, 48, 160)),
        ("models/*_cls_*.onnx", (1, 3, 48, 192)),
    ],
)
def test_paddle_models_compute_the_same(pattern: str, shape: tuple[int, ...]) -> None:
    path = packaged("rapidocr", pattern)
    graph = import_model(path, {"x": shape})
    assert_same_function(path, graph)
    assert any(isinstance(value.constant, FileConstant) for value in graph.constants())  # weights in Constant nodes


def test_magika_computes_the_same() -> None:
    path = packaged("magika", "models/standard*/model.onnx")
    graph = import_model(path, {"bytes": (1, 2048)})
    assert [(port.name, port.dtype, port.value.dtype) for port in graph.inputs] == [("bytes", "int32", "int32")]
    assert_same_function(path, graph)


def test_both_exporters_give_the_same_gptneo() -> None:
    dynamo, legacy, dynamic = (Counter(n.op for n in tiny(f"gptneo-tiny{k}").nodes) for k in ("", "-legacy", "-dynamic"))
    assert dynamo == legacy == dynamic
    assert not set(dynamo) & {"Shape", "Range", "Trilu", "Cast", "Expand", "Slice", "ConstantOfShape", "Identity", "Constant"}


def test_attention_is_replaced_by_its_definition() -> None:
    ops = Counter(node.op for node in tiny("vit-tiny-opset23").nodes)
    assert ops["Attention"] == ops["Where"] == 0
    assert ops["Softmax"] == ops["Gelu"] == 2  # Gelu is a native operator


def test_the_tied_table_is_stored_once_and_not_transposed() -> None:
    graph = tiny("gptneo-tiny-tied")
    tables = [value for value in graph.constants() if 307 in value.shape]
    assert len(tables) == 1
    (table,) = tables
    assert isinstance(table.constant, FileConstant)
    assert {node.op for node in graph.consumers()[table]} == {"Gather", "Transpose"}


def test_weights_stay_in_the_data_file() -> None:
    graph = tiny("gptneo-tiny-external")
    files = {Path(v.constant.path).name for v in graph.constants() if isinstance(v.constant, FileConstant)}
    assert files == {"gptneo-tiny-external.onnx.data"}


def test_types_are_the_models() -> None:
    graph = tiny("gptneo-tiny")
    (port,) = graph.inputs
    assert (port.dtype, port.value.dtype) == ("int64", "int64")
    masks = [value for value in graph.constants() if value.constant is not None and value.constant.dtype == np.bool_]
    assert [(mask.shape, mask.dtype) for mask in masks] == [((1, 1, 16, 16), "bool")] * 2  # global and local


def test_nodes_are_in_order_and_named() -> None:
    for name in TINY:
        graph = tiny(name)
        known = {port.value for port in graph.inputs}
        for node in graph.nodes:
            assert all(v is None or v.constant is not None or v in known for v in node.inputs)
            assert all(value.producer is node for value in node.outputs)
            known.update(node.outputs)
        assert {port.value for port in graph.outputs} <= known
        assert len({node.name for node in graph.nodes}) == len(graph.nodes)


# Models built here


def make(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str | None]],
    outputs: list[str],
    constants: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 18,
    elem: int = TensorProto.FLOAT,
    functions: tuple[onnx.FunctionProto, ...] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, elem, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, elem, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    domains = {"": opset} | {function.domain: 1 for function in functions}
    imports = [helper.make_opsetid(*domain) for domain in domains.items()]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.onnx"


def relu(path: Path, shape: list[int | str | None], **options: int) -> Path:
    onnx.save(make([helper.make_node("Relu", ["x"], ["y"])], {"x": shape}, ["y"], **options), path)
    return path


def test_functions_are_inlined(path: Path) -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["b"]), helper.make_node("Tanh", ["b"], ["c"])]
    function = helper.make_function("mine", "SquareTanh", ["a"], ["c"], body, [helper.make_opsetid("", 18)])
    call = helper.make_node("SquareTanh", ["x"], ["y"], domain="mine")
    onnx.save(make([call], {"x": [2, 3]}, ["y"], functions=(function,)), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == ["Mul", "Tanh"]
    assert_same_function(path, graph)


def test_unnamed_nodes_get_distinct_names_and_missing_inputs_are_none(path: Path) -> None:
    nodes = [helper.make_node("Clip", ["x", "", "top"], ["a"]), helper.make_node("Clip", ["a", "low"], ["y"])]
    onnx.save(make(nodes, {"x": [4]}, ["y"], {"top": np.float32(2), "low": np.float32(-1)}), path)
    graph = import_model(path)
    assert len({node.name for node in graph.nodes}) == 2 and all(node.name for node in graph.nodes)
    assert graph.nodes[0].optional(1) is None
    assert_same_function(path, graph)


def test_large_masks_shrink_to_the_part_that_is_used(path: Path) -> None:
    mask = np.tril(np.ones((1, 1, 512, 512), np.bool_))
    nodes = [
        helper.make_node("Slice", ["mask", "starts", "ends", "axes"], ["part"]),
        helper.make_node("Where", ["part", "x", "low"], ["y"]),
    ]
    bounds = {"starts": np.array([0, 0]), "ends": np.array([8, 2**63 - 1]), "axes": np.array([2, 3])}
    onnx.save(make(nodes, {"x": [1, 1, 8, 512]}, ["y"], {"mask": mask, "low": np.float32(-9)} | bounds), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == ["Where"]
    assert {value.shape for value in graph.constants()} == {(1, 1, 8, 512), ()}
    assert all(isinstance(value.constant, ArrayConstant) for value in graph.constants())
    assert_same_function(path, graph)


def test_paddings_that_pytorch_turns_around_are_folded(path: Path) -> None:
    """torch.nn.functional.pad counts from the last dimension: its export reverses the numbers with a Slice."""
    nodes = [
        helper.make_node("Slice", ["pads", "last", "before", "axis", "back"], ["turned"]),
        helper.make_node("Transpose", ["turned"], ["ordered"], perm=[1, 0]),
        helper.make_node("Reshape", ["ordered", "flat"], ["all"]),
        helper.make_node("Pad", ["x", "all"], ["y"], mode="reflect"),
    ]
    constants = {"pads": np.array([[2, 3], [0, 1]]), "last": np.array([-1]), "before": np.array([-(2**63) + 1])}
    constants |= {"axis": np.array([0]), "back": np.array([-1]), "flat": np.array([-1])}
    onnx.save(make(nodes, {"x": [2, 9]}, ["y"], constants), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == ["Pad"]
    assert graph.outputs[0].value.shape == (3, 14)
    assert_same_function(path, graph)


def test_a_slice_backwards_from_before_the_first_element_takes_that_one(path: Path) -> None:
    """ONNX clamps the start; its reference implementation, which folds constants, returns nothing."""
    nodes = [
        helper.make_node("Slice", ["c", "starts", "ends", "axes", "steps"], ["s"]),
        helper.make_node("Add", ["x", "s"], ["y"]),
    ]
    constants = {"c": np.arange(12, dtype=np.float32).reshape(2, 6), "starts": np.array([-9]), "ends": np.array([-20])}
    constants |= {"axes": np.array([-1]), "steps": np.array([-1])}
    onnx.save(make(nodes, {"x": [2, 3]}, ["y"], constants), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == ["Slice", "Add"]
    assert_same_function(path, graph)


@pytest.mark.parametrize(
    ("shape", "bias", "attributes", "expected"),
    [
        ([2, 3, 6], [6], {}, "MatMul"),
        ([3, 2, 1, 6], [], {"transB": 1}, "MatMul"),
        ([3, 2, 6], [1], {"transB": 1, "alpha": 1.0}, "MatMul"),
        ([2, 3, 6], [6, 1], {}, "Gemm"),
        ([2, 3, 6], [6], {"transA": 1}, "Gemm"),
        ([2, 3, 6], [6], {"alpha": 0.5}, "Gemm"),
        ([3, 6, 2], [6], {}, "Gemm"),
        ([36], [6], {}, "Gemm"),
    ],
)
def test_gemm_before_a_change_of_shape(
    shape: list[int], bias: list[int], attributes: dict[str, float], expected: str, path: Path
) -> None:
    """It becomes a MatMul of more dimensions, if the result is the same."""
    draw = np.random.default_rng(3).standard_normal
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["a"]),
        helper.make_node("Gemm", ["a", "w", "c"], ["b"], **attributes),
        helper.make_node("Reshape", ["b", "shape"], ["d"]),
        helper.make_node("Tanh", ["d"], ["y"]),
    ]
    constants = {
        "rows": np.array([-1, 6]),
        "shape": np.array(shape),
        "w": draw((6, 6)).astype(np.float32),
        "c": draw(bias).astype(np.float32),
    }
    onnx.save(make(nodes, {"x": [2, 3, 6]}, ["y"], constants), path)
    graph = import_model(path)
    assert expected in {node.op for node in graph.nodes}
    assert_same_function(path, graph)


@pytest.mark.parametrize("op", ["Transpose", "Cast", "Reshape"])
def test_no_plain_copy_of_a_weight_is_made(op: str, path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16 if op == "Cast" else np.float32)
    inputs, attributes = ["w"], {"Cast": {"to": TensorProto.FLOAT}, "Transpose": {"perm": [1, 0]}}.get(op, {})
    constants = {"w": weight}
    if op == "Reshape":
        inputs, constants = ["w", "shape"], {"w": weight.reshape(4096), "shape": np.array([64, 64])}
    nodes = [helper.make_node(op, inputs, ["v"], **attributes), helper.make_node("MatMul", ["x", "v"], ["y"])]
    onnx.save(make(nodes, {"x": [2, 64]}, ["y"], constants), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == [op, "MatMul"]
    held = graph.nodes[0].input(0).constant
    assert isinstance(held, FileConstant) and held.dtype == weight.dtype
    np.testing.assert_array_equal(held.array(), constants["w"])
    assert_same_function(path, graph)


def test_operators_that_change_nothing_disappear(path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "zeros"], ["a"]),
        helper.make_node("Mul", ["ones", "a"], ["b"]),
        helper.make_node("Where", ["always", "b", "ones"], ["c"]),
        helper.make_node("Add", ["c", "wide"], ["d"]),  # this one broadcasts
        helper.make_node("Dropout", ["d"], ["e"]),
        helper.make_node("Identity", ["e"], ["y"]),
    ]
    constants = {"zeros": np.zeros((1, 3), np.float32), "ones": np.ones(3, np.float32), "wide": np.zeros((5, 1, 3), np.float32)}
    onnx.save(make(nodes, {"x": [2, 3]}, ["y"], constants | {"always": np.ones((2, 1), np.bool_)}), path)
    graph = import_model(path)
    assert [node.op for node in graph.nodes] == ["Add"]
    assert graph.outputs[0].value.shape == (5, 2, 3)
    assert_same_function(path, graph)


def test_a_model_that_returns_its_input_and_a_constant(path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Add", ["c", "c"], ["z"])]
    onnx.save(make(nodes, {"x": [2]}, ["y", "z"], {"c": np.float32([1, 2])}), path)
    graph = import_model(path)
    y, z = graph.outputs
    assert (y.name, z.name) == ("y", "z") and z.value.constant is not None
    np.testing.assert_array_equal(z.value.constant.array(), [2, 4])


def test_import_does_not_read_the_weights(path: Path) -> None:
    """128 MB of weights inside the file; the process may grow by a quarter of them."""
    rows = 4096
    weights = {f"w{i}": np.full((rows, rows), i, np.float32) for i in range(2)}
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("MatMul", ["a", "w1"], ["y"])]
    onnx.save(make(nodes, {"x": [1, rows]}, ["y"], weights), path)
    script = (
        "import resource, sys\n"
        "from flashmem.compiler.frontend.importer import import_model\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])\n"
        "before = peak()\n"
        "graph = import_model(sys.argv[1])\n"
        "print(peak() - before, sum(v.size for v in graph.constants()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    growth, elements = map(int, done.stdout.split())
    assert elements == 2 * rows * rows
    assert growth < 32 * 1024  # KiB


# Dimensions


def test_open_dimensions_take_the_shapes_given(path: Path) -> None:
    graph = import_model(relu(path, ["n", 3, None, -1]), {"x": (2, 3, 4, 5)})
    assert graph.inputs[0].value.shape == graph.outputs[0].value.shape == (2, 3, 4, 5)


def test_a_name_bound_in_one_input_is_bound_in_all(path: Path) -> None:
    onnx.save(make([helper.make_node("Add", ["x", "z"], ["y"])], {"x": ["n", "m"], "z": ["n", 1]}, ["y"]), path)
    assert [port.value.shape for port in import_model(path, {"x": (2, 3)}).inputs] == [(2, 3), (2, 1)]
    with pytest.raises(UserError, match="dimension 'n' cannot be 2 in input 'x' and 5 in input 'z'"):
        import_model(path, {"x": (2, 3), "z": (5, 1)})


@pytest.mark.parametrize("name", ["?", "None", "unknown"])
def test_names_that_are_none_bind_nothing(name: str, path: Path) -> None:
    assert import_model(relu(path, [name, name]), {"x": (2, 3)}).inputs[0].value.shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        (["n", 3], {}, r"input 'x' leaves dimension 0 \(n\) open \(--shape x=<n>x3\)"),
        ([-1, 3, "h"], {}, r"leaves dimensions 0, 2 \(h\) open \(--shape x=<\?>x3x<h>\)"),
        (None, {}, r"input 'x' has no declared shape"),
        (["n", 3], {"x": (2, 3, 4)}, r"2x3x4 given for input 'x' has rank 3, but .* wants <n>x3"),
        (["n", 3], {"x": (2, 4)}, r"2x4 given for input 'x' contradicts .*, which wants <n>x3"),
        (["n", 3], {"x": (-1, 3)}, r"-1x3 given for input 'x' has a negative size"),
        (["n", 3], {"z": (2, 3)}, r"has no input 'z' to give a shape to: its inputs are x"),
        (["n", "n"], {"x": (2, 3)}, r"dimension 'n' cannot be 2 in input 'x' and 3"),
    ],
)
def test_wrong_shapes(shape: list[int | str | None], given: dict[str, tuple[int, ...]], message: str, path: Path) -> None:
    with pytest.raises(UserError, match=message):
        import_model(relu(path, shape), given)


# Operators and types


def test_all_unsupported_nodes_are_listed_at_once(path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="first"),
        helper.make_node("Relu", ["x"], ["r"], name="fine"),
        helper.make_node("Det", ["r"], ["e"], name="second"),
        helper.make_node("Hardmax", ["r"], ["h"], name="third"),
    ]
    onnx.save(make(nodes, {"x": [3, 3]}, ["d", "e", "h"]), path)
    graph = import_model(path)
    with pytest.raises(UnsupportedModelError) as caught:
        collect_unsupported(graph, lambda node: None if node.op == "Relu" else f"{node.op} is missing")
    assert caught.value.nodes == (("first", "Det is missing"), ("second", "Det is missing"), ("third", "Hardmax is missing"))
    assert str(caught.value).endswith(
        "3 nodes that flashmem cannot run: Det is missing (first, second); Hardmax is missing (third)"
    )
    collect_unsupported(graph, lambda node: None)


def test_long_lists_of_nodes_are_cut(path: Path) -> None:
    nodes = [helper.make_node("Hardmax", [f"x{i}"], [f"x{i + 1}"], name=f"node {i}") for i in range(181)]
    onnx.save(make(nodes, {"x0": [3]}, ["x181"]), path)
    graph = import_model(path)
    with pytest.raises(UnsupportedModelError) as caught:
        collect_unsupported(graph, lambda node: "Hardmax is missing" if node.name != "node 180" else "another reason")
    assert len(caught.value.nodes) == 181
    assert str(caught.value).endswith(": Hardmax is missing (node 0, node 1, node 2, 177 more); another reason (node 180)")
    with pytest.raises(UnsupportedModelError, match=rf"; reason of node {REASONS - 1} [^;]*; {181 - REASONS} more$"):
        collect_unsupported(graph, lambda node: f"reason of {node.name}")


def test_what_no_graph_can_say_is_listed_with_the_rest(path: Path) -> None:
    then, other = (
        helper.make_graph([node], "b", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)])
        for node in (helper.make_node("Neg", ["x"], ["b"]), helper.make_node("Concat", ["x", "x"], ["b"], axis=0))
    )
    nodes = [
        helper.make_node("NonZero", ["x"], ["i"], name="depends"),
        helper.make_node("Fancy", ["x"], ["f"], name="foreign", domain="com.example"),
        helper.make_node("Hardmax", ["x"], ["h"], name="missing"),
        helper.make_node("ReduceSum", ["x"], ["s"], name="sum", keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], name="cast", to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other),
        helper.make_node("SequenceConstruct", ["x", "y"], ["q"], name="sequence"),
        helper.make_node("Relu", ["f"], ["g"], name="after"),
    ]
    model = make(nodes, {"x": [4]}, ["i", "f", "h", "y", "g"])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.output.append(helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None))
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(path, supported=lambda node: "Hardmax is missing" if node.op == "Hardmax" else None)
    assert {name for name, _ in caught.value.nodes} == {"depends", "foreign", "missing", "choice", "sequence"}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("opset", "ok"), [(6, False), (7, True), (28, True), (29, False)])
def test_operator_set_versions(opset: int, ok: bool, path: Path) -> None:
    relu(path, [2], opset=opset)
    if ok:
        assert import_model(path).opset == opset
    else:
        with pytest.raises(UserError, match=f"uses ONNX operator set {opset}, but 7 to 28 are supported"):
            import_model(path)


@pytest.mark.parametrize("elem", [TensorProto.STRING, TensorProto.COMPLEX64])
def test_types_that_are_not_supported(elem: int, path: Path) -> None:
    onnx.save(make([helper.make_node("Identity", ["x"], ["y"])], {"x": [2]}, ["y"], elem=elem), path)
    with pytest.raises(
        UserError, match=f"'x' has element type {TensorProto.DataType.Name(elem).lower()}, which is not supported"
    ):
        import_model(path)


def test_quantised_constants_stay_quantised(path: Path) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0),
        helper.make_node("Add", ["x", "w"], ["y"]),
    ]
    constants = {"s": np.float32([0.5, 2]), "z": np.uint8([3, 0]), "q": np.uint8([[3, 4], [5, 6]])}
    onnx.save(make(nodes, {"x": [2, 2]}, ["y"], constants), path)
    (value,) = import_model(path).constants()
    assert isinstance(value.constant, QuantizedConstant) and value.constant.storage == "uint8"
    np.testing.assert_array_equal(value.constant.array(), [[0, 0.5], [10, 12]])
    np.testing.assert_array_equal(value.constant.transposed((1, 0)).array(), [[0, 10], [0.5, 12]])
    split = value.constant.reshaped((2, 1, 2))
    assert split is not None and split.array().tolist() == [[[0, 0.5]], [[10, 12]]]
    assert value.constant.reshaped((4,)) is None  # no remaining axis has the scales


def test_integers_keep_64_bits(path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "c"], ["y"], name="adds")]
    onnx.save(make(nodes, {"x": [2]}, ["y"], {"c": np.array([2**40])}, elem=TensorProto.INT64), path)
    (value,) = import_model(path).constants()
    assert value.dtype == "int64" and value.constant is not None and value.constant.array().tolist() == [2**40]


# Files


def weighted(path: Path, location: str | None = None, **entries: str) -> Path:
    """A model with one 64 x 64 weight; external if `location` is given."""
    model = make([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 64]}, ["y"], {"w": np.eye(64, dtype=np.float32)})
    if location is not None:
        (tensor,) = model.graph.initializer
        (path.parent / "ok.data").write_bytes(b"\7" * 32 + tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in ({"location": location, "offset": "32"} | entries).items():
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("entries", [{}, {"length": "16384"}])
def test_external_data(entries: dict[str, str], path: Path) -> None:
    (value,) = import_model(weighted(path, "ok.data", **entries)).constants()
    assert value.constant is not None
    np.testing.assert_array_equal(value.constant.array(), np.eye(64))


def test_external_data_in_a_folder_below_and_through_a_link_inside(path: Path) -> None:
    weighted(path, "ok.data")
    (path.parent / "below").mkdir()
    (path.parent / "ok.data").rename(path.parent / "below" / "w")
    (path.parent / "link").symlink_to("below/w")
    for location in ("below/w", "link", "./below/../below/w"):
        (value,) = import_model(weighted(path, location)).constants()
        assert isinstance(value.constant, FileConstant)
        assert Path(value.constant.path) == path.parent / "below" / "w"


def test_a_model_that_is_a_link_brings_its_own_weights(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    weighted(tmp_path / "blobs" / "0123")
    (tmp_path / "m.onnx").symlink_to("blobs/0123")
    (value,) = import_model(tmp_path / "m.onnx").constants()
    assert isinstance(value.constant, FileConstant)
    np.testing.assert_array_equal(value.constant.array(), np.eye(64))


@pytest.mark.parametrize(
    ("location", "entries", "message"),
    [
        ("../outside", {}, r"weight 'w' is in '\.\./outside', outside the model's folder"),
        ("{outside}", {}, r"outside the model's folder"),
        ("link", {}, r"weight 'w' is in 'link', outside the model's folder"),
        ("below/../../outside", {}, r"outside the model's folder"),
        ("", {}, r"weight 'w' is external but names no file"),
        ("ok.data", {"offset": "33"}, r"is at bytes 33 to 16417 of ok.data, which has 16416"),
        ("ok.data", {"offset": "-1"}, r"is at bytes -1 to"),
        ("ok.data", {"offset": "99999999999999999999"}, r"which has 16416"),
        ("ok.data", {"offset": "x"}, r"an external offset or length that is no number"),
        ("ok.data", {"length": "16388"}, r"needs 16384 bytes, but the model gives it 16388"),
    ],
)
def test_wrong_external_data(location: str, entries: dict[str, str], message: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(1 << 16))
    (tmp_path / "models" / "below").mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(outside)
    weighted(tmp_path / "models" / "m.onnx", location.format(outside=outside), **entries)
    with pytest.raises(UserError, match=message) as caught:
        import_model(tmp_path / "models" / "m.onnx")
    assert "\n" not in str(caught.value)


def test_missing_files(path: Path) -> None:
    with pytest.raises(MissingFileError, match="no model at"):
        import_model(path)
    with pytest.raises(MissingFileError, match=r"external data file 'gone' \(weight 'w'\) is not next to the model"):
        import_model(weighted(path, "gone"))


def test_embedded_weights_of_the_wrong_size(path: Path) -> None:
    model = onnx.load(weighted(path))
    model.graph.initializer[0].raw_data += b"\0\0\0\0"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match="weight 'w' needs 16384 bytes, but the model gives it 16388"):
        import_model(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello, world\n", b"\x7fELF" + bytes(200), b"\0" * 64, b"PK\3\4 a zip", b"\xff" * 4096]
)
def test_files_that_are_not_onnx(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)) as caught:
        import_model(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as an ONNX model"):
        import_model(tmp_path)


@pytest.mark.parametrize("name", ["resnet-tiny", "gptneo-tiny-external"])
def test_truncated_files(name: str, path: Path) -> None:
    whole = (DATA / f"{name}.onnx").read_bytes()
    for kept in [*range(1, 200, 7), *range(200, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(UserError):
            import_model(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda graph: graph.node[0].input.__setitem__(0, "nowhere"),
            "Mul node 'Mul_y' reads 'nowhere', which nothing computes before it",
        ),
        (lambda graph: graph.initializer[0].float_data.append(1), "weight 'c' needs 2 elements, but has 3"),
        (lambda graph: graph.initializer[0].dims.append(-1), "weight 'c' has a negative dimension"),
        (
            lambda graph: setattr(graph.initializer[0], "data_type", 99),
            "weight 'c' has element type 99, which is not supported",
        ),
        (
            lambda graph: setattr(graph.initializer[0], "data_type", 8),
            "weight 'c' has element type string, which is not supported",
        ),
        (lambda graph: setattr(graph.node[0], "op_type", "Mull"), "Mull is not an ONNX operator"),
        (lambda graph: graph.node.append(graph.node[0]), "is not a valid ONNX model"),
    ],
)
def test_invalid_models(damage: Callable[[onnx.GraphProto], None], message: str, path: Path) -> None:
    model = make([helper.make_node("Mul", ["x", "c"], ["y"])], {"x": [2]}, ["y"])
    model.graph.initializer.append(helper.make_tensor("c", TensorProto.FLOAT, [2], [1, 2]))
    damage(model.graph)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=message):
        import_model(path)


def test_an_error_of_flashmem_does_not_accuse_the_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = TypeError("no such shape\nat all")

    def fail(*given: object) -> None:
        raise RuntimeError("folding failed") from failure

    monkeypatch.setattr(importer, "clean_up", fail)
    add = helper.make_node("Add", ["x", "z"], ["y"])
    onnx.save(make([add], {"x": [2], "z": [2]}, ["y"]), path)
    with pytest.raises(DefectError, match=r"by a defect of flashmem.*report it.*TypeError: no such shape at all") as caught:
        import_model(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None and caught.value.__cause__.__cause__ is failure
    onnx.save(make([add], {"x": [2], "z": [3]}, ["y"]), path)
    with pytest.raises(UserError, match=r"is not a valid ONNX model: .*Incompatible dimensions") as denied:
        import_model(path)
    assert "\n" not in str(denied.value)
    failure = UserError("node 'n' has too much")
    with pytest.raises(UserError, match=r"m\.onnx: node 'n' has too much$"):
        import_model(path)


def test_names_that_are_not_text(path: Path) -> None:
    path.write_bytes(relu(path, [2]).read_bytes().replace(b"Relu", b"Re\xffu"))
    with pytest.raises(UserError, match="a name in it is not text"):
        import_model(path)


def test_many_small_external_tensors_take_no_file_descriptors(tmp_path: Path) -> None:
    """A limit of 1024 descriptors is usual, and a quantised model has as many scales."""
    count = 60
    weights = {f"w{i}": np.full((3, 5), i + 1, np.float32) for i in range(count)}
    nodes = [helper.make_node("Add", [f"x{i}" if i else "x", f"w{i}"], [f"x{i + 1}"]) for i in range(count)]
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3, 5]) for name in ("x", f"x{count}")]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], [numpy_helper.from_array(v, k) for k, v in weights.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    made = import_model(tmp_path / "m.onnx")
    descriptors = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [name for name in descriptors if name.startswith(str(tmp_path))]
    found = {value.name: value.constant.array() for value in made.constants() if value.constant is not None}
    assert len(found) == count and all(np.array_equal(found[name], weights[name]) for name in found)


def test_external_data_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(external_data, "os", SimpleNamespace(pread=refused))
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])
    other = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [value], [other], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    file = path.parent / "small.onnx"
    onnx.save_model(model, file, save_as_external_data=True, location="small.data", size_threshold=0)
    with pytest.raises(UserError, match=r"weight 'w' cannot be read from .*small\.data: Input/output error"):
        import_model(file)
