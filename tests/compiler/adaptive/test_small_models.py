"""Smallest budgets of small models of which one product, or the activations, are the most: shapes of networks from packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import flashmem
from flashmem import Session
from flashmem.base.errors import BudgetError
from flashmem.runtime.opencl.discovery import list_devices

Array = NDArray[Any]
DEVICES = [device.descriptor_name for device in list_devices()]


class _Made:
    """A model of float32 under construction, with weights of zero mean."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.random = np.random.default_rng(28)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.shape = list(shape)

    def weight(self, *shape: int) -> str:
        """The name of a weight whose product with a vector of ones has about the norm of one."""
        data = self.random.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape).astype(np.float32)
        return self.constant(data)

    def constant(self, data: Array) -> str:
        self.constants.append(numpy_helper.from_array(data, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"n{len(self.nodes)}"], f"{op}{len(self.nodes)}", **attributes))
        return str(self.nodes[-1].output[0])

    def save(self, output: str, path: Path) -> Path:
        kind = onnx.TensorProto.FLOAT
        x, y = helper.make_tensor_value_info("x", kind, self.shape), helper.make_tensor_value_info(output, kind, None)
        graph = helper.make_graph(self.nodes, "small", [x], [y], self.constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return path


def wake_word(path: Path) -> Path:
    """The head of a detector of wake words: nine tenths of its weights are one product."""
    made = _Made((1, 16, 96))
    x = made.node("Flatten", "x")
    for wide, deep in ((128, 1536), (128, 128)):
        x = made.node("Relu", made.node("Gemm", x, made.weight(wide, deep), made.weight(wide), transB=1))
    return made.save(made.node("Sigmoid", made.node("Gemm", x, made.weight(1, 128), transB=1)), path)


def spectrogram(path: Path) -> Path:
    """A mel spectrogram: the real and the imaginary part are convolutions of 512 taps with the same sound."""
    made = _Made((1, 1, 4096))
    parts = [made.node("Conv", "x", made.weight(257, 1, 512), strides=[160]) for _ in range(2)]
    squares = [made.node("Mul", part, part) for part in parts]
    power = made.node("Transpose", made.node("Add", *squares), perm=[0, 2, 1])
    return made.save(made.node("MatMul", power, made.weight(257, 32)), path)


def text_detector(path: Path) -> Path:
    """A detector of text: layers with few weights on large images, then many weights on small ones."""
    made = _Made((1, 3, 128, 128))
    x, before = "x", 3
    for channels, stride in ((16, 2), (32, 1), (32, 2), (64, 1), (64, 2), (96, 2)):
        x = made.node("Conv", x, made.weight(channels, before, 3, 3), pads=[1] * 4, strides=[stride] * 2)
        x, before = made.node("Relu", x), channels
    for _ in range(4):
        x = made.node("Relu", made.node("Conv", x, made.weight(96, 96, 3, 3), pads=[1] * 4))
    scales = made.constant(np.array([1, 1, 16, 16], np.float32))
    x = made.node("Resize", made.node("Conv", x, made.weight(8, 96, 1, 1)), "", scales, mode="nearest")
    return made.save(made.node("Sigmoid", made.node("Conv", x, made.weight(1, 8, 3, 3), pads=[1] * 4)), path)


def spindles(path: Path) -> Path:
    """Convolutions of a long signal whose padding wraps around: Slices and a Concat before each."""
    made = _Made((1, 16, 3000))

    def number(value: int) -> str:
        return made.constant(np.array([value], np.int64))

    x, before = "x", 16
    for at in range(5):
        pad = 2**at
        ends = [
            made.node("Slice", x, number(-pad), number(9999), number(2)),
            made.node("Slice", x, number(0), number(pad), number(2)),
        ]
        wrapped = made.node("Concat", ends[0], x, ends[1], axis=2)
        y = made.node("Relu", made.node("Conv", wrapped, made.weight(64, before, 3), dilations=[pad]))
        x, before = (made.node("Add", x, y) if before == 64 else y), 64
    return made.save(made.node("Conv", x, made.weight(4, 64, 5), strides=[5]), path)


def smallest(model: Path, device: str) -> int:
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(model, model.with_suffix(".refused"), device=device, budget=1, build=False)
    return refused.value.smallest_bytes


CASES = {wake_word: 0.2, spectrogram: 0.15, text_detector: 0.3, spindles: 9.5}
"""The models, and the most of the weights that their smallest budget may be.

It was 1.0, 1.1, 0.8 and 11.2 with slices and patches of the default sizes, and a Transpose before and behind each Concat of
`spindles`. Its activations are the most: one layer reads and writes 1.5 MB, and its weights are 0.2 MB.
"""


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_budget_of_a_small_model_is_part_of_its_weights_and_its_answer_is_the_same(
    make: Any, device: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "small.onnx")
    least = smallest(model, device)
    weights = sum(each.nbytes for each in flashmem.compile(model, tmp_path / "all", device=device, build=False).program.slices)
    assert least <= CASES[make] * weights

    reference = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(2).normal(size=reference.get_inputs()[0].shape).astype(np.float32)
    [want] = reference.run(None, {"x": x})
    for budget in (least, 2 * least):
        bundle = flashmem.compile(model, tmp_path / str(budget), device=device, budget=budget, build=False)
        with Session(bundle, device=device) as session:
            [got] = session.run(None, {"x": x})
            assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
        assert np.abs(got - want).max() <= 1e-5 * np.ptp(want) + 1e-6
    with pytest.raises(BudgetError):
        flashmem.compile(model, tmp_path / "less", device=device, budget=least - 1, build=False)


@pytest.mark.parametrize("device", ["generic-cpu", "adreno750", "nvidia"])
def test_default_slices_are_kept_where_the_budget_has_room_for_them(device: str, tmp_path: Path) -> None:
    model = wake_word(tmp_path / "small.onnx")
    bundle = flashmem.compile(model, tmp_path / "bundle", device=device, budget="16MB", build=False)
    assert all(part.name.endswith("[0]") for part in bundle.program.slices)


def test_padding_that_wraps_around_between_convolutions_of_one_dimension_needs_no_transposes(tmp_path: Path) -> None:
    model = spindles(tmp_path / "small.onnx")
    bundle = flashmem.compile(model, tmp_path / "bundle", device="generic-cpu", build=False)
    moved = [launch.name for launch in bundle.program.launches if "Transpose" in " ".join(launch.operators)]
    assert len(moved) <= 2, "one for the input and one for the output"
