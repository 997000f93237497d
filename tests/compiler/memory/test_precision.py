"""`--precision fp16`: activations are stored in half, rounded once for each launch, and computed in float32.

Every kernel reads and writes halves. The same operator is computed in float64 from the halves that flashmem read. The stored
result must be what a float32 answer rounds to, with the error that float32 permits (`tests.support.rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import flashmem
from flashmem.base.types import TENSOR_ALIGNMENT
from flashmem.compiler.ir.fusion_group import FusedGraph
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.kernels.contraction.configs import Contraction
from flashmem.compiler.memory.precision import SMALL
from flashmem.compiler.operators import is_elementwise
from flashmem.compiler.passes.fusion import fuse, split
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.stages import pipeline
from flashmem.compiler.stages.pipeline import generate
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import load_descriptor
from tests.compiler.selection.test_configs import CONFIGS
from tests.support.command_line import command_line
from tests.support.compared import DEVICES, PLACES, apart, by_runtime, outside_halves
from tests.support.inputs import KINDS
from tests.support.rounding import evaluated
from tests.support.zoo_data import DATA, examples

Array = NDArray[Any]
RANDOM = np.random.default_rng(16)


QUICK = next((device for device, _ in DEVICES if device == "intel-cpu"), None)
"""The device with the fastest kernel builds."""

QUICKEST = next((place for place in PLACES if place[0] == QUICK), PLACES[0])

ONCE = [place for place in PLACES if place in DEVICES or place[0] == QUICK]
"""Every device once, the one with the fastest builds on each memory path."""


def _halves(*shape: int) -> Array:
    """Numbers that are exact in half, so that weights lose nothing."""
    return RANDOM.standard_normal(shape).astype(np.float16).astype(np.float32)


OF_HALVES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    **{kind: KINDS[kind] for kind in ("normal", "around 1e3", "around -1e4", "positive")},
    "large": lambda random, shape: 1e4 * random.uniform(-1, 1, shape),  # products and sums are infinite in half
    "tiny": lambda random, shape: 1e-6 * random.standard_normal(shape),  # subnormal halves
}
"""The distribution of activations, of each kind within the range of halves."""


@dataclass(frozen=True)
class Half:
    """An activation of this shape that is stored in half; or one that could be, but must stay float32 (`kept`).

    `normal`: standard normal times `scale` in every run, for positions and integers. Others are of every kind in turn.
    """

    shape: tuple[int, ...]
    scale: float = 1
    kept: bool = False
    normal: bool = False

    @property
    def rounded(self) -> bool:
        """Whether its elements are rounded to half."""
        return not self.kept and int(np.prod(self.shape)) > SMALL


@dataclass(frozen=True)
class Given:
    """Run-time data that is not a float, or that stays float32."""

    data: Array


@dataclass(frozen=True)
class Case:
    """One operator. `inputs`: halves, run-time data, and constants (arrays). `kept`: its result stays float32."""

    op: str
    inputs: Sequence[Half | Given | Array]
    attributes: dict[str, Any] = field(default_factory=dict)
    exact: bool = False
    kept: bool = False
    outputs: Sequence[str] = ("float32",)


def _case(op: str, *inputs: Half | Given | Array, exact: bool = False, kept: bool = False,
          outputs: Sequence[str] = ("float32",), **attributes: Any) -> Case:  # fmt: skip
    arrays = [each if isinstance(each, Half | Given) else np.asarray(each) for each in inputs]
    return Case(op, arrays, attributes, exact, kept, outputs)


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


X = Half((1, 3, 7, 11))  # 231 elements: no vector width divides it
ROWS = Half((7, 33))

CONTRACTIONS = [
    _case("MatMul", ROWS, _halves(33, 21)),
    _case("MatMul", Half((3, 7, 33)), Half((3, 33, 15))),
    _case("Gemm", ROWS, Half((15, 33)), transB=1),
    _case("Conv", X, _halves(13, 3, 3, 3), pads=[1, 1, 1, 1]),
    _case("Conv", X, Half((35, 3, 1, 3))),
    _case("Conv", X, _halves(3, 1, 3, 3), pads=[1, 0, 1, 0], group=3),
    _case("Conv", Half((1, 3, 5, 3, 7)), _halves(5, 3, 3, 1, 3)),
    _case("DeformConv", X, _halves(5, 3, 3, 3), Half((1, 18, 5, 9), kept=True, normal=True)),
    _case("ConvTranspose", X, _halves(3, 5, 3, 3), strides=[2, 2]),
]

STAGED = [
    _case("MatMul", Half((19, 52)), _halves(52, 45)),
    _case("MatMul", Half((13, 71)), _halves(71, 36)),
    _case("MatMul", Half((3, 2, 9, 20)), Half((2, 20, 12))),
    _case("MatMul", Half((2, 9, 22)), Half((2, 22, 13))),
    _case("Gemm", Half((11, 22)), Half((15, 22)), transB=1),
    _case("Conv", Half((2, 16, 9, 7)), _halves(21, 16, 3, 3), pads=[1, 2, 0, 1], strides=[2, 1]),
    _case("Conv", Half((2, 16, 9, 7)), _halves(6, 8, 3, 3), group=2, dilations=[1, 2]),
]

COPIES = [
    _case("Transpose", Half((3, 7, 11)), perm=[2, 0, 1], exact=True),
    _case("Transpose", Half((3, 32, 48)), perm=[0, 2, 1], exact=True),
    _case("Transpose", Half((48, 33)), perm=[1, 0], exact=True),
    _case("Transpose", Given(_halves(32, 48)), perm=[1, 0], exact=True),
    _case("Slice", Half((9, 43)), _ints(1, 40), _ints(9, 1), _ints(0, 1), _ints(1, -3), exact=True),
    _case("Slice", Half((9, 44)), _ints(4), _ints(44), _ints(1), exact=True),
    _case("Concat", ROWS, Half((7, 4)), axis=1, exact=True),
    _case("Concat", ROWS, Given(_halves(7, 5)), axis=1, exact=True),
    _case("Pad", ROWS, _ints(1, -2, 0, 3), np.float32(1.5).reshape(()), exact=True),
    _case("Tile", ROWS, _ints(3, 1), exact=True),
    _case("Expand", Half((3, 1, 99)), _ints(3, 5, 99), exact=True),
    _case("Gather", ROWS, Given(_ints(0, 6, -3, 2)), axis=0, exact=True),
    _case("Gather", _halves(9, 33), Given(_ints(5, -9, 3)), axis=0, exact=True),
    _case("GatherElements", ROWS, Given(RANDOM.integers(-7, 7, (5, 33))), axis=0, exact=True),
    _case("ScatterElements", ROWS, Given(RANDOM.permuted(np.tile(np.arange(7), (33, 1)), axis=1).T[:4].copy()),
          Given(_halves(4, 33)), axis=0, exact=True),
    _case("ScatterND", ROWS, Given(np.array([[5], [2]])), Given(_halves(2, 33)), exact=True),
    _case("ScatterElements", ROWS, Given(RANDOM.integers(0, 7, (9, 33))), Given(_halves(9, 33)), axis=0, reduction="add",
          kept=True),
    _case("MaxPool", X, kernel_shape=[3, 2], pads=[1, 0, 1, 0], exact=True),
    _case("MaxUnpool", Half((1, 3, 5, 7)), Given(RANDOM.permutation(420)[:105].reshape(1, 3, 5, 7)), kernel_shape=[2, 2],
          strides=[2, 2], exact=True),
    _case("MaxPool", Half((1, 3, 9, 13)), kernel_shape=[2, 2], exact=True, outputs=("float32", "int64")),
    _case("Resize", X, np.zeros(0, np.float32), np.array([1, 1, 2, 3], np.float32), mode="nearest", exact=True),
    _case("TopK", Half((9, 45)), _ints(40), exact=True, outputs=("float32", "int64")),
    _case("ArgMax", Half((9, 45)), axis=1, exact=True, outputs=("int64",)),
]  # fmt: skip

SUMS = [
    _case("Softmax", ROWS),
    _case("Softmax", Half((5, 3, 7)), axis=1),
    _case("LogSoftmax", ROWS),
    _case("LayerNormalization", ROWS, _halves(33), _halves(33)),
    _case("ReduceMean", Half((101, 9)), _ints(1), kept=True),
    _case("ReduceMax", Half((9, 101)), _ints(0), exact=True, kept=True),
    _case("ReduceLogSumExp", Half((101, 3)), _ints(1), kept=True),
    _case("LRN", X, size=3),
    _case("AveragePool", X, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    _case("Resize", X, np.zeros(0, np.float32), np.array([1, 1, 2, 1.5], np.float32), mode="linear"),
    _case("GridSample", X, Given(RANDOM.uniform(-1.2, 1.2, (1, 5, 9, 2)).astype(np.float32))),
    _case("RoiAlign", X, Given(np.array([[0, 0, 6, 5], [1, 2, 9, 6]], np.float32)), Given(_ints(0, 0)), output_height=5,
          output_width=4, mode="avg", sampling_ratio=2),
    _case("CumSum", Half((3, 5, 7)), np.int64(1)),
    _case("CumSum", Half((3, 700)), np.int64(1)),
    _case("Add", ROWS, Half((7, 33))),
    _case("Mul", Half((33, 4)), Half((33, 1))),
    _case("Gelu", ROWS),
    _case("Where", Given(RANDOM.random((7, 33)) < 0.5), ROWS, _halves(33), exact=True),
    _case("QuantizeLinear", ROWS, np.float32(0.02), np.uint8(120), exact=True, outputs=("uint8",)),
    _case("Cast", Half((7, 33), scale=3000, kept=True, normal=True), to=int(onnx.TensorProto.INT32), exact=True,
          outputs=("int32",)),
    _case("Det", Half((13, 3, 3), kept=True), kept=True),
    _case("LSTM", Half((5, 3, 11)), _halves(1, 28, 11), _halves(1, 28, 7), hidden_size=7, kept=True),
]  # fmt: skip


def _build(cases: Sequence[Case]) -> onnx.ModelProto:
    """A model of all cases: each activation is a Slice of an input, which stores it; each result is joined with itself."""
    nodes, ports, outputs, constants = [], [], [], []

    def add_constant(name: str, data: Array) -> str:
        constants.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def add_input(name: str, dtype: Any, shape: Sequence[int]) -> None:
        ports.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))

    one, end = add_constant("one", _ints(1)), add_constant("end", _ints(2**31))
    for number, case in enumerate(cases):
        names = []
        for index, given in enumerate(case.inputs):
            name = f"n{number}.{index}"
            if isinstance(given, Half):
                add_input(f"{name}.x", np.float32, [int(np.prod(given.shape)) + 1])
                nodes.append(helper.make_node("Slice", [f"{name}.x", one, end], [f"{name}.flat"]))
                shape = add_constant(f"{name}.shape", _ints(*given.shape))
                nodes.append(helper.make_node("Reshape", [f"{name}.flat", shape], [name]))
            elif isinstance(given, Given):
                add_input(name, given.data.dtype, given.data.shape)
            else:
                add_constant(name, given)
            names.append("" if isinstance(given, np.ndarray) and given.size == 0 else name)
        made = [f"y{number}.{i}" for i in range(len(case.outputs))]
        nodes.append(helper.make_node(case.op, names, made, **case.attributes))
        for name, dtype in zip(made, case.outputs, strict=True):
            flat = add_constant(f"{name}.shape", _ints(-1))
            nodes.append(helper.make_node("Reshape", [name, flat], [f"{name}.flat"]))
            nodes.append(helper.make_node("Concat", [f"{name}.flat"] * 2, [f"{name}.twice"], axis=0))
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            outputs.append(helper.make_tensor_value_info(f"{name}.twice", kind, None))
    graph = helper.make_graph(nodes, "halves", ports, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _data(cases: Sequence[Case], kind: str) -> tuple[dict[str, Array], list[list[Array]]]:
    """The inputs of the model of `cases`, and for each case the arrays that its operator reads."""
    feeds: dict[str, Array] = {}
    read = []
    for number, case in enumerate(cases):
        arrays = []
        for index, given in enumerate(case.inputs):
            name = f"n{number}.{index}"
            if isinstance(given, Half):
                random, count = np.random.default_rng([number, index]), int(np.prod(given.shape)) + 1
                drawn = OF_HALVES["normal" if given.normal else kind](random, (count,))
                data = feeds[f"{name}.x"] = (given.scale * drawn).astype(np.float32)
                stored = data[1:].astype(np.float16).astype(np.float32) if given.rounded else data[1:]
                arrays.append(stored.reshape(given.shape))
            elif isinstance(given, Given):
                feeds[name] = given.data
                arrays.append(given.data)
            else:
                arrays.append(given)
        read.append(arrays)
    return feeds, read


def _alone(case: Case, arrays: Sequence[Array]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of the operator alone, and its inputs: the halves that it reads, in float32."""
    feeds = {f"x{i}": array for i, array in enumerate(arrays) if array.size}
    names = [f"x{i}" if array.size else "" for i, array in enumerate(arrays)]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        for i, dtype in enumerate(case.outputs)
    ]
    node = helper.make_node(case.op, names, [info.name for info in outputs], **case.attributes)
    graph = helper.make_graph([node], "one", infos, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), feeds


def _check(cases: Sequence[Case], place: tuple[str, str], folder: Path) -> None:
    """Compare one program of all `cases` with each operator alone, for activations of every kind."""
    model = _build(cases)
    device, path = place
    onnx.save(model, folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "b", device=device, memory_path=path, precision="fp16")  # type: ignore[arg-type]
    stored = {tensor.name: tensor.dtype for tensor in bundle.program.tensors}
    for number, case in enumerate(cases):
        for index, given in enumerate(case.inputs):
            if isinstance(given, Half):
                assert stored[f"n{number}.{index}.flat"] == ("float16" if given.rounded else "float32"), case.op
    names = [info.name for info in model.graph.output]
    found: list[str] = []
    with flashmem.Session(bundle, device=device) as session:
        for kind in OF_HALVES:
            feeds, read = _data(cases, kind)
            answers = dict(zip(names, session.run(None, feeds), strict=True))
            for number, (case, arrays) in enumerate(zip(cases, read, strict=True)):
                twice = [answers[f"y{number}.{i}.twice"] for i in range(len(case.outputs))]
                found += _wrong(case, arrays, twice, f"{case.op} {number}, {kind}")
    assert not found, "\n".join(found)


def _wrong(case: Case, arrays: Sequence[Array], answers: Sequence[Array], about: str) -> list[str]:
    """Compare `answers`, each twice in a row, with those of the operator alone; says which floats are wrong."""
    found: list[str] = []
    model, feeds = _alone(case, arrays)
    others = by_runtime(model, feeds)
    known = [None] * len(others) if case.exact else evaluated(model, feeds)
    for answer, other, right in zip(answers, others, known, strict=True):
        got, again = (half.reshape(other.shape) for half in np.split(answer, 2))
        np.testing.assert_array_equal(got, again, err_msg=about)
        assert got.dtype == other.dtype, about
        in_half = got.dtype == np.float32 and not case.kept and got.size > SMALL
        assert not in_half or np.array_equal(got, got.astype(np.float16), equal_nan=True), f"{about} is not stored in half"
        if right is None:
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(got, other.astype(np.float16) if in_half else other, err_msg=about)
            continue
        wrong = outside_halves(got, right, other) if in_half else apart(got, right, other)
        if wrong.any():
            at = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            found.append(f"{about}: {int(wrong.sum())} of {got.size} are wrong, at {at} {got[at]}, not {right.exact[at]}")
    return found


@pytest.mark.parametrize("place", ONCE, ids="-".join)
def test_contractions_read_and_leave_halves(place: tuple[str, str], tmp_path: Path) -> None:
    _check(CONTRACTIONS if place[0] == QUICK else CONTRACTIONS[:4], place, tmp_path)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config.name)
def test_staged_contractions_read_and_leave_halves(
    config: Contraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda self, *given: config)
    _check(STAGED, QUICKEST, tmp_path)
    launches = flashmem.Bundle.open(tmp_path / "b").program.launches
    staged = {each.shape.family for each in launches if max(each.local_size or (1,)) == config.items}
    assert staged >= set(config.families)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_what_computes_reads_and_leaves_halves(place: tuple[str, str], tmp_path: Path) -> None:
    _check(SUMS, place, tmp_path)


def test_copies_of_halves_are_exact(tmp_path: Path) -> None:
    _check(COPIES, QUICKEST, tmp_path)


@pytest.mark.parametrize("compiled_for", ["", "nvidia"])
@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_attention_reads_and_leaves_halves(place: tuple[str, str], compiled_for: str, tmp_path: Path) -> None:
    """Also in the form for GPUs, with local memory, on every device."""
    device, path = place
    nodes, inputs, outputs, constants = [], [], [], []
    shapes: dict[str, tuple[int, ...]] = {}
    for n, (rows, keys, size, value_size) in enumerate(((19, 37, 20, 9), (1, 150, 16, 101), (70, 13, 8, 8))):
        given = {"q": (2, rows, size), "k": (2, keys, size), "v": (2, keys, value_size), "m": (rows, keys)}
        shapes |= {f"{letter}{n}": shape for letter, shape in given.items()}
        constants.append(numpy_helper.from_array(np.array([size**-0.5], np.float32), f"scale{n}"))
        nodes += [helper.make_node("Neg", [f"{letter}{n}"], [f"{letter}{n}.h"]) for letter in given]
        nodes += [
            helper.make_node("Transpose", [f"k{n}.h"], [f"t{n}"], perm=[0, 2, 1]),
            helper.make_node("MatMul", [f"q{n}.h", f"t{n}"], [f"p{n}"]),
            helper.make_node("Mul", [f"p{n}", f"scale{n}"], [f"s{n}"]),
            helper.make_node("Add", [f"s{n}", f"m{n}.h"], [f"a{n}"]),
            helper.make_node("Softmax", [f"a{n}"], [f"w{n}"], axis=-1),
            helper.make_node("MatMul", [f"w{n}", f"v{n}.h"], [f"r{n}"]),
            helper.make_node("Concat", [f"r{n}", f"r{n}"], [f"y{n}"], axis=0),
        ]
        outputs.append(helper.make_tensor_value_info(f"y{n}", onnx.TensorProto.FLOAT, None))
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    chosen: dict[str, Any] = {"device": compiled_for or device, "memory_path": path}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", precision="fp16", **chosen)
    assert [launch.shape.family for launch in bundle.program.launches].count("attention") == 3
    by_tensor_cores = any(launch.kernel.startswith("tensor_") for launch in bundle.program.launches)
    with flashmem.Session(bundle, device=device) as session:
        for kind in OF_HALVES:
            random = np.random.default_rng(len(kind))
            kinds = {"q": "normal", "k": "normal", "v": kind, "m": kind}  # scores of 1e6 have no digits for a softmax
            feeds = {n: OF_HALVES[kinds[n[0]]](random, shape).astype(np.float32) for n, shape in shapes.items()}
            answers = session.run(None, feeds)
            stored = {n: x if x.size <= SMALL else x.astype(np.float16).astype(np.float32) for n, x in feeds.items()}
            others, known = by_runtime(model, stored), evaluated(model, stored)
            for n, (answer, right, other) in enumerate(zip(answers, known, others, strict=True)):
                np.testing.assert_array_equal(answer, answer.astype(np.float16))
                # Tensor cores take the weights of the values in half; the sum of the weights is 1.
                more = 2.0**-11 * float(np.abs(feeds[f"v{n}"]).max()) if by_tensor_cores else 0.0
                wrong = outside_halves(answer, right, other, more)
                assert not wrong.any(), f"{kind}: {wrong.sum()} of {wrong.size}: {answer[wrong][0]} not {right.exact[wrong][0]}"


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_stores_round_to_nearest_even_and_overflow_to_infinity(place: tuple[str, str], tmp_path: Path) -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    between = finite.view(np.uint32) + np.array([[0xFFF], [0x1000], [0x1001]], np.uint32)  # around the middle of two halves
    numbers = np.concatenate([halves, between.view(np.float32).reshape(-1), np.float32([65519.996, 65520, 1e38, -1e38, 1e-8])])
    answers = _through(numbers, "float32", "Identity", place, tmp_path)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(answers, numbers.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_half_ports_are_not_converted(place: tuple[str, str], tmp_path: Path) -> None:
    numbers = RANDOM.standard_normal(333).astype(np.float16)
    np.testing.assert_array_equal(_through(numbers, "float16", "Relu", place, tmp_path), np.maximum(numbers, 0))
    stored = {tensor.dtype for tensor in flashmem.Bundle.open(tmp_path / "b").program.tensors}
    assert stored == {"float16"}


def _through(numbers: Array, dtype: str, op: str, place: tuple[str, str], folder: Path) -> Array:
    """The result of two copies with `op` between them, both of which store their results."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("Slice", ["x", "start", "end"], ["cut"]),
        helper.make_node(op, ["cut"], ["made"]),
        helper.make_node("Concat", ["made", "made"], ["y"], axis=0),
    ]
    constants = [numpy_helper.from_array(_ints(1), "start"), numpy_helper.from_array(_ints(numbers.size + 1), "end")]
    graph = helper.make_graph(
        nodes, "through", [helper.make_tensor_value_info("x", kind, (numbers.size + 2,))],
        [helper.make_tensor_value_info("y", kind, None)], constants,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "m.onnx")
    device, path = place
    bundle = flashmem.compile(folder / "m.onnx", folder / "b", device=device, memory_path=path, precision="fp16")  # type: ignore[arg-type]
    with flashmem.Session(bundle, device=device) as session:
        [answer] = session.run(None, {"x": np.pad(numbers, 1)})
    return answer[: numbers.size]


def _graph(name: str) -> Graph:
    return read_graph(DATA / f"{name}.onnx", resolve(BundleRequest(device="generic-cpu", precision="fp16")))


@pytest.mark.parametrize("name", ["gptneo-tiny", "mobilenet-tiny", "sam2-narrow"])
def test_what_lies_between_the_pieces_of_a_layer_is_not_rounded(name: str) -> None:
    graph = _graph(name)
    cuts = frozenset(node for node in graph.nodes if is_elementwise(node))
    descriptor = load_descriptor("generic-cpu")
    apart = generate(split(fuse(graph), cuts), descriptor, precision="fp16").program
    between = {tensor.name: tensor.dtype for tensor in apart.tensors}
    for tensor in generate(fuse(graph), descriptor, precision="fp16").program.tensors:
        assert between.pop(tensor.name) == tensor.dtype
    assert between and "float16" not in between.values()


@pytest.mark.skipif(QUICK is None, reason="many kernels: only where they are built fast")
def test_cuts_leave_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gptneo-tiny"
    device, draw = str(QUICK), np.random.default_rng(3)
    inputs = examples(name)
    answers = []
    for is_cut in (False, True):

        def split_more(fused: FusedGraph, cuts: Collection[Node], is_cut: bool = is_cut) -> FusedGraph:
            chosen = [node for node in fused.graph.nodes if is_elementwise(node) and is_cut and draw.random() < 0.4]
            return split(fused, {*cuts, *chosen})

        monkeypatch.setattr(pipeline, "split", split_more)
        bundle = flashmem.compile(
            DATA / f"{name}.onnx", tmp_path / f"{is_cut}", device=device, precision="fp16", unfusion=False
        )
        with flashmem.Session(bundle, device=device) as session:
            answers.append(session.run(None, inputs))
    for whole, cut in zip(*answers, strict=True):
        np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("name", ["vit-tiny", "resnet-tiny", "sam2-narrow", "sd-tiny-unet"])
def test_activations_take_half_the_memory(name: str) -> None:
    graph = _graph(name)
    sizes = {}
    for precision in ("fp32", "fp16"):
        program = generate(fuse(graph), load_descriptor("generic-cpu"), precision=precision).program  # type: ignore[arg-type]
        ports = {port.tensor for port in (*program.inputs, *program.outputs)}
        sizes[precision] = sum(t.nbytes for t in program.tensors if t.name not in ports and t.nbytes > 8 * TENSOR_ALIGNMENT)
    assert sizes["fp16"] < 0.56 * sizes["fp32"]


def test_an_overflow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["large"]),
        helper.make_node("Softmax", ["large"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (9, 33)) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(33, dtype=np.float32) * 30000, "w")
    graph = helper.make_graph(nodes, "large", ports[:1], ports[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.full((9, 33), 4, np.float32))
    flashmem_ = command_line(monkeypatch, capfd)
    words = ["run", tmp_path / "m.onnx", "--device", QUICKEST[0], "--input", tmp_path / "x.npz", "--verify", "--json"]
    assert flashmem_(*words).code == 0
    outcome = flashmem_(*words, "--precision", "fp16")
    assert outcome.code == 1 and "65504" in outcome.err and "--precision fp32" in outcome.err
    assert outcome.json["verify"]["ok"] is False
