"""ONNX Runtime's contrib operators, expanded into ONNX operators: single nodes and whole files, against ONNX Runtime."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import flashmem
from flashmem.base.errors import UnsupportedModelError, UserError
from flashmem.compiler.frontend import contrib
from flashmem.compiler.frontend.cleanup import clean_up
from flashmem.compiler.frontend.external_data import resolve_external_data
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.frontend.mapped_file import load_mapped
from flashmem.compiler.ir.graph import FileConstant, Graph
from flashmem.compiler.operators import is_native
from tests.compiler.frontend.test_importer import OPEN_SHAPES, assert_same_function
from tests.conformance.test_models import IDS, OPEN_SIZE, PLACES, _error, _reference
from tests.support.compared import apart
from tests.support.contrib_case import Array, Case, floats, ids, imports, numbers, run
from tests.support.contrib_cases import DEVICE_CASES, FLOAT_CASES, SAMPLED_CASES
from tests.support.contrib_cases_quantized import QUANTIZED_CASES, nbits
from tests.support.inputs import KINDS
from tests.support.rounding import EPS, Answer, evaluated
from tests.support.zoo_data import DATA, examples

ALL = [*FLOAT_CASES, *SAMPLED_CASES, *QUANTIZED_CASES]
LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, which has static shapes, without operators of ONNX Runtime's domain.

    DequantizeLinear with a minimum, which ONNX lacks, is a sum here.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model)
    contrib.mark(proto)
    for output in proto.graph.output:
        output.type.Clear()
    made = ir.to_proto(clean_up(proto, is_native))
    for at, node in reversed([*enumerate(made.graph.node)]):
        if node.op_type == "DequantizeLinear" and len(node.input) > 3:
            add_minimum(made.graph, at)
    assert {node.domain for node in made.graph.node} == {""}, [(node.op_type, node.metadata_props) for node in made.graph.node]
    for entry in made.opset_import:  # nodes may be newer than the file; none of these has changed since its version
        entry.version = max(entry.version, 21) if entry.domain == "" else entry.version
    return made


def add_minimum(graph: onnx.GraphProto, at: int) -> None:
    """Write out the minima of node `at`, a DequantizeLinear of blocks along the last axis, as operators of ONNX."""
    node = graph.node[at]
    *_, minimum = node.input
    [made] = node.output
    [codes] = [each for each in graph.initializer if each.name == node.input[0]]
    block = next(each.i for each in node.attribute if each.name == "block_size")
    rows, columns = codes.dims
    del node.input[2:]
    node.output[0] = f"{made}.scaled"
    shapes = {"wide": [rows, -(-columns // block), 1], "spread": [rows, -(-columns // block), block], "flat": [rows, -1]}
    shapes |= {"from": [0], "to": [columns], "axis": [1]}
    names = {name: f"{made}.{name}" for name in shapes}
    graph.initializer.extend(numpy_helper.from_array(np.array(shape), names[name]) for name, shape in shapes.items())
    steps = [
        helper.make_node("Reshape", [minimum, names["wide"]], [f"{made}.1"]),
        helper.make_node("Expand", [f"{made}.1", names["spread"]], [f"{made}.2"]),
        helper.make_node("Reshape", [f"{made}.2", names["flat"]], [f"{made}.3"]),
        helper.make_node("Slice", [f"{made}.3", names["from"], names["to"], names["axis"]], [f"{made}.4"]),
        helper.make_node("Add", [f"{made}.scaled", f"{made}.4"], [made]),
    ]
    for step in reversed(steps):
        graph.node.insert(at + 1, step)


def assert_close(case: Case, answers: Sequence[Array], expected: Sequence[Array]) -> None:
    for index, (answer, right) in enumerate(zip(answers, expected, strict=True)):
        assert answer.shape == right.shape
        if answer.dtype.kind in "iub":  # one quantisation step, if a tie is rounded the other way
            assert answer.dtype == right.dtype
            assert np.abs(answer.astype(np.int64) - right.astype(np.int64)).max(initial=0) <= (case.op.startswith("Q"))
            continue
        pairs = [(answer, right)]
        if case.rows is not None and index == 0:
            pairs = [(answer[i, rows], right[i, rows]) for i, rows in enumerate(case.rows)]
        for found, wanted in pairs:
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)


FLOAT_OPERATORS = {case.op for case in FLOAT_CASES} - {case.op for case in QUANTIZED_CASES}


def takes_floats(case: Case) -> bool:
    """Whether ONNX Runtime has the operator, its first input is data, and its expansion has no random numbers or integers."""
    return case.expected is None and case.op in FLOAT_OPERATORS and case.feeds.get("x0", np.zeros(0)).dtype == np.float32


def of_kind(case: Case, kind: str) -> dict[str, Array]:
    """The inputs of `case`, with data of a kind of `KINDS`."""
    data = case.feeds["x0"]
    return {**case.feeds, "x0": KINDS[kind](np.random.default_rng(data.size), data.shape).astype(np.float32)}


APPROXIMATED = {"FastGelu", "QuickGelu", "FusedConv"}
"""Operators whose sigmoid or tanh ONNX Runtime approximates: with an error relative to 1, not to the sigmoid."""


def assert_right(
    case: Case, answers: Sequence[Array], known: Sequence[Answer], about: str, allowed: Array | float = 0.0
) -> None:
    """Compare with float64. Every element may also have an absolute error of `allowed`."""
    for index, (answer, right) in enumerate(zip(answers, known, strict=True)):
        assert answer.shape == right.exact.shape, about
        if answer.dtype.kind != "f":
            np.testing.assert_array_equal(answer, right.exact, err_msg=about)
            continue
        wrong = apart(answer, right) & ~(np.abs(answer - right.exact) <= allowed)
        if case.rows is not None and index == 0:
            wrong = np.concatenate([wrong[i, rows] for i, rows in enumerate(case.rows)])
        assert not wrong.any(), f"{about}, output {index}: {wrong.sum()} of {wrong.size} elements are wrong"


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{case.op}-{number}" for number, case in enumerate(ALL)])
def test_an_expansion_computes_the_same(number: int) -> None:
    case = ALL[number]
    model = expanded(case.model)
    if not takes_floats(case):
        assert_close(case, run(model, case.feeds), case.reference())
        return
    for kind in KINDS:
        feeds = of_kind(case, kind)
        factor = np.abs(feeds["x0"]) if case.op in ("FastGelu", "QuickGelu") else 1.0
        allowed = EPS * factor if case.op in APPROXIMATED else 0.0
        assert_right(case, run(case.model, feeds), evaluated(model, feeds), kind, allowed)


def test_every_operator_has_a_case() -> None:
    assert set(contrib.operators()) - {"BitmaskBiasDropout", "NhwcConv"} == {case.op for case in ALL}  # twins of others


def merged(cases: Sequence[Case], opset: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """One model of all `cases`, whose names get prefixes, and its inputs."""
    graph, feeds = onnx.GraphProto(name="g"), {}
    for number, case in enumerate(cases):
        graph.node.append(onnx.NodeProto.FromString(case.node.SerializeToString()))
        for names in (graph.node[-1].input, graph.node[-1].output):
            names[:] = [name and f"{number}.{name}" for name in names]
        sources = ((case.inputs, graph.input), (case.outputs, graph.output), (case.initializers, graph.initializer))
        for source, target in sources:
            for value in source:
                target.add().CopyFrom(value)
                target[-1].name = f"{number}.{value.name}"
        feeds |= {f"{number}.{name}": array for name, array in case.feeds.items()}
    return helper.make_model(graph, opset_imports=imports(opset), ir_version=10), feeds


def known(case: Case, kind: str) -> list[Answer]:
    """The answers of `case` in float64."""
    return evaluated(expanded(case.model), of_kind(case, kind))


@pytest.mark.parametrize(("place", "opset"), list(zip(PLACES, itertools.cycle((12, 17, 21)), strict=False)), ids=IDS)
def test_expansions_run_on_devices(place: Any, opset: int, tmp_path: Path) -> None:
    """Each place runs some of the cases, in operator sets that lack parts of the expansions."""
    device, path = place
    share = DEVICE_CASES[PLACES.index(place) :: len(PLACES)]
    model, feeds = merged(share, opset)
    onnx.save(model, tmp_path / "m.onnx")
    name = device.descriptor_name
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=name, memory_path=path)
    with flashmem.Session(bundle, device=name) as session:
        for kind in KINDS:
            for number, case in enumerate(share):
                if takes_floats(case):
                    feeds |= {f"{number}.{port}": array for port, array in of_kind(case, kind).items()}
            answers = session.run(None, feeds)
            for number, case in enumerate(share):
                made = [answers.pop(0) for _ in case.outputs]
                if takes_floats(case):
                    assert_right(case, made, known(case, kind), f"{case.op} {number}, {kind}")
                elif kind == "normal":
                    assert_close(case, made, case.reference())


# Whole files


def saved(name: str, level: str, folder: Path) -> Path:
    """The tiny model `name` as written by ONNX Runtime's optimizer."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = LEVELS[level], 4
    options.optimized_model_filepath = str(folder / f"{name}.onnx")
    onnxruntime.InferenceSession(DATA / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
    for data in DATA.glob(f"{name}.onnx.data"):
        shutil.copy(data, folder)
    return folder / f"{name}.onnx"


def newest(graph: Graph) -> Graph:
    """`graph` declared for operator set 21 at least: some nodes are newer than its own set, and no other node has changed
    since.
    """
    return replace(graph, opset=max(graph.opset, 21))


def operators(path: Path) -> Counter[str]:
    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.domain.startswith("com.microsoft"))


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.onnx")))
def test_files_of_the_optimizer_compute_the_same(name: str, tmp_path: Path) -> None:
    path = saved(name, "extended", tmp_path)
    if "resnet" not in name:  # "all" first adds contrib operators for its batch normalizations and additions
        assert operators(path)
    size = OPEN_SIZE if name in OPEN_SHAPES else None
    shapes = {port: array.shape for port, array in examples(name, size=size).items()}
    assert_same_function(path, newest(import_model(path, shapes)), lambda seed: examples(name, seed, size))


@pytest.mark.parametrize(
    ("name", "level", "place"),
    [
        ("vit-tiny", "extended", 0),
        ("gptneo-tiny-legacy", "all", 1),
        ("regnet-tiny", "extended", 2),
        ("resnet-tiny", "basic", 3),
    ],
)
def test_files_of_the_optimizer_run(name: str, level: str, place: int, tmp_path: Path) -> None:
    device, memory_path = PLACES[place % len(PLACES)]
    path, model = saved(name, level, tmp_path), DATA / f"{name}.onnx"
    inputs = examples(name)
    bundle = flashmem.compile(path, tmp_path / "m.flashmem", device=device.descriptor_name, memory_path=memory_path)
    with flashmem.Session(bundle, device=device.descriptor_name) as session:
        assert _error(session.run(None, inputs), _reference(model, inputs)) <= 1e-5


def test_files_of_the_transformers_optimizer_compute_the_same(tmp_path: Path) -> None:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    for name, kind in (("vit-tiny", "vit"), ("gptneo-tiny-legacy", "gpt2")):
        path = tmp_path / f"{name}.onnx"
        model = optimizer.optimize_model(str(DATA / path.name), model_type=kind, num_heads=4, hidden_size=32, opt_level=0)
        model.save_model_to_file(str(path))
        assert operators(path)["SkipLayerNormalization"] >= 4
        assert_same_function(path, newest(import_model(path)), functools.partial(examples, name))


def test_blocked_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = saved("regnet-tiny", "all", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r'nchwc\.Conv keeps its weights in blocks .* level "extended"'):
        import_model(path)


# Weights


def test_a_packed_projection_stays_in_its_file(tmp_path: Path) -> None:
    weight = floats(64, 192)
    case = Case("Attention", [floats(1, 5, 64)], [weight, floats(192)], num_heads=4)
    onnx.save(case.model, tmp_path / "m.onnx")
    graph = import_model(tmp_path / "m.onnx")
    large = [value.constant for value in graph.constants() if value.size == weight.size]
    assert len(large) == 1 and isinstance(large[0], FileConstant)
    assert sum(value.size for value in graph.constants()) < weight.size + 1024


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_in_blocks_stay_in_their_file(bits: int, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(nbits(64, 256, 32, bits).model, path)
    proto = load_mapped(path)
    resolve_external_data(proto, path)
    (before,) = [tensor for tensor in proto.graph.initializer if len(tensor.dims) == 3]
    model = clean_up(proto, is_native)
    kind = ir.DataType.UINT4 if bits == 4 else ir.DataType.UINT8
    (after,) = [
        value.const_value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.dtype == kind and value.const_value.size == 64 * 256
    ]
    assert isinstance(after, ir.ExternalTensor)
    assert str(after.offset) == {entry.key: entry.value for entry in before.external_data}["offset"]


# Forms that cannot be expanded


def node(op: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, name=op, domain=attributes.pop("domain", "com.microsoft"), **attributes)


def refusal(nodes: Sequence[onnx.NodeProto], inputs: dict[str, Array], path: Path) -> UserError:
    infos = [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in inputs.items()]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)])
    onnx.save(helper.make_model(graph, opset_imports=imports(17), ir_version=10), path)
    with pytest.raises(UserError) as refused:
        import_model(path)
    return refused.value


X = floats(2, 4, 6)


@pytest.mark.parametrize(
    ("made", "inputs", "sentence"),
    [
        (
            node("PackedMultiHeadAttention", ["x"]),
            {"x": X},
            r"Attention is an operator of ONNX Runtime's own .*: save the model",
        ),
        (
            node("Sampler", ["x"], domain="ai.onnx.contrib"),
            {"x": X},
            r"ai\.onnx\.contrib\.Sampler is an operator of ONNX Runtime's",
        ),
        (node("Attention", ["x", "w"], num_heads=4), {"x": X, "w": floats(6, 18)}, "with 4 heads and hidden sizes"),
        (node("Attention", ["x", "w"], num_heads=0), {"x": X, "w": floats(6, 18)}, "with 0 heads"),
        (node("Attention", ["x", "w"]), {"x": X, "w": floats(6, 18)}, "without an integer num_heads"),
        (
            node("Attention", ["x", "w"], num_heads=2),
            {"x": X, "w": floats(5, 18)},
            r"weights of shape \(5, 18\) over an input of 6",
        ),
        (
            node("Attention", ["x", "w", "", "m"], num_heads=2),
            {"x": X, "w": floats(6, 18), "m": numbers(1, 2, 3, 4, 5, 6, 7, 8)},
            r"with a mask of shape \(8,\)",
        ),
        (node("Attention", ["x", "w"], num_heads=2, do_rotary=1), {"x": X, "w": floats(6, 18)}, "with do_rotary"),
        (
            node("MultiHeadAttention", ["x", "k", "k"], num_heads=2, unidirectional=1),
            {"x": X, "k": floats(2, 5, 6)},
            "that is unidirectional, of 4 queries and 5 keys",
        ),
        (node("MultiHeadAttention", ["x"], num_heads=2), {"x": X}, "without input 1"),
        (node("SkipLayerNormalization", ["x", "x"]), {"x": X}, "without input 2"),
        (node("Trilu", ["x", "k"]), {"x": X, "k": np.array(1)}, "whose diagonal is computed at run time"),
        (node("FusedConv", ["x", "w"], activation="Cube"), {"x": X, "w": floats(4, 4, 1)}, "with activation Cube"),
        (node("BiasSoftmax", ["x", "x"], axis=5, is_inner_broadcast=1), {"x": X}, "along axis 5 of a tensor of 3"),
        (
            node("GroupNorm", ["x", "s", "s"], groups=4, activation=0),
            {"x": floats(1, 2, 2, 6), "s": floats(6)},
            "6 channels in 4 groups",
        ),
        (
            node("MatMulNBits", ["x", "w", "s"], K=6, N=4, block_size=16),
            {"x": X, "w": ids(9, 4, 1, 8), "s": floats(4)},
            "run time",
        ),
        (node("Gelu", ["x"], ["y", "z"]), {"x": X}, None),
    ],
)
def test_what_cannot_be_expanded_is_refused_by_name(
    made: onnx.NodeProto, inputs: dict[str, Array], sentence: str | None, tmp_path: Path
) -> None:
    if sentence is None:  # an unknown output that nobody reads
        graph = helper.make_graph(
            [made], "g", [helper.make_tensor_value_info("x", 1, X.shape)], [helper.make_tensor_value_info("y", 1, None)]
        )
        onnx.save(helper.make_model(graph, opset_imports=imports(17), ir_version=10), tmp_path / "m.onnx")
        assert [each.op for each in import_model(tmp_path / "m.onnx").nodes] == ["Gelu"]
        return
    refused = refusal([made], inputs, tmp_path / "m.onnx")
    assert isinstance(refused, UnsupportedModelError)
    refused_as = str(refused)
    assert made.op_type in refused_as
    assert re.search(sentence, refused_as), refused_as


def test_all_that_cannot_be_expanded_is_listed_at_once(tmp_path: Path) -> None:
    nodes = [node("Attention", ["x", "w"], ["a"]), node("Inverse", ["a"], ["b"]), node("Gelu", ["b"])]
    refused = refusal(nodes, {"x": X, "w": floats(6, 18)}, tmp_path / "m.onnx")
    assert isinstance(refused, UnsupportedModelError)
    assert [name for name, _ in refused.nodes] == ["Attention", "Inverse"]


def test_only_the_cause_of_a_refusal_is_listed(tmp_path: Path) -> None:
    nodes = [node("Attention", ["x", "w"], ["a"]), node("FastGelu", ["a"], ["b"]), node("FusedMatMul", ["b", "w"])]
    refused = refusal(nodes, {"x": X, "w": floats(6, 18)}, tmp_path / "m.onnx")
    assert isinstance(refused, UnsupportedModelError)
    assert [name for name, _ in refused.nodes] == ["Attention"]
    assert str(refused).startswith("the model has 1 node that flashmem cannot run: com.microsoft.Attention")


def test_a_function_of_the_file_wins(tmp_path: Path) -> None:
    body = [helper.make_node("Mul", ["a", "a"], ["b"])]
    function = helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    graph = helper.make_graph(
        [node("Gelu", ["x"])], "g", [helper.make_tensor_value_info("x", 1, [3])], [helper.make_tensor_value_info("y", 1, [3])]
    )
    onnx.save(helper.make_model(graph, opset_imports=imports(17), functions=[function], ir_version=10), tmp_path / "m.onnx")
    assert [each.op for each in import_model(tmp_path / "m.onnx").nodes] == ["Mul"]
