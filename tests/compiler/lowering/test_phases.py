"""Transposed convolutions by phases: float64 and ONNX Runtime, where phases apply and where they do not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import find_descriptor
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import DEVICES, PLACES, Nodes, compare
from tests.support.inputs import floats

CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 12, 6, 7), (12, 9, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 6, 5, 4), (6, 5, 3, 3), {"strides": [2, 3], "pads": [0, 1, 1, 0], "output_padding": [1, 2], "group": 2}),
    ((1, 5, 6, 5), (5, 40, 3, 4), {"strides": [2, 3], "dilations": [3, 2], "pads": [1, 2, 3, 1]}),
    ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 2], "dilations": [2, 1]}),
    ((1, 8, 4, 4), (8, 8, 2, 2), {"strides": [3, 3]}),
    ((1, 3, 7, 6), (3, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 6, 11), (6, 7, 5), {"strides": [2], "pads": [2, 1], "output_padding": [1]}),
    ((1, 3, 3, 4, 3), (3, 2, 3, 3, 2), {"strides": [2, 2, 1], "pads": [1, 0, 0, 1, 1, 0]}),
)  # fmt: skip
"""Input, weights, attributes. Phases of unequal numbers of taps, without taps, of unequal sizes; groups; dilations with and
without a common factor with the stride; 1D and 3D."""


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_answers(place: tuple[str, str], tmp_path: Path) -> None:
    """With a fused bias and activation, which read operands at the places that a phase stores."""
    nodes = Nodes()
    for shape, weights, attributes in CASES:
        x, bias = (
            nodes.input(floats(*shape, kind="around 1e3")),
            nodes.constant(floats(weights[1] * attributes.get("group", 1))),
        )
        [y] = nodes.node("ConvTranspose", x, nodes.constant(floats(*weights)), bias, **attributes)
        nodes.node("Relu", y)
    compare(nodes, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids=str)
def test_weights_computed_at_run_time(place: tuple[str, str], tmp_path: Path) -> None:
    nodes = Nodes()
    for shape, weights, attributes in CASES[:2]:
        nodes.node("ConvTranspose", nodes.input(floats(*shape)), nodes.input(floats(*weights)), **attributes)
    compare(nodes, place, tmp_path)


def model_of(weight: Any, shape: tuple[int, ...], made: tuple[int, ...], strides: tuple[int, int]) -> onnx.ModelProto:
    """Two transposed convolutions by the same weight, one of them with other strides."""
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in (("x", shape), ("y", made), ("z", (1, weight.shape[1], *(n + 3 for n in shape[2:]))))
    ]
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=strides),
        helper.make_node("ConvTranspose", ["x", "w"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "transposed", info[:1], info[1:], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def transposed(x: Any, weight: Any, strides: tuple[int, int]) -> Any:
    """In double precision, tap by tap: a tap adds only where it falls."""
    kernel = weight.shape[2:]
    sizes = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, kernel, strict=True)]
    made = np.zeros((1, weight.shape[1], *sizes))
    for i, j in np.ndindex(*kernel):
        added = np.einsum("nchw,ck->nkhw", x.astype(np.float64), weight[:, :, i, j].astype(np.float64))
        down, across = (slice(at, at + (n - 1) * s + 1, s) for at, n, s in zip((i, j), x.shape[2:], strides, strict=True))
        made[:, :, down, across] += added
    return made


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_modes_precisions_and_infinities(place: tuple[str, str], tmp_path: Path) -> None:
    """One weight in two orders; every mode gives the exact answer, also of halves. Outside the image, infinity adds nothing."""
    device, path = place
    random = np.random.default_rng(7)
    x = random.integers(1, 5, (1, 20, 5, 6)).astype(np.float32)
    weight = random.integers(1, 4, (20, 24, 4, 4)).astype(np.float32)
    weight[3, 5, 0, 1] = np.inf
    y, z = transposed(x, weight, (2, 3)), transposed(x, weight, (1, 1))
    onnx.save(model_of(weight, x.shape, y.shape, (2, 3)), tmp_path / "m.onnx")
    for precision in ("fp32", "fp16"):
        wanted: Any = {"device": device, "memory_path": path, "precision": precision}
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / f"{precision}.flashmem", **wanted)
        for mode in find_descriptor(device).modes[path]:  # type: ignore[index]
            with flashmem.Session(bundle, device=device, mode=mode) as session:
                answers = session.run(None, {"x": x})
            for answer, exact in zip(answers, (y, z), strict=True):
                np.testing.assert_array_equal(answer, exact.astype(np.float32))


def test_only_useful_products_are_counted(tmp_path: Path) -> None:
    weight = np.ones((16, 8, 4, 4), np.float32)
    onnx.save(model_of(weight, (1, 16, 8, 8), (1, 8, 18, 18), (2, 2)), tmp_path / "m.onnx")
    graph = read_graph(tmp_path / "m.onnx", resolve(BundleRequest(device="pocl")))
    made = generate(fuse(graph), load_descriptor("pocl"))
    of_y = next(launch for launch in made.program.launches if launch.macs and launch.shape.rows == math.prod((18, 18)))
    assert of_y.macs == 18 * 18 * 4 * 16 * 8
