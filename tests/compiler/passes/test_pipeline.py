"""The pass pipeline: graphs between passes are verified, and written as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from flashmem.base.errors import UserError
from flashmem.compile import compile as compile_model
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.pipeline import PASSES, Pass, dump_graph, prepare, run_passes
from flashmem.compiler.passes.verifier import InvalidResultError, verify
from tests.support.attention_cases import FORMS, Model
from tests.support.command_line import Command, command_line
from tests.support.evaluate_graph import evaluate
from tests.support.paths import DATA

VIT = DATA / "vit-tiny.onnx"


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(monkeypatch, capfd)


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


def test_a_pass_that_breaks_a_graph_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(graph: Graph) -> Graph:
        return replace(graph, nodes=graph.nodes[1:])

    with pytest.raises(InvalidResultError, match="after pass broken: t is read before"):
        run_passes(small()[0], [Pass("broken", broken)])
    with pytest.raises(InvalidResultError, match="pass last requires a graph that is decomposed"):
        run_passes(small()[0], [Pass("last", lambda graph: graph, requires=("decomposed",))])
    monkeypatch.setattr("flashmem.compiler.passes.pipeline.PASSES", [Pass("broken", broken)])
    with pytest.raises(InvalidResultError):
        dump_graph(small()[0], tmp_path)
    assert "= Neg(" in (tmp_path / "00-imported.txt").read_text()
    assert "= Neg(" not in (tmp_path / "01-broken.txt").read_text()  # the graph after the pass, to show the error


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


def test_compile_writes_the_graph_before_and_after_each_pass(flashmem: Command, tmp_path: Path) -> None:
    folder = tmp_path / "passes"
    outcome = flashmem("compile", VIT, "-o", tmp_path / "m.flashmem", "--no-build", "--dump-passes", folder)
    assert outcome.code == 0
    files = sorted(path.name for path in folder.iterdir())
    assert files == [f"{i:02}-{name}.txt" for i, name in enumerate(["imported", *(step.name for step in PASSES), "fuse"])]
    assert "LayerNormalization(" in (folder / files[0]).read_text()
    assert "LayerNormalization(" not in (folder / files[1]).read_text()
    matched = next(i for i, name in enumerate(files) if "match-attention" in name)
    assert "FusedAttention(" not in (folder / files[matched - 1]).read_text()
    assert "FusedAttention(" in (folder / files[matched]).read_text()


def test_each_shape_variant_has_a_folder(tmp_path: Path) -> None:
    shapes = [{"input_ids": (1, 8)}, {"input_ids": (1, 16)}]
    model = DATA / "gptneo-tiny-dynamic.onnx"
    compile_model(model, tmp_path / "m.flashmem", shapes=shapes, build=False, dump_passes=tmp_path / "passes")
    texts = [(tmp_path / "passes" / f"variant-{i}" / "00-imported.txt").read_text() for i in (1, 2)]
    assert "int64[1,8]" in texts[0] and "int64[1,16]" in texts[1]


@pytest.mark.parametrize(
    ("folder", "sentence"), [("gone/passes", "create it first"), ("file", "is not a folder"), ("/proc", "cannot be written")]
)
def test_a_folder_that_cannot_be_written_is_refused(folder: str, sentence: str, flashmem: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = flashmem("compile", VIT, "-o", tmp_path / "m.flashmem", "--dump-passes", tmp_path / folder)
    assert outcome.code == 2 and outcome.out == "" and not (tmp_path / "m.flashmem").exists()
    assert sentence in outcome.err.strip().splitlines()[-1]


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashmem.compiler.passes.pipeline.written_whole", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        dump_graph(small()[0], tmp_path)
