"""LSTM as onnxruntime's `quantize_dynamic` writes it, against ONNX Runtime with the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

import flashmem
from flashmem.base.errors import UnsupportedModelError
from tests.support.compared import DEVICES
from tests.support.recurrent import sigmoid

Array = NDArray[Any]
STEPS, BATCH, INPUTS, HIDDEN = 7, 3, 24, 32

FORMS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "asymmetric": {"extra_options": {"WeightSymmetric": False}},
    "channels": {"per_channel": True},
}


def saved(direction: str, folder: Path, form: str) -> tuple[Path, Path]:
    """An LSTM of floats, and the file that `quantize_dynamic` makes of it."""
    rng, count = np.random.default_rng(0), 2 if direction == "bidirectional" else 1

    def weights(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    shapes = {"W": (count, 4 * HIDDEN, INPUTS), "R": (count, 4 * HIDDEN, HIDDEN), "B": (count, 8 * HIDDEN)}
    constants = [numpy_helper.from_array(weights(*shape), name) for name, shape in shapes.items()]
    node = helper.make_node("LSTM", ["x", *shapes], ["y", "h", "c"], name="n", hidden_size=HIDDEN, direction=direction)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [STEPS, BATCH, INPUTS])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "h", "c")]
    graph = helper.make_graph([node], "g", [x], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "floats.onnx")
    # 7 bits: with 8, ONNX Runtime's sums saturate on processors without VNNI, and are no reference
    quantize_dynamic(folder / "floats.onnx", folder / "m.onnx", reduce_range=True, **FORMS[form])
    return folder / "floats.onnx", folder / "m.onnx"


def by_runtime(path: Path, x: Array) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    answers: list[Array] = onnxruntime.InferenceSession(path, options).run(None, {"x": x})
    return answers


def rounded(values: Array) -> Array:
    """Numbers as DynamicQuantizeLinear rounds them to 8 bits, by the range of all."""
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    step = np.float32((high - low) / 255) or np.float32(1)
    zero = np.clip(np.rint(-low / step), 0, 255)
    return np.asarray((np.clip(np.rint(values / step) + zero, 0, 255) - zero) * step)


def by_definition(path: Path, direction: str, x: Array, *, rounds: bool) -> list[Array]:
    """The answers in float64 of the weights that the file's integers mean.

    `rounds`: with x and the state of each step rounded, as ONNX Runtime does.
    """
    stored = {tensor.name: numpy_helper.to_array(tensor).astype(np.float64) for tensor in onnx.load(path).graph.initializer}
    kept: Callable[[Array], Array] = rounded if rounds else lambda values: values
    found = []
    for index, way in enumerate({"bidirectional": ["forward", "reverse"]}.get(direction, [direction])):
        w, r = (
            (stored[f"{name}_quantized"][index] - stored[f"{name}_zero_point"][index]) * stored[f"{name}_scale"][index]
            for name in "WR"
        )
        bias = stored["B"][index].reshape(2, -1).sum(0)
        h, c, y = np.zeros((BATCH, HIDDEN)), np.zeros((BATCH, HIDDEN)), np.zeros((STEPS, BATCH, HIDDEN))
        inputs = kept(x.astype(np.float64))
        for step in range(STEPS) if way == "forward" else reversed(range(STEPS)):
            i, o, f, g = np.split(inputs[step] @ w + kept(h) @ r + bias, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            y[step] = h = sigmoid(o) * np.tanh(c)
        found.append((y, h, c))
    return [np.stack(each, axis) for each, axis in zip(zip(*found, strict=True), (1, 0, 0), strict=True)]


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_lstm_is_what_its_weights_mean(form: str, direction: str, place: tuple[str, str], tmp_path: Path) -> None:
    floats, path = saved(direction, tmp_path, form)
    device, memory_path = place
    x = np.random.default_rng(1).standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)
    given: Any = {"device": device, "memory_path": memory_path}
    bundle = flashmem.compile(path, tmp_path / "m.flashmem", build=False, **given)
    with flashmem.Session(bundle, device=device) as session:
        answers = session.run(None, {"x": x})
    exact, as_theirs = (by_definition(path, direction, x, rounds=rounds) for rounds in (False, True))
    theirs, before = by_runtime(path, x), by_runtime(floats, x)
    for mine, other, right, rounded_too, source in zip(answers, theirs, exact, as_theirs, before, strict=True):
        assert mine.shape == other.shape == right.shape
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(other, rounded_too, rtol=1e-3, atol=1e-4)  # all of the difference is their rounding
        assert np.mean((mine - source) ** 2) <= np.mean((other - source) ** 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "sideways"}, "com.microsoft.DynamicQuantizeLSTM with direction 'sideways' is not implemented"),
        ({"direction": "bidirectional"}, "with direction 'bidirectional' and weights of 1 directions"),
        ({"W_scale": np.ones(7, np.float32)}, r"whose input 8 has shape \(7,\), not \(1, 128\)"),
        ({"W_zero_point": np.zeros(7, np.int8)}, r"whose input 9 has shape \(7,\), not \(1,\)"),
    ],
)
def test_forms_that_mean_nothing_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, path = saved("forward", tmp_path, "symmetric")
    model = onnx.load(path)
    for name, value in change.items():
        if isinstance(value, str):
            attribute = next(each for each in model.graph.node[0].attribute if each.name == name)
            attribute.s = value.encode()
        else:
            tensor = next(each for each in model.graph.initializer if each.name == name)
            tensor.CopyFrom(numpy_helper.from_array(value, name))
    with pytest.raises(UnsupportedModelError, match=message):
        flashmem.compile(model, device="generic-cpu")
