"""Normalizations, softmax and reductions, for many ranges of numbers.

With parameters and statistics at run time, several outputs, windows of channels, and very long rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.compared import DEVICES, OF_A_GPU, Nodes, answers_of, by_runtime, compare, refusal
from tests.support.inputs import KINDS, floats

SHAPE = (2, 6, 5, 19)
THREE = ("float32",) * 3


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_normalizations_of_numbers_of_every_kind(place: tuple[str, str], tmp_path: Path) -> None:
    """Over rows, and over columns if the operator supports them. A kernel for each, a launch for each range of numbers."""
    n = Nodes(opset=21)
    rows, channels = [(n.constant(1 + 0.1 * floats(size)), n.constant(floats(size, seed=3))) for size in (19, 6)]
    for kind in KINDS:
        x = n.input(floats(*SHAPE, kind=kind))
        for op in ("Softmax", "LogSoftmax"):
            n.node(op, x, axis=-1)
            n.node(op, x, axis=1)
        n.node("LayerNormalization", x, *rows, dtypes=THREE)
        n.node("InstanceNormalization", x, *channels)
        n.node("GroupNormalization", x, *channels, num_groups=3)
        n.node("MeanVarianceNormalization", x)
        n.node("LpNormalization", x, p=2)
        n.node("LpNormalization", x, p=1, axis=1)
        n.node("LRN", x, size=5, alpha=0.3, beta=0.6, bias=1.5)
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_reductions_of_numbers_of_every_kind(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=21)
    axes, last = [n.constant(np.array([axis])) for axis in (3, 1)], n.constant(np.array(3))
    for kind in KINDS:
        x = n.input(floats(*SHAPE, kind=kind))
        for op in ("L1", "L2", "LogSumExp", "Max", "Mean", "Min", "Sum", "SumSquare"):
            for axis in axes:
                n.node(f"Reduce{op}", x, axis)
        n.node("GlobalAveragePool", x)
        n.node("GlobalLpPool", x, p=3)
        if kind in ("around 1e6", "positive"):  # the reference is slow
            n.node("AveragePool", x, kernel_shape=[3, 3], pads=[1] * 4)
        n.node("CumSum", x, last)
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_very_many_positive_numbers(place: tuple[str, str], tmp_path: Path) -> None:
    """A plain running sum loses more and more digits: 1e-4 of the sum here."""
    n = Nodes(opset=21)
    rows, columns = n.input(floats(2, 100_000, kind="positive")), n.input(floats(100_000, 2, kind="around 1e3"))
    for op in ("Mean", "Sum", "SumSquare", "LogSumExp"):
        n.node(f"Reduce{op}", rows, n.constant(np.array([1])))
        n.node(f"Reduce{op}", columns, n.constant(np.array([0])))
    n.node("LogSoftmax", rows)
    n.node("LogSoftmax", columns, axis=0)
    compare(n, place, tmp_path, against_runtime=False)  # whose error is as large as described above


@pytest.mark.filterwarnings("ignore:.*was compiled for nvidia")
@pytest.mark.parametrize(("device", "path", "kernels"), OF_A_GPU)
def test_rows_that_work_items_share(device: str, path: str, kernels: str, tmp_path: Path) -> None:
    n = Nodes(opset=21)
    rows = n.constant(1 + 0.1 * floats(700)), n.constant(floats(700, seed=3))
    for kind in KINDS:
        x = n.input(floats(3, 700, kind=kind))
        n.node("LogSoftmax", x)
        n.node("LayerNormalization", x, *rows)
        n.node("ReduceSum", x, n.constant(np.array([1])))
    compare(n, (device, path), tmp_path, compiled_for=kernels)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_tiny_numbers_have_a_norm(place: tuple[str, str], tmp_path: Path) -> None:
    """Their squares, and those of huge numbers, are out of float32's range."""
    n = Nodes()
    for size in (1e-25, 1e25, 0.0):
        x = n.input((size * floats(3, 7)).astype(np.float32))
        n.node("LpNormalization", x)
        n.node("LpNormalization", x, p=1, axis=0)
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_rows_with_infinities_and_nan(place: tuple[str, str], tmp_path: Path) -> None:
    """As IEEE 754 and ONNX Runtime have it: beside an infinite norm numbers are 0, and what has no value is NaN."""
    inf, nan = np.inf, np.nan
    odd = np.array([[inf, 1, 2, 3], [1, -inf, 2, 0], [inf, -inf, 1, 2], [1, nan, 2, 3], [inf, nan, 1, 2], [0, 0, 0, 0],
                    [-inf, -inf, -inf, -inf], [1, 2, -3, 4]], np.float32)  # fmt: skip
    n = Nodes(opset=23)
    rows, columns, scale = n.input(odd), n.input(np.ascontiguousarray(odd.T)), n.constant(np.float32([1, 2, 3, 4]))
    for p in (1, 2):
        n.node("LpNormalization", rows, p=p)
        n.node("LpNormalization", columns, p=p, axis=0)
    for axis, x in ((1, rows), (0, columns)):
        n.node("Softmax", x, axis=axis)
        n.node("LogSoftmax", x, axis=axis)
        for op in ("L1", "L2", "LogSumExp", "Mean", "SumSquare"):
            n.node(f"Reduce{op}", x, n.constant(np.array([axis])))
    n.node("LayerNormalization", rows, scale)
    n.node("RMSNormalization", rows, scale)
    model = n.proto()
    for info, answer, wanted in zip(
        model.graph.output, answers_of(model, n.feeds, place, tmp_path), by_runtime(model, n.feeds), strict=True
    ):
        np.testing.assert_allclose(answer, wanted, rtol=1e-5, atol=1e-30, err_msg=info.name)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_windows_of_channels_and_norms(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    x = n.input(floats(2, 8, 5, 7))
    for size in (1, 5, 21):
        n.node("LRN", x, size=size, alpha=0.3, beta=0.6, bias=1.5)
    [y] = n.node("Conv", x, n.constant(floats(8, 8, 3, 3)), pads=[1] * 4)
    n.node("LRN", y, size=5, alpha=0.3, beta=0.6, bias=1.5)  # channels-last
    for axis, p in ((0, 1), (1, 2), (-1, 1)):
        n.node("LpNormalization", x, axis=axis, p=p)
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_statistics(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=21)
    for kind in ("normal", "around 1e3", "positive"):
        x, v = n.input(floats(2, 6, 5, 7, kind=kind)), n.input(floats(2, 6, 3, 4, 5, kind=kind))
        scale, bias, mean = (n.input(floats(6, seed=seed)) for seed in range(3))
        variance = n.input(np.abs(floats(6)) + np.float32(0.5))
        n.node("BatchNormalization", x, scale, bias, mean, variance, epsilon=0.01)
        n.node("BatchNormalization", x, scale, bias, mean, variance, dtypes=THREE, training_mode=1, momentum=0.7)
        n.node(
            "BatchNormalization", n.input(floats(3, 6, kind=kind)), scale, bias, mean, variance, dtypes=THREE, training_mode=1
        )
        n.node("LayerNormalization", x, n.constant(floats(7)), dtypes=THREE)
        n.node("LayerNormalization", v, n.constant(floats(3, 4, 5)), dtypes=THREE, axis=2)
        n.node("GroupNormalization", x, scale, bias, num_groups=3)
        n.node("InstanceNormalization", v, scale, bias)
        n.node("MeanVarianceNormalization", x)
        n.node("MeanVarianceNormalization", v, axes=[1, 3, 4])
    compare(n, place, tmp_path)


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    x = n.input(floats(1, 4, 3))
    n.node("LpNormalization", x, p=3)
    n.node("LRN", x, size=0)
    text = refusal(n, tmp_path)
    assert "LpNormalization with p = 3" in text and "LRN over 0 channels" in text
