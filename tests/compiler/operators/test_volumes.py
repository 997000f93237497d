"""Convolutions and pools over three dimensions, in groups, and with weights computed at run time."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

import flashmem
from tests.support.compared import DEVICES, PLACES, Nodes, answers_of, by_runtime, compare, refusal
from tests.support.inputs import KINDS, floats


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_convolutions(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    bias, variance = n.constant(floats(8)), n.constant(np.abs(floats(8)) + 0.5)
    weights = [n.constant(floats(*shape)) for shape in ((8, 3, 3, 2, 3), (5, 6, 1, 1, 1), (6, 5, 2, 3, 2), (6, 2, 2, 3, 2))]
    window = {"pads": [1, 0, 1, 1, 1, 1], "strides": [2, 1, 2], "dilations": [1, 2, 1]}
    for kind in KINDS:
        x = n.input(floats(2, 6, 5, 7, 6, kind=kind))
        # batch normalization and activation are fused into the convolution, channels-last
        [y] = n.node("Conv", x, weights[0], bias, group=2, **window)
        [y] = n.node("BatchNormalization", y, bias, bias, bias, variance)
        n.node("Relu", y)
        n.node("Conv", x, weights[1])
        n.node("ConvTranspose", x, weights[2], strides=[2, 1, 2], pads=[1, 0, 1, 0, 1, 0])
        n.node("ConvTranspose", x, weights[3], group=3, strides=[2, 1, 2], output_padding=[1, 0, 0])
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_weights_computed_at_run_time(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    weights = n.constant(floats(8, 2, 2, 2))
    for kind in KINDS:
        x = n.input(floats(1, 8, 9, 9, kind=kind))
        for op, shape, attributes in (
            ("Conv", (20, 4, 3, 3), {"group": 2}),  # a full panel and a partial one
            ("Conv", (8, 1, 3, 3), {"group": 8, "pads": [1] * 4}),
            ("ConvTranspose", (8, 3, 3, 3), {"group": 2, "strides": [2, 1]}),
        ):
            made = n.node("Neg", n.input(floats(*shape, kind=kind)))[0]
            n.node(op, x, made, **attributes)
        # weights that a convolution computes are channels-last, but the next one needs ONNX's order
        [made] = n.node("Conv", n.input(floats(3, 2, 4, 4, kind=kind)), weights)
        n.node("Conv", x, made)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_pools(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=18)
    bytes_ = floats(1, 6, 7, 7) * 60
    window = {"kernel_shape": [2, 3, 2], "strides": [1, 2, 1], "pads": [1, 1, 0, 0, 1, 1]}
    both = ("float32", "int64")
    n.node("MaxPool", n.input(bytes_.astype(np.int8)), dtypes=("int8",), kernel_shape=[3, 3], pads=[1] * 4)
    unsigned = n.input((bytes_ % 256).astype(np.uint8))
    n.node("MaxPool", unsigned, dtypes=("uint8", "int64"), kernel_shape=[3, 3], pads=[1] * 4)
    for kind in KINDS:
        x, plane = n.input(floats(2, 3, 5, 7, 6, kind=kind)), n.input(floats(1, 6, 9, 9, kind=kind))
        n.node("MaxPool", x, dtypes=both, **window)
        n.node("MaxPool", x, dtypes=both, kernel_shape=[2, 3, 2], storage_order=1)
        n.node("MaxPool", plane, dtypes=both, kernel_shape=[3, 2], dilations=[2, 1], storage_order=1)
        n.node("MaxPool", n.input(floats(2, 6, 17, kind=kind)), dtypes=both, kernel_shape=[3], strides=[2])
        n.node("AveragePool", x, count_include_pad=1, ceil_mode=1, **window)
        n.node("LpPool", x, kernel_shape=[2, 3, 2], p=3)
        n.node("LpPool", plane, kernel_shape=[3, 2], pads=[1, 0, 1, 1])
        for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
            n.node(op, x)
        n.node("GlobalLpPool", plane, p=3)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_unpooling(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    shapes = (((1, 3, 8, 6), [2, 2], [1, 3, 9, 6]), ((2, 2, 3, 4, 4), [1, 2, 2], [2, 2, 4, 4, 7]))
    for kind, (shape, window, larger) in product(KINDS, shapes):
        x = n.input(floats(*shape, kind=kind))
        values, indices = n.node("MaxPool", x, dtypes=("float32", "int64"), kernel_shape=window, strides=window)
        n.node("MaxUnpool", values, indices, kernel_shape=window, strides=window)
        n.node("MaxUnpool", values, indices, n.constant(np.array(larger)), kernel_shape=window, strides=window)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_the_last_of_those_that_go_to_one_place_is_left(place: tuple[str, str], tmp_path: Path) -> None:
    """As in ONNX Runtime, which processes them in order. A kernel with many work-items does not."""
    n = Nodes()
    x, where = floats(1, 4, 60, 50), np.random.default_rng(0).integers(0, 300, (1, 4, 60, 50))
    n.node("MaxUnpool", n.input(x), n.input(where), kernel_shape=[2, 2], strides=[2, 2])
    expected = np.zeros(4 * 120 * 100, np.float32)
    for value, at in zip(x.reshape(-1), where.reshape(-1), strict=True):
        expected[at] = value
    [answer] = answers_of(n.proto(), n.feeds, place, tmp_path)
    np.testing.assert_array_equal(answer, expected.reshape(1, 4, 120, 100))
    np.testing.assert_array_equal(answer, by_runtime(n.proto(), n.feeds)[0])


def test_overlapping_windows_go_to_one_place(tmp_path: Path) -> None:
    """Overlapping windows write their maxima to one place; adjacent ones do not, and need no claims."""
    for stride, claims in ((1, 1), (2, 0)):
        n = Nodes()
        window = {"kernel_shape": [2, 2], "strides": [stride, stride]}
        values, indices = n.node("MaxPool", n.input(floats(1, 3, 6, 6)), dtypes=("float32", "int64"), **window)
        changed = n.node("Mul", values, n.input(floats(1, 3, *[5 if stride == 1 else 3] * 2)))
        n.node("MaxUnpool", *changed, indices, **window)
        onnx.save(n.proto(), tmp_path / "m.onnx")
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / f"{stride}.flashmem", build=False)
        assert sum("[claims]" in launch.name for launch in bundle.program.launches) == claims


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    n.node("Conv", n.input(floats(1, 2, 3, 3, 3, 3)), n.constant(floats(2, 2, 1, 1, 1, 1)))
    x, indices = n.input(floats(1, 1, 2, 2)), n.input(np.zeros((1, 1, 2, 2), np.int64))
    n.node("MaxUnpool", x, indices, n.constant(np.array([1, 1, 3, 5])), kernel_shape=[2, 2], strides=[2, 2])
    n.node("LpPool", x, kernel_shape=[1, 1], p=0)
    text = refusal(n, tmp_path)
    assert "Conv over 4 spatial dimensions" in text
    assert "MaxUnpool to the shape (1, 1, 3, 5), which is smaller than the (1, 1, 4, 4)" in text
    assert "LpPool with p = 0" in text
