"""The taps of a Resize: the inputs that each output position reads along one axis, and their weights.

Source: ONNX Resize. Coordinates are float32 in the order of ONNX Runtime's operations. The reason is that their last bit
decides which input `floor` and `ceil` select when an output coincides with one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Rule:
    """The attributes of a Resize that determine one output. `mode`: "nearest", "linear" or "cubic".

    `nearest_mode` "simple" is that of operator sets 9 and 10, which had no such attribute.
    """

    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Rule:
        """The rule of ONNX's `attributes` of a Resize."""
        names = {"coordinates": "coordinate_transformation_mode"}
        given = {field.name: names.get(field.name, field.name) for field in fields(cls)}
        return cls(**{field: attributes[name] for field, name in given.items() if name in attributes})


@dataclass(frozen=True)
class Axis:
    """One resized axis: sizes before and after, the scale (given, or their ratio), and the region of the input.

    The region, for tf_crop_and_resize, is in fractions of the input.
    """

    size: int
    out_size: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Taps:
    """`at`: input positions; `weights`: their weights; both [out_size, taps].

    A row of `at` that is -1 is outside the input, where the result is tf_crop_and_resize's extrapolation value.
    """

    at: NDArray[np.int32]
    weights: Floats


def resize_taps(axis: Axis, rule: Rule) -> Taps:
    """The taps of every output position of `axis`."""
    at = _coordinates(axis, rule)
    if rule.mode == "nearest":
        rounded = _ROUNDINGS[rule.nearest_mode](at.astype(np.float64), axis.scale)
        taps = rounded.astype(np.int64)[:, None]
        weights = np.ones((axis.out_size, 1))
    elif rule.antialias:
        taps, weights = _antialiased(at, axis.scale, rule)
    else:
        base = np.floor(at).astype(np.int64)
        taps = base[:, None] + np.arange(*((0, 2) if rule.mode == "linear" else (-1, 3)))
        weights = _weight(at[:, None].astype(np.float64) - taps, rule)
    if rule.exclude_outside:
        weights = np.where((taps < 0) | (taps >= axis.size), 0.0, weights)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    places = taps.clip(0, axis.size - 1).astype(np.int32)
    if rule.coordinates == "tf_crop_and_resize":
        places[(at < 0) | (at > axis.size - 1)] = -1
    return Taps(places, weights.astype(np.float32))


def _coordinates(axis: Axis, attributes: Rule) -> Floats:
    """The coordinate of each output in units of inputs."""
    rule = attributes.coordinates
    place = np.arange(axis.out_size, dtype=np.float32)
    size = np.float32(axis.size)
    out_size = np.float32(axis.out_size)
    scale = np.float32(axis.scale)
    half = np.float32(0.5)
    one = np.float32(1)
    if rule == "tf_crop_and_resize":
        start = np.float32(axis.region[0])
        end = np.float32(axis.region[1])
        if axis.out_size == 1:
            return np.array([0.5 * float(start + end) * float(size - one)], np.float32)
        return start * (size - one) + place * (end - start) * (size - one) / (out_size - one)
    if scale == 1 or (attributes.antialias and axis.out_size == axis.size):
        return place
    if rule == "align_corners":
        return place * (size - one) / (out_size - one) if axis.out_size > 1 else np.zeros(1, np.float32)
    if rule == "asymmetric":
        return place / scale
    if rule == "tf_half_pixel_for_nn":
        return (place + half) / scale
    if rule == "half_pixel_symmetric":
        offset = size / np.float32(2) * (one - out_size / (scale * size))
        return (float(offset) + (place.astype(np.float64) + 0.5) / float(scale) - 0.5).astype(np.float32)
    if rule == "pytorch_half_pixel" and axis.out_size == 1:
        return np.zeros(1, np.float32)
    return (place + half) / scale - half


_TIE = 1e-6
"""A position this close to the middle between two inputs counts as the middle, as in ONNX Runtime, for float32's precision."""

_ROUNDINGS: dict[str, Callable[[NDArray[np.float64], float], NDArray[np.float64]]] = {
    "round_prefer_floor": lambda at, scale: np.ceil(at - 0.5 - _TIE),
    "round_prefer_ceil": lambda at, scale: np.floor(at + 0.5 + _TIE),
    "floor": lambda at, scale: np.floor(at),
    "ceil": lambda at, scale: np.ceil(at),
    "simple": lambda at, scale: np.ceil(at) if scale < 1 else np.trunc(at),
}


def _antialiased(at: Floats, scale: float, rule: Rule) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Taps and weights of a filter that is widened by the reduction in size, so that every input counts."""
    narrowing = min(float(scale), 1.0)
    support = (1 if rule.mode == "linear" else 2) / narrowing
    first = np.floor(at.astype(np.float64) - support).astype(np.int64) + 1
    taps = first[:, None] + np.arange(int(np.ceil(2 * support)))
    weights = _weight((at[:, None] - taps) * narrowing, rule)
    return taps, weights / weights.sum(1, keepdims=True)


def _weight(distance: NDArray[np.float64], rule: Rule) -> NDArray[np.float64]:
    """The weight of an input at `distance` from the output: a tent, or Keys' cubic convolution."""
    x = np.abs(distance.astype(np.float64))
    if rule.mode == "linear":
        return (1 - x).clip(0)
    a = rule.cubic_coeff_a
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
