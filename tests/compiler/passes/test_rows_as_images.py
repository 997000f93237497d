"""Rows as images: Slices, Concats and elementwise operators between convolutions of one dimension, beside ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import flashmem
from flashmem.compiler.frontend.import_graph import import_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.rows_as_images import rows_as_images
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.runtime.opencl.discovery import list_devices

MODEL = """<ir_version: 9, opset_import: ["" : 17]>
agraph (float[2, 3, 20] x, float[2, 4, 17] z, float[5, 1] column)
=> (float[2, 5, 13] y, float[2, 5, 10] part, float[2, 5, 20] scaled)
<int64[1] three = {3}, int64[1] minus = {-1}, int64[1] far = {-99}, int64[1] last = {2},
 int64[1] end = {20}, int64[1] step = {-2}>
{
    a = Conv <pads = [1, 1]> (x, w)
    scaled = Mul (a, column)
    cut = Slice (scaled, three, end, last)
    joined = Concat <axis = 1> (z, cut)
    y = Conv <dilations = [2]> (joined, v)
    part = Slice (a, minus, far, last, step)
}"""
"""A Concat of channels with an input of the model; a Slice backwards, and results in the middle, are outputs."""


def made(path: Path) -> Path:
    model = parser.parse_model(MODEL)
    random = np.random.default_rng(3)
    weights = {"w": (5, 3, 3), "v": (5, 9, 3)}
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    model.graph.initializer.extend(numpy_helper.from_array(data, name) for name, data in arrays.items())
    onnx.save(model, path)
    return path


def graph_of(path: Path) -> Graph:
    return decompose(import_graph(path, resolve(BundleRequest(device="generic-cpu"))))


def test_slices_and_concats_between_convolutions_are_images_of_one_row(tmp_path: Path) -> None:
    graph = rows_as_images(graph_of(made(tmp_path / "m.onnx")))
    ranks = {(node.op, len(node.outputs[0].shape)) for node in graph.nodes if node.op in ("Slice", "Concat", "Mul")}
    assert ranks == {("Slice", 4), ("Concat", 4), ("Mul", 4)}


def test_a_graph_without_convolutions_of_one_dimension_stays_as_it_is(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]>
agraph (float[1, 4, 6] x) => (float[1, 8, 6] y) { y = Concat <axis = 1> (x, x) }"""
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    graph = graph_of(tmp_path / "m.onnx")
    assert [node.op for node in rows_as_images(graph).nodes] == [node.op for node in graph.nodes]


@pytest.mark.parametrize("device", [device.descriptor_name for device in list_devices()])
def test_answers_are_those_of_onnx_runtime(device: str, tmp_path: Path) -> None:
    model = made(tmp_path / "m.onnx")
    random = np.random.default_rng(4)
    shapes = {"x": (2, 3, 20), "z": (2, 4, 17), "column": (5, 1)}
    feeds = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    want = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    bundle = flashmem.compile(model, tmp_path / "bundle", device=device, build=False)
    with flashmem.Session(bundle, device=device) as session:
        for got, expected in zip(session.run(None, feeds), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
