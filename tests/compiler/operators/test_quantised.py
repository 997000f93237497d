"""Quantised operators and weights, on every device, memory path and transfer mode.

Integer products are compared with exact sums. Weights that stay 8 or 4 bit are compared bit for bit with the same model with
float weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import flashmem
from flashmem.base.errors import UserError
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from tests.conformance.test_exact_types import Model
from tests.support.compared import DEVICES, Nodes, compare, require_right
from tests.support.inputs import KINDS
from tests.support.paths import DATA, ROOT
from tests.support.rounding import evaluated

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


def described(device: str, memory_path: str, folder: Path) -> str:
    """The target of the compilation: the real device on one path; on others small tiles, whose kernels build faster."""
    if (device, memory_path) == CASES[0]:
        return device
    text = (ROOT / "devices" / f"{device}.toml").read_text()
    for name, size in (("rows", 2), ("columns", 8), ("vector", 4)):
        text = re.sub(rf"^{name} = \d+", f"{name} = {size}", text, flags=re.MULTILINE)
    text = re.sub(r"^(capacity_model|counted|tuned).*", "", text, flags=re.MULTILINE)
    small = folder / f"{device}-small.toml"
    small.write_text(text)
    return str(small)


def run_in_all_modes(path: Path, bundle: Path, device: str, memory_path: Any, feeds: dict[str, Array]) -> list[Array]:
    """The answers; checks that they have the same bits in every transfer mode."""
    answers: list[list[Array]] = []
    made = flashmem.compile(path, bundle, device=described(device, memory_path, path.parent), memory_path=memory_path)
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
    m.matmul("uint8 by int8", m.draw("uint8", 7, 37), m.draw("int8", 37, 21), 3, m.draw("int8", 21))
    m.matmul("int8 by uint8", m.draw("int8", 2, 3, 37), m.draw("uint8", 37, 21), None, 7)
    m.matmul("both of the run", m.draw("uint8", 7, 37), m.draw("uint8", 37, 21), m.draw("uint8", 7), 5, runtime=True)
    m.conv("3x3", m.draw("uint8", 2, 5, 9, 8), m.draw("int8", 11, 5, 3, 3), 100, m.draw("int8", 11), pads=[1, 2, 0, 1])
    m.conv("groups", m.draw("int8", 1, 6, 7, 7), m.draw("uint8", 8, 3, 3, 3), -9, 131, group=2, strides=[2, 1], pads=[1] * 4)
    m.conv("depthwise", m.draw("int8", 1, 6, 7, 7), m.draw("int8", 6, 1, 3, 3), 131 - 256, 4, group=6, pads=[1] * 4)
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


LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int8": (-128, 127), "uint8": (0, 255), "uint16": (0, 65535)}


class Weights(Model):
    """Products with constants after a DequantizeLinear, or with the floats that these represent."""

    def __init__(self, *, floats: bool) -> None:
        super().__init__()
        self.floats, self.random = floats, np.random.default_rng(11)

    def codes(self, dtype: str, shape: tuple[int, ...]) -> tuple[Array, str]:
        low, high = LIMITS[dtype]
        data = self.random.integers(low, high + 1, shape)
        name = f"q{len(self.constants)}"
        stored = data.astype(getattr(ml_dtypes, dtype) if dtype.endswith("int4") else dtype)
        self.constants.append(numpy_helper.from_array(stored, name))
        return data, name

    def weight(self, dtype: str, shape: tuple[int, ...], *, axis: int | None = None, block: int = 0, zero: bool = True) -> str:
        """A weight with one scale in all, one for each index of `axis`, or one for each `block` along it."""
        counts = tuple(-(-n // block) if a == axis else n for a, n in enumerate(shape)) if block else ()
        counts = (shape[axis],) if axis is not None and not block else counts
        data, name = self.codes(dtype, shape)
        zeros, zero_name = self.codes(dtype, counts)
        scale = (self.random.random(counts) * 0.02 + 0.01).astype(np.float32)

        def spread(array: Array) -> Array:
            if block:
                assert axis is not None
                return array.take(np.arange(shape[axis]) // block, axis)
            return array if axis is None else array.reshape([-1 if a == axis else 1 for a in range(len(shape))])

        if self.floats:
            return self.constant((data - spread(zeros) * zero).astype(np.float32) * spread(scale), "float32")
        inputs = [name, self.constant(scale, "float32"), *([zero_name] if zero else [])]
        attributes = ({} if axis is None else {"axis": axis}) | ({"block_size": block} if block else {})
        return self.node(f"{name} dequantised", "DequantizeLinear", *inputs, inner=True, **attributes)

    def product(self, title: str, op: str, x: tuple[int, ...], weight: str, **attributes: Any) -> None:
        self.node(title, op, self.input(self.random.standard_normal(x), "float32"), weight, dtype="float32", **attributes)


def weights(*, floats: bool) -> Weights:
    m = Weights(floats=floats)
    m.product("uint8", "MatMul", (2, 5, 150), m.weight("uint8", (150, 70)))
    stored = m.weight("uint4", (70, 150), axis=1, block=32)
    turned = m.node("turned", "Transpose", stored, inner=True, perm=[1, 0])
    m.product("uint4 in blocks, transposed", "MatMul", (5, 150), turned)
    m.product("int4 in long blocks", "Gemm", (5, 200), m.weight("int4", (200, 6), axis=0, block=96, zero=False))
    m.product("a scale a row", "MatMul", (3, 40), m.weight("int8", (40, 6), axis=0))
    m.product("a stack", "MatMul", (2, 3, 40), m.weight("int8", (2, 40, 6), axis=2, zero=False))
    m.product("Conv", "Conv", (1, 16, 6, 5), m.weight("int8", (20, 16, 3, 3), axis=0, zero=False), pads=[1] * 4)
    m.product("Conv in blocks", "Conv", (1, 16, 6, 5), m.weight("uint4", (9, 16, 3, 1), axis=1, block=8))
    m.product("depthwise", "Conv", (1, 20, 6, 5), m.weight("int4", (20, 1, 3, 3), axis=0), group=20)
    m.product("ConvTranspose", "ConvTranspose", (1, 16, 3, 4), m.weight("uint16", (16, 6, 2, 2), axis=1), strides=[2, 2])
    table = m.weight("uint4", (50, 24), axis=1, block=8)
    m.node("rows", "Gather", table, m.input([[3, -1], [49, 0]], "int64"), dtype="float32")
    return m


def _of_kind(data: Array, numbers: Callable[..., Array], random: np.random.Generator) -> Array:
    """Floats of another distribution in place of `data`; integers as they are."""
    return numbers(random, data.shape).astype(data.dtype) if data.dtype == np.float32 else data


@pytest.mark.parametrize(("device", "path"), CASES[:3])
def test_quantised_weights_give_the_bits_of_the_floats_they_stand_for(device: str, path: str, tmp_path: Path) -> None:
    quantised, floats = weights(floats=False), weights(floats=True)
    answers = run_in_all_modes(saved(quantised.proto(21), tmp_path), tmp_path / "q.flashmem", device, path, quantised.feeds)
    require_right(floats.proto(21), floats.feeds, answers)
    with flashmem.Session(tmp_path / "q.flashmem", device=device) as session:
        for kind, numbers in KINDS.items():
            random = np.random.default_rng(len(kind))
            feeds = {name: _of_kind(data, numbers, random) for name, data in quantised.feeds.items()}
            assert feeds.keys() == floats.feeds.keys()
            require_right(floats.proto(21), feeds, session.run(None, feeds))
    if (device, path) == CASES[:3][-1]:
        file = saved(floats.proto(21), tmp_path, "floats")
        same = flashmem.compile(
            file,
            tmp_path / "f.flashmem",
            device=described(device, path, tmp_path),
            memory_path=path,  # type: ignore[arg-type]
        )
        with flashmem.Session(same, device=device) as session:
            for output, answer, wanted in zip(quantised.outputs, answers, session.run(None, floats.feeds), strict=True):
                np.testing.assert_array_equal(answer, wanted, err_msg=output.name)


def linear() -> Model:
    """Quantisation at run time, and operators that requantise."""
    m = Model()
    random = np.random.default_rng(2)
    wild = [[0.5, 1.5, 2.5, -0.5, -1.5], [1e9, -1e9, 254.5, 0.0, -3.5], [127.4, 127.6, -128.5, 3e38, 7.0]]
    x = m.input(wild, "float32")
    one = m.constant(1.0, "float32")
    m.node("to uint8", "QuantizeLinear", x, one, m.constant(3, "uint8"), dtype="uint8")
    m.node("to int8", "QuantizeLinear", x, m.constant(0.5, "float32"), dtype="int8", output_dtype=TensorProto.INT8)
    m.node("to int16", "QuantizeLinear", x, m.constant([1, 2, 3, 4, 5], "float32"), m.constant([1] * 5, "int16"), dtype="int16")
    codes = m.input(random.integers(0, 256, (3, 8)), "uint8")
    blocks = m.input(random.random((3, 2)), "float32")
    m.node("in blocks", "DequantizeLinear", codes, blocks, dtype="float32", axis=1, block_size=4)
    m.node(
        "uneven", "DequantizeLinear", codes, m.constant(random.random((3, 3)), "float32"), dtype="float32", axis=1, block_size=3
    )
    drawn = {kind: numbers(random, (5, 9)) for kind, numbers in KINDS.items()}
    for title, data in {**drawn, "none": np.zeros((2, 3)), "above": [[3.0, 4.0]]}.items():
        names = [f"{title}, by its range", f"{title}, scale", f"{title}, zero point"]
        m.nodes.append(helper.make_node("DynamicQuantizeLinear", [m.input(data, "float32")], names))
        kinds = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
        m.outputs += [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)]
    a, b = m.input(random.integers(0, 256, (2, 7, 33)), "uint8"), m.constant(random.integers(-128, 128, (33, 10)), "int8")
    left = (a, m.constant(0.02, "float32"), m.constant(100, "uint8"))
    right = (b, m.constant(random.random(10) * 0.02, "float32"), m.constant([0] * 10, "int8"))
    y = (m.constant(0.05, "float32"), m.constant(128, "uint8"))
    product = m.node("requantised", "QLinearMatMul", *left, *right, *y, dtype="uint8")
    m.node("and on", "Transpose", product, dtype="uint8", perm=[1, 0, 2])
    image = (m.input(random.integers(0, 256, (1, 6, 9, 9)), "uint8"), m.constant(0.1, "float32"), m.constant(120, "uint8"))
    scales = m.constant(random.random(11) * 0.01, "float32")
    kernel = (m.constant(random.integers(-128, 128, (11, 6, 3, 3)), "int8"), scales, m.constant([0] * 11, "int8"))
    bias = m.constant(random.integers(-9000, 9000, 11), "int32")
    m.node("convolved", "QLinearConv", *image, *kernel, *y, bias, dtype="uint8", pads=[1] * 4, strides=[2, 2])
    return m


@pytest.mark.parametrize("device", sorted({device for device, _ in CASES}))
def test_quantising_rounds_and_saturates_as_onnx_runtime(device: str, tmp_path: Path) -> None:
    m = linear()
    made = flashmem.compile(saved(m.proto(21), tmp_path), tmp_path / "b.flashmem", device=device)
    with flashmem.Session(made, device=device) as session:
        answers = session.run(None, m.feeds)
    known = run_ort(m.proto(21), m.feeds)
    exact = [answer.exact for answer in evaluated(m.proto(21), m.feeds)]
    for output, answer, wanted, integers in zip(m.outputs, answers, known, exact, strict=True):
        products = output.name in ("requantised", "and on", "convolved")  # where ONNX Runtime's saturate without VNNI
        np.testing.assert_array_equal(answer, integers if products else wanted, err_msg=output.name)
    # QLinear operators store 8 bits in memory.
    assert {tensor.dtype for tensor in made.program.tensors if tensor.name.startswith("requantised")} == {"uint8"}


def layers(bits: int, count: int = 6, width: int = 512) -> onnx.ModelProto:
    """A chain of MatMuls with weights of `bits` (float32 if 32)."""
    random = np.random.default_rng(1)
    m = Model()
    x = m.input(random.standard_normal((3, width)), "float32")
    for i in range(count):
        codes = random.integers(-7, 8, (width, width))
        name = f"w{i}"
        if bits == 32:
            x = m.node(f"y{i}", "MatMul", x, m.constant(codes * 0.01, "float32"), dtype="float32", inner=i < count - 1)
            continue
        stored = codes.astype(ml_dtypes.int4 if bits == 4 else np.int8)
        m.constants.append(numpy_helper.from_array(stored, name))
        block = {"block_size": 64} if bits == 4 else {}
        scale = m.constant(np.full((width // 64, width) if block else (width,), 0.01), "float32")
        weight = m.node(f"{name}.f", "DequantizeLinear", name, scale, inner=True, axis=0 if block else 1, **block)
        x = m.node(f"y{i}", "MatMul", x, weight, dtype="float32", inner=i < count - 1)
    return m.proto(21)


@pytest.mark.parametrize("path", ["buffer", "texture"])
@pytest.mark.parametrize(("bits", "share", "budget"), [(8, 4.0, 1_400_000), (4, 32 / 4.5, 800_000)])
def test_weights_stay_narrow_and_stream_inside_a_budget(
    bits: int, share: float, budget: int, path: Any, tmp_path: Path
) -> None:
    device = next(iter(MODES))
    feeds = {"x0": np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)}
    wide = 6 * 512 * 512 * 4
    file = saved(layers(bits), tmp_path)
    answers: list[Array] = []
    for mode in MODES[device][path]:
        made = flashmem.compile(
            file, tmp_path / "b.flashmem", device=device, memory_path=path, mode=mode, budget=budget, chunk="64KiB"
        )
        streamed = made.program.weights_bytes - made.program.constants_bytes
        assert streamed > budget and streamed / wide == pytest.approx(1 / share, rel=0.03)
        with flashmem.Session(made, device=device, mode=mode) as session:
            (answer,) = session.run(None, feeds)
            assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
        answers.append(answer)
        np.testing.assert_array_equal(answer, answers[0])
    require_right(layers(32), feeds, answers[:1])


def quantised(kind: str, folder: Path) -> tuple[Path, dict[str, Array]]:
    """A model of tests/data, quantised by ONNX Runtime's tools, and inputs for it."""
    name = {"dynamic": "vit-tiny", "QDQ": "vit-tiny", "QOperator": "resnet-tiny", "4 bit": "gptneo-tiny"}[kind]
    model = onnx.load(DATA / f"{name}.onnx")
    del model.graph.value_info[:]
    source, target = saved(model, folder, "float"), folder / "quantised.onnx"
    random = np.random.default_rng(4)
    feeds: dict[str, Array] = {}
    for port in onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"]).get_inputs():
        integers = "int64" in port.type
        feeds[port.name] = random.integers(0, 50, port.shape) if integers else random.standard_normal(port.shape, np.float32)
    if kind == "dynamic":
        quantization.quantize_dynamic(source, target, per_channel=True, weight_type=quantization.QuantType.QUInt8)
    elif kind == "4 bit":
        made = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=False, quant_format=quantization.QuantFormat.QDQ)
        made.process()
        onnx.save(made.model.model, target)
    else:
        reader = type("Reader", (quantization.CalibrationDataReader,), {"get_next": lambda self: next(self.rest, None)})()
        reader.rest = iter([feeds])
        quantization.quantize_static(
            source,
            target,
            reader,
            quant_format=quantization.QuantFormat[kind],
            per_channel=True,
            op_types_to_quantize=["Conv", "MatMul"],
            weight_type=quantization.QuantType.QInt8,
        )
    return target, feeds


@pytest.mark.parametrize(
    ("kind", "operator", "share"),
    [
        ("dynamic", "MatMulInteger", 3.7),  # beside its codes, a column has their sum in 4 bytes
        ("QDQ", "DequantizeLinear", 3.4),
        ("QOperator", "QLinearConv", 2.5),
        ("4 bit", "DequantizeLinear", 2.5),
    ],
)
def test_models_that_onnx_runtime_quantised(kind: str, operator: str, share: float, tmp_path: Path) -> None:
    path, feeds = quantised(kind, tmp_path)
    assert operator in {node.op_type for node in onnx.load(path).graph.node}
    device = next(iter(MODES))
    made = flashmem.compile(path, tmp_path / "q.flashmem", device=device)
    with flashmem.Session(made, device=device) as session:
        answers = session.run(None, feeds)
    reference = onnx.load(path)
    for entry in reference.opset_import:  # the evaluator has no older DequantizeLinear; no operator here has changed since
        entry.version = max(entry.version, 21) if entry.domain == "" else entry.version
    require_right(reference, feeds, answers, against_runtime=False)
    floats = flashmem.compile(tmp_path / "float.onnx", tmp_path / "f.flashmem", device=device)
    if kind in ("QDQ", "QOperator"):  # tensors between two products have 8 bits
        assert {"uint8", "int8"} & {tensor.dtype for tensor in made.program.tensors}
        assert made.program.arena_bytes < floats.program.arena_bytes
    narrow, wide = (sum(part.nbytes for part in bundle.program.slices) for bundle in (made, floats))
    assert narrow * share <= wide


def _refused(what: str) -> Model:
    m = Model()
    x, one = m.input(np.zeros((2, 6)), "float32"), m.constant(1.0, "float32")
    if what == "4 bits of the run":
        m.node("y", "QuantizeLinear", x, one, inner=True, output_dtype=TensorProto.INT4)
        m.node("z", "DequantizeLinear", "y", one, dtype="float32")
    elif what == "scale":
        m.node("y", "QuantizeLinear", x, m.constant([1.0] * 4, "float32"), m.constant([0] * 4, "int8"), dtype="int8")
    elif what == "weights of the run":
        image, kernel = m.input(np.zeros((1, 1, 4, 4)), "uint8"), m.input(np.zeros((1, 1, 2, 2)), "int8")
        m.node("y", "ConvInteger", image, kernel, dtype="int32")
    else:
        m.node("y", "MatMulInteger", m.input(np.zeros((2, 6)), "int8"), m.constant(np.zeros((5, 4)), "int8"), dtype="int32")
    return m


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("4 bits of the run", "has element type int4"),
        ("scale", "scale of shape"),
        ("weights of the run", "ConvInteger with weights computed at run time"),
        ("shapes", "MatMulInteger"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(what: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as refused:
        flashmem.compile(saved(_refused(what).proto(21), tmp_path), tmp_path / "b.flashmem", device=next(iter(MODES)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_volumes_and_taps_that_move(place: tuple[str, str], tmp_path: Path) -> None:
    """An integer convolution over three dimensions, and quantised weights of a kernel that reads only floats."""
    random = np.random.default_rng(4)
    weights = random.integers(-128, 128, (8, 3, 3, 3, 3)).astype(np.int8)
    scales = (0.01 + 0.02 * random.random(8)).astype(np.float32)
    n = Nodes(opset=22)
    scale, zero, none = n.constant(np.float32(0.02)), n.constant(np.uint8(120)), n.constant(np.zeros(8, np.int8))
    x = n.input(random.integers(0, 256, (1, 3, 5, 6, 7)).astype(np.uint8))
    bias = n.constant(random.integers(-999, 999, 8).astype(np.int32))
    given = (n.constant(weights), n.constant(scales), none, n.constant(np.float32(0.9)), zero, bias)
    n.node("QLinearConv", x, scale, zero, *given, dtypes=("uint8",), pads=[1] * 6)
    (moved,) = n.node("DequantizeLinear", n.constant(weights[:, :, 0]), given[1], none, axis=0)
    image, offset = (n.input(random.standard_normal((1, c, 6, 6)).astype(np.float32)) for c in (3, 18))
    n.node("DeformConv", image, moved, offset, pads=[1] * 4)
    compare(n, place, tmp_path)


def test_a_scale_shows_nan_that_integers_cannot(tmp_path: Path) -> None:
    """As ONNX's definition has it. ONNX Runtime's result depends on the place of the NaN."""
    m = Model()
    names = ["integers", "scale", "zero point"]
    m.nodes.append(helper.make_node("DynamicQuantizeLinear", [m.input([1.0, np.nan, -2.0], "float32")], names))
    kinds = (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)
    m.outputs += [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)]
    made = flashmem.compile(saved(m.proto(21), tmp_path), tmp_path / "b.flashmem", device=CASES[0][0])
    with flashmem.Session(made, device=CASES[0][0]) as session:
        _, scale, zero = session.run(None, m.feeds)
    assert np.isnan(scale) and zero == 255
