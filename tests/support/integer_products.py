"""Products of 8-bit integers with constant weights: models, and their exact sums by numpy in int64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
_KINDS = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}


@dataclass(frozen=True)
class Case:
    """A MatMulInteger of rows x depth x columns, or a ConvInteger of an image [1, channels, height, width] by `filters`.

    `zero`: the zero point of the left operand, given as a constant; `weight_zero`: that of the right one, for each column if
    `by_column`. `attributes`: those of the convolution. `ends`: all codes are the largest or the smallest.
    """

    left: str = "uint8"
    right: str = "int8"
    sizes: tuple[int, ...] = (13, 64, 48)
    filters: tuple[int, ...] = ()
    zero: int | None = None
    weight_zero: int | None = None
    by_column: bool = False
    ends: bool = False
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution."""
        return bool(self.filters)

    def drawn(self, seed: int = 0) -> tuple[Array, Array, Array]:
        """Both operands and the zero points of the right one, of the whole range of their types."""
        draw = np.random.default_rng(seed)

        def codes(dtype: str, shape: tuple[int, ...]) -> Array:
            limits = np.iinfo(dtype)
            found = draw.integers(limits.min, limits.max + 1, shape)
            return (np.where(found < found.mean(), limits.min, limits.max) if self.ends else found).astype(dtype)

        x = codes(self.left, self.sizes if self.convolves else self.sizes[:2])
        w = codes(self.right, self.filters or self.sizes[1:])
        columns = w.shape[0] if self.convolves else w.shape[1]
        zero = np.full(columns, self.weight_zero or 0).astype(self.right)
        return x, w, (zero + np.arange(columns) % 7).astype(self.right) if self.by_column else zero

    def model(self, seed: int = 0) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """The model and its input."""
        x, w, zeros = self.drawn(seed)
        constants, inputs = {"w": w}, ["x", "w", ""]
        if self.zero is not None:
            inputs[2], constants["xz"] = "xz", np.array(self.zero, self.left)
        if self.weight_zero is not None:
            inputs.append("wz")
            constants["wz"] = zeros if self.by_column else zeros[0].reshape(())
        while not inputs[-1]:
            inputs.pop()
        y = exact(self, seed)
        node = helper.make_node("ConvInteger" if self.convolves else "MatMulInteger", inputs, ["y"], **dict(self.attributes))
        graph = helper.make_graph(
            [node], "integers", [helper.make_tensor_value_info("x", _KINDS[self.left], x.shape)],
            [helper.make_tensor_value_info("y", TensorProto.INT32, y.shape)],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), {"x": x}


def exact(case: Case, seed: int = 0) -> Array:
    """The sums of differences from zero points."""
    x, w, zeros = case.drawn(seed)
    left = x.astype(np.int64) - (case.zero or 0)
    right = w.astype(np.int64)
    if not case.convolves:
        return left @ (right - zeros.astype(np.int64) * (case.weight_zero is not None))
    if case.weight_zero is not None:
        right = right - zeros.astype(np.int64)[:, None, None, None]
    given = dict(case.attributes)
    pads, strides = given.get("pads", (0, 0, 0, 0)), given.get("strides", (1, 1))
    dilations, groups = given.get("dilations", (1, 1)), given.get("group", 1)
    left = np.pad(left, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))  # a difference of 0: the zero point
    reach = [(size - 1) * step + 1 for size, step in zip(w.shape[2:], dilations, strict=True)]
    size = [(whole - part) // step + 1 for whole, part, step in zip(left.shape[2:], reach, strides, strict=True)]
    y = np.zeros((left.shape[0], len(w), *size), np.int64)
    of_group, inputs = len(w) // groups, w.shape[1]
    for group in range(groups):
        part = left[:, group * inputs : (group + 1) * inputs]
        filters = right[group * of_group : (group + 1) * of_group]
        for i in range(w.shape[2]):
            for j in range(w.shape[3]):
                down, across = i * dilations[0], j * dilations[1]
                taps = part[
                    :, :, down : down + size[0] * strides[0] : strides[0], across : across + size[1] * strides[1] : strides[1]
                ]
                y[:, group * of_group : (group + 1) * of_group] += np.einsum("nchw,fc->nfhw", taps, filters[:, :, i, j])
    return y
