"""Normalizations with parameters and statistics at run time, with further outputs, and over windows of channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compared import DEVICES, Nodes, compare, refusal
from numpy.typing import NDArray


def floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


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
    n.node("LpNormalization", n.input(np.zeros((2, 3), np.float32)))
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_statistics(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes(opset=21)
    x, v = n.input(floats(2, 6, 5, 7)), n.input(floats(2, 6, 3, 4, 5))
    scale, bias, mean = (n.input(floats(*[1] * i, 6).reshape(6)) for i in range(3))
    variance = n.input(np.abs(floats(6)) + 0.5)
    three = ("float32",) * 3
    n.node("BatchNormalization", x, scale, bias, mean, variance, epsilon=0.01)
    n.node("BatchNormalization", x, scale, bias, mean, variance, dtypes=three, training_mode=1, momentum=0.7)
    n.node("BatchNormalization", n.input(floats(3, 6)), scale, bias, mean, variance, dtypes=three, training_mode=1)
    n.node("LayerNormalization", x, n.constant(floats(7)), dtypes=three)
    n.node("LayerNormalization", v, n.constant(floats(3, 4, 5)), dtypes=three, axis=2)
    n.node("GroupNormalization", x, scale, bias, num_groups=3)
    n.node("InstanceNormalization", v, scale, bias)
    n.node("MeanVarianceNormalization", x)
    compare(n, place, tmp_path)


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    x = n.input(floats(1, 4, 3))
    n.node("LpNormalization", x, p=3)
    n.node("LRN", x, size=0)
    text = refusal(n, tmp_path)
    assert "LpNormalization with p = 3" in text and "LRN over 0 channels" in text
