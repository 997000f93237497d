"""Kernel configs of contractions: each kind of staging agrees with ONNX Runtime, with the same bits in each transfer mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, Optimize
from flashmem.compiler.configs.kinds import least_config
from flashmem.compiler.configs.listed import configs_of, listed_configs, plain_configs, with_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.attention.configs import KeyBlockConfig, QueryRowsConfig, SharedWeightsConfig, SplitKeysConfig
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.compiler.kernels.contraction.configs import (
    CONTRACTIONS,
    Contraction,
    PlainContraction,
    SlicedContraction,
    StagedContraction,
    Winograd,
)
from flashmem.compiler.kernels.contraction.tensor_cores import TensorContraction
from flashmem.compiler.selection.configs import candidates, choose, seconds
from flashmem.compiler.selection.selector import KernelSelector, packed_bytes
from flashmem.compiler.weights.packing import Storage
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.opencl.device import HALF_ARITHMETIC
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names, load_descriptor
from tests.support.compared import DEVICES, Nodes, apart, by_runtime, outside_halves, require_right
from tests.support.inputs import floats
from tests.support.rounding import EPS, HALF_EPS, evaluated

CONFIGS = [
    StagedContraction("parts", 4, 8, (2, 2), k_block=16, two_stage=True, slice_k=4),
    StagedContraction("square", 8, 8, (2, 4), k_block=4, two_stage=True),
    StagedContraction("one stage", 4, 4, (4, 2), k_block=8),
    StagedContraction("odd group", 2, 4, (3, 5), k_block=8, slice_k=2),
    StagedContraction("one row", 1, 4, (1, 4), k_block=16, two_stage=True, slice_k=4),
]
BESIDE = PlainContraction("beside", 4, 16, 4, panel_columns=4)
LEAST = least_config("conv")
PLACES = [(device.descriptor_name, path) for device in list_devices() for path in descriptor_for(device).memory_paths]
CASES = [(CONFIGS[0], *place) for place in DEVICES] + [
    (config, DEVICES[0][0], ("texture", "buffer")[index % 2]) for index, config in enumerate(CONFIGS[1:])
] + [(BESIDE, *place) for place in PLACES] + [(LEAST, *DEVICES[0])]  # fmt: skip
"""One staged config on all devices, the others on the first: PoCL takes a minute to build such kernels."""


def model() -> Nodes:
    """Products whose sizes are multiples of no block, with aligned and unaligned rows."""
    nodes, random = Nodes(), np.random.default_rng(5)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    bias = nodes.constant(numbers(45))
    nodes.node("Add", *nodes.node("MatMul", nodes.input(numbers(2, 19, 52)), nodes.constant(numbers(52, 45))), bias)
    nodes.node("MatMul", nodes.input(floats(13, 71, kind="positive")), nodes.constant(numbers(71, 36)))
    nodes.node("MatMul", nodes.input(numbers(3, 2, 9, 20)), nodes.input(numbers(2, 20, 12)))
    nodes.node("MatMul", nodes.input(numbers(2, 9, 22)), nodes.input(numbers(2, 22, 13)))
    nodes.node("MatMul", nodes.input(numbers(2, 9, 32)), nodes.input(numbers(2, 32, 8)))
    transposed = nodes.node("Transpose", nodes.input(numbers(2, 11, 22)), perm=[0, 2, 1])
    nodes.node("MatMul", nodes.input(numbers(2, 5, 22)), *transposed)
    image = nodes.input(floats(2, 16, 9, 7, kind="around 1e3"))
    nodes.node("Conv", image, nodes.constant(numbers(21, 16, 3, 3)), pads=[1, 2, 0, 1], strides=[2, 1])
    nodes.node("Conv", image, nodes.constant(numbers(6, 8, 3, 3)), group=2, dilations=[1, 2])
    nodes.node("Conv", image, nodes.constant(numbers(5, 16, 1, 1)))
    nodes.node(
        "Conv", nodes.input(numbers(2, 3, 13, 15)), nodes.constant(numbers(9, 3, 7, 5)), pads=[3, 2, 3, 2], strides=[2, 2]
    )
    ragged = nodes.input(numbers(1, 10, 8, 7))
    nodes.node("Conv", ragged, nodes.constant(numbers(6, 5, 3, 2)), pads=[1, 0, 1, 1], group=2, dilations=[1, 3])
    nodes.node("Conv", ragged, nodes.constant(numbers(6, 10, 2, 3)), pads=[0, 1, 1, 1], dilations=[2, 1])
    return nodes


def in_half(array: Any) -> Any:
    """The halves nearest to `array`, in float32."""
    return array.astype(np.float16).astype(np.float32)


def with_half_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with weights that are exact in half."""
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(in_half(numpy_helper.to_array(tensor)), tensor.name))
    return proto


def require_right_in_half(proto: onnx.ModelProto, feeds: dict[str, Any], answers: Sequence[Any]) -> None:
    """Raise AssertionError unless `answers` are right in float32, and rounded once where they are halves."""
    for port, answer, right, other in zip(
        proto.graph.output, answers, evaluated(proto, feeds), by_runtime(proto, feeds), strict=True
    ):
        wrong = (outside_halves if np.array_equal(answer, in_half(answer)) else apart)(answer, right, other)
        assert not wrong.any(), f"{port.name}: {wrong.sum()} of {wrong.size}: {answer[wrong][0]} not {right.exact[wrong][0]}"


NODES = model()


@pytest.mark.parametrize(("config", "device", "path"), CASES, ids=lambda each: getattr(each, "name", each))
def test_answers(config: Contraction, device: str, path: MemoryPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked: config)
    file, precision = tmp_path / "m.onnx", "fp16" if config.name == "one stage" else "fp32"
    proto, feeds = NODES.proto(), NODES.feeds
    if precision == "fp16":  # images are stored with channels last, in half
        proto, feeds = with_half_weights(proto), {name: in_half(data) for name, data in feeds.items()}
    file.write_bytes(proto.SerializeToString())
    bundle = flashmem.compile(file, tmp_path / "b", device=device, memory_path=path, precision=precision)
    assert {launch.shape.family for launch in bundle.program.launches} >= set(CONTRACTIONS)
    contractions = [launch.shape for launch in bundle.program.launches if launch.shape.family in CONTRACTIONS]
    assert all(shape.k_block == config.staged_depth for shape in contractions)
    assert max(shape.tile_columns for shape in contractions) == config.columns
    answers = []
    for mode in load_descriptor(device).modes[path]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers.append(session.run(None, feeds))
    (require_right_in_half if precision == "fp16" else require_right)(proto, feeds, answers[0])
    for number, answer in enumerate(answers[0]):
        for other in answers[1:]:
            np.testing.assert_array_equal(other[number], answer)


@pytest.mark.parametrize(("device", "path"), PLACES, ids=lambda each: each)
def test_taps_of_few_channels(device: str, path: MemoryPath, tmp_path: Path) -> None:
    """The form for CPUs: images narrower than a row of taps, padding on every side, several images, vertical dilation."""
    nodes = Nodes()
    wide = nodes.constant(floats(40, 5, 3, 7, kind="positive"))
    narrow = nodes.input(floats(2, 5, 4, 3, kind="around 1e3"))
    nodes.node("Conv", narrow, wide, pads=[2, 6, 1, 5], strides=[1, 2], dilations=[2, 1])
    colours = nodes.input(floats(2, 3, 13, 15, kind="of many sizes"))
    nodes.node("Conv", colours, nodes.constant(floats(9, 3, 7, 5)), pads=[3, 2, 3, 2], strides=[2, 2])
    (tmp_path / "m.onnx").write_bytes(nodes.proto().SerializeToString())
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, memory_path=path)
    if path == "buffer":  # a texture may be folded, and then no read crosses its folds
        assert ("float part[" in bundle.source.plain) == (load_descriptor(device).kind == "cpu")
    for mode in load_descriptor(device).modes[path]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers = session.run(None, nodes.feeds)
        require_right(nodes.proto(), nodes.feeds, answers)


def stored_model() -> Nodes:
    """Products of activations that are large enough to be stored in half, unlike a model's own inputs."""
    nodes, random = Nodes(), np.random.default_rng(6)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    def kept(op: str, *inputs: str, **attributes: Any) -> str:
        [made] = nodes.node(op, *inputs, **attributes)
        nodes.outputs.pop()
        return made

    def stored(*shape: int) -> str:
        return kept("Tanh", nodes.input(numbers(*shape)))

    nodes.node("MatMul", stored(2, 39, 50), nodes.constant(numbers(50, 45)))
    nodes.node("MatMul", stored(3, 2, 29, 20), stored(2, 20, 64))
    nodes.node("MatMul", stored(2, 19, 70), kept("Transpose", stored(2, 31, 70), perm=[0, 2, 1]))
    nodes.node("Conv", stored(2, 16, 9, 11), nodes.constant(numbers(21, 16, 3, 3)), pads=[1, 2, 0, 1], strides=[2, 1])
    nodes.node("Conv", stored(1, 3, 25, 21), nodes.constant(numbers(9, 3, 5, 5)), pads=[2, 2, 2, 2])
    return nodes


HALVES = [
    PlainContraction("plain", 4, 8, 8, (2, 2), half=8),
    StagedContraction("staged", 4, 8, (2, 2), k_block=16, two_stage=True, slice_k=2, half=3),
]
HALF_PLACES = [
    (device.descriptor_name, path)
    for device in list_devices()
    if HALF_ARITHMETIC in device.extensions
    for path in descriptor_for(device).memory_paths
]


@pytest.mark.parametrize("config", HALVES, ids=lambda each: each.name)
@pytest.mark.parametrize(("device", "path"), HALF_PLACES, ids=lambda each: each)
def test_sums_in_half(
    config: Contraction, device: str, path: MemoryPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked: config)
    nodes, file = stored_model(), tmp_path / "m.onnx"
    file.write_bytes(nodes.proto().SerializeToString())
    for precision in ("fp32", "fp16"):
        bundle = flashmem.compile(file, tmp_path / precision, device=device, memory_path=path, precision=precision)
        texts = kernel_texts(bundle.source.plain)
        in_half = {launch.shape.family for launch in bundle.program.launches if HALF_ARITHMETIC in texts[launch.kernel]}
        assert in_half == (set(CONTRACTIONS) if precision == "fp16" else set())
    with flashmem.Session(bundle, device=device) as session:
        answers = session.run(None, nodes.feeds)
    for answer, right, port in zip(answers, evaluated(nodes.proto(), nodes.feeds), nodes.outputs, strict=True):
        roundings = np.abs(answer - right.exact) / (right.spread * HALF_EPS / EPS)  # the effect of one rounding of each step
        assert roundings.max() < 2, port.name
        assert roundings.max() > 0.01, f"{port.name} was not summed in half"


@pytest.mark.skipif(not HALF_PLACES, reason="no device here computes in half")
@pytest.mark.parametrize("device", [d.descriptor_name for d in list_devices() if HALF_ARITHMETIC not in d.extensions])
def test_a_session_says_that_its_device_has_no_arithmetic_in_half(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked: HALVES[0])
    (tmp_path / "m.onnx").write_bytes(stored_model().proto().SerializeToString())
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "b", device=HALF_PLACES[0][0], memory_path="buffer", precision="fp16", build=False
    )
    with pytest.raises(UserError, match=r"compute in half .*; compile the model for this device"):
        flashmem.Session(bundle, device=device)


def test_a_device_without_arithmetic_in_half_gets_no_such_config(monkeypatch: pytest.MonkeyPatch) -> None:
    device = list_devices()[0]
    listed = replace(with_configs(load_descriptor(device.descriptor_name), HALVES), instruction_set="")
    monkeypatch.setattr("flashmem.runtime.opencl.devices.load_descriptor", lambda name: listed)
    for extensions, wanted in (({HALF_ARITHMETIC}, tuple(HALVES)), (set[str](), ())):
        assert listed_configs(descriptor_for(replace(device, extensions=frozenset(extensions)))) == wanted


@pytest.mark.parametrize("name", descriptor_names())
def test_shipped_configs_can_be_built(name: str) -> None:
    """The assumptions of the templates, and no more local memory than every device of the kind has."""
    for config in listed_configs(load_descriptor(name)):
        assert config.local_bytes <= 48 << 10 and config.items <= 1024
        match config:
            case StagedContraction(k_block=depth):
                assert depth % 4 == depth % config.slice_k == 0 == config.local_bytes % 16
            case TensorContraction(k_block=depth, local_size=(down, across)):
                (high, wide), chunk = config.warp_items, config.chunk
                assert down % high == across % wide == config.columns % 8 == depth % (config.step * config.slice_k) == 0
                assert config.local_bytes % 16 == 0 and (config.storage == "float16" or config.rows % 2 == 0)
                assert 2 <= config.pipeline <= 5 and config.copying % math.lcm(depth // chunk, config.panel // chunk) == 0
                assert config.copiers % 32 == 0
            case SlicedContraction(lanes=lanes):
                assert lanes >= 8 and lanes & (lanes - 1) == 0
                tile = load_descriptor(name).tile
                assert (config.columns, config.vector) == (tile.columns, tile.vector)  # it reads the plain config's panels
            case Winograd(channels=channels):
                assert channels % config.vector == 0 == config.local_bytes % 16
            case KeyBlockConfig(channels=channels):
                assert channels % 4 == 0 == config.local_bytes % 16
            case QueryRowsConfig():
                assert config.queries % config.vector == 0
            case SharedWeightsConfig():
                assert config.queries in (1, 2, 4) and config.local_size[1] % 4 == 0
            case TensorAttention():
                assert config.queries % (16 * config.tiles) == config.keys % (16 * config.parts) == 0
                assert 2 <= config.pipeline <= 5 and config.fits(Workload("attention", "buffer", 128, 64, 128, 12, "float16"))
            case SplitKeysConfig():
                assert all(each & (each - 1) == 0 for each in (config.queries, config.keys, config.lanes))
                assert config.queries <= config.lanes >= 128
        if isinstance(config, Contraction):
            assert config.columns % config.vector == 0


@pytest.mark.parametrize("name", descriptor_names())
def test_packed_weights_of_groups_are_less_than_twice_as_large(name: str) -> None:
    """For all configs and tuning databases. With fewer columns than a vector has, there is one vector."""
    descriptor = load_descriptor(name)
    storages: tuple[Storage, ...] = ("float32", "float16")
    for path, storage, rows, depth in product(descriptor.memory_paths, storages, (1, 49, 3136), ((1, 4), (9, 4), (9, 64))):
        for columns in (1, 3, 4, 8, 12, 16, 24, 32, 48, 64, 100, 128, 300):
            conv = Workload("conv", path, rows, math.prod(depth), columns, 32, storage, depth[0])
            raw = conv.batches * conv.depth * max(4, columns) * (2 if storage == "float16" else 4)
            fitting = candidates(descriptor, conv)
            assert [each.name for each in fitting if packed_bytes(conv, each) >= 2 * raw] == [], conv
            assert seconds(descriptor, conv).keys() <= set(fitting)


@pytest.mark.parametrize("name", descriptor_names())
def test_weights_of_a_grouped_model_take_less_than_twice_their_bytes(name: str, tmp_path: Path) -> None:
    """As in ResNeXt: 32 groups of 4, 8 and 16 channels."""
    nodes, raw = Nodes(), 0
    for channels, size in ((128, 28), (256, 14), (512, 7)):
        weight = np.ones((channels, channels // 32, 3, 3), np.float32)
        raw += weight.nbytes
        nodes.node("Conv", nodes.input(np.ones((1, channels, size, size), np.float32)), nodes.constant(weight), group=32)
    (tmp_path / "m.onnx").write_bytes(nodes.proto().SerializeToString())
    for optimize in get_args(Optimize):
        bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / optimize, device=name, optimize=optimize, build=False)
        assert sum(part.nbytes for part in bundle.program.slices) < 2 * raw


@given(
    st.sampled_from(descriptor_names()).map(load_descriptor),
    st.sampled_from((*CONTRACTIONS, "attention")),
    st.tuples(*[st.integers(1, 5000)] * 3),
    st.integers(1, 64),
)
def test_one_of_the_list_is_chosen(
    descriptor: DeviceDescriptor, family: str, sizes: tuple[int, int, int], batches: int
) -> None:
    assert choose(descriptor, Workload(family, "buffer", *sizes, batches)) in configs_of(descriptor, family)


@pytest.mark.parametrize(("columns", "groups", "wide"), [(4, 32, False), (32, 4, True), (4, 1, True)])
def test_groups_are_not_mostly_padding(columns: int, groups: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide panel for each of 32 groups of 4 columns would keep eight times the weights, and is never worth its time."""
    descriptor = load_descriptor("nvidia")
    workload = Workload("conv", "buffer", 3136, 36, columns, groups, taps=9)
    [plain, *_] = plain_configs(descriptor, "conv")
    fast = StagedContraction("wide", 4, 8, (8, 4), k_block=8)

    def as_if_measured(descriptor: DeviceDescriptor, workload: Workload) -> dict[Any, float]:
        return {plain: 1.0, fast: 0.001}

    monkeypatch.setattr("flashmem.compiler.selection.selector.seconds", as_if_measured)
    found = KernelSelector(descriptor, "steady").config(workload)
    assert found == (fast if wide else plain)
    assert groups == 1 or packed_bytes(workload, found) == 4 * 36 * columns * groups
