"""Quantisation of a model's weights: errors against float64, and answers against ONNX Runtime with what weights became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.types import Quantize
from flashmem.compiler.frontend.contrib.packed import packed_codes
from flashmem.compiler.frontend.quantize import BLOCKS, quantise, quantised
from tests.support.caches import empty_bundle_cache
from tests.support.command_line import Command, command_line
from tests.support.compared import PLACES
from tests.support.inputs import floats
from tests.support.paths import DATA

Array = NDArray[Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def _nearest(rows: Array, block: int, top: float, largest: int) -> Array:
    """Rounded to the nearest code, with scales of the largest weight / `top` in float64."""
    blocks = rows.astype(np.float64).reshape(-1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / top
    return (np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -largest, largest) * scale).reshape(rows.shape)


@pytest.mark.parametrize("kind", ["normal", "positive", "around 1e6", "tiny", "of many sizes"])
@pytest.mark.parametrize("block", BLOCKS)
def test_errors_are_those_of_the_nearest_codes_or_less(kind: str, block: int) -> None:
    rows = floats(40, 4 * block, kind=kind)
    for bits, top in ((4, 7), (8, 127)):
        made = quantise(rows, block, bits)
        assert made.codes.min() >= -(1 << bits - 1) and made.codes.max() < 1 << bits - 1
        if kind in ("normal", "positive"):
            assert np.array_equal(made.scales, made.scales.astype(np.float16))
        wrong = np.square(made.floats.astype(np.float64) - rows).sum()
        nearest = np.square(_nearest(rows, block, top, top) - rows).sum()
        assert wrong <= 1.01 * nearest + np.square(2.0**-11 * rows.astype(np.float64)).sum()  # scales are in half
        assert bits == 8 or kind != "normal" or wrong < 0.95 * nearest  # the search finds better ones


def test_zeros_and_weights_beyond_half() -> None:
    rows = np.zeros((3, 32), np.float32)
    rows[1], rows[2, 5] = 1e30, -3e8
    for bits in (4, 8):
        made = quantise(rows, 32, bits)
        assert not made.floats[0].any()
        np.testing.assert_allclose(made.floats[1:], rows[1:], rtol=1e-6)


@given(st.integers(1, 5), st.sampled_from([16, 48]), st.integers(0, 2**32 - 1))
def test_two_codes_share_a_byte(rows: int, depth: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-8, 8, (rows, depth)).astype(np.int8)
    low, high = (packed_codes(codes.view(np.uint8), 4).astype(np.int8) << shift >> 4 for shift in (4, 0))
    assert np.array_equal(np.stack([low, high], -1).reshape(codes.shape), codes)
    assert np.array_equal(packed_codes(codes.view(np.uint8), 8).view(np.int8), codes)


WITH_INT4 = {
    "table": 8, "into": 4, "turned": 4, "odd": 4, "rows": 8, "head": 8, "filter": 8, "grouped": 8, "line": 8
}  # fmt: skip
"""Bits of the weights that are quantised: `rows` has a depth that no block divides. The others stay float."""

SHAPES = {
    "table": (200, 64), "into": (64, 96), "turned": (120, 96), "odd": (120, 76), "rows": (76, 61), "head": (61, 80),
    "filter": (24, 8, 5, 5), "grouped": (72, 8, 3, 3), "line": (40, 8, 16),
    "added": (64, 64), "inside": (61, 80), "small": (64, 32), "read": (64, 80),
}  # fmt: skip
OUTPUTS = ("logits", "conv", "tone.out", "moved", "small.out", "read.out", "read", "branch")


def _value(name: str, kind: int, shape: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _branch(name: str, op: str) -> onnx.GraphProto:
    node = helper.make_node(op, ["inside"], [f"{name}.out"])
    return helper.make_graph([node], name, [], [_value(f"{name}.out", TensorProto.FLOAT)])


def _network(weights: Mapping[str, Array], feeds: Mapping[str, Array], opset: int) -> onnx.ModelProto:
    """A model with a weight of each kind; operator set 11 has no DequantizeLinear with an axis."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["h0"]),
        node("MatMul", ["h0", "into"], ["h1"]),
        node("Transpose", ["turned"], ["turned.t"], perm=[1, 0]),
        node("Identity", ["turned.t"], ["turned.i"]),
        node("MatMul", ["h1", "turned.i"], ["h2"]),
        node("Reshape", ["h2", "flat"], ["h2.flat"]),
        node("Gemm", ["h2.flat", "odd"], ["h3"], alpha=0.5),
        node("MatMul", ["h3", "rows"], ["h4"]),
        node("Gemm", ["h4", "head", "bias"], ["scores"]),
        node("Softmax", ["scores"], ["logits"], axis=1),
        node("Conv", ["image", "filter"], ["c0"], pads=[2, 2, 2, 2]),
        node("Conv", ["c0", "grouped"], ["conv"], strides=[2, 2], group=3),
        node("Conv", ["tone", "line"], ["tone.out"]),
        node("Add", ["added", "one"], ["added.one"]),
        node("MatMul", ["h0", "added.one"], ["moved"]),
        node("MatMul", ["h0", "small"], ["small.out"]),
        node("MatMul", ["h0", "read"], ["read.out"]),
        node("If", ["first"], ["branch"], then_branch=_branch("then", "Relu"), else_branch=_branch("else", "Neg")),
    ]
    others = {"bias": floats(80), "one": np.ones(1, np.float32), "flat": np.array([7, 120])}
    constants = [numpy_helper.from_array(each, name) for name, each in {**weights, **others}.items()]
    inputs = [_value(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) for name, each in feeds.items()]
    outputs = [_value(name, TensorProto.FLOAT) for name in OUTPUTS]
    graph = helper.make_graph(nodes, "weights", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=7)


@pytest.mark.parametrize(("place", "number"), [(place, number) for number, place in enumerate(PLACES)], ids=str)
def test_answers_are_those_of_what_weights_became(place: tuple[str, str], number: int, tmp_path: Path) -> None:
    (device, path), opset, kind = place, (11, 18)[number % 2], ("normal", "positive")[number // 2 % 2]
    weights = {name: floats(*shape, kind=kind) / np.float32(8) for name, shape in SHAPES.items()}
    feeds: dict[str, Array] = {
        "ids": np.arange(7)[None] * 28,
        "image": floats(1, 8, 12, 12, kind="positive"),
        "tone": floats(1, 8, 30),
        "first": np.array(True),
    }
    file = tmp_path / "m.onnx"
    onnx.save(_network(weights, feeds, opset), file)
    wanted: Quantize
    for wanted in ("int4", "int8"):
        options: Any = {"device": device, "memory_path": path, "constants": {"first": True}}
        bundle = flashmem.compile(file, tmp_path / wanted, quantize=wanted, **options)
        bits = {each["name"]: each["bits"] for each in bundle.meta["quantised"]}
        assert bits == (WITH_INT4 if wanted == "int4" else dict.fromkeys(WITH_INT4, 8))
        with quantised(file, wanted, as_floats=True) as made:
            right = onnxruntime.InferenceSession(made.path).run(None, feeds)
            constants = onnx.load(made.path).graph.initializer
            became = {each.name: numpy_helper.to_array(each) for each in constants}
        with flashmem.Session(bundle, device=device) as session:
            answers = session.run(None, {name: each for name, each in feeds.items() if name != "first"})
        for name, answer, expected in zip(OUTPUTS, answers, right, strict=True):
            assert np.abs(answer - expected).max() <= 2e-5 * np.abs(expected).max(), name
        for each in bundle.meta["quantised"]:
            before = weights[each["name"]].astype(np.float64)
            error = np.sqrt(np.square(became[each["name"]] - before).sum() / np.square(before).sum())
            assert each["error"] == pytest.approx(error, rel=1e-4)
            assert error < (0.12 if each["bits"] == 4 else 0.02)


def test_a_quantised_network_is_verified_with_what_its_weights_became(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty_bundle_cache(tmp_path / "cache", monkeypatch)
    words = ("run", DATA / "vit-tiny.onnx", "--quantize", "int8", "--verify", "--json")
    report = command(*words)
    assert report.json["verify"]["ok"] and "to 8 bits with errors of" in report.err
    assert command(*words).json["verify"] == report.json["verify"]


def test_what_cannot_be_quantised(command: Command, tmp_path: Path) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 64))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 128))],
            [numpy_helper.from_array(np.full((64, 128), np.nan, np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "nan.onnx")
    with pytest.raises(UserError, match="weight w has infinities or NaN"):
        flashmem.compile(tmp_path / "nan.onnx", tmp_path / "b", quantize="int8")
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((64, 128), np.float16), "w"))
    onnx.save(model, tmp_path / "half.onnx")
    with pytest.raises(UserError, match="no float32 weights of 4096 elements or more"):
        flashmem.compile(tmp_path / "half.onnx", tmp_path / "b", quantize="int4")
    with pytest.raises(UserError, match="'int3' is unknown; name one of: int4, int8"):
        flashmem.compile(DATA / "vit-tiny.onnx", tmp_path / "b", quantize="int3")  # type: ignore[arg-type]
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused = command("compile", tmp_path / "m.gguf", "--quantize", "int4")
    assert refused.code == 2 and "leave out --quantize" in refused.err
    assert not (tmp_path / "b").exists()
