"""DFT and STFT compared with numpy's transforms in double precision; windows, Det and Col2Im with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.compared import DEVICES, Nodes, compare, refusal
from tests.support.inputs import floats


def pairs(x: NDArray[Any]) -> NDArray[np.float64]:
    return np.stack([x.real, x.imag], -1)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_transforms(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    real, complex_ = floats(2, 10, 7, 1), floats(2, 10, 7, 2)
    x, c, first, second = n.input(real), n.input(complex_), n.constant(np.array(1)), n.constant(np.array(-2))
    shorter, longer = n.constant(np.array(6)), n.constant(np.array(16))
    numbers, signal = complex_[..., 0] + 1j * complex_[..., 1], real[..., 0]
    expected = []

    def transform(made: NDArray[Any], *inputs: str, **attributes: int) -> None:
        n.node("DFT", *inputs, **attributes)
        expected.append(pairs(made) if np.iscomplexobj(made) else made[..., None])

    transform(np.fft.fft(signal, axis=1), x, "", first)
    transform(np.fft.rfft(signal, 6, axis=1), x, shorter, first, onesided=1)
    behind = real.copy()
    behind[:, 6:] = np.inf
    transform(np.fft.rfft(signal, 6, axis=1), n.input(behind), shorter, first, onesided=1)
    transform(np.fft.fft(numbers, axis=2), c, "", second)
    transform(np.fft.ifft(numbers, axis=1), c, "", first, inverse=1)
    transform(np.fft.rfft(signal, 16, axis=1), x, longer, first, onesided=1)
    transform(np.fft.irfft(numbers, 15, axis=2), c, n.constant(np.array(15)), second, inverse=1, onesided=1)
    compare(n, place, tmp_path, expected)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_short_time_transforms(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    signal, window = floats(3, 130, 1), np.hamming(16).astype(np.float32)
    x, c, w, step = n.input(signal), n.input(floats(2, 50, 2)), n.input(window), n.constant(np.array(7))
    size = n.constant(np.array(16))
    n.node("STFT", x, step, w, size)
    n.node("STFT", x, step, n.constant(window))
    n.node("STFT", x, step, "", size, onesided=0)
    n.node("STFT", c, step, n.constant(window), size, onesided=0)

    frames = np.lib.stride_tricks.sliding_window_view(signal[..., 0].astype(np.float64), 16, axis=1)[:, ::7]
    numbers = (n.feeds[c][..., 0] + 1j * n.feeds[c][..., 1]).astype(np.complex128)
    others = np.lib.stride_tricks.sliding_window_view(numbers, 16, axis=1)[:, ::7]
    windowed = np.fft.rfft(frames * window)
    expected = [pairs(each) for each in (windowed, windowed, np.fft.fft(frames), np.fft.fft(others * window))]
    compare(n, place, tmp_path, expected)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_windows_and_weights_of_constants(place: tuple[str, str], tmp_path: Path) -> None:
    """Functions of constants are folded, so that a spectrogram's window is part of its matrix."""
    n = Nodes()
    size, numbers = n.constant(np.array(40)), [n.constant(np.array(i)) for i in (16, 256, 8000)]
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        n.node(op, size)
        n.node(op, size, periodic=0)
    n.node("MelWeightMatrix", *numbers, *(n.constant(np.array(i, np.float32)) for i in (20, 3800)))
    n.node("Neg", n.input(floats(1)))
    compare(n, place, tmp_path)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_determinants_and_columns(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    for matrices in (floats(3, 4, 5, 5), floats(2, 20, 20), np.ones((2, 3, 3), np.float32), floats(1, 1)):
        n.node("Det", n.input(matrices))
    n.node(
        "Col2Im", n.input(floats(2, 24, 12)), n.constant(np.array([5, 6])), n.constant(np.array([2, 3])), strides=[1, 2],
        pads=[0, 0, 0, 1],
    )  # fmt: skip
    n.node("Col2Im", n.input(floats(2, 6, 9)), n.constant(np.array([11])), n.constant(np.array([3])))
    compare(n, place, tmp_path, against_runtime=False)


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    n.node("DFT", n.input(floats(1, 40000, 1)))
    n.node("Col2Im", n.input(floats(1, 1600, 1)), n.constant(np.array([40, 40])), n.constant(np.array([40, 40])))
    text = refusal(n, tmp_path)
    assert "DFT of length 40000, whose matrix has more than 67108864 elements" in text
    assert "Col2Im in blocks of 1600 elements" in text
