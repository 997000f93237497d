"""Weights in float16 and bfloat16 stay so: products beside float64, rows of a table bit for bit, a tied table once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import FlashmemWarning
from flashmem.base.types import MemoryPath
from flashmem.compiler.ir.blocks.floats import BF16, F16
from tests.compiler.lowering.test_blocks import as_model
from tests.support.compared import DEVICES, OF_A_GPU, PLACES
from tests.support.inputs import floats

KINDS = (F16, BF16)
CASES = ((512, 70), (96, 33), (75, 16))
"""Depth and columns: panels that are not whole, depths that are no multiple of four."""


def stored(kind: Any, rows: int, depth: int) -> NDArray[np.uint8]:
    """Weights of all sizes, some denormal in float16 and some infinite numbers beyond it, as bytes [rows, 2 * depth]."""
    random = np.random.default_rng(depth)
    numbers = random.standard_normal((rows, depth)) * 2.0 ** random.integers(-20, 3, (rows, depth))
    if kind is F16:
        return numbers.astype("<f2").view(np.uint8)
    numbers *= 2.0 ** random.choice([0, -90, 8], (rows, depth))
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def widened(kind: Any, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """By NumPy alone."""
    if kind is F16:
        return data.view("<f2").astype(np.float32)
    upper = data.reshape(*data.shape[:-1], -1, 2)
    return np.concatenate([np.zeros_like(upper), upper], -1).view("<f4")[..., 0]


def products(rows: int) -> onnx.ModelProto:
    nodes, constants, outputs = [], [], []
    for kind in KINDS:
        for depth, columns in CASES:
            out = f"{kind.name}.{depth}"
            constants.append(numpy_helper.from_array(stored(kind, columns, depth), f"{out}.bytes"))
            nodes.append(helper.make_node("Blocks", [f"{out}.bytes"], [f"{out}.w"], domain="flashmem", kind=kind.name))
            nodes.append(helper.make_node("Transpose", [f"{out}.w"], [f"{out}.t"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [f"x{depth}", f"{out}.t"], [out]))
            outputs.append(helper.make_tensor_value_info(out, TensorProto.FLOAT, (rows, columns)))
    inputs = [helper.make_tensor_value_info(f"x{depth}", TensorProto.FLOAT, (rows, depth)) for depth, _ in CASES]
    return as_model(helper.make_graph(nodes, "floats", inputs, outputs, constants))


def check(rows: int, options: dict[str, Any], device: str, folder: Path) -> None:
    """Sums are within the bound of float32, and weights take two bytes each."""
    onnx.save(products(rows), folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "b.flashmem", **options)
    assert sum(part.raw for part in bundle.program.slices) == sum(
        2 * depth * columns for _ in KINDS for depth, columns in CASES
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashmemWarning)  # compiled for another device
        session = flashmem.Session(bundle, device=device)
    with session:
        xs = {depth: floats(rows, depth, kind="around 1e3") for depth, _ in CASES}
        ys = iter(session.run(None, {f"x{depth}": x for depth, x in xs.items()}))
        for kind in KINDS:
            for depth, columns in CASES:
                x, w = xs[depth].astype(np.float64), widened(kind, stored(kind, columns, depth)).T.astype(np.float64)
                assert (np.abs(next(ys) - x @ w) <= depth * 2.0**-23 * (np.abs(x) @ np.abs(w)) + 1e-30).all(), (
                    kind.name,
                    depth,
                )


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_products(place: tuple[str, MemoryPath], rows: int, tmp_path: Path) -> None:
    check(rows, {"device": place[0], "memory_path": place[1]}, place[0], tmp_path)


@pytest.mark.parametrize("place", OF_A_GPU[:1], ids=str)
@pytest.mark.parametrize(
    ("target", "path", "rows"),
    [("nvidia", "buffer", 1), ("nvidia", "buffer", 40), ("adreno750", "texture", 1), ("adreno750", "buffer", 40),
     ("mali-g715", "texture", 8), ("generic-gpu", "buffer", 40)],
)  # fmt: skip
def test_products_of_a_gpu_s_kernels(
    target: str, path: MemoryPath, rows: int, place: tuple[str, MemoryPath, str], tmp_path: Path
) -> None:
    check(rows, {"device": target, "memory_path": path, "build": False}, place[0], tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("place", DEVICES, ids=str)
def test_a_tied_table_is_stored_once(place: tuple[str, MemoryPath], kind: Any, tmp_path: Path) -> None:
    """The head's panels have the rows of the table, which are read bit for bit."""
    data = stored(kind, 1100, 512)
    nodes = [
        helper.make_node("Blocks", ["bytes"], ["w"], domain="flashmem", kind=kind.name),
        helper.make_node("Gather", ["w", "ids"], ["rows"], axis=0),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "t"], ["y"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, size)) for name, size in (("rows", 512), ("y", 1100))
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, (1, 4))]
    constants = [numpy_helper.from_array(data, "bytes")]
    onnx.save(as_model(helper.make_graph(nodes, "tied", inputs, outputs, constants)), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device=place[0], memory_path=place[1])
    copies = 2 if place[1] == "texture" and kind is F16 else 1  # an image has no rows that the host could read
    assert bundle.weights_path.stat().st_size < (copies + 0.1) * data.nbytes
    ids = np.array([[0, 1099, -1, 150]])
    with flashmem.Session(bundle, device=place[0]) as session:
        [found, y] = session.run(None, {"ids": ids})
    wanted = widened(kind, data)[ids]
    np.testing.assert_array_equal(found, wanted)
    exact = wanted.astype(np.float64) @ widened(kind, data).T.astype(np.float64)
    assert (np.abs(y - exact) <= 512 * 2.0**-23 * (np.abs(wanted) @ np.abs(widened(kind, data)).T) + 1e-30).all()
