"""Resize: taps compared with ONNX Runtime over a grid, applied in numpy; then each kernel on every device."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import flashmem
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.kernels.spatial.resize_taps import Axis, Rule, resize_taps
from flashmem.compiler.passes.decompose import decompose
from tests.support.compared import DEVICES, answers_of, apart
from tests.support.inputs import floats
from tests.support.rounding import EPS, SAMPLES, Answer

Floats = NDArray[np.float32]

COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize")
FORMS: dict[str, list[dict[str, Any]]] = {
    "nearest": [{"nearest_mode": each} for each in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")],
    "linear": [{}],
    "cubic": [{"cubic_coeff_a": a, "exclude_outside": e} for a, e in product((-0.75, -0.5), (0, 1))],
    "antialiased linear": [{"antialias": 1, "exclude_outside": e} for e in (0, 1)],
    "antialiased cubic": [{"antialias": 1, "exclude_outside": e} for e in (0, 1)],
}
SHAPE = (1, 2, 10, 7)
FACTORS = ((0.7, 0.9), (1.3, 2.3), (0.3, 3.3), (2.0, 0.15), (1.0, 1.4), (1.1, 1.0))
SIZES = ((4, 17), (20, 14), (1, 3), (10, 5))
REGION = [0.0, 0.0, -0.2, 0.3, 1.0, 1.0, 0.9, 0.8]


def model_of(shape: tuple[int, ...], opset: int = 19, **attributes: Any) -> onnx.ModelProto:
    """A model of one Resize; `roi`, `scales` and `sizes` among the attributes are its inputs."""
    types = {"roi": TensorProto.FLOAT, "scales": TensorProto.FLOAT, "sizes": TensorProto.INT64}
    given = {name: attributes.pop(name) for name in types if name in attributes}
    node = helper.make_node("Resize", ["x", *(name if name in given else "" for name in types)], ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        "resize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor(name, types[name], [len(data)], data) for name, data in given.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def imported(model: onnx.ModelProto, folder: Path) -> Graph:
    onnx.save(model, folder / "resize.onnx")
    return decompose(import_model(folder / "resize.onnx"))


def evaluated(graph: Graph, x: NDArray[Any]) -> NDArray[Any]:
    """The result of a graph of Resize and Reshape, by the taps of the kernels."""
    values: dict[Any, NDArray[Any]] = {graph.inputs[0].value: x}
    for node in graph.nodes:
        data, made = values[node.input(0)], node.outputs[0]
        if node.op == "Reshape":
            values[made] = data.reshape(made.shape)
            continue
        assert node.op == "Resize"
        for axis in (2, 3):
            region = node.attributes["regions"][2 * axis - 4 : 2 * axis - 2]
            side = Axis(data.shape[axis], made.shape[axis], node.attributes["scales"][axis - 2], region)
            taps = resize_taps(side, Rule.of(node.attributes))
            shape = (*[1] * axis, *taps.weights.shape, *[1] * (3 - axis))
            outside = (taps.at[:, 0] < 0).reshape(-1, *[1] * (3 - axis))
            data = (data.take(taps.at, axis) * taps.weights.reshape(shape)).sum(axis + 1)
            data = np.where(outside, node.attributes["extrapolation_value"], data)
        values[made] = data
    return values[graph.outputs[0].value]


def drawn(shape: tuple[int, ...]) -> Floats:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def expected_of(model: onnx.ModelProto, x: Floats) -> Floats:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # it warns about the sizes that onnx infers
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("form", FORMS)
def test_taps_are_onnxruntimes(form: str, coordinates: str, tmp_path: Path) -> None:
    x = drawn(SHAPE)
    crop: dict[str, Any] = {"roi": REGION, "extrapolation_value": 9.0} if coordinates == "tf_crop_and_resize" else {}
    wanted = [{"scales": (1.0, 1.0, *factors)} for factors in FACTORS] + [{"sizes": (1, 2, *sizes)} for sizes in SIZES]
    for rule, size in product(FORMS[form], wanted):
        attributes = {"mode": form.split()[-1], "coordinate_transformation_mode": coordinates, **rule, **crop, **size}
        model = model_of(SHAPE, **attributes)
        expected = expected_of(model, x)
        if crop and any(before == after for before, after in zip(SHAPE[2:], expected.shape[2:], strict=True)):
            continue  # ONNX Runtime ignores the region there; ONNX does not
        answer = evaluated(imported(model, tmp_path), x)
        assert answer.shape == expected.shape, attributes
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=2e-5, err_msg=str(attributes))


@pytest.mark.parametrize("factor", [0.3, 0.55, 0.6, 0.7, 0.9, 1.1, 1.3, 1.4, 1.7, 2.3, 2.9, 3.3])
def test_scales_give_the_sizes_and_the_ties_of_onnxruntime(factor: float, tmp_path: Path) -> None:
    for size, mode in product((3, 5, 7, 9, 10, 12, 13, 17, 20, 39), ("round_prefer_floor", "round_prefer_ceil")):
        if size * factor < 1:
            continue
        model = model_of((size,), mode="nearest", nearest_mode=mode, scales=[factor])
        x = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(evaluated(imported(model, tmp_path), x), expected_of(model, x), err_msg=f"{size} {mode}")


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
@pytest.mark.parametrize(
    ("shape", "axes", "sizes"),
    [
        ((9,), [0], [5]),
        ((3, 9), [0, 1], [5, 20]),
        ((2, 3, 9), [2], [14]),
        ((4, 3, 5), [0, 2], [7, 4]),
        ((1, 4, 6, 3), [1, 2], [9, 4]),
        ((1, 3, 4, 6), [3], [4]),
        ((1, 3, 4, 6), [0, 1, 2, 3], [2, 2, 9, 5]),
        ((1, 2, 3, 4, 5), [3, 4], [6, 2]),
        ((2, 2, 3, 4, 5), [2, 3, 4], [5, 6, 2]),
    ],
)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_any_dimensions_may_be_resized(
    mode: str, shape: tuple[int, ...], axes: list[int], sizes: list[int], policy: str, tmp_path: Path
) -> None:
    """Compared with ONNX's reference: ONNX Runtime supports linear and cubic in fewer forms, and ignores negative axes."""
    attributes: dict[str, Any] = {"mode": mode, "axes": axes, "sizes": sizes, "keep_aspect_ratio_policy": policy}
    x = drawn(shape)
    (expected,) = ReferenceEvaluator(model_of(shape, **attributes)).run(None, {"x": x})
    attributes["axes"] = [axis - len(shape) for axis in axes]
    answer = evaluated(imported(model_of(shape, **attributes), tmp_path), x)
    assert answer.shape == expected.shape
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=2e-5)


def test_a_region_counts_where_the_size_stays(tmp_path: Path) -> None:
    attributes: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    model = model_of((1, 1, 4, 6), **attributes, sizes=(1, 1, 4, 6), roi=[0, 0, 0.5, 0, 1, 1, 1, 0.5])
    x = drawn((1, 1, 4, 6))
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(evaluated(imported(model, tmp_path), x), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("op", "opset"), [("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_the_first_operator_sets(op: str, opset: int, mode: str, tmp_path: Path) -> None:
    """They have one rule for coordinates and one for rounding, which takes the next input if there are fewer outputs."""
    for factors in ((1.4, 2.0), (2.3, 3.0), (0.7, 0.3))[: 3 if op == "Resize" else 2]:
        model = model_of(SHAPE, opset, mode=mode, scales=(1.0, 1.0, *factors))
        model.graph.node[0].op_type = op
        model.graph.node[0].input[:] = ["x", "scales"]
        x = drawn(SHAPE)
        answer, expected = evaluated(imported(model, tmp_path), x), expected_of(model, x)
        assert answer.shape == expected.shape
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=2e-5, err_msg=str(factors))


def test_a_constant_is_resized_by_the_same_rule(tmp_path: Path) -> None:
    """ONNX's reference, which folds constants, has 6 elements here instead of 7."""
    model = model_of((10,), mode="nearest", scales=[0.7])
    x = drawn((10,))
    expected = expected_of(model, x)
    model.graph.initializer.append(numpy_helper.from_array(x, "c"))
    model.graph.node[0].input[0] = "c"
    model.graph.node.append(helper.make_node("Add", ["y", "x"], ["z"]))
    model.graph.output[0].name = "z"
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7
    onnx.save(model, tmp_path / "resize.onnx")
    bundle = flashmem.compile(tmp_path / "resize.onnx", tmp_path / "b.flashmem")
    with flashmem.Session(bundle) as session:
        (answer,) = session.run(None, {"x": np.ones(7, np.float32)})
    np.testing.assert_array_equal(answer, expected + 1)


ON_DEVICES: dict[str, dict[str, Any]] = {
    "nearest": {"mode": "nearest", "scales": (1, 1, 0.7, 2.3)},
    "linear": {"mode": "linear", "coordinate_transformation_mode": "align_corners", "scales": (1, 1, 1.3, 0.9)},
    "cubic": {"mode": "cubic", "exclude_outside": 1, "sizes": (1, 5, 4, 17)},
    "antialiased": {"mode": "linear", "antialias": 1, "scales": (1, 1, 0.3, 2.3)},
    "cropped": {
        "mode": "linear",
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "sizes": (1, 5, 8, 9),
        "roi": REGION,
        "extrapolation_value": 9.0,
    },
    "cropped to nearest": {
        "mode": "nearest",
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "sizes": (1, 5, 8, 9),
        "roi": REGION,
        "extrapolation_value": float("-inf"),
    },
}


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("name", ON_DEVICES)
def test_kernels(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Compared with the taps in float64: onnx's reference computes other sizes."""
    shape, random = (1, 5, 10, 7), np.random.default_rng(2)
    model = model_of(shape, **ON_DEVICES[name])
    for kind in ("normal", "around 1e6", "of many sizes"):
        x = floats(*shape, kind=kind)
        (answer,) = answers_of(model, {"x": x}, place, tmp_path)
        graph, wide = imported(model, tmp_path), x.astype(np.float64)
        noisy = [evaluated(graph, wide * (1 + EPS * random.uniform(-1, 1, shape))) for _ in range(SAMPLES)]
        wrong = apart(answer, Answer(evaluated(graph, wide), tuple(noisy), alone=False), expected_of(model, x))
        assert not wrong.any(), (kind, np.argwhere(wrong)[:3])


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("name", ON_DEVICES)
def test_nan_stays_where_it_is(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    model, x = model_of((1, 5, 10, 7), **ON_DEVICES[name]), floats(1, 5, 10, 7)
    x[0, 0, 0, 0] = np.nan
    (answer,) = answers_of(model, {"x": x}, place, tmp_path)
    np.testing.assert_array_equal(np.isnan(answer), np.isnan(expected_of(model, x)))
