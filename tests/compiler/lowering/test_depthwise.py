"""Depthwise convolutions with several outputs a channel: float64 and ONNX Runtime, quantised weights, halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from tests.support.compared import DEVICES, Nodes, compare
from tests.support.inputs import floats

CASES: tuple[tuple[tuple[int, ...], int, dict[str, Any]], ...] = (
    ((1, 16, 9, 11), 2, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ((2, 10, 8, 7), 3, {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [0, 1, 2, 0]}),
    ((1, 3, 12, 12), 16, {"kernel_shape": [3, 3], "dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((1, 2, 6, 20), 32, {"kernel_shape": [1, 5], "pads": [0, 2, 0, 2]}),
    ((3, 5, 30), 4, {"kernel_shape": [3], "pads": [1, 1]}),
    ((1, 4, 7, 6), 1, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ((1, 7, 5, 9), 8, {"kernel_shape": [2, 2]}),
    ((2, 16, 7, 9), 1, {"kernel_shape": [5, 3], "pads": [2, 1, 2, 1]}),
    ((1, 24, 8, 11), 1, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 1, 1]}),
    ((1, 36, 6, 3), 1, {"kernel_shape": [3, 2], "dilations": [1, 2], "pads": [1, 3, 1, 2]}),
)  # fmt: skip
"""Shape of the input, outputs a channel, attributes: vectors of repeated, of single and of unequal channels, remainders;
rows of pixels whose channels are whole vectors of 16, 8 and 4."""


@pytest.mark.parametrize("place", DEVICES, ids=str)
@pytest.mark.parametrize("kind", ["around 1e3", "positive"])
def test_answers(place: tuple[str, str], kind: Any, tmp_path: Path) -> None:
    nodes = Nodes()
    for shape, multiplier, attributes in CASES:
        x = floats(*shape, kind=kind)
        weight = floats(shape[1] * multiplier, 1, *attributes["kernel_shape"])
        bias = floats(len(weight))
        nodes.node("Conv", nodes.input(x), nodes.constant(weight), nodes.constant(bias), group=shape[1], **attributes)
    compare(nodes, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids=str)
@pytest.mark.parametrize("kind", ["around 1e3", "positive"])
def test_fewer_pixels_where_registers_are_few(place: tuple[str, str], kind: Any, tmp_path: Path) -> None:
    """Mali's kernels: four, two, two and one pixel for each work-item, of rows with a remainder."""
    nodes = Nodes()
    for taps, stride in ((3, 1), (3, 2), (5, 1), (5, 2)):
        x, weight = floats(2, 12, 9, 11, kind=kind), floats(12, 1, taps, taps)
        attributes = {"kernel_shape": [taps, taps], "strides": [stride, stride], "pads": [taps // 2] * 4}
        nodes.node("Conv", nodes.input(x), nodes.constant(weight), nodes.constant(floats(12)), group=12, **attributes)
    compare(nodes, place, tmp_path, compiled_for="mali-g710")


@pytest.mark.parametrize("place", DEVICES, ids=str)
def test_integers(place: tuple[str, str], tmp_path: Path) -> None:
    """Integer convolutions with zero points on both sides: taps outside the image add nothing."""
    nodes, random = Nodes(), np.random.default_rng(5)
    for channels, multiplier in ((6, 4), (5, 3), (2, 16)):
        x = nodes.input(random.integers(0, 256, (1, channels, 7, 8)).astype(np.uint8))
        w = nodes.constant(random.integers(-128, 128, (channels * multiplier, 1, 3, 3)).astype(np.int8))
        zeros = [nodes.constant(np.uint8(131)), nodes.constant(np.int8(-7))]
        nodes.node("ConvInteger", x, w, *zeros, dtypes=("int32",), group=channels, pads=[1, 1, 1, 1])
    compare(nodes, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids=str)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_modes_and_infinities(multiplier: int, place: tuple[str, str], tmp_path: Path) -> None:
    """Every transfer mode gives the bits of float64, also with halves; NaN and infinities reach only outputs that see them."""
    device, path = place
    channels = 24
    random = np.random.default_rng(6)
    x = random.integers(-8, 8, (1, channels, 10, 9)).astype(np.float32)
    x[0, 3, 2, 4], x[0, 7, 9, 0], x[0, 9, 0, 8] = np.nan, np.inf, -np.inf
    weight = random.integers(1, 5, (channels * multiplier, 1, 3, 3)).astype(np.float32)
    big = np.repeat(np.pad(x[0].astype(np.float64), ((0, 0), (1, 1), (1, 1))), multiplier, axis=0)
    windows = np.lib.stride_tricks.sliding_window_view(big, (3, 3), (1, 2))
    exact = np.einsum("chwij,cij->chw", windows, weight[:, 0])[None].astype(np.float32)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", x.shape), ("y", exact.shape))]
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=channels, pads=[1] * 4)
    graph = helper.make_graph([node], "depthwise", info[:1], info[1:], [onnx.numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    for precision in ("fp32", "fp16"):
        wanted: Any = {"device": device, "memory_path": path, "precision": precision}
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / f"{precision}.flashmem", **wanted)
        modes = flashmem.runtime.request.options.find_descriptor(device).modes[path]  # type: ignore[index]
        for mode in modes:
            with flashmem.Session(bundle, device=device, mode=mode) as session:
                [answer] = session.run(None, {"x": x})
            np.testing.assert_array_equal(answer, exact)
