"""DFT and STFT compared with numpy's transforms in double precision; windows, Det and Col2Im with onnx's definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.compared import DEVICES, Nodes, compare, refusal
from tests.support.inputs import KINDS, floats


def pairs(x: NDArray[Any]) -> NDArray[np.float64]:
    return np.stack([x.real, x.imag], -1)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_transforms(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    first, second, shorter, longer, odd = (n.constant(np.array(i)) for i in (1, -2, 6, 16, 15))
    expected = []

    def transform(made: NDArray[Any], *inputs: str, **attributes: int) -> None:
        n.node("DFT", *inputs, **attributes)
        expected.append(pairs(made) if np.iscomplexobj(made) else made[..., None])

    for kind in KINDS:
        real, complex_ = floats(2, 10, 7, 1, kind=kind), floats(2, 10, 7, 2, kind=kind)
        x, c = n.input(real), n.input(complex_)
        signal, wide = real[..., 0].astype(np.float64), complex_.astype(np.float64)
        numbers = wide[..., 0] + 1j * wide[..., 1]
        transform(np.fft.fft(signal, axis=1), x, "", first)
        transform(np.fft.rfft(signal, 6, axis=1), x, shorter, first, onesided=1)
        behind = real.copy()
        behind[:, 6:] = np.inf
        transform(np.fft.rfft(signal, 6, axis=1), n.input(behind), shorter, first, onesided=1)
        transform(np.fft.fft(numbers, axis=2), c, "", second)
        transform(np.fft.ifft(numbers, axis=1), c, "", first, inverse=1)
        transform(np.fft.rfft(signal, 16, axis=1), x, longer, first, onesided=1)
        transform(np.fft.irfft(numbers, 15, axis=2), c, odd, second, inverse=1, onesided=1)
    compare(n, place, tmp_path, expected, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_short_time_transforms(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    window = np.hamming(16).astype(np.float32)
    w, same, step, size = n.input(window), n.constant(window), n.constant(np.array(7)), n.constant(np.array(16))
    expected = []
    for kind in KINDS:
        signal, complex_ = floats(3, 130, 1, kind=kind), floats(2, 50, 2, kind=kind)
        x, c = n.input(signal), n.input(complex_)
        n.node("STFT", x, step, w, size)
        n.node("STFT", x, step, same)
        n.node("STFT", x, step, "", size, onesided=0)
        n.node("STFT", c, step, same, size, onesided=0)

        frames = np.lib.stride_tricks.sliding_window_view(signal[..., 0].astype(np.float64), 16, axis=1)[:, ::7]
        wide = complex_.astype(np.float64)
        others = np.lib.stride_tricks.sliding_window_view(wide[..., 0] + 1j * wide[..., 1], 16, axis=1)[:, ::7]
        windowed = np.fft.rfft(frames * window)
        expected += [pairs(each) for each in (windowed, windowed, np.fft.fft(frames), np.fft.fft(others * window))]
    compare(n, place, tmp_path, expected, against_runtime=False)


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
    compare(n, place, tmp_path, against_runtime=False)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_determinants_and_columns(place: tuple[str, str], tmp_path: Path) -> None:
    n = Nodes()
    n.node("Det", n.input(np.ones((2, 3, 3), np.float32)))
    sizes = [n.constant(np.array(each)) for each in ([5, 6], [2, 3], [11], [3])]
    for kind in KINDS:
        for shape in ((3, 4, 5, 5), (2, 20, 20), (1, 1)):
            if kind != "tiny" or shape[-1] < 20:  # products of twenty tiny numbers are 0 in float32
                n.node("Det", n.input(floats(*shape, kind=kind)))
        n.node("Col2Im", n.input(floats(2, 24, 12, kind=kind)), *sizes[:2], strides=[1, 2], pads=[0, 0, 0, 1])
        n.node("Col2Im", n.input(floats(2, 6, 9, kind=kind)), *sizes[2:])
    compare(n, place, tmp_path, against_runtime=False)


def test_refusals(tmp_path: Path) -> None:
    n = Nodes()
    n.node("DFT", n.input(floats(1, 40000, 1)))
    n.node("Col2Im", n.input(floats(1, 1600, 1)), n.constant(np.array([40, 40])), n.constant(np.array([40, 40])))
    text = refusal(n, tmp_path)
    assert "DFT of length 40000, whose matrix has more than 67108864 elements" in text
    assert "Col2Im in blocks of 1600 elements" in text
