"""Launch order with the lowest peak: right answers for any order of nodes in a file, and smaller arenas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.memory.launch_order import in_lowest_order
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.target.descriptor import load_descriptor

BRANCHES = 5


def branches(folder: Path, seed: int) -> Path:
    """Branches that widen and narrow, some of which read another's end; nodes in a random valid order."""
    random = np.random.default_rng(0)
    nodes, weights, ends = [], [], []
    for i in range(BRANCHES):
        source = "x" if i < 3 else f"end{i - 3}"
        for name, shape in ((f"up{i}", (48, 400 + 16 * i)), (f"down{i}", (400 + 16 * i, 48))):
            weights.append(numpy_helper.from_array((random.standard_normal(shape) / 16).astype(np.float32), name))
        nodes += [
            helper.make_node("MatMul", [source, f"up{i}"], [f"wide{i}"]),
            helper.make_node("Relu", [f"wide{i}"], [f"relu{i}"]),
            helper.make_node("MatMul", [f"relu{i}", f"down{i}"], [f"end{i}"]),
        ]
        ends.append(f"end{i}")
    nodes.append(helper.make_node("Concat", ends, ["y"], axis=1))
    shuffle, ordered, known = np.random.default_rng(seed), [], {"x", *(each.name for each in weights)}
    left = list(nodes)
    while left:
        ready = [node for node in left if set(node.input) <= known]
        node = min(ready, key=nodes.index) if seed == 0 else ready[shuffle.integers(len(ready))]
        if seed == 1:  # all widening nodes first
            node = min(ready, key=lambda each: (not each.output[0].startswith(("wide", "relu")), nodes.index(each)))
        ordered.append(node)
        known.update(node.output)
        left.remove(node)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 40 * n, 48)) for name, n in (("x", 1), ("y", BRANCHES))]
    graph = helper.make_graph(ordered, "branches", ports[:1], ports[1:], weights)
    path = folder / f"{seed}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_answers_do_not_depend_on_the_order_of_a_file(tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((1, 40, 48)).astype(np.float32)
    first, peaks = None, {}
    for seed in range(4):
        path = branches(tmp_path, seed)
        made = flashmem.compile(path, tmp_path / f"{seed}.flashmem")
        order = made.program.order
        assert order is not None and order.bound_bytes <= order.peak_bytes <= order.given_bytes
        peaks[seed] = order
        with flashmem.Session(made) as session:
            (answer,) = session.run(None, {"x": x})
        (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
        np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-4)
        first = answer if first is None else first
        np.testing.assert_array_equal(answer, first)
    assert len({order.peak_bytes for order in peaks.values()}) == 1 and all(order.gap == 0 for order in peaks.values())
    assert peaks[1].method != "as given" and peaks[1].peak_bytes < peaks[1].given_bytes / 2


def test_a_lower_peak_is_a_smaller_arena(tmp_path: Path) -> None:
    graph = prepare(import_model(branches(tmp_path, 1), {}, why_unsupported))
    fused, device = fuse(graph), load_descriptor("pocl")
    ordered = in_lowest_order(fused)
    order = ordered.order
    assert order is not None and {id(group) for group in ordered.groups} == {id(group) for group in fused.groups}
    given, lower = (generate(each, device).program for each in (fused, ordered))
    assert (given.live_bytes, lower.live_bytes) == (order.given_bytes, order.peak_bytes)
    assert lower.arena_bytes < given.arena_bytes
    half = in_lowest_order(fused, half=True)
    assert half.order is not None and half.order.peak_bytes < order.peak_bytes
    assert generate(half, device, precision="fp16").program.live_bytes == half.order.peak_bytes
