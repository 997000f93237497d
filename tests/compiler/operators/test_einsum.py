"""Einsum: its decomposition, evaluated by numpy for many equations, and some equations on every device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.decompose import decompose
from tests.support.compared import PLACES, answers_of, require_right
from tests.support.inputs import KINDS

Array = NDArray[Any]

# An equation, shapes, and which operands are constant.
EQUATIONS: list[tuple[str, list[tuple[int, ...]], set[int]]] = [
    ("bhij,hg->bgij", [(2, 3, 5, 4), (3, 6)], {1}),
    ("bqhd,bkhd->bhqk", [(2, 5, 3, 4), (2, 6, 3, 4)], set()),
    ("bsd,dhk->bshk", [(2, 3, 5), (5, 2, 3)], {1}),
    ("bshk,hkd->bsd", [(2, 3, 2, 3), (2, 3, 5)], {1}),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (2, 5, 4, 2)], set()),
    ("...i->...", [(2, 3, 4)], set()),
    ("ii->i", [(5, 5)], set()),
    ("ii", [(5, 5)], set()),
    ("iji->j", [(3, 4, 3)], set()),
    ("ij,kj,li->kl", [(3, 4), (5, 4), (6, 3)], {1}),
    ("i,j->ij", [(3,), (4,)], set()),
    ("i,i->", [(5,), (5,)], set()),
    ("ij,ij->", [(3, 5), (3, 5)], {0}),
    (",i->i", [(), (4,)], set()),
    ("Aa,aB->AB", [(3, 4), (4, 5)], set()),
    ("b n i , n o -> o b i".replace(" ", ""), [(2, 3, 4), (3, 5)], {1}),
    ("ba", [(3, 4)], set()),
    ("ij,jk", [(3, 4), (4, 5)], set()),
    ("bij,bjk,bkl->bil", [(2, 3, 4), (2, 4, 5), (2, 5, 3)], set()),
    ("i...,j...->ij...", [(3, 2, 4), (5, 1, 4)], set()),
    ("bi,bi->b", [(3, 4), (1, 4)], set()),
    ("ab,ab,c->", [(2, 3), (2, 3), (4,)], set()),
    ("bchw,bckw->bchk", [(2, 3, 4, 5), (2, 3, 6, 5)], set()),
    ("...,...->...", [(2, 3), (1, 3)], set()),
]


def model_of(
    equations: list[tuple[str, list[tuple[int, ...]], set[int]]], dtype: str = "float32", kinds: Sequence[str] = ("normal",)
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model with a node for each equation and kind of numbers (`KINDS`; integers have one), and its inputs."""
    random_ = np.random.default_rng(3)
    feeds: dict[str, Array] = {}
    constants, nodes, outputs = [], [], []
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    for i, ((equation, shapes, fixed), form) in enumerate(product(equations, kinds)):
        names = [f"x{i}_{j}" for j in range(len(shapes))]
        for j, shape in enumerate(shapes):
            data = KINDS[form](random_, shape) if dtype == "float32" else random_.integers(-9, 9, shape)
            if j in fixed:
                constants.append(numpy_helper.from_array(np.asarray(data, dtype), names[j]))
            else:
                feeds[names[j]] = np.asarray(data, dtype)
        nodes.append(helper.make_node("Einsum", names, [f"y{i}"], equation=equation, name=f"einsum{i}"))
        outputs.append(helper.make_tensor_value_info(f"y{i}", kind, None))
    inputs = [helper.make_tensor_value_info(name, kind, data.shape) for name, data in feeds.items()]
    graph = helper.make_graph(nodes, "einsum", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), feeds


def normal_form(model: onnx.ModelProto, folder: Path) -> Graph:
    onnx.save(model, folder / "model.onnx")
    return decompose(import_model(folder / "model.onnx", {}, why_unsupported))


def evaluated(graph: Graph, feeds: dict[str, Array]) -> list[Array]:
    """Evaluate the decomposed graph with numpy."""
    known: dict[Value, Array] = {port.value: feeds[port.name] for port in graph.inputs}

    def read(value: Value | None) -> Array:
        assert value is not None
        return known[value] if value.constant is None else np.asarray(value.constant.array()).reshape(value.shape)

    for node in graph.nodes:
        x, a = [read(value) for value in node.inputs], node.attributes
        match node.op:
            case "Reshape":
                made = x[0].reshape(node.outputs[0].shape)
            case "Transpose":
                made = x[0].transpose(a["perm"])
            case "ReduceSum":
                made = x[0].sum(a["axes"], keepdims=True)
            case "Slice":
                index = (
                    np.arange(n) * step + start
                    for n, start, step in zip(node.outputs[0].shape, a["starts"], a["steps"], strict=True)
                )
                made = x[0][np.ix_(*index)]
            case "Mul":
                made = x[0] * x[1]
            case "MatMul":
                made = x[0] @ (x[1].swapaxes(-1, -2) if a["transposed"] else x[1])
        assert made.shape == node.outputs[0].shape, node
        known[node.outputs[0]] = made
    return [read(port.value) for port in graph.outputs]


def test_every_equation_is_what_numpy_says(tmp_path: Path) -> None:
    model, feeds = model_of(EQUATIONS)
    known = feeds | {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    answers = evaluated(normal_form(model, tmp_path), feeds)
    for node, answer in zip(model.graph.node, answers, strict=True):
        equation = node.attribute[0].s.decode()
        expected = np.einsum(equation, *(known[name] for name in node.input))
        assert answer.shape == expected.shape, equation
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5, err_msg=equation)


def test_random_equations_are_what_numpy_says(tmp_path: Path) -> None:
    rng, cases = random.Random(11), []
    for _ in range(150):
        sizes = {letter: rng.randint(1, 4) for letter in "abcDE"}
        terms, shapes = [], []
        for _ in range(rng.choice((1, 2, 2, 2, 3, 4))):
            term = "".join(rng.choice("abcDE") for _ in range(rng.randint(1, 4)))
            terms.append(term)
            shapes.append(tuple(sizes[letter] for letter in term))
        used = sorted(set("".join(terms)))
        output = "".join(rng.sample(used, rng.randint(0, len(used))))
        fixed = {i for i in range(1, len(terms)) if rng.random() < 0.4}
        cases.append((",".join(terms) + (f"->{output}" if rng.random() < 0.8 else ""), shapes, fixed))
    model, feeds = model_of(cases, "int64")
    known = feeds | {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node, answer in zip(model.graph.node, evaluated(normal_form(model, tmp_path), feeds), strict=True):
        equation = node.attribute[0].s.decode()
        np.testing.assert_array_equal(answer, np.einsum(equation, *(known[name] for name in node.input)), err_msg=equation)


@pytest.mark.parametrize(
    ("index", "kept"),
    [
        (0, {"MatMul": 1}),  # DeepViT's: the small matrix is the left operand, without data movement
        (1, {"MatMul": 1, "Transpose": 2}),
        (2, {"MatMul": 1}),
        (3, {"MatMul": 1}),
        (4, {"MatMul": 1}),
        (15, {"MatMul": 1, "Transpose": 1}),
        (22, {"MatMul": 1}),
    ],
)
def test_no_more_is_moved_than_has_to_be(index: int, kept: dict[str, int], tmp_path: Path) -> None:
    model, _ = model_of([EQUATIONS[index]])
    counts = Counter(node.op for node in normal_form(model, tmp_path).nodes)
    del counts["Reshape"]
    assert counts == kept, EQUATIONS[index]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_on_a_device(place: tuple[str, str], tmp_path: Path) -> None:
    model, feeds = model_of([EQUATIONS[i] for i in (0, 2, 8, 9)], kinds=list(KINDS))
    require_right(model, feeds, answers_of(model, feeds, place, tmp_path))


@pytest.mark.parametrize(
    ("equation", "shapes", "sentence"),
    [
        ("ij->ik", [(2, 3)], "names a dimension twice, or one that no input has"),
        ("ij,jk->ik", [(2, 3), (4, 5)], "with sizes 3 and 4 of dimension 'j'"),
        ("ij,jk->ik", [(2, 3)], "of 1 inputs"),
        ("i->i", [(2, 3)], "whose term 'i' does not fit an input of 2 dimensions"),
    ],
)
def test_what_is_no_equation_is_refused(equation: str, shapes: list[tuple[int, ...]], sentence: str) -> None:
    values = [Value(f"x{i}", shape, "float32") for i, shape in enumerate(shapes)]
    reason = why_unsupported(Node("Einsum", "einsum", values, [Value("y", (), "float32")], {"equation": equation}))
    assert reason is not None
    assert sentence in reason
