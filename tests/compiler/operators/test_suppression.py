"""NonMaxSuppression compared with ONNX Runtime: the boxes, their order and number, and outputs computed from them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import flashmem
from flashmem.base.errors import UnsupportedModelError
from flashmem.base.types import MemoryPath
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.compared import DEVICES, OF_A_GPU, Array, Nodes, answers_of, by_runtime
from tests.support.strict_device import PROFILES, Profile
from tests.support.strict_device.door import strict

PLACES = [(*place, "") for place in DEVICES] + OF_A_GPU


def boxes_of(kind: str, images: int, count: int, centred: bool) -> Array:
    """Boxes: crowded, equal, on a coarse grid (overlaps are exact fractions), or without area, turned and not finite."""
    random = np.random.default_rng(len(kind) * 100 + count)
    low = random.uniform(-5, 20, (images, count, 2))
    size = random.uniform(0.1, 12, (images, count, 2))
    if kind == "grid":
        low, size = np.floor(low / 5) * 5, np.ceil(size / 4) * 5
    if kind == "equal":
        low[:], size[:] = low[:, :1], size[:, :1]
    if kind == "strange":
        size[:, ::5] = 0
        size[:, 1::7] *= -1
    boxes = np.concatenate([low + size / 2, size] if centred else [low, low + size], -1).astype(np.float32)
    if kind == "strange":
        boxes[:, 3::11, 1] = np.inf
        boxes[:, 4::13, 2] = np.nan
        boxes[:, 5::17] = 1e30
    return boxes


def scores_of(kind: str, images: int, classes: int, count: int) -> Array:
    random = np.random.default_rng(count)
    scores = random.uniform(-1, 1, (images, classes, count))
    return (np.round(scores * 3) / 3 if kind in ("grid", "equal") else scores).astype(np.float32)  # few numbers: many ties


@pytest.mark.parametrize(("device", "path", "compiled_for"), PLACES, ids=str)
def test_the_boxes_are_those_of_onnx_runtime(device: str, path: str, compiled_for: str, tmp_path: Path) -> None:
    nodes = Nodes()
    sizes = {"crowded": (2, 3, 130), "grid": (1, 2, 61), "equal": (3, 1, 17), "strange": (2, 2, 97), "one": (1, 1, 1)}
    kept: list[dict[str, Any]] = [
        {"overlap": 0.5, "most": 7, "least": None}, {"overlap": 0.0, "most": 100, "least": 0.1},
        {"overlap": 1.0, "most": 2**62, "least": None}, {"overlap": 0.25, "most": 1000, "least": 1.0},
    ]  # fmt: skip
    for (kind, (images, classes, count)), centred in product(sizes.items(), (0, 1)):
        boxes = nodes.input(boxes_of(kind, images, count, bool(centred)))
        scores = nodes.input(scores_of(kind, images, classes, count))
        for each in kept:
            given = [
                nodes.constant(np.array([each["most"]], np.int64)),
                nodes.constant(np.array([each["overlap"]], np.float32)),
            ]
            if each["least"] is not None:
                given.append(nodes.constant(np.array([each["least"]], np.float32)))
            nodes.node("NonMaxSuppression", boxes, scores, *given, dtypes=["int64"], center_point_box=centred)
    nodes.node("NonMaxSuppression", boxes, scores, dtypes=["int64"])  # selects none
    model = nodes.proto()
    expected = by_runtime(model, nodes.feeds)
    answers = answers_of(model, nodes.feeds, (device, path), tmp_path, compiled_for)
    assert len({len(each) for each in expected}) > 9
    for node, answer, wanted in zip(model.graph.node, answers, expected, strict=True):
        np.testing.assert_array_equal(answer, wanted, err_msg=str(node))


DETECTIONS = """
<ir_version: 10, opset_import: ["" : 17]>
detect (float[2, 40, 4] boxes, float[2, 3, 40] scores, float[8, 6] w) => (
    float[n, 4] found, float[n] certainty, int64[n] kind, float[1, n, 5] rows, float[n, 6] projected, float[2, 40, 4] same)
<int64[1] most = {9}, float[1] overlap = {0.4}, float[1] least = {0.15}, int64[1] zero = {0}, int64[1] one = {1},
 int64[1] two = {2},
 int64[1] three = {3}, int64[2] open = {-1, 1}, int64[1] flat = {-1}, int64[3] lead = {1, -1, 5}, int64[2] ends = {0, 2}>
{
    selected = NonMaxSuppression (boxes, scores, most, overlap, least)
    kinds = Slice (selected, one, two, one)
    kind = Reshape (kinds, flat)
    image = Slice (selected, zero, one, one)
    position = Slice (selected, two, three, one)
    where = Concat <axis = 1> (image, position)
    found = GatherND (boxes, where)
    point = Gather <axis = 1> (selected, ends)
    which = Concat <axis = 1> (image, kinds, position)
    score = GatherND (scores, selected)
    certainty = Mul (score, score)
    column = Reshape (score, open)
    joined = Concat <axis = 1> (found, column)
    rows = Reshape (joined, lead)
    both = Concat <axis = 1> (found, found)
    projected = MatMul (both, w)
    same = Relu (boxes)
}
"""


@pytest.mark.parametrize(("device", "path"), DEVICES, ids=str)
def test_outputs_computed_from_the_boxes_have_their_number(device: str, path: MemoryPath, tmp_path: Path) -> None:
    onnx.save(parser.parse_model(DETECTIONS), tmp_path / "m.onnx")
    random = np.random.default_rng(5)
    runtime = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    compiled = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device=device, memory_path=path)
    numbers = set()
    with flashmem.Session(compiled, device=device) as session:
        assert [each.shape for each in session.get_outputs()] == [
            [None, 4],
            [None],
            [None],
            [1, None, 5],
            [None, 6],
            [2, 40, 4],
        ]
        for shift in (0.0, -0.6, -2.0, 0.9):
            feeds = {
                "boxes": boxes_of("crowded", 2, 40, False),
                "scores": random.uniform(-1 + shift, 1 + shift, (2, 3, 40)).astype(np.float32),
                "w": random.uniform(-3, 1, (8, 6)).astype(np.float32),
            }
            expected = runtime.run(None, feeds)
            for answer, wanted in zip(session.run(None, feeds), expected, strict=True):
                assert answer.shape == wanted.shape
                np.testing.assert_allclose(answer, wanted, rtol=1e-5, atol=1e-4)
            only = session.run(["kind"], feeds)
            np.testing.assert_array_equal(only[0], expected[2])
            numbers.add(len(expected[0]))
    assert len(numbers) > 2 and 0 in numbers


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("s = Cast <to = 1> (selected)  y = ReduceSum <keepdims = 0> (s, zero)", "ReduceSum of what NonMaxSuppression selects"),
        ("y = Shape (selected)", "Shape of what NonMaxSuppression selects"),
        ("y = Slice (selected, zero, one, zero)", "Slice of what NonMaxSuppression selects"),
        (
            "b = Neg (boxes)  o = NonMaxSuppression (b, scores, most)  y = Add (selected, o)",
            "Add of what NonMaxSuppression selects",
        ),
        ("y = Gather (selected, zero)", "Gather of what NonMaxSuppression selects"),
        ("y = Reshape (selected, flat)", "Reshape of what NonMaxSuppression selects"),
    ],
)
def test_nodes_that_mix_boxes_are_refused(text: str, what: str, tmp_path: Path) -> None:
    model = f"""
    <ir_version: 10, opset_import: ["" : 17]>
    detect (float[1, 6, 4] boxes, float[1, 1, 6] scores) => (y)
    <int64[1] most = {{4}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] flat = {{-1}}>
    {{ selected = NonMaxSuppression (boxes, scores, most)  {text} }}
    """
    parsed = parser.parse_model(model)
    onnx.save(parsed, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match=what) as caught:
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device="generic-cpu")
    assert len(caught.value.nodes) == 1


def test_a_limit_at_run_time_is_refused(tmp_path: Path) -> None:
    nodes = Nodes()
    limit = nodes.input(np.array([3], np.int64))
    nodes.node("NonMaxSuppression", nodes.input(np.zeros((1, 2, 4), np.float32)), nodes.input(np.zeros((1, 1, 2), np.float32)),
               limit, dtypes=["int64"])  # fmt: skip
    onnx.save(nodes.proto(), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match=r"input 2 .* computed at run time is not implemented"):
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device="generic-cpu")


@pytest.mark.filterwarnings("ignore:.*was compiled for")
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_boxes_and_random_numbers_break_no_rule(profile: Profile, tmp_path: Path) -> None:
    """On a device that checks each call: outputs that are copied early, and their number, which is read at the end."""
    nodes = Nodes()
    boxes, scores = nodes.input(boxes_of("crowded", 1, 40, False)), nodes.input(scores_of("crowded", 1, 2, 40))
    limits = [nodes.constant(np.array([30])), nodes.constant(np.array([0.3], np.float32))]
    (selected,) = nodes.node("NonMaxSuppression", boxes, scores, *limits, dtypes=["int64"])
    nodes.node("GatherND", scores, selected)
    model = nodes.proto()
    expected = by_runtime(model, nodes.feeds)
    nodes.node("RandomNormalLike", boxes)
    onnx.save(nodes.proto(), tmp_path / "m.onnx")
    with strict(profile) as device:
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device=list_devices()[0].descriptor_name, build=False)
        with flashmem.Session(bundle, lanes=False) as session:
            for _ in range(2):
                answers = session.run(None, nodes.feeds)
        assert device.rules.broken == [] and device.rules.mapped == []
    for answer, wanted in zip(answers, expected, strict=False):
        np.testing.assert_array_equal(answer, wanted)
    assert answers[2].shape == (1, 40, 4) and 0 < len(answers[0]) < 60
