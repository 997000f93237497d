"""Removal of data movement: graphs before and after the passes, by numpy; and whole models on every device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.builder import sliced_constant
from flashmem.compiler.ir.graph import ArrayConstant, Graph, Value
from flashmem.compiler.ir.quantised import QuantizedConstant
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import PASSES, prepare, run_passes
from tests.conformance.random_graphs.graph import draw
from tests.conformance.random_graphs.patterns import packed, turned, windows
from tests.support.attention_cases import Model
from tests.support.compared import PLACES, answers_of
from tests.support.evaluate_graph import evaluate
from tests.support.graph_to_onnx import run

PATTERNS = {
    "packed": (packed, "MatMul"),
    "windows": (windows, "LayerNormalization"),
    "turned": (turned, "Neg"),
}

BEFORE = [step.name for step in PASSES].index("assign-layouts") + 1
"""Number of passes before those that move data."""


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pass_changes_what_a_graph_computes(pattern: str, tmp_path: Path) -> None:
    how, op = PATTERNS[pattern]
    moved = []
    for seed in range(50):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = draw(random.Random(seed), 12, pool=[(1.0, how, (op,))])
        if any(value.own.dtype not in (np.float32, np.float64, np.int64) for value in drawn.values.values()):
            continue
        onnx.save(drawn.model, tmp_path / "graph.onnx")
        feeds = drawn.feeds
        graph = run_passes(import_model(tmp_path / "graph.onnx", {}, why_unsupported), PASSES[:BEFORE])
        wanted, before = evaluate(graph, feeds), cost(graph)
        for step in PASSES[BEFORE:]:
            graph = step.run(graph)
            for answer, expected in zip(evaluate(graph, feeds), wanted, strict=True):
                largest = np.nanmax(np.abs(expected), initial=1e-30)
                np.testing.assert_allclose(answer, expected, rtol=1e-9, atol=1e-9 * largest, err_msg=f"{seed} {step.name}")
        moved.append((before, cost(graph)))
    assert len(moved) > 10
    assert sum(after for _, after in moved) < 0.9 * sum(before for before, _ in moved)


@pytest.mark.parametrize(("start", "end", "step"), [(0, 1, 1), (3, 5, 1), (6, 0, -2), (0, 7, 1)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_of_a_reshaped_transpose_keeps_the_order_of_its_factors(
    axis: int, start: int, end: int, step: int, tmp_path: Path
) -> None:
    """A dimension of 188 elements is 4 by 47, of which the first has the smaller stride."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["t"], perm=[1, 0]),
        helper.make_node("Reshape", ["t", "shape"], ["b"]),
        helper.make_node("Slice", ["b", "start", "end", "axis", "step"], ["c"]),
    ]
    numbers = {"shape": [7, 188], "start": [start], "end": [end], "axis": [axis], "step": [step]}
    constants = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in numbers.items()]
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (47, 28))
    result = helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", [given], [result], constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "graph.onnx")
    x = np.random.default_rng(0).standard_normal((47, 28)).astype(np.float32)
    whole = np.maximum(x, 0).T.reshape(7, 188)
    cut = slice(start, end, step)
    graph = run_passes(import_model(tmp_path / "graph.onnx", {}, why_unsupported), PASSES)
    [answer] = evaluate(graph, {"x": x})
    np.testing.assert_array_equal(answer, whole[cut] if axis == 0 else whole[:, cut])


def cost(graph: Graph) -> int:
    """The number of elements that Transposes and Slices copy."""
    return sum(node.outputs[0].size for node in graph.nodes if node.op in ("Transpose", "Slice"))


class Made(Model):
    """A model whose weights are constants."""

    def weight(self, *shape: int) -> str:
        """The name of a random constant."""
        return self.constant(self.generator.standard_normal(shape) / np.sqrt(shape[0]))

    def linear(self, x: str, depth: int, columns: int) -> str:
        """x by a constant matrix, and a bias."""
        return str(self.op("Add", self.op("MatMul", x, self.weight(depth, columns)), self.weight(columns)))

    def ints(self, *numbers: int) -> str:
        """The name of constant integers."""
        return self.constant(numbers, np.int64)


def gated(m: Made) -> None:
    """GEGLU: the gate is the second half of one projection."""
    value, gate = m.op("Split", m.linear(m.input(2, 21, 12), 12, 68), m.ints(34, 34), outputs=2, axis=-1)
    m.answer(m.op("Mul", value, m.op("Gelu", gate)))


def apart(m: Made, bits: int = 0) -> None:
    """Queries, keys and values of one projection; queries are pooled before their use."""
    x = m.input(3, 16, 12)
    if bits:
        codes = m.generator.integers(-7, 8, (12, 60)).astype(np.int8)
        name = m.constant(codes, np.int8)
        scales = m.constant(m.generator.random(60) / 8 + 0.01)
        y = m.op("Add", m.op("MatMul", x, m.op("DequantizeLinear", name, scales, axis=1)), m.weight(60))
    else:
        y = m.linear(x, 12, 60)
    y = m.op("Reshape", y, m.ints(3, 16, 3, 2, 10))
    q, k, v = (m.op("Squeeze", each, m.ints(2)) for each in m.op("Split", y, m.ints(1, 1, 1), outputs=3, axis=2))
    q = m.op("Transpose", m.op("Reshape", q, m.ints(3, 4, 4, 20)), perm=[0, 3, 1, 2])
    q = m.op("Transpose", m.op("MaxPool", q, kernel_shape=[2, 2], strides=[2, 2]), perm=[0, 2, 3, 1])
    q = m.op("Transpose", m.op("Reshape", q, m.ints(3, 4, 2, 10)), perm=[0, 2, 1, 3])
    k, v = m.op("Transpose", k, perm=[0, 2, 3, 1]), m.op("Transpose", v, perm=[0, 2, 1, 3])
    answer = m.op("MatMul", m.op("Softmax", m.op("MatMul", q, k), axis=-1), v)
    m.answer(m.op("Reshape", m.op("Transpose", answer, perm=[0, 2, 1, 3]), m.ints(3, 2, 2, 20)))


def images(m: Made, channels: int = 20, groups: int = 4) -> None:
    """Group normalization between convolutions, as PyTorch exports it, with an image as output."""
    x = m.op("Conv", m.input(2, 3, 7, 9), m.weight(channels, 3, 3, 3), m.weight(channels), pads=[1, 1, 1, 1])
    rows = m.op("Reshape", x, m.ints(2, groups, -1))
    normal = m.op("InstanceNormalization", rows, m.weight(groups), m.weight(groups))
    normal = m.op("Reshape", normal, m.ints(2, channels, 7, 9))
    y = m.op("Add", m.op("Mul", normal, m.weight(channels, 1, 1)), m.weight(channels, 1, 1))
    y = m.op("Mul", y, m.op("Sigmoid", y))
    y = m.op("Add", m.op("Conv", y, m.weight(channels, channels, 3, 3), pads=[1, 1, 1, 1]), x)
    m.answer(m.op("Conv", y, m.weight(5, channels, 1, 1), m.weight(5)))


def windowed(m: Made) -> None:
    """A transformer block with attention inside windows of an image."""
    image = m.input(1, 6, 8, 12)
    x = m.op("LayerNormalization", image, m.weight(12), m.weight(12))
    x = m.op("Transpose", m.op("Reshape", x, m.ints(1, 2, 3, 2, 4, 12)), perm=[0, 1, 3, 2, 4, 5])
    y = m.linear(m.op("Reshape", x, m.ints(4, 12, 12)), 12, 36)
    y = m.op("Transpose", m.op("Reshape", y, m.ints(4, 12, 3, 2, 6)), perm=[2, 0, 3, 1, 4])
    q, k, v = (m.op("Gather", y, m.constant(i, np.int64), axis=0) for i in range(3))
    scores = m.op("MatMul", q, m.op("Transpose", k, perm=[0, 1, 3, 2]))
    x = m.op("Transpose", m.op("MatMul", m.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    x = m.linear(m.op("Reshape", x, m.ints(4, 12, 12)), 12, 12)
    x = m.op("Transpose", m.op("Reshape", x, m.ints(1, 2, 2, 3, 4, 12)), perm=[0, 1, 3, 2, 4, 5])
    m.answer(m.op("Add", image, m.op("Reshape", x, m.ints(1, 6, 8, 12))))


FORMS: dict[str, tuple[Callable[[Made], None], set[str], int]] = {
    "gated": (gated, {"MatMul"}, 2),
    "apart": (apart, {"MatMul", "MaxPool", "FusedAttention"}, 4),
    "apart, of 8 bits": (lambda m: apart(m, 8), {"MatMul", "MaxPool", "FusedAttention"}, 4),
    "images": (images, {"Transpose", "Conv", "NormalizeGroups"}, 5),
    "groups of 7": (lambda m: images(m, 21, 3), {"Transpose", "Conv", "NormalizeGroups"}, 5),
    "windowed": (windowed, {"Normalize", "MatMul", "FusedAttention"}, 4),
}
"""A pattern, the main operators of its fusion groups, and their number: no other launch copies data."""


@pytest.mark.parametrize("name", FORMS)
def test_patterns_of_models_move_nothing(name: str, tmp_path: Path) -> None:
    form, operators, count = FORMS[name]
    model = Made()
    form(model)
    onnx.save(model.proto(), tmp_path / "graph.onnx")
    groups = fuse(prepare(import_model(tmp_path / "graph.onnx", {}, why_unsupported))).groups
    assert ({group.main.op for group in groups}, len(groups)) == (operators, count)
    assert sum(group.main.op == "Transpose" for group in groups) == (operators >= {"Transpose"})  # of the model's own input


@pytest.mark.parametrize(("device", "path"), PLACES)
def test_answers_are_those_of_onnx_runtime(device: str, path: str, tmp_path: Path) -> None:
    model = Made()
    for form, *_ in FORMS.values():
        form(model)
    proto = model.proto()
    expected = run(proto, model.feeds)  # unoptimised: else it rounds operands of quantised weights
    for name, answer in zip(model.answers, answers_of(proto, model.feeds, (device, path), tmp_path), strict=True):
        wanted = expected[name]
        np.testing.assert_allclose(answer, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max()), err_msg=name)


def test_a_part_of_quantised_weights_is_quantised() -> None:
    generator = np.random.default_rng(3)
    codes = ArrayConstant(generator.integers(-8, 8, (12, 10)).astype(np.int8))
    for shape, block in (((1, 1), (12, 10)), ((1, 10), (12, 1)), ((3, 10), (4, 1)), ((12, 5), (1, 2))):
        scale = ArrayConstant(generator.random(shape).astype(np.float32))
        zero = ArrayConstant(generator.integers(-3, 3, shape).astype(np.int8))
        value = Value("w", (12, 10), "float32", QuantizedConstant(codes, scale, zero, block, 4))
        for axis, first, end in ((1, 2, 6), (1, 0, 10), (0, 4, 8), (1, 3, 4), (0, 1, 12)):
            part = sliced_constant(value, axis, first, end)
            if part is None:
                assert block[axis] > 1 and shape[axis] > 1 and (first % block[axis] or end % block[axis])
                continue
            assert isinstance(part.constant, QuantizedConstant) and value.constant is not None
            np.testing.assert_array_equal(part.constant.array(), value.constant.array().take(range(first, end), axis))
            again = part.constant.transposed((1, 0)).array()
            np.testing.assert_array_equal(again, part.constant.array().T)


def test_a_weight_that_is_read_in_different_parts_stays_whole(tmp_path: Path) -> None:
    model = Made()
    weight = model.weight(8, 12)
    for sizes in ((4, 8), (6, 6)):
        first, second = model.op("Split", model.op("MatMul", model.input(5, 8), weight), model.ints(*sizes), outputs=2, axis=1)
        model.answer(model.op("Neg", first))
        model.answer(model.op("Abs", second))
    onnx.save(model.proto(), tmp_path / "graph.onnx")
    graph = prepare(import_model(tmp_path / "graph.onnx", {}, why_unsupported))
    assert sum(node.op == "MatMul" for node in graph.nodes) == 2
    assert {value.shape for value in graph.constants()} == {(8, 12)}
