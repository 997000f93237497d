"""Operators that read, write, select and sum along an axis, compared with ONNX Runtime on every device and memory path.

All nodes are outputs of one model, so that each device compiles once. If ONNX Runtime lacks an operator, numpy computes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import UnsupportedModelError
from tests.conformance.test_exact_types import DEVICES, Model

Array = NDArray[Any]

RANDOM = np.random.default_rng(5)
MANY = RANDOM.standard_normal(1000).astype(np.float32)
WHERE = RANDOM.integers(-37, 37, 1000)
LONG = RANDOM.integers(-2, 2, 3000).astype(np.float32)


def _draw(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def _gathers(m: Model) -> None:
    x = m.input(_draw(3, 5, 7), "float32")
    for title, indices in (("", m.input(RANDOM.integers(-7, 7, (2, 5, 9)), "int64")),
                           ("constant ", m.constant(RANDOM.integers(-7, 7, (2, 5, 9)), "int32"))):  # fmt: skip
        m.node(f"{title}elements", "GatherElements", x, indices, dtype="float32", axis=-1)
    wide = m.input([[2**40, -(2**50)], [3, -4]], "int64")
    m.node("wide elements", "GatherElements", wide, m.input([[1, 0], [-1, 0]], "int32"), dtype="int64", axis=0)
    m.node("runs", "GatherND", x, m.input([[0, -1], [2, 3]], "int64"), dtype="float32")
    m.node("of each batch", "GatherND", x, m.input([[[1, 2]], [[-1, -1]], [[0, 6]]], "int64"), dtype="float32", batch_dims=1)
    m.node("booleans", "GatherND", m.input([[True, False]], "bool"), m.constant([0, -2], "int64"), dtype="bool")
    for time in (0, 1):
        lengths = m.input(RANDOM.integers(1, (3, 5)[time] + 1, (5, 3)[time]), "int64")
        m.node(f"reversed {time}", "ReverseSequence", x, lengths, dtype="float32", time_axis=time, batch_axis=1 - time)
    m.node("compressed", "Compress", x, m.constant([True, False, False, True], "bool"), dtype="float32", axis=1)


def _scatters(m: Model) -> None:
    x, line = m.input(_draw(4, 6, 5), "float32"), m.input(np.zeros(37), "float32")
    m.node("in order", "ScatterElements", line, m.input(WHERE, "int64"), m.input(MANY, "float32"), dtype="float32",
           reduction="add")  # fmt: skip
    m.node("constant in order", "ScatterND", m.constant(np.zeros(37), "float32"), m.constant(WHERE[:, None], "int64"),
           m.input(MANY, "float32"), dtype="float32", reduction="add")  # fmt: skip
    lines = m.input(np.stack([RANDOM.permutation(6)[:3] for _ in range(8)]).reshape(4, 2, 3).transpose(0, 2, 1), "int32")
    m.node("elements set", "ScatterElements", x, lines, m.input(_draw(4, 3, 2), "float32"), dtype="float32", axis=1)
    wide = m.input(np.arange(12).reshape(3, 4) * 2**40, "int64")
    rows, twice = m.input(np.arange(8).reshape(2, 4) - 2**41, "int64"), m.input([[1], [-2]], "int64")
    for reduction in ("mul", "max", "min"):
        m.node(f"rows {reduction}", "ScatterND", wide, twice, rows, dtype="int64", reduction=reduction)
    # An assignment to a slice: x[1:3, :, 2] = updates, without indices at run time.
    index = np.stack(np.broadcast_arrays(np.array([[1], [2]]), np.arange(6), np.array(2)), -1)
    m.node("slice", "ScatterND", x, m.constant(index, "int64"), m.input(_draw(2, 6), "float32"), dtype="float32")
    odd = np.array([[0, 0], [3, 5], [1, 1]])
    m.node("constant runs", "ScatterND", x, m.constant(odd, "int64"), m.input(_draw(3, 5), "float32"), dtype="float32")
    flags = m.input([True, False, True, False, False], "bool")
    m.node("flags", "ScatterElements", flags, m.input([4, 0], "int64"), m.input([True, False], "bool"), dtype="bool")


def _choices(m: Model) -> None:
    tied = m.input(RANDOM.integers(-9, 9, (3, 500)), "float32")
    for op in ("ArgMax", "ArgMin"):
        m.node(f"{op} of rows", op, tied, dtype="int64", axis=-1, keepdims=0)
        m.node(f"{op}, the last", op, tied, dtype="int64", axis=1, select_last_index=1)
    image = m.input(RANDOM.integers(0, 5, (2, 21, 3, 11)), "uint8")
    m.node("classes", "ArgMax", image, dtype="int64", axis=1)
    nan, inf = np.nan, np.inf
    odd = m.input([[1, nan, 3, 2], [nan, 1, 2, 3], [-inf, nan, -inf, nan], [nan, nan, nan, nan]], "float32")
    m.node("beside NaN", "ArgMax", odd, dtype="int64", axis=1)
    m.node("least beside NaN", "ArgMin", odd, dtype="int64", axis=0, select_last_index=1)
    m.node("hard beside NaN", "Hardmax", odd, dtype="float32", axis=1)
    for largest in (0, 1):
        m.top(f"top beside NaN {largest}", odd, 3, axis=1, largest=largest)
    m.node("hard", "Hardmax", m.input(_draw(3, 4, 5), "float32"), dtype="float32", axis=1)
    for k, largest in ((1, 1), (7, 0), (40, 1), (500, 1)):
        m.top(f"top {k}", tied, k, axis=1, largest=largest)
    m.top("top of columns", m.input(RANDOM.integers(0, 99, (2, 100, 3)), "int64"), 35, axis=1)
    m.node("one hot", "OneHot", m.input([[0, -1, 3], [4, 2, -5]], "int64"), m.constant(4, "int64"), m.input([2, 5], "int64"),
           dtype="int64", axis=1)  # fmt: skip
    for upper in (0, 1):
        m.node(f"triangle {upper}", "Trilu", m.input(_draw(2, 5, 7), "float32"), m.input(-1, "int64"), dtype="float32",
               upper=upper)  # fmt: skip
    m.node("eye", "EyeLike", m.input(np.zeros((5, 7)), "int32"), dtype="float32", k=2, **{"dtype_": TensorProto.FLOAT})


def _sums(m: Model) -> None:
    axis = m.constant(0, "int64")
    long = m.input(LONG, "float32")
    for exclusive in (0, 1):
        for reverse in (0, 1):
            m.node(f"sums {exclusive} {reverse}", "CumSum", long, axis, dtype="float32", exclusive=exclusive, reverse=reverse)
    x = m.input(RANDOM.integers(-5, 5, (3, 40, 7)) * 2**40, "int64")
    m.node("sums of vectors", "CumSum", m.input(RANDOM.integers(-5, 5, (2, 3, 128)), "int64"), axis, dtype="int64")
    m.node("sums within", "CumSum", x, m.constant(-2, "int64"), dtype="int64", reverse=1)


def _rearranged(m: Model) -> None:
    x = m.input(_draw(2, 12, 3, 5), "float32")
    for mode in ("DCR", "CRD"):
        m.node(f"depth to space {mode}", "DepthToSpace", x, dtype="float32", blocksize=2, mode=mode)
    m.node("space to depth", "SpaceToDepth", m.input(_draw(1, 3, 4, 9), "float32"), dtype="float32", blocksize=1)
    m.node("shrunk", "Shrink", x, dtype="float32", lambd=0.5, bias=0.25)
    m.node("shift of all bits", "BitShift", m.input([1, 200], "uint8"), m.input([8, 1], "uint8"), dtype="uint8",
           direction="LEFT")  # fmt: skip


class _Model(Model):
    """TopK has two outputs; ONNX's attribute `dtype` is passed as `dtype_`."""

    def top(self, title: str, x: str, k: int, **attributes: Any) -> None:
        names = [title, f"where {title}"]
        self.nodes.append(helper.make_node("TopK", [x, self.constant([k], "int64")], names, name=title, **attributes))
        kind = helper.np_dtype_to_tensor_dtype(self.feeds[x].dtype)
        self.outputs += [helper.make_tensor_value_info(names[0], kind, None)]
        self.outputs += [helper.make_tensor_value_info(names[1], TensorProto.INT64, None)]

    def node(self, title: str, op: str, *inputs: str, dtype: str = "", inner: bool = False, **attributes: Any) -> str:
        given = {name.removesuffix("_"): value for name, value in attributes.items()}
        of_onnx = given.pop("dtype", None) if "dtype_" in attributes else None
        super().node(title, op, *inputs, dtype=dtype, inner=inner, **given)
        if of_onnx is not None:
            self.nodes[-1].attribute.append(helper.make_attribute("dtype", of_onnx))
        return title


MODEL = _Model()
for _part in (_gathers, _scatters, _choices, _sums, _rearranged):
    _part(MODEL)
TITLES = [output.name for output in MODEL.outputs]


@pytest.fixture(scope="module")
def expected() -> dict[str, Array]:
    session = onnxruntime.InferenceSession(MODEL.proto().SerializeToString(), providers=["CPUExecutionProvider"])
    answers = dict(zip(TITLES, session.run(TITLES, MODEL.feeds), strict=True))
    return answers | {"shift of all bits": np.array([0, 144], np.uint8)}


@pytest.fixture(scope="module", params=DEVICES, ids="-".join)
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Array]]:
    """Two runs: in the first transfer mode, and on the path texture in `interleave`."""
    device, path = request.param
    folder = tmp_path_factory.mktemp("indexing")
    onnx.save(MODEL.proto(), folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "m.flashmem", device=device, memory_path=path)
    with flashmem.Session(bundle, device=device, mode="auto" if path == "buffer" else "interleave") as session:
        runs = [session.run(None, MODEL.feeds) for _ in range(2)]
    return [dict(zip(TITLES, run, strict=True)) for run in runs]


@pytest.mark.parametrize("title", TITLES)
def test_as_onnx_runtime(title: str, answers: list[dict[str, Array]], expected: dict[str, Array]) -> None:
    wanted = expected[title]
    for answer in answers:
        assert answer[title].dtype == wanted.dtype and answer[title].shape == wanted.shape
        np.testing.assert_array_equal(answer[title], wanted)  # also for sums, in the order of the indices


def _newer() -> tuple[onnx.ModelProto, dict[str, Array], dict[str, Array]]:
    """Operators that ONNX Runtime lacks, with their expected results."""
    m = Model()
    x, cache, update = np.array([[2, -3, 4], [5, 1, -2]], np.int32), _draw(2, 1, 5, 3), _draw(2, 1, 3, 3)
    at, bits = np.array([1, 4]), np.array([[1.0, -2.5, np.inf]], np.float32)
    held = [m.input(cache, "float32"), m.input(update, "float32"), m.input(at, "int64")]
    m.node("products", "CumProd", m.input(x, "int32"), m.constant(1, "int64"), dtype="int32", exclusive=1)
    m.node("around", "TensorScatter", *held, dtype="float32", mode="circular")
    m.node("bits", "BitCast", m.input(bits, "float32"), dtype="uint32", to=TensorProto.UINT32)
    m.node("unsigned", "BitCast", m.input([-1, 5], "int8"), dtype="uint8", to=TensorProto.UINT8)
    y, z = np.array([5.5, -5.5, 5.5, -5.5, 0, -1, 7], np.float32), np.array([3, 3, -3, -3, -2, np.inf, 0], np.float32)
    m.node("remainder", "Mod", m.input(y, "float32"), m.input(z, "float32"), dtype="float32")
    around = cache.copy()
    for batch in range(2):
        around[batch, 0, (at[batch] + np.arange(3)) % 5] = update[batch, 0]
    with np.errstate(all="ignore"):
        remainder = np.mod(y, z)
    wanted = {
        "products": np.array([[1, 2, -6], [1, 5, 5]], np.int32), "around": around, "bits": bits.view(np.uint32),
        "unsigned": np.array([255, 5], np.uint8), "remainder": remainder,
    }  # fmt: skip
    proto = m.proto()
    proto.opset_import[0].version = 26
    return proto, m.feeds, wanted


@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_what_onnx_runtime_lacks(device: str, path: Any, tmp_path: Path) -> None:
    proto, feeds, wanted = _newer()
    onnx.save(proto, tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, memory_path=path)
    with flashmem.Session(bundle, device=device) as session:
        answers = dict(zip([output.name for output in proto.graph.output], session.run(None, feeds), strict=True))
    assert answers.keys() == wanted.keys()
    for title, array in wanted.items():
        assert answers[title].dtype == array.dtype, title
        np.testing.assert_array_equal(answers[title], array, title)


def test_an_index_outside_is_said_and_the_session_goes_on(tmp_path: Path) -> None:
    m = Model()
    m.node("read", "GatherElements", m.input(np.arange(5.0), "float32"), m.input([0], "int64"), dtype="float32")
    held = [m.input(np.zeros((3, 2)), "float32"), m.input([[0]], "int64"), m.input(np.ones((1, 2)), "float32")]
    m.node("written", "ScatterND", *held, dtype="float32", reduction="add")
    onnx.save(m.proto(), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl")
    with flashmem.Session(bundle, device="pocl") as session:
        for name, layer, index in (("x1", "read", 5), ("x1", "read", -6), ("x3", r"written\[scatter\]", 2**40)):
            with pytest.raises(ValueError, match=f"layer {layer} was given an index outside"):
                session.run(None, m.feeds | {name: np.full_like(m.feeds[name], index)})
        read, written = session.run(None, m.feeds | {"x3": np.array([[-1]])})
    assert read.tolist() == [0] and written.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_work_items_that_share_a_column_find_the_same(tmp_path: Path) -> None:
    """In the form for GPUs: several work-items for a column, more and shorter chunks."""
    m = Model()
    tied = m.input(RANDOM.integers(-9, 9, (3, 500)), "float32")
    m.node("rows", "ArgMax", tied, dtype="int64", axis=1, select_last_index=1)
    m.node("columns", "ArgMin", tied, dtype="int64", axis=0)
    m.node("sums", "CumSum", m.input(LONG, "float32"), m.constant(0, "int64"), dtype="float32", reverse=1)
    onnx.save(m.proto(), tmp_path / "m.onnx")
    titles = [output.name for output in m.outputs]
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="generic-gpu", memory_path="buffer")
    with flashmem.Session(bundle, device="pocl") as session:
        answers = session.run(None, m.feeds)
    wanted = onnxruntime.InferenceSession(m.proto().SerializeToString()).run(titles, m.feeds)
    for title, answer, reference in zip(titles, answers, wanted, strict=True):
        np.testing.assert_array_equal(answer, reference, title)


def _one(
    op: str, *inputs: Any, dtype: str = "float32", opset: int = 18, outputs: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """A model of one node with `outputs` outputs. Arrays are run-time inputs, other values are constants."""
    m = Model()
    names = [m.input(x, x.dtype) if isinstance(x, np.ndarray) else m.constant(x, np.asarray(x).dtype) for x in inputs]
    m.node("y", op, *names, dtype=dtype, **attributes)
    m.nodes[0].output.extend(f"y{i}" for i in range(1, outputs))
    proto = m.proto()
    proto.opset_import[0].version = opset
    return proto


ZEROS = np.zeros((3, 4), np.float32)
REFUSED = {
    "GatherElements with index 7": _one("GatherElements", ZEROS, [[0, 7]], axis=1),
    "GatherND with index -4 in a dimension of 3": _one("GatherND", ZEROS, [[-4, 0]]),
    "ScatterElements with index 3": _one("ScatterElements", ZEROS, [[3]], np.zeros((1, 1), np.float32)),
    "reduction 'mean'": _one("ScatterElements", ZEROS, [[2]], np.zeros((1, 1), np.float32), reduction="mean"),
    "TensorScatter from index 2": _one("TensorScatter", ZEROS, ZEROS[:, :3], [0, 2, 1], axis=1, opset=24),
    "TensorScatter of 5 elements into 4": _one(
        "TensorScatter", ZEROS, np.zeros((3, 5), np.float32), axis=1, opset=24, mode="circular"
    ),
    "make its k a constant": _one("TopK", ZEROS, np.array([2]), outputs=2),
    "ReverseSequence of 9 steps among 3": _one("ReverseSequence", ZEROS, [1, 9, 2, 3]),
    "CumSum along axis 2": _one("CumSum", ZEROS, [2]),
    "Trilu along an axis of 2097152 elements": _one("Trilu", np.zeros((1, 1 << 21), np.float32)),
    "SpaceToDepth of a tensor": _one("SpaceToDepth", np.zeros((1, 1, 3, 4), np.float32), blocksize=2),
    "make its condition a constant": _one("Compress", ZEROS, np.array([True])),
    "keep all elements and mask them": _one("NonZero", ZEROS, dtype="int64"),
    "export the model for inference": _one("Dropout", ZEROS, np.array(0.5, np.float32), True),
    "which are computed as float32": _one("BitCast", ZEROS.astype(np.float16), dtype="int16", to=TensorProto.INT16, opset=26),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_run_is_refused_in_one_sentence(why: str, tmp_path: Path) -> None:
    onnx.save(REFUSED[why], tmp_path / "m.onnx")
    with pytest.raises(flashmem.base.errors.UserError, match=why) as refused:
        flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl")
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, UnsupportedModelError) or why.startswith("CumSum")
