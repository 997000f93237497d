"""The pass pipeline: graphs between passes are verified."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.pipeline import PASSES, Pass, prepare, run_passes
from flashmem.compiler.passes.verifier import InvalidResultError, verify
from tests.support.attention_cases import FORMS, Model
from tests.support.evaluate_graph import evaluate


def small() -> tuple[Graph, Node, Node]:
    """y = Transpose(Neg(x)), and its two nodes."""
    x, t, y = Value("x", (2, 3), "float32"), Value("t", (2, 3), "float32"), Value("y", (3, 2), "float32")
    first = Node("Neg", "first", [x], [t])
    second = Node("Transpose", "second", [t], [y], {"perm": (1, 0)})
    t.producer, y.producer = first, second
    graph = Graph("g", [GraphPort("x", "float32", x)], [GraphPort("y", "float32", y)], [first, second])
    verify(graph, ["decomposed"])
    return graph, first, second


def test_the_verifier_finds_what_is_wrong() -> None:
    graph, first, second = small()
    with pytest.raises(InvalidResultError, match="read before"):
        verify(replace(graph, nodes=[second, first]))
    with pytest.raises(InvalidResultError, match="read before"):
        verify(replace(graph, nodes=[second]))
    with pytest.raises(InvalidResultError, match="made twice"):
        verify(replace(graph, nodes=[first, first, second]))
    with pytest.raises(InvalidResultError, match="output y has no producer"):
        verify(replace(graph, nodes=[first]))
    second.attributes["perm"] = (0, 1)
    with pytest.raises(InvalidResultError, match=r"permuted: .* # second"):
        verify(graph, ["decomposed"])
    graph, first, second = small()
    first.outputs[0].producer = second
    with pytest.raises(InvalidResultError, match="another node"):
        verify(graph)


@pytest.mark.parametrize(
    ("op", "shapes", "attributes", "message"),
    [
        ("Neg", [(2, 3), (3, 3)], {}, "broadcast"),
        ("Add", [(2, 3), (3,), (3, 3)], {}, "broadcast"),
        ("Add", [(1,), (), (2,)], {}, "broadcast"),
        ("Reshape", [(2, 3), (5,)], {}, "other elements"),
        ("Slice", [(4, 3), (2, 3)], {"starts": (3, 0), "steps": (1, 1)}, "outside"),
        ("Concat", [(4, 3), (2, 3), (5, 3)], {"axis": 0}, "fill"),
        ("MatMul", [(4, 3), (2, 3), (4, 2)], {"transposed": False}, "product"),
        ("MatMul", [(4, 3), (2, 3), (4, 3)], {"transposed": True}, "product"),
        ("LayerNormalization", [(4, 3), (4, 3)], {}, "neither an expression nor a kernel"),
        ("Neg", [(0, 3), (0, 3)], {}, "without elements"),
    ],
)
def test_shapes_that_do_not_fit_are_found(
    op: str, shapes: list[tuple[int, ...]], attributes: dict[str, object], message: str
) -> None:
    *inputs, output = (Value(f"v{i}", shape, "float32") for i, shape in enumerate(shapes))
    node = Node(op, "n", list(inputs), [output], attributes)
    output.producer = node
    graph = Graph("g", [GraphPort(each.name, "float32", each) for each in inputs], [], [node])
    with pytest.raises(InvalidResultError, match=message):
        verify(graph, ["decomposed"])


def test_a_pass_that_breaks_a_graph_is_named() -> None:
    def broken(graph: Graph) -> Graph:
        return replace(graph, nodes=graph.nodes[1:])

    with pytest.raises(InvalidResultError, match="after pass broken: t is read before"):
        run_passes(small()[0], [Pass("broken", "", broken)])
    with pytest.raises(InvalidResultError, match="pass last requires a graph that is decomposed"):
        run_passes(small()[0], [Pass("last", "", lambda graph: graph, requires=("decomposed",))])


def test_each_form_is_ensured_before_it_is_required() -> None:
    for index, step in enumerate(PASSES):
        assert {form for before in PASSES[:index] for form in before.ensures} >= set(step.requires), step.name


def test_attention_computes_the_same_with_and_without_views(tmp_path: Path) -> None:
    model = Model()
    for name in ("seven", "one query", "three queries"):
        FORMS[name](model)
    onnx.save(model.proto(), tmp_path / "m.onnx")
    graph = import_model(tmp_path / "m.onnx", {}, why_unsupported)
    before = [step.name for step in PASSES].index("match-attention")
    wanted = evaluate(run_passes(graph, PASSES[:before]), model.feeds)
    graph = import_model(tmp_path / "m.onnx", {}, why_unsupported)
    compared = []

    def compare(step: Pass, after: Graph) -> None:
        if "attention matched" not in (*step.requires, *step.ensures):
            return
        compared.append(step.name)
        assert sum(node.op == "FusedAttention" for node in after.nodes) == 3
        for one, two in zip(evaluate(after, model.feeds), wanted, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-9)

    prepare(graph, compare)
    assert len(compared) == 5
