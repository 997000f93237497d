"""Quantised operators and weights, on every device, memory path and transfer mode.

Integer products are held to exact sums; weights that stay 8 or 4 bit to the same model with float weights, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from test_exact_types import Model

import flashmem
from flashmem.runtime.devices import descriptor_for
from flashmem.runtime.opencl import list_devices

Array = NDArray[Any]
CASES = [
    (device.descriptor_name, path) for device in list_devices() for path in descriptor_for(device).memory_paths
]  # fmt: skip
MODES = {device.descriptor_name: descriptor_for(device).modes for device in list_devices()}


def saved(model: onnx.ModelProto, folder: Path, name: str = "m") -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    return path


def run_ort(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def run_in_all_modes(path: Path, bundle: Path, device: str, memory_path: Any, feeds: dict[str, Array]) -> list[Array]:
    """The answers, which are the same bits however weights travel."""
    answers: list[list[Array]] = []
    made = flashmem.compile(path, bundle, device=device, memory_path=memory_path)
    for mode in MODES[device][memory_path]:
        with flashmem.Session(made, device=device, mode=mode) as session:
            assert session.mode == mode
            answers.append(session.run(None, feeds))
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    return answers[0]


class Products(Model):
    """Integer products; `expected` by name."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)
        self.expected: dict[str, Array] = {}

    def draw(self, dtype: str, *shape: int) -> Array:
        limits = np.iinfo(dtype)
        return self.random.integers(limits.min, limits.max + 1, shape).astype(dtype)

    def matmul(self, title: str, a: Array, b: Array, zero_a: Any, zero_b: Any, *, runtime: bool = False) -> None:
        right = self.input(b, b.dtype.name) if runtime else self.constant(b, b.dtype.name)
        zeros = ["" if zero is None else self.constant(zero, of.dtype.name) for zero, of in ((zero_a, a), (zero_b, b))]
        self.node(title, "MatMulInteger", self.input(a, a.dtype.name), right, *zeros, dtype="int32")
        left_zero = np.asarray(0 if zero_a is None else zero_a, np.int64)
        left = a.astype(np.int64) - (left_zero[:, None] if left_zero.ndim == 1 and left_zero.size > 1 else left_zero)
        self.expected[title] = (left @ (b.astype(np.int64) - np.asarray(0 if zero_b is None else zero_b))).astype(np.int32)

    def conv(self, title: str, x: Array, w: Array, zero_x: Any, zero_w: Any, **attributes: Any) -> None:
        zeros = ["" if zero is None else self.constant(zero, of.dtype.name) for zero, of in ((zero_x, x), (zero_w, w))]
        inputs = (self.input(x, x.dtype.name), self.constant(w, w.dtype.name))
        self.node(title, "ConvInteger", *inputs, *zeros, dtype="int32", **attributes)
        by_filter = np.asarray(0 if zero_w is None else zero_w, np.float32).reshape(-1, *[1] * (w.ndim - 1))
        plain = Model()
        y = plain.input(x.astype(np.float32) - np.float32(zero_x or 0), "float32")
        plain.node("y", "Conv", y, plain.constant(w.astype(np.float32) - by_filter, "float32"), dtype="float32", **attributes)
        (sums,) = run_ort(plain.proto(), plain.feeds)
        assert abs(sums).max() < 2**24  # exact in float32
        self.expected[title] = sums.astype(np.int32)


def products() -> Products:
    m = Products()
    for left in ("uint8", "int8"):
        for right in ("uint8", "int8"):
            a, b = m.draw(left, 7, 37), m.draw(right, 37, 21)
            m.matmul(f"{left} by {right}", a, b, 3, m.draw(right, 21))
    m.matmul("both of the run", m.draw("uint8", 7, 37), m.draw("int8", 37, 21), m.draw("uint8", 7), 5, runtime=True)
    m.matmul("stacked", m.draw("uint8", 2, 3, 9), m.draw("int8", 2, 9, 5), None, m.draw("int8", 2, 1, 5))
    m.matmul("a vector", m.draw("int8", 9), m.draw("uint8", 9, 4), None, 7)
    m.conv("3x3", m.draw("uint8", 2, 5, 9, 8), m.draw("int8", 11, 5, 3, 3), 100, m.draw("int8", 11), pads=[1, 2, 0, 1])
    m.conv("groups", m.draw("int8", 1, 6, 7, 7), m.draw("uint8", 8, 3, 3, 3), -9, 131, group=2, strides=[2, 1], pads=[1] * 4)
    m.conv("depthwise", m.draw("uint8", 1, 6, 7, 7), m.draw("int8", 6, 1, 3, 3), 131, 4, group=6, pads=[1] * 4)
    m.conv("1D", m.draw("uint8", 2, 3, 12), m.draw("int8", 4, 3, 3), 3, m.draw("int8", 4), dilations=[2], pads=[2, 1])
    return m


@pytest.fixture(scope="module")
def integer_model() -> Products:
    return products()


@pytest.mark.parametrize(("device", "path"), CASES)
def test_sums_of_integers_are_exact(device: str, path: str, integer_model: Products, tmp_path: Path) -> None:
    file = saved(integer_model.proto(), tmp_path)
    answers = run_in_all_modes(file, tmp_path / "b.flashmem", device, path, integer_model.feeds)
    for output, answer in zip(integer_model.outputs, answers, strict=True):
        np.testing.assert_array_equal(answer, integer_model.expected[output.name], err_msg=output.name)
