"""Values in float64 with bounds of the errors that a device may make, for operators of layouts, products and convolutions.

Each function takes `Known` arrays and returns one: the exact value, and for each element the largest absolute error of a device
that stores results in the precision and sums in float32. Errors of sums are random in sign, so they grow like the square root
of their number (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from flashmem.base.types import Precision

Array = NDArray[np.float64]

_FLOAT, _HALF = 2.0**-24, 2.0**-11
_FUNCTION = 16 * _FLOAT
"""Relative error of exp, erf and others: OpenCL permits up to 16 units in the last place."""

_SURE = 8
"""Standard deviations of a sum's error: no sum of a run has more."""

_WINOGRAD = 12
"""By how much the transforms of F(2x2, 3x3) may amplify rounding: an output has 9 terms, of sums of 4 elements."""


@dataclass(frozen=True)
class Known:
    """An array, and a bound of a device's error in each element."""

    exact: Array
    error: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.exact.shape

    def moved(self, move: Callable[[Array], Array]) -> Known:
        """The result of an operator that only moves elements."""
        return Known(move(self.exact), move(self.error))


class Arithmetic:
    """The arithmetic of a precision."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self._unit, self._least = (_HALF, 2.0**-24) if precision == "fp16" else (_FLOAT, 2.0**-126)
        self._operand = _HALF if precision == "tf32" else 0.0
        self.most = 2e4 if precision == "fp16" else 1e30

    def leaf(self, array: NDArray[Any]) -> Known:
        """Data of the graph, which is rounded where it is stored in half."""
        exact = array.astype(np.float64)
        return Known(exact, np.abs(exact) * self._unit + self._least if self.precision == "fp16" else np.zeros(exact.shape))

    def stored(self, exact: Array, error: Array, operations: float = 1.0) -> Known:
        """A result of so many `operations` in float32, stored."""
        size = np.abs(exact) + error
        return Known(exact, error + size * (operations * _FLOAT + self._unit) + self._least)

    def product(self, a: Known, b: Known, *, constant: bool) -> Known:
        """`a` @ `b`. Operands are rounded in TF32 if one of them is `constant`."""
        return self._sums(np.matmul, a, b, a.shape[-1], self._operand if constant else 0.0)

    def convolution(
        self, x: Known, w: Known, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int], groups: int
    ) -> Known:
        """ONNX's Conv in two dimensions, without a bias. `pads` are the four of ONNX."""

        def convolved(x: Array, w: Array) -> Array:
            padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
            span = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
            windows = sliding_window_view(padded, span, axis=(2, 3))
            windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
            n, _, height, width = windows.shape[:4]
            outputs = []
            for part, taps in zip(np.split(windows, groups, axis=1), np.split(w, groups), strict=True):
                rows = part.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1)
                outputs.append((rows @ taps.reshape(len(taps), -1).T).reshape(n, height, width, -1).transpose(0, 3, 1, 2))
            return np.concatenate(outputs, axis=1)

        plain = self._sums(convolved, x, w, int(np.prod(w.shape[1:])), self._operand)
        if (*w.shape[2:], *strides, *dilations, groups) != (3, 3, 1, 1, 1, 1, 1):
            return plain
        # Winograd's tiles mix an element with its neighbours, so the largest one decides.
        mixed = np.abs(x.exact).max(axis=(2, 3)) @ np.abs(w.exact).sum(axis=(2, 3)).T
        rounding = _WINOGRAD * _SURE * np.sqrt(w.shape[1]) * _FLOAT
        return Known(plain.exact, plain.error + rounding * mixed[..., None, None])

    def _sums(self, multiply: Callable[[Any, Any], Array], a: Known, b: Known, depth: int, operand: float) -> Known:
        exact = multiply(a.exact, b.exact)
        sizes = np.abs(a.exact), np.abs(b.exact)
        size = multiply(*sizes)
        error = multiply(sizes[0] + a.error, b.error) + multiply(a.error, sizes[1])
        return self.stored(exact, error + size * (2 * operand + _SURE * np.sqrt(depth + 4) * _FLOAT))

    def plus(self, a: Known, b: Known) -> Known:
        """`a` + `b`, of shapes that broadcast."""
        exact = a.exact + b.exact
        return self.stored(exact, a.error + b.error)

    def times(self, a: Known, b: Known) -> Known:
        """`a` * `b`, of shapes that broadcast."""
        error = np.abs(a.exact) * b.error + np.abs(b.exact) * a.error + a.error * b.error
        return self.stored(a.exact * b.exact, error)

    def function(self, x: Known, function: Callable[[Array], Array], steepest: float) -> Known:
        """A function of each element, nowhere steeper than `steepest`, whose steps have numbers of the size of `x` and 1."""
        exact = function(x.exact)
        return self.stored(exact, steepest * x.error + _FUNCTION * (np.abs(exact) + np.minimum(np.abs(x.exact), 1)))

    def softmax(self, x: Known, axis: int) -> Known:
        """Softmax along `axis`."""
        below = x.exact - x.exact.max(axis=axis, keepdims=True)
        powers = np.exp(below)
        exact = powers / powers.sum(axis=axis, keepdims=True)
        off = 2 * x.error.max(axis=axis, keepdims=True) + 2 * (_FUNCTION + (1 + np.abs(below)) * _FLOAT)
        return self.stored(exact, exact * np.expm1(np.minimum(off, 10)), _SURE * np.sqrt(x.shape[axis]) + 4)

    def normalised(self, x: Known, scale: Known, bias: Known, epsilon: float) -> Known:
        """LayerNormalization of the last axis."""
        mean = x.exact.mean(-1, keepdims=True)
        centred = x.exact - mean
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
        rounding = _SURE * np.sqrt(x.shape[-1]) * _FLOAT * np.abs(x.exact).max(-1, keepdims=True)
        away = x.error + x.error.mean(-1, keepdims=True) + rounding
        ratio = centred / deviation
        off = (away + np.abs(ratio) * np.sqrt((away**2).mean(-1, keepdims=True))) / deviation + 8 * _FUNCTION * np.abs(ratio)
        unit = self.stored(ratio, off) if self.precision != "fp16" else Known(ratio, off + np.abs(ratio) * self._unit)
        return self.plus(self.times(unit, scale), bias)

    def total(self, x: Known, axes: tuple[int, ...], *, mean: bool) -> Known:
        """The sum or mean over `axes`, which are kept."""
        count = int(np.prod([x.shape[axis] for axis in axes]))
        part = 1 / count if mean else 1.0
        size = np.abs(x.exact).sum(axis=axes, keepdims=True) * part
        error = x.error.sum(axis=axes, keepdims=True) * part + size * _SURE * np.sqrt(count) * _FLOAT
        return self.stored(x.exact.sum(axis=axes, keepdims=True) * part, error)


def largest(x: Known, axes: tuple[int, ...]) -> Known:
    """The largest element over `axes`, which are kept."""
    return Known(x.exact.max(axis=axes, keepdims=True), x.error.max(axis=axes, keepdims=True))


def windows(x: Known, size: int, stride: int) -> Known:
    """The windows of a pool over the last two axes, as two axes more."""
    return x.moved(lambda each: sliding_window_view(each, (size, size), axis=(2, 3))[:, :, ::stride, ::stride])
