"""Products with weights in ggml's blocks, and rows of tables in them: beside float64 of what the package gguf reads."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import FlashmemWarning
from flashmem.base.paths import VARIABLE
from flashmem.base.types import MemoryPath
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.ir.blocks import FORMATS
from flashmem.compiler.kernels.contraction.tensor_cores import CodesContraction
from flashmem.program.kernel_text import kernel_texts, uses_tensor_cores
from tests.compiler.lowering.test_tensor_codes import DEVICE, SMALL
from tests.support.blocks import any_blocks, bound
from tests.support.compared import DEVICES, OF_A_GPU, PLACES
from tests.support.inputs import floats
from tests.support.only_config import only_config
from tests.support.warp_instructions import with_warps

CASES = ((512, 70), (256, 33))
"""Depth and columns: panels that are not whole, several blocks and one."""


LINEAR = [name for name, kind in FORMATS.items() if not kind.values]
"""Kinds whose codes are numbers: kernels that sum codes multiply these alone."""

Product = tuple[str, int, int]

PRODUCTS: list[Product] = [(name, depth, columns) for name in FORMATS for depth, columns in CASES]
"""Kind of blocks, depth and columns."""


def model_of(rows: int, products: Sequence[Product]) -> onnx.ModelProto:
    """A product with each of the weights."""
    nodes, constants, outputs = [], [], []
    for name, depth, columns in products:
        out = f"{name}.{depth}"
        constants.append(numpy_helper.from_array(weights(name, depth, columns), f"{out}.blocks"))
        nodes.append(helper.make_node("Blocks", [f"{out}.blocks"], [f"{out}.w"], domain="flashmem", kind=name))
        nodes.append(helper.make_node("Transpose", [f"{out}.w"], [f"{out}.t"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", [f"x{depth}", f"{out}.t"], [out]))
        outputs.append(helper.make_tensor_value_info(out, TensorProto.FLOAT, (rows, columns)))
    inputs = [helper.make_tensor_value_info(f"x{depth}", TensorProto.FLOAT, (rows, depth)) for depth, _ in CASES]
    return as_model(helper.make_graph(nodes, "blocks", inputs, outputs, constants))


def as_model(graph: onnx.GraphProto) -> onnx.ModelProto:
    """A model with flashmem's operators."""
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("flashmem", 1)], ir_version=10
    )


def weights(name: str, depth: int, columns: int) -> Any:
    """Finite weights, of scales of all sizes below 2."""
    return any_blocks(FORMATS[name], columns, depth, depth, finite=True)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_products(place: tuple[str, MemoryPath], rows: int, tmp_path: Path) -> None:
    device, path = place
    _check(rows, {"device": device, "memory_path": path}, device, tmp_path)


@pytest.mark.parametrize("place", OF_A_GPU, ids=str)
@pytest.mark.parametrize(
    ("target", "path", "rows"),
    [("nvidia", "buffer", 1), ("nvidia", "buffer", 3), ("nvidia", "buffer", 40), ("adreno750", "texture", 8),
     ("adreno750", "buffer", 40), ("mali-g715", "texture", 1)],
)  # fmt: skip
def test_products_of_a_gpu_s_kernels(
    target: str, path: MemoryPath, rows: int, place: tuple[str, MemoryPath, str], tmp_path: Path
) -> None:
    program = _check(rows, {"device": target, "memory_path": path, "build": False}, place[0], tmp_path).program
    few = sum("matmul_sliced" in launch.kernel for launch in program.launches)
    assert few == (sum(name in LINEAR for name, *_ in PRODUCTS) if rows <= 8 else 0)


def _check(rows: int, options: dict[str, Any], device: str, folder: Path, products: Sequence[Product] = PRODUCTS) -> Bundle:
    """Compile the products, and require their error bounds, and no more bytes than the blocks have; the bundle."""
    onnx.save(model_of(rows, products), folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "b.flashmem", **options)
    given = sum(weights(*each).nbytes for each in products)
    assert sum(part.raw for part in bundle.program.slices) == given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashmemWarning)  # compiled for another device
        session = flashmem.Session(bundle, device=device)
    with session:
        for how in ("normal", "around 1e3"):
            xs = {depth: floats(rows, depth, kind=how) for depth, _ in CASES}  # type: ignore[arg-type]
            ys = session.run(None, {f"x{depth}": x for depth, x in xs.items()})
            for y, (name, depth, columns) in zip(ys, products, strict=True):
                data, x = weights(name, depth, columns), xs[depth]
                exact = x.astype(np.float64) @ quants.dequantize(data, Kind[name]).T.astype(np.float64)
                assert (np.abs(y - exact) <= bound(FORMATS[name], data, x)).all(), name
    return bundle


@pytest.mark.skipif(not DEVICE, reason="no CPU here")
@pytest.mark.parametrize(("name", "config"), list(zip(LINEAR, itertools.cycle(SMALL), strict=False)))
def test_products_by_warps(name: str, config: CodesContraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tensor cores, whose instructions a CPU emulates."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("flashmem.runtime.opencl.device.with_tensor_cores", with_warps)
    only_config(monkeypatch, "matmul", config)
    products = [(name, *CASES[0])]
    bundle = _check(21, {"device": "nvidia", "memory_path": "buffer", "build": False}, DEVICE, tmp_path, products)
    texts = kernel_texts(bundle.source.plain)
    assert sum(uses_tensor_cores(texts[launch.kernel]) for launch in bundle.program.launches) == 1


@pytest.mark.parametrize("place", DEVICES, ids=str)
def test_rows_of_a_table(place: tuple[str, MemoryPath], tmp_path: Path) -> None:
    """Bit for bit; the table is in the bundle in its own bits."""
    device, path = place
    nodes, constants, outputs, given = [], [], [], 0
    for name, kind in FORMATS.items():
        table = any_blocks(kind, 300, 512, 5, finite=True)
        given += table.nbytes
        constants.append(numpy_helper.from_array(table, f"{name}.blocks"))
        nodes.append(helper.make_node("Blocks", [f"{name}.blocks"], [f"{name}.w"], domain="flashmem", kind=name))
        nodes.append(helper.make_node("Gather", [f"{name}.w", "ids"], [name], axis=0))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 3, 512)))
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, (2, 3))]
    onnx.save(as_model(helper.make_graph(nodes, "rows", inputs, outputs, constants)), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device=device, memory_path=path)
    assert bundle.weights_path.stat().st_size < 1.02 * given + 4096 * len(FORMATS)
    ids = np.array([[0, 299, 7], [7, -1, 150]])
    with flashmem.Session(bundle, device=device) as session:
        for y, (name, kind) in zip(session.run(None, {"ids": ids}), FORMATS.items(), strict=True):
            wanted = quants.dequantize(any_blocks(kind, 300, 512, 5, finite=True), Kind[name])
            np.testing.assert_array_equal(y, wanted[ids])


@pytest.mark.parametrize("name", FORMATS)
def test_a_tied_table_is_stored_once(name: str, tmp_path: Path) -> None:
    """Rows are read in the panels of the head, bit for bit: also those of its last panel, which is not whole."""
    count = (1 << 20) // FORMATS[name].row_bytes(512) + 21  # smaller ones are constants in memory
    table = any_blocks(FORMATS[name], count, 512, 5, finite=True)
    nodes = [
        helper.make_node("Blocks", ["blocks"], ["w"], domain="flashmem", kind=name),
        helper.make_node("Gather", ["w", "ids"], ["rows"], axis=0),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "t"], ["y"]),
    ]
    outputs = [
        helper.make_tensor_value_info(each, TensorProto.FLOAT, (1, 6, size)) for each, size in (("rows", 512), ("y", count))
    ]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, (1, 6))]
    onnx.save(
        as_model(helper.make_graph(nodes, "tied", inputs, outputs, [numpy_helper.from_array(table, "blocks")])),
        tmp_path / "m.onnx",
    )
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", device="pocl")
    assert bundle.weights_path.stat().st_size < 1.02 * table.nbytes + (1 << 13)
    ids = np.array([[0, count - 1, 7, 9, -1, count - 10]])
    with flashmem.Session(bundle, device="pocl") as session:
        [rows, _] = session.run(None, {"ids": ids})
    np.testing.assert_array_equal(rows, quants.dequantize(table, Kind[name])[ids])
