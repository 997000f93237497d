"""Parts of a product's columns that elementwise operators read where they are, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import flashmem
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.tiling.patches import Chain, in_patches
from tests.support.compared import DEVICES, Array, by_runtime
from tests.support.evaluate_graph import evaluate
from tests.support.launches import families_of

WIDTH = 64


def gated(rows: tuple[int, ...], parts: tuple[int, ...], *, transposed: bool = False) -> onnx.ModelProto:
    """A product of `parts` columns in a row: the sigmoid of the first part times all others.

    Both operands are inputs: a product with weights would become one for each part. `transposed`: the last part is also an
    output with its last dimensions exchanged.
    """
    columns = sum(parts)
    names = [f"p{number}" for number in range(len(parts))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Split", ["m", "sizes"], names, axis=-1)]
    nodes += [helper.make_node("Sigmoid", ["p0"], ["s"]), helper.make_node("Mul", ["s", names[-1]], ["y0"])]
    outputs = ["y0"]
    for number, name in enumerate(names[1:-1], start=1):
        nodes.append(helper.make_node("Mul", [name, f"y{number - 1}"], [f"y{number}"]))
        outputs = [f"y{number}"]
    if transposed:
        perm = [*range(len(rows) - 1), len(rows), len(rows) - 1]
        nodes.append(helper.make_node("Transpose", [names[-1]], ["t"], perm=perm))
        outputs.append("t")
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [*rows, WIDTH])
    w = helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [WIDTH, columns])
    graph = helper.make_graph(nodes, "g", [x, w], values, [numpy_helper.from_array(np.array(parts, np.int64), "sizes")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def inputs(rows: tuple[int, ...], columns: int) -> dict[str, Array]:
    random = np.random.default_rng(2)
    x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((*rows, WIDTH), (WIDTH, columns)))
    return {"x": x, "w": w / 8}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("rows", "parts", "transposed", "copies"),
    [
        ((8,), (48, 48), False, 0),
        ((1, 5), (96, 96), False, 0),
        ((2, 3), (16, 16, 16), False, 0),
        ((8,), (40, 40), False, 2),  # no whole vectors
        ((8,), (48, 48), True, 2),  # a part that is copied anyway
    ],
)
@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_parts_are_read_where_they_are(
    place: tuple[str, str], rows: tuple[int, ...], parts: tuple[int, ...], transposed: bool, copies: int, precision: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    device, path = place
    model = gated(rows, parts, transposed=transposed)
    if place == DEVICES[0]:
        assert families_of(model, tmp_path).count("movement") == copies
    feeds = inputs(rows, sum(parts))
    onnx.save(model, tmp_path / "m.onnx")
    made = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, memory_path=path, precision=precision, build=False
    )
    with flashmem.Session(made, device=device) as session:
        for _ in range(2):
            for got, wanted in zip(session.run(None, feeds), by_runtime(model, feeds), strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 if precision == "fp32" else 4e-3)


def test_patches_read_copies(tmp_path: Path) -> None:
    """A patch of the gate reads some rows of each part, by a Slice of it. The answers stay the same, bit for bit."""
    model = gated((8,), (48, 48))
    onnx.save(model, tmp_path / "m.onnx")
    graph = prepare(import_model(tmp_path / "m.onnx", {}, why_unsupported))
    feeds = inputs((8,), 96)
    assert [node.op for node in graph.nodes].count("RowPart") == 2
    at = next(number for number, group in enumerate(fuse(graph).groups) if group.main.op == "Sigmoid")
    patched = in_patches(fuse(graph), [Chain(at, at, 0, (0, 3))])
    assert "RowPart" not in [node.op for node in patched.nodes]
    np.testing.assert_array_equal(evaluate(patched, feeds)[0], evaluate(graph, feeds)[0])
    np.testing.assert_allclose(evaluate(graph, feeds)[0], by_runtime(model, feeds)[0], rtol=0, atol=1e-5)
