"""Pools, transposed convolutions and those of few channels compared with ONNX Runtime: sizes, pads and values, many at once."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.passes.decompose import decompose
from tests.support.compared import DEVICES, PLACES, answers_of, require_right
from tests.support.inputs import floats

Case = tuple[str, dict[str, Any]]


def model_of(cases: list[Case], shape: tuple[int, ...]) -> onnx.ModelProto:
    """A node for each case, all with the same input; their results are the outputs, in order."""
    nodes, outputs, weights = [], [], []
    for index, (op, attributes) in enumerate(cases):
        inputs = ["x"]
        if op.startswith("Conv"):
            inputs.append(f"w{index}")
            sizes = (shape[1], 4) if op == "ConvTranspose" else (20, shape[1])
            data = np.random.default_rng(index).standard_normal((*sizes, *attributes["kernel_shape"])).astype(np.float32)
            weights.append(numpy_helper.from_array(data, f"w{index}"))
        nodes.append(helper.make_node(op, inputs, [f"y{index}"], **attributes))
        outputs.append(helper.make_tensor_value_info(f"y{index}", TensorProto.FLOAT, None))
    graph = helper.make_graph(
        nodes,
        "windows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        outputs,
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def expected_of(model: onnx.ModelProto, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # it warns about the sizes that onnx infers
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})  # type: ignore[no-any-return]


def pools(shape: tuple[int, ...], count: int) -> list[Case]:
    """Windows that ONNX Runtime supports: smaller than the padded input, pads smaller than the window.

    With SAME pads it ignores dilations, unlike ONNX's formula, so the two are not combined.
    """
    draw = random.Random(len(shape))
    cases: list[Case] = []
    while len(cases) < count:
        kernel, strides, dilations, before, after = ([] for _ in range(5))  # type: ignore[var-annotated]
        automatic = draw.choice(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
        for size in shape[2:]:
            kernel.append(draw.randint(1, 4))
            strides.append(draw.randint(1, 4) if automatic in ("NOTSET", "VALID") else draw.randint(1, kernel[-1]))
            dilations.append(draw.choice([1, 1, 2, 3]) if automatic in ("NOTSET", "VALID") else 1)
            room = size - dilations[-1] * (kernel[-1] - 1) - 1
            before.append(draw.randint(0, kernel[-1] - 1))
            after.append(draw.randint(0, kernel[-1] - 1))
            if room + (before[-1] + after[-1] if automatic == "NOTSET" else 0) < 0:
                break
        else:
            attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
            attributes |= {"pads": before + after} if automatic == "NOTSET" else {"auto_pad": automatic}
            op = draw.choice(["MaxPool", "AveragePool"])
            attributes["ceil_mode"] = draw.randint(0, 1)
            if op == "AveragePool":
                attributes["count_include_pad"] = draw.randint(0, 1)
            cases.append((op, attributes))
    return cases


def spreads(size: int, count: int) -> list[Case]:
    """Transposed convolutions whose pads, or with output_shape the rest of the division, need not be even."""
    draw = random.Random(0)
    cases: list[Case] = []
    while len(cases) < count:
        kernel, stride, dilation = draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3)
        extra = draw.randint(0, stride - 1)
        full = (size - 1) * stride + dilation * (kernel - 1) + 1 + extra
        attributes: dict[str, Any] = {"kernel_shape": [kernel], "strides": [stride], "dilations": [dilation]}
        attributes["output_padding"] = [extra]
        automatic = draw.choice(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
        if automatic != "NOTSET":
            attributes["auto_pad"] = automatic
        if automatic != "VALID" and draw.random() < 0.5:
            attributes["output_shape"] = [draw.randint(max(1, full - 4), full)]
        elif automatic == "NOTSET":
            before, after = draw.randint(0, 2), draw.randint(0, 2)
            if before + after >= full:
                continue
            attributes["pads"] = [before, after]
        cases.append(("ConvTranspose", attributes))
    return cases


# With this number of channels every pool has the same work-group, so each kind is compiled once.
MODELS: dict[str, tuple[list[Case], tuple[int, ...]]] = {
    "pools over planes": (pools((1, 1030, 9, 6), 60), (1, 1030, 9, 6)),
    "pools over lines": (pools((2, 1030, 8), 40), (2, 1030, 8)),
    "transposed convolutions": (spreads(4, 40), (1, 5, 4)),
    "transposed convolutions of one": (spreads(1, 20), (1, 5, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_onnxruntimes(name: str, tmp_path: Path) -> None:
    cases, shape = MODELS[name]
    model = model_of(cases, shape)
    onnx.save(model, tmp_path / "windows.onnx")
    graph = import_model(tmp_path / "windows.onnx")
    for case, port, expected in zip(cases, graph.outputs, expected_of(model, np.zeros(shape, np.float32)), strict=True):
        assert port.value.shape == expected.shape, case


@pytest.mark.parametrize("name", ["transposed convolutions", "transposed convolutions of one"])
def test_pads_of_transposed_convolutions(name: str, tmp_path: Path) -> None:
    """Their results, computed in numpy with the pads of the decomposed graph."""
    cases, shape = MODELS[name]
    model = model_of(cases, shape)
    onnx.save(model, tmp_path / "windows.onnx")
    graph = decompose(import_model(tmp_path / "windows.onnx"))
    nodes = [node for node in graph.nodes if node.op == "ConvTranspose"]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for case, node, expected in zip(cases, nodes, expected_of(model, x), strict=True):
        weight, window = node.input(1).constant, node.attributes
        assert weight is not None
        made = np.zeros((*expected.shape[:2], 100))
        for tap, place in product(range(case[1]["kernel_shape"][0]), range(shape[2])):
            at = place * window["strides"][1] + tap * window["dilations"][1]
            made[:, :, at] += x[:, :, place] @ weight.array()[:, :, 0, tap]
        first = window["pads"][1]
        np.testing.assert_allclose(
            made[:, :, first : first + expected.shape[2]], expected, rtol=1e-4, atol=1e-5, err_msg=str(case)
        )


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("kind", ["normal", "around 1e6", "of many sizes"])
@pytest.mark.parametrize("name", list(MODELS)[:3])
def test_values_are_right(name: str, kind: str, place: tuple[str, str], tmp_path: Path) -> None:
    cases, shape = MODELS[name]
    cases = cases[::10]  # each one compiles new kernels
    model, feeds = model_of(cases, shape), {"x": floats(*shape, kind=kind)}
    answers = answers_of(model, feeds, place, tmp_path)
    for case, answer, expected in zip(cases, answers, expected_of(model, feeds["x"]), strict=True):
        lowest = expected == np.finfo(np.float32).min  # a window of padding only, which is -inf here
        assert (answer[lowest] == -np.inf).all(), case
        answer[lowest] = expected[lowest]
    require_right(model, feeds, answers)


@pytest.mark.parametrize("place", [place for place in PLACES if place[1] == "buffer"], ids="-".join)
@pytest.mark.parametrize("channels", [1, 3])
def test_rows_of_taps_inside_the_image_and_across_its_edges(channels: int, place: tuple[str, str], tmp_path: Path) -> None:
    """A CPU reads the first in place, and copies the others with zeros: left, right, above, below, and all at once."""
    cases: list[Case] = [
        ("Conv", {"kernel_shape": [7, 7], "strides": [2, 2], "pads": [3, 3, 3, 3]}),
        ("Conv", {"kernel_shape": [3, 3], "pads": [0, 0, 0, 0]}),
        ("Conv", {"kernel_shape": [3, 5], "strides": [1, 2], "pads": [0, 4, 2, 0]}),
        ("Conv", {"kernel_shape": [2, 3], "strides": [3, 1], "dilations": [4, 1], "pads": [3, 0, 0, 2]}),
        ("Conv", {"kernel_shape": [1, 45], "pads": [0, 8, 0, 3]}),
    ]
    shape = (2, channels, 17, 45)
    model, feeds = model_of(cases, shape), {"x": floats(*shape)}
    require_right(model, feeds, answers_of(model, feeds, place, tmp_path))


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("channels", [1, 5])
def test_a_maximum_with_nan_is_nan(channels: int, place: tuple[str, str], tmp_path: Path) -> None:
    """As in numpy: ONNX Runtime's result depends on the position of the NaN in the window, and on the dilation."""
    x = np.random.default_rng(0).standard_normal((1, channels, 6, 7)).astype(np.float32)
    x[:, :, 2:4, 3], x[:, 0, 0, 0] = np.nan, -np.inf
    (answer,) = answers_of(model_of([("MaxPool", {"kernel_shape": [2, 3]})], x.shape), {"x": x}, place, tmp_path)
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 3), axis=(2, 3))
    np.testing.assert_array_equal(answer, windows.max((4, 5)))
