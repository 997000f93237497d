"""Loops, branches, sequences, optional values and functions: the unrolled graph computes what ONNX Runtime computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from flashmem.base.errors import UnsupportedModelError, UserError
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.tools.zoo.graph_file import graph_to_onnx
from tests.support.graph_to_onnx import draw, run

LOOP = """
agraph (float[2, 3] x, float[3] w) => (float[N, 3] last, float[M, 2, 3] all)
<int64 trips = {4}, bool yes = {1}, float[2, 3] zero = {0, 0, 0, 0, 0, 0}>
{
    last, all = Loop (trips, yes, x) <
    body = body (int64 i, bool go, float[n, m] state) =>
    (bool still, float[n, m] next, float[2, 3] seen)
    <float[1] half = {0.5}> {
        still = Identity (go)
        number = Cast <to = 1> (i)
        shifted = Add (x, number)
        scaled = Mul (shifted, half)
        seen = Mul (scaled, w)
        next = Concat <axis = 0> (state, seen)
    }>
}
"""

WHILE = """
agraph (float[2] x) => (float[2] y, float[M, 1] seen)
<bool yes = {1}, int64 zero = {0}, int64 one = {1}, int64 top = {5}, int64 most = {100}>
{
    n, y, seen = Loop (most, yes, zero, x) <
    body = body (int64 i, bool go, int64 count, float[2] state) =>
    (bool still, int64 more, float[2] next, float[1] part) {
        more = Add (count, one)
        still = Less (more, top)
        next = Add (state, state)
        part = ReduceSum <keepdims = 1> (next)
    }>
}
"""

PEELED = """
agraph (float[2, 3] x) => (float[N, 3] y, int64[M] rows)
<bool yes = {1}, int64[1] zero = {0}, int64 top = {9}, int64 most = {100}>
{
    y, rows = Loop (most, yes, x) <
    body = body (int64 i, bool go, float[n, m] state) =>
    (bool still, float[n, m] next, int64 number) {
        next = Concat <axis = 0> (state, x)
        shape = Shape (next)
        index = Constant <value = int64 {0}> ()
        number = Gather (shape, index)
        still = Less (number, top)
    }>
}
"""

NESTED = """
agraph (float[3] x) => (float[3] y)
<int64 trips = {3}, int64 two = {2}, float[3] c = {1, 2, 3}>
{
    y = Loop (trips, , x) <
    body = outer (int64 i, bool go, float[n] state) =>
    (bool still, float[n] next) {
        still = Identity (go)
        first = Equal (i, two)
        picked = If (first) <
            then_branch = yes () => (float[n] a) { a = Mul (state, c) },
            else_branch = no () => (float[n] b) { b = Add (state, c) }
        >
        next = Loop (two, , picked) <
    body = inner (int64 j, bool run, float[n] t) =>
    (bool on, float[n] u) {
            on = Identity (run)
            both = Add (i, j)
            f = Cast <to = 1> (both)
            v = Mul (t, f)
            u = Add (v, state)
        }>
    }>
}
"""

SCAN = """
agraph (float[2] s, float[4, 2] x, float[2, 4] z) => (float[2] end, float[4, 2] one, float[2, 4] two)
{
    end, one, two = Scan <num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1], 
    scan_output_axes = [0, 1], scan_output_directions = [1, 0],
    body = body (float[2] state, float[2] a, float[2] b) => (float[2] next, float[2] p, float[2] q) {
        t = Mul (a, b)
        next = Add (state, t)
        p = Identity (next)
        q = Sub (next, a)
    }> (s, x, z)
}
"""

SCAN8 = """
agraph (float[3, 2] s, float[3, 4, 2] x) => (float[3, 2] end, float[3, 4, 2] all)
{
    end, all = Scan <num_scan_inputs = 1, directions = [1],
    body = body (float[2] state, float[2] a) => (float[2] next, float[2] p) {
        next = Add (state, a)
        p = Mul (next, a)
    }> ( , s, x)
}
"""

SEQUENCES = """
agraph (float[2, 3] x, float[2, 5] z) => 
(float[2, 7] a, float[2, 2, 3] b, int64 n, float[2, 1] c, float[2] d)
<int64 at = {-1}, int64 first = {0}, int64[2] parts = {2, 3}, int64 two = {2}, int64 trips = {2}>
{
    made = SequenceConstruct (x, x)
    b = ConcatFromSequence <axis = 1, new_axis = 1> (made)
    pieces = SplitToSequence <axis = 1> (z, parts)
    longer = SequenceInsert (pieces, x, at)
    n = SequenceLength (longer)
    shorter = SequenceErase (longer, first)
    rest = SequenceInsert (shorter, z)
    some = SequenceAt (rest, first)
    chunks = SplitToSequence <axis = -1> (z, two)
    c = SequenceAt (chunks, at)
    cut = SequenceErase (rest)
    joined = ConcatFromSequence <axis = 1> (cut)
    columns = SplitToSequence <axis = 1, keepdims = 0> (z)
    d = SequenceAt (columns, first)
    empty = SequenceEmpty <dtype = 1> ()
    FILLED
    columns2 = ConcatFromSequence <axis = 1> (filled)
    a = Concat <axis = 1> (columns2, z)
}
"""

FILLED = """filled = Loop (trips, , empty) <
    body = body (int64 i, bool go, seq(float[N, M]) before) =>
    (bool still, seq(float[N, M]) after) {
        still = Identity (go)
        f = Cast <to = 1> (i)
        v = Add (c, f)
        after = SequenceInsert (before, v)
    }>"""

CHOICE = """
agraph (float[2, 3] x, float[1] limit) => (float[2, 3] y, float[2] z)
<float zero = {0}>
{
    total = ReduceSum <keepdims = 0> (x)
    high = Greater (total, limit)
    y, z = If (high) <
        then_branch = yes () => (float[2, 3] a, float[2] b) { a = Relu (x)  b = ReduceMax <axes = [1], keepdims = 0> (x) },
        else_branch = no () => (float[2, 3] c, float[2] d) { c = Neg (x)  d = ReduceMin <axes = [1], keepdims = 0> (x) }
    >
}
"""

OPTIONAL = """
agraph (float[2] x) => (float[2] y, bool here)
{
    held = Optional (x)
    here = OptionalHasElement (held)
    y = If (here) <
        then_branch = yes () => (float[2] a) { b = OptionalGetElement (held)  a = Neg (b) },
        else_branch = no () => (float[2] c) { c = Identity (x) }
    >
}
"""


def saved(text: str, opset: int, folder: Path) -> Path:
    graph = onnx.parser.parse_graph(text.strip())
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def compared(path: Path) -> Graph:
    """The graph. Checks that it computes the results of ONNX Runtime on the file, for two sets of inputs."""
    graph = import_model(path)
    for seed in (0, 1, 2):
        feeds = draw(graph, seed, 3)
        computed = replace(graph, outputs=[port for port in graph.outputs if port.value.constant is None])
        expected, found = run(str(path), feeds), run(graph_to_onnx(computed), feeds)
        found |= {port.name: port.value.constant.array() for port in graph.outputs if port.value.constant is not None}
        assert set(expected) == set(found)
        for name, answer in found.items():
            assert answer.shape == expected[name].shape, name
            np.testing.assert_allclose(answer, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    return graph


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_a_loop_becomes_copies_of_its_body(opset: int, tmp_path: Path) -> None:
    graph = compared(saved(LOOP, opset, tmp_path))
    assert "Loop" not in ops(graph)
    assert len({value for value in graph.constants() if value.shape == (1,)}) <= 2  # the body's factor is stored once


def test_a_condition_that_counts_is_followed(tmp_path: Path) -> None:
    graph = compared(saved(WHILE, 11, tmp_path))
    assert ops(graph)["ReduceSum"] == 5


def test_a_condition_that_follows_from_shapes_is_followed_after_each_iteration(tmp_path: Path) -> None:
    graph = compared(saved(PEELED, 13, tmp_path))
    assert graph.outputs[0].value.shape == (10, 3)
    rows = graph.outputs[1].value.constant
    assert rows is not None
    np.testing.assert_array_equal(rows.array(), [4, 6, 8, 10])
    assert all(node.name.count(".") < 3 for node in graph.nodes), [node.name for node in graph.nodes]


def test_a_loop_that_is_refused_after_some_iterations_keeps_its_name(tmp_path: Path) -> None:
    """The condition is a constant for three iterations, and then depends on data."""
    late = PEELED.replace(
        "number = Gather (shape, index)\n        still = Less (number, top)",
        """number = Gather (shape, index)
        limit = Constant <value = int64 {6}> ()
        early = Less (number, limit)
        still = If (early) <
            then_branch = yes () => (bool a) { a = Less (number, top) },
            else_branch = no () => (bool b) { s = ReduceMax <keepdims = 0> (state)  w = Cast <to = 7> (s)  b = Less (w, top) }
        >""",
    )
    assert late != PEELED
    path = saved(late, 13, tmp_path)
    model = onnx.load(path)
    model.graph.node[0].name = "walk"
    onnx.save(model, path)
    with pytest.raises(UnsupportedModelError, match="Loop whose condition is computed at run time") as caught:
        import_model(path)
    assert [name for name, _ in caught.value.nodes] == ["walk"]


@pytest.mark.parametrize("opset", [11, 16])
def test_loops_and_choices_in_loops(opset: int, tmp_path: Path) -> None:
    assert set(ops(compared(saved(NESTED, opset, tmp_path)))) == {"Add", "Mul"}


@pytest.mark.parametrize(("text", "opset"), [(SCAN, 9), (SCAN, 11), (SCAN, 17), (SCAN8, 8)])
def test_a_scan_becomes_copies_of_its_body(text: str, opset: int, tmp_path: Path) -> None:
    assert "Scan" not in ops(compared(saved(text, opset, tmp_path)))


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_sequences_disappear(opset: int, tmp_path: Path) -> None:
    filled = FILLED if opset >= 13 else "filled = SequenceConstruct (c, c)"  # loops can carry sequences since 13
    graph = compared(saved(SEQUENCES.replace("FILLED", filled), opset, tmp_path))
    assert not [op for op in ops(graph) if "Sequence" in op]


def test_an_optional_value_is_followed(tmp_path: Path) -> None:
    assert set(ops(compared(saved(OPTIONAL, 18, tmp_path)))) == {"Neg"}


def test_a_small_choice_at_run_time_computes_both(tmp_path: Path) -> None:
    assert ops(compared(saved(CHOICE, 11, tmp_path)))["Where"] == 2


def test_a_branch_with_random_numbers_is_computed(tmp_path: Path) -> None:
    """They are the same in every run, so that they can be computed unasked."""
    graph = import_model(saved(BRANCHES.format("r = RandomNormalLike (x)  a = Add (r, x)"), 13, tmp_path))
    assert ops(graph)["RandomNormalLike"] == ops(graph)["Where"] == 1


BRANCHES = """
agraph (float[2, 3] x, bool choice, int64[1] at) => (float[N, M] y)
{{
    y = If (choice) <then_branch = yes () => (float[N, M] a) {{ {} }}, else_branch = no () => (float[N, M] b) {{ b = Neg (x) }}>
}}
"""


TRIPS = LOOP.replace("<int64 trips = {4}, ", "<").replace("float[3] w)", "float[3] w, int64 trips)")
CONDITION = WHILE.replace(
    "still = Less (more, top)", "p = ReduceMax <keepdims = 0> (state)  some = Cast <to = 7> (p)  still = Less (more, some)"
)
POSITION = SEQUENCES.replace("[2, 5] z)", "[2, 5] z, int64 here)").replace("At (columns, first)", "At (columns, here)")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (BRANCHES.format("a = Transpose (x)"), r"whose branches give FLOAT \[3,2\] and FLOAT \[2,3\], is not supported: both"),
        (BRANCHES.format("a = Gather (x, at)"), "is not supported with Gather in a branch, which cannot be computed unasked"),
        (
            BRANCHES.format("  ".join(f"a{i + 1} = Exp ({f'a{i}' if i else 'x'})" for i in range(128)) + "  a = Exp (a128)"),
            "whose branches have 130 nodes, is not supported: at most 128 are all computed",
        ),
        (TRIPS, "Loop whose number of iterations is computed at run time"),
        (CONDITION, "Loop whose condition is computed at run time"),
        (POSITION, "SequenceAt at a position computed at run time"),
    ],
)
def test_what_depends_on_data_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=sentence) as caught:
        import_model(saved(text.replace("FILLED", FILLED), 12 if "ReduceMax" in text else 13, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_loop_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unroll to more than 20000 nodes, the most that are made"):
        import_model(saved(NESTED.replace("trips = {3}", "trips = {100000000}"), 16, tmp_path))


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        (LOOP, "(int64 i, bool go, float[n, m] state)", "(int64 i, bool go)"),
        (LOOP, "(bool still, float[n, m] next, float[2, 3] seen)", "(bool still, float[n, m] next)"),
        (SCAN, "num_scan_inputs = 2", "num_scan_inputs = 4"),
        (SCAN, "scan_input_axes = [0, 1]", "scan_input_axes = [0, 7]"),
        (SCAN, "scan_input_axes = [0, 1]", "scan_input_axes = [0]"),
        (SEQUENCES, "parts = {2, 3}", "parts = {2, 7}"),
        (SEQUENCES, "first = {0}", "first = {9}"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, old: str, new: str, tmp_path: Path) -> None:
    assert old in text
    with pytest.raises(UserError) as caught:
        import_model(saved(text.replace(old, new).replace("FILLED", FILLED), 13, tmp_path))
    assert "\n" not in str(caught.value)


def function(name: str, inputs: Sequence[str], text: str, opset: int, attributes: Sequence[str] = ()) -> onnx.FunctionProto:
    listed = f"<{', '.join(attributes)}>" if attributes else ""
    head = f'<opset_import: ["" : {opset}, "mine" : 1], domain: "mine"> {name} {listed} ({", ".join(inputs)})'
    made = onnx.parser.parse_function(f"{head} => (out) {{ {text} }}")
    assert isinstance(made, onnx.FunctionProto)
    return made


def test_functions_of_several_operator_sets_and_of_functions(tmp_path: Path) -> None:
    """The model itself imports no operator set of ONNX; attributes pass through two calls, also into a subgraph."""
    inner = function("Inner", ["a"], "b = LeakyRelu <alpha: float = @slope> (a)  out = Add (b, b)", 18, ["slope"])
    outer = function(
        "Outer",
        ["a"],
        "b = mine.Inner <slope: float = @slope> (a)  c = mine.Inner <slope = 0.5> (b)  out = ReduceSum <keepdims = 1> (c)",
        18,
        ["slope"],
    )
    branches = function("Branches", ["a"], "axes = Constant <value = int64[1] {-1}> ()  out = Unsqueeze (a, axes)", 13)
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Outer", ["x"], ["h"], domain="mine", slope=0.25),
                helper.make_node("Branches", ["h"], ["y"], domain="mine"),
            ],
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("mine", 1)],
        functions=[inner, outer, branches],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "model.onnx")
    graph = import_model(tmp_path / "model.onnx")
    model.opset_import.append(helper.make_opsetid("", 18))
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    (expected,) = run(model, {"x": x}).values()
    (found,) = run(graph_to_onnx(graph), {"x": x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert graph.opset == 18
