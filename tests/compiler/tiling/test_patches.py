"""Patch-based tiling of operator chains: the answers of the untiled graph, and the stated smallest budget works."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.compiler.adaptive import tiling as adaptive_tiling
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import REGISTRY
from flashmem.compiler.operators.tiling_interface import AxisRange, outermost
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.tiling.patches import Chain, in_patches
from flashmem.program.program import fixed_bytes
from flashmem.target.descriptor import load_descriptor
from tests.conformance.random_graphs import values
from tests.conformance.random_graphs.graph import draw
from tests.conformance.random_graphs.judge import judge
from tests.conformance.random_graphs.listed import listed
from tests.support.compared import DEVICES, Array, Nodes, answers_of, by_runtime, compare, require_right
from tests.support.inputs import floats
from tests.support.paths import DATA

compiling = importlib.import_module("flashmem.compile")
read_graph = compiling.read_graph


REDUCTIONS = {"ReduceL2", "ReduceMax"}
"""Operators with the same declaration as another one."""


def each_group(graph: Graph) -> Graph:
    """Tile every group that can be computed in uneven patches alone, along each axis in turn."""
    chains, fused = [], fuse(graph)
    for at, group in enumerate(fused.groups):
        axes = [axis for axis, size in enumerate(group.output.shape) if size > 1]
        for axis in axes[at % max(1, len(axes)) :] + axes:
            size = group.output.shape[axis]
            chain = Chain(at, at, axis, tuple(sorted({0, max(1, size // 3), size - 1})))
            if can_be(fused, chain):
                chains.append(chain)
                break
    return in_patches(fused, chains)


def can_be(fused: FusedGraph, chain: Chain) -> bool:
    try:
        in_patches(fused, [chain])
    except ValueError:
        return False
    return True


def some_chains(graph: Graph, rng: random.Random, longest: int = 12) -> Graph:
    """Chains of groups, tiled in random patches of their last results."""
    fused = fuse(graph)
    groups, chains, at = fused.groups, [], 0
    while at < len(groups):
        last = min(at + rng.randint(0, longest), len(groups) - 1)
        shape = groups[last].output.shape
        size = shape[outermost(shape)] if shape else 1
        if size > 1:
            cuts = sorted(rng.sample(range(1, size), min(size - 1, rng.randint(1, 3))))
            chain = Chain(at, last, outermost(shape), (0, *cuts))
            chains += [chain] if can_be(fused, chain) else []
        at = last + 1
    return in_patches(fused, chains)


def tiled(monkeypatch: pytest.MonkeyPatch, change: Callable[[Graph], Graph]) -> list[Graph]:
    """Compile a model's graph as changed by `change`; returns the list of these graphs."""
    made: list[Graph] = []

    def read(model: Path, options: Any, *rewrite: Any) -> Graph:
        made.append(change(read_graph(model, options, *rewrite)))
        return made[-1]

    monkeypatch.setattr(compiling, "read_graph", read)
    return made


def in_parts(graph: Graph) -> set[str]:
    """The operators that `graph` computes in parts."""
    return {node.op for node in graph.nodes if re.search(r"\[\d+:\d+\]$", node.name)}


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def close(answers: list[Array], wanted: list[Array], tolerance: float = 1e-5) -> None:
    for answer, expected in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(answer, expected, rtol=tolerance, atol=tolerance * float(np.abs(expected).max()))


def operators(kind: str) -> Nodes:
    """A node of every operator that declares parts, and more of those whose parts depend on pads, strides and steps."""
    n = Nodes()
    image, tokens = n.input(floats(2, 4, 13, 9, kind=kind)), n.input(floats(1, 11, 12, kind=kind))
    weight, bias = n.constant(normal(6, 4, 3, 3)), n.constant(normal(6))
    for attributes in (
        {"pads": [1, 1, 1, 1]},
        {"pads": [2, 0, 1, 1], "strides": [2, 1]},
        {"dilations": [2, 1], "pads": [2, 1, 2, 1]},
        {"strides": [3, 2]},
    ):
        n.node("Conv", image, weight, bias, **attributes)
    n.node("Conv", image, n.constant(normal(4, 1, 3, 3, seed=2)), group=4, pads=[1, 1, 1, 1])
    n.node("Conv", image, n.constant(normal(5, 4, 1, 1)))
    back = n.constant(normal(4, 6, 3, 3, seed=3))
    for attributes in ({"strides": [2, 2]}, {"strides": [3, 1], "pads": [1, 1, 1, 1]}, {"dilations": [2, 2]}):
        n.node("ConvTranspose", image, back, **attributes)
    n.node("ConvTranspose", image, n.constant(normal(4, 3, 2, 2)), strides=[4, 4])  # gaps that no input reaches
    n.node("MaxPool", image, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    n.node("AveragePool", image, kernel_shape=[3, 2], pads=[1, 0, 1, 0], ceil_mode=1, strides=[2, 2], count_include_pad=1)
    n.node("LpPool", image, kernel_shape=[3, 3])
    for mode, rule in (("linear", "half_pixel"), ("nearest", "asymmetric"), ("cubic", "align_corners")):
        n.node(
            "Resize",
            image,
            "",
            n.constant(np.array([1, 1, 1.7, 2.3], np.float32)),
            mode=mode,
            coordinate_transformation_mode=rule,
        )
    n.node("LRN", image, size=3)
    n.node("MatMul", tokens, n.constant(normal(12, 7)))
    n.node("MatMul", n.input(normal(2, 3, 5, 4)), n.input(normal(3, 4, 6)))
    for op in ("Softmax", "LogSoftmax"):
        n.node(op, tokens, axis=-1)
    n.node("LayerNormalization", tokens, n.constant(normal(12)), n.constant(normal(12, seed=4)))
    axes = n.constant(np.array([2]))
    [mean] = n.node("ReduceMean", n.node("Mul", tokens, tokens)[0], axes)
    [root] = n.node("Sqrt", n.node("Add", mean, n.constant(np.float32(1e-5)))[0])
    n.node("Div", tokens, root)  # RMS normalization
    for op in sorted(REDUCTIONS):
        n.node(op, tokens, axes)
    n.node("ArgMax", tokens, axis=2, dtypes=["int64"])
    n.node("ArgMin", tokens, axis=2, dtypes=["int64"])
    n.node("CumSum", tokens, n.constant(np.array(2)))
    n.node("Concat", tokens, tokens, axis=2)
    n.node("Expand", n.input(normal(5, 1, 4)), n.constant(np.array([5, 3, 4])))
    n.node("Gather", tokens, n.constant(np.array([3, 0, 0, 7, 1])), axis=1)
    n.node("Gather", tokens, n.constant(np.array([3, 0, 0, 7, 1])), axis=2)
    numbers = [n.constant(np.array(each)) for each in ([1, -3], [10, -20], [1, 2], [2, -4])]
    n.node("Slice", tokens, *numbers)
    n.node("Slice", tokens, *[n.constant(np.array(each)) for each in ([1, 2], [11, 11], [1, 2], [3, 2])])
    for pads in ([0, 2, 1, 0, 0, 0], [0, -1, 0, 0, 0, 3]):
        n.node("Pad", tokens, n.constant(np.array(pads)), n.constant(np.array(0.5, np.float32)))
    n.node("Tile", tokens, n.constant(np.array([1, 1, 3])))
    n.node("Tile", tokens, n.constant(np.array([3, 2, 1])))
    n.node("Transpose", image, perm=[3, 2, 0, 1])
    n.node("Reshape", n.node("Relu", tokens)[0], n.constant(np.array([11, 3, 4])))
    n.node("Add", tokens, n.constant(normal(11, 1)))
    attention(n, kind)
    return n


def attention(n: Nodes, kind: str) -> None:
    """Attention over everything with a mask, and over windows that are adjacent in memory. `kind`: of values and mask."""
    query, key = (n.input(normal(2, 3, 10, 4, seed=seed)) for seed in range(2))
    value, mask = n.input(floats(2, 3, 10, 4, kind=kind, seed=2)), n.input(floats(2, 1, 10, 10, kind=kind))
    swapped = hidden(n, "Transpose", key, perm=[0, 1, 3, 2])
    scores = hidden(n, "Add", hidden(n, "MatMul", query, swapped), mask)
    made = hidden(n, "MatMul", hidden(n, "Softmax", scores, axis=-1), value)
    n.node("Transpose", made, perm=[0, 2, 1, 3])
    windows = [n.input(floats(6, 5, 8, kind="normal" if seed < 2 else kind, seed=seed)) for seed in range(3)]
    scores = hidden(n, "MatMul", windows[0], hidden(n, "Transpose", windows[1], perm=[0, 2, 1]))
    n.node("MatMul", hidden(n, "Softmax", scores, axis=-1), windows[2])


def hidden(n: Nodes, op: str, *inputs: str, **attributes: Any) -> str:
    """A node whose result is not an output of the model."""
    [name] = n.node(op, *inputs, **attributes)
    n.outputs.pop()
    return name


@pytest.mark.parametrize(("place", "kind"), list(zip(DEVICES, ("around 1e3", "positive", "normal"), strict=False)))
def test_every_operator_in_patches(place: tuple[str, str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = operators(kind)
    graphs = tiled(monkeypatch, each_group)
    compare(nodes, place, tmp_path)
    declared = {name for name, operator in REGISTRY.items() if operator.tiling and not name.startswith("Reduce")}
    # Upsample is older than the operator set, CumProd newer; Reshapes are parts of chains.
    assert declared - {"CumProd", "Reshape", "Upsample"} | REDUCTIONS <= in_parts(graphs[0])


@pytest.mark.parametrize(
    ("name", "kind"), [("sam2-narrow", "around 1e3"), ("depthanything-tiny", "positive"), ("depthanything-tiny", "large")]
)
def test_networks_in_patches(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks: window partition, attention, pooling, residuals; upsampling with halo."""
    model = onnx.load(DATA / f"{name}.onnx")
    feeds = {}
    for port in model.graph.input:
        shape = [max(1, dim.dim_value) for dim in port.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
        feeds[port.name] = floats(*shape, kind=kind) if dtype == np.float32 else np.ones(shape, dtype)
    graphs = tiled(monkeypatch, lambda graph: some_chains(graph, random.Random(name)))
    place = DEVICES[0]
    require_right(model, feeds, answers_of(model, feeds, place, tmp_path), against_runtime=False)
    assert len(in_parts(graphs[0])) > 4


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_random_graphs_in_patches(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, path = DEVICES[0]
    monkeypatch.setattr(values, "_rounding", values._rounding)
    values.set_precision(precision)  # type: ignore[arg-type]
    kinds: list[str] = []

    @settings(
        max_examples=6 if precision == "fp32" else 2, deadline=None, derandomize=True, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(seed=st.integers(0, 2**32))
    def agree(seed: int) -> None:
        tiled(monkeypatch, lambda graph: some_chains(graph, random.Random(seed), 6))
        verdict = judge(draw(random.Random(seed), 12, listed), device, path, precision)  # type: ignore[arg-type]
        kinds.append(verdict.kind)
        assert verdict.kind in ("agreed", "refused"), f"{verdict.culprit}: {verdict.reasons}"

    agree()
    assert kinds.count("agreed") > kinds.count("refused")


@given(
    size=st.integers(3, 30), reach=st.integers(1, 4), stride=st.integers(1, 5), dilation=st.integers(1, 3),
    pads=st.tuples(st.integers(0, 3), st.integers(0, 3)), cut=st.tuples(st.integers(0, 99), st.integers(1, 99)),
    transposed=st.booleans(),
)  # fmt: skip
def test_parts_of_windows(
    size: int, reach: int, stride: int, dilation: int, pads: tuple[int, int], cut: tuple[int, int], transposed: bool
) -> None:
    """The convolution of the input range of a part, with the part's pads, equals that part of the convolution."""
    extent = dilation * (reach - 1) + 1
    made = (size - 1) * stride + extent - sum(pads) if transposed else (size + sum(pads) - extent) // stride + 1
    if made < 1:
        return
    start = cut[0] % made
    span = AxisRange(1, start, min(made, start + cut[1]))
    x, kernel = normal(size), normal(reach)
    weight = Value("w", (1, 1, reach, 1), "float32")
    attributes = {"strides": (stride, 1), "dilations": (dilation, 1), "pads": (pads[0], 0, pads[1], 0), "group": 1}
    output = Value("y", (1, made, 1, 1), "float32")
    op = "ConvTranspose" if transposed else "Conv"
    node = Node(op, "n", [Value("x", (1, size, 1, 1), "float32"), weight], [output], attributes)
    part = REGISTRY[op].tile_of(node, span)
    whole = _convolved(op, x, kernel, stride, dilation, pads[0], made)[span.start : span.stop]
    if part is None:
        np.testing.assert_array_equal(whole, np.zeros_like(whole))  # it covers no input
        return
    needed = part.needs[0]
    assert needed is not None and 0 <= needed.start < needed.stop <= size
    taken = x[needed.start : needed.stop]
    np.testing.assert_allclose(_convolved(op, taken, kernel, stride, dilation, part.attributes["pads"][0], span.size), whole)


def _convolved(op: str, x: Array, kernel: Array, stride: int, dilation: int, pad: int, made: int) -> Array:
    result = np.zeros(made, np.float32)
    for place in range(made):
        for tap, weight in enumerate(kernel):
            at = place * stride - pad + tap * dilation
            if op == "ConvTranspose":
                at, rest = divmod(place + pad - tap * dilation, stride)
                at = -1 if rest else at
            if 0 <= at < len(x):
                result[place] += weight * x[at]
    return result


def wide() -> onnx.ModelProto:
    """The end of a depth head, and an MLP of tokens: narrow at both ends, wide between."""
    weights = {
        "first": normal(8, 8, 3, 3), "second": normal(16, 8, 3, 3), "third": normal(1, 16, 1, 1),
        "up": normal(32, 512) / 8, "down": normal(512, 32) / 8, "scales": np.array([1, 1, 4, 4], np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["image", "first"], ["a"], pads=[1] * 4),
        helper.make_node("Resize", ["a", "", "scales"], ["b"], mode="linear"),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "third"], ["depth"]),
        helper.make_node("MatMul", ["tokens", "up"], ["e"]),
        helper.make_node("Sigmoid", ["e"], ["f"]),
        helper.make_node("MatMul", ["f", "down"], ["g"]),
        helper.make_node("Add", ["g", "tokens"], ["features"]),
    ]
    given = {"image": (1, 8, 32, 32), "tokens": (1, 1024, 32)}
    made = {"depth": (1, 1, 128, 128), "features": (1, 1024, 32)}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ports.items()]
        for ports in (given, made)
    )
    constants = [numpy_helper.from_array(data, name) for name, data in weights.items()]
    graph = helper.make_graph(nodes, "wide", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("place", DEVICES)
def test_the_smallest_budget_works(place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is smaller with patches than without. A session stays within it in every mode, with right answers."""
    monkeypatch.setattr(adaptive_tiling, "LEAST_PATCH_BYTES", {"cpu": 1 << 14, "gpu": 1 << 14})
    model, file = wide(), tmp_path / "wide.onnx"
    onnx.save(model, file)
    name, path = place
    free = flashmem.compile(file, tmp_path / "free.flashmem", device=name, memory_path=path, build=False)  # type: ignore[arg-type]
    assert not any("in patches" in note for note in free.plan.notes)
    feeds = {"image": normal(1, 8, 32, 32), "tokens": normal(1, 1024, 32)}
    first: list[Array] = []
    for mode in load_descriptor(name).modes[path]:  # type: ignore[index]
        limits: dict[str, Any] = {"device": name, "memory_path": path, "mode": mode, "build": False}
        with pytest.raises(BudgetError, match="with chains of operators in patches") as refused:
            flashmem.compile(file, tmp_path / "no.flashmem", budget=1000, **limits)
        budget = refused.value.smallest_bytes
        assert budget < 0.6 * fixed_bytes(free.program) and budget < refused.value.without_patches
        if not first:  # one mode stands for all: the search is the same
            with pytest.raises(BudgetError) as less:
                flashmem.compile(file, tmp_path / "no.flashmem", budget=budget - 1, **limits)
            assert less.value.smallest_bytes == budget
        bundle = flashmem.compile(file, tmp_path / f"{mode}.flashmem", budget=budget, **limits)
        assert any("in patches" in note for note in bundle.plan.notes)
        with flashmem.Session(bundle, device=name, mode=mode) as session:
            answers = session.run(None, feeds)
            assert session.last_run.memory.peak_bytes <= budget
        require_right(model, feeds, answers)
        first = first or answers
        assert all(np.array_equal(a, b) for a, b in zip(answers, first, strict=True))


def test_the_smallest_budget_of_a_network_quantised_dynamically(tmp_path: Path) -> None:
    """Its scales and zero points are scalars, computed when most activations are alive: they have no axis to tile."""
    weights = {"first": normal(16, 3, 3, 3), "second": normal(16, 16, 3, 3), "third": normal(4, 16, 3, 3)}
    nodes = [
        helper.make_node("Conv", ["image", "first"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Conv", ["d", "third"], ["y"], pads=[1] * 4),
    ]
    ports = [helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, 64, 64))]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 4, 64, 64))]
    constants = [numpy_helper.from_array(data, name) for name, data in weights.items()]
    graph = helper.make_graph(nodes, "network", ports, results, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "floats.onnx")
    model = tmp_path / "integers.onnx"
    quantize_dynamic(tmp_path / "floats.onnx", model)
    assert "DynamicQuantizeLinear" in [node.op_type for node in onnx.load(model).graph.node]
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(model, tmp_path / "no.flashmem", budget=1)
    budget = refused.value.smallest_bytes
    bundle = flashmem.compile(model, tmp_path / "b.flashmem", budget=budget)
    feeds = {"image": normal(1, 3, 64, 64)}
    with flashmem.Session(bundle) as session:
        [answer] = session.run(None, feeds)
        assert session.last_run.memory.peak_bytes <= budget
    close([answer], by_runtime(onnx.load(model), feeds))
