"""Products with weights of 4 and 8 bits, on CPUs and by the kernels of GPUs: error bounds against float64."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import FlashmemWarning
from flashmem.base.types import MemoryPath
from flashmem.program.program import Program
from flashmem.runtime.request.options import find_descriptor
from tests.support.compared import OF_A_GPU, PLACES
from tests.support.inputs import floats

TYPES = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}

CASES = ((64, 96, 0), (256, 70, 32), (192, 33, 64), (128, 100, 16), (150, 45, 30), (77, 50, 0), (512, 64, 128))
"""Depth, columns, block (0: one scale for each column): whole and partial panels, steps and words."""


def draw(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Codes of that type, as integers."""
    return np.random.default_rng(seed).integers(*TYPES[dtype], shape)


def model_of(dtype: str, zeros: bool, rows: int = 1) -> tuple[onnx.ModelProto, list[tuple[Any, Any, Any]]]:
    """A product for each case, and (codes, zero points, scales) of each step of depth and column."""
    kind = getattr(TensorProto, dtype.upper())
    nodes, constants, inputs, outputs, weights = [], [], [], [], []
    for i, (depth, columns, block) in enumerate(CASES):
        parts = (-(-depth // block), columns) if block else (columns,)
        codes, zero = draw(dtype, (depth, columns), i), draw(dtype, parts, i + 50) * zeros
        scale = np.random.default_rng(i).uniform(0.01, 0.2, parts).astype(np.float32)
        names = [f"codes{i}", f"scale{i}", *([f"zero{i}"] if zeros else [])]
        constants.append(helper.make_tensor(names[0], kind, codes.shape, codes.reshape(-1)))
        constants.append(numpy_helper.from_array(scale, names[1]))
        if zeros:
            constants.append(helper.make_tensor(names[2], kind, zero.shape, zero.reshape(-1)))
        blocked = {"axis": 0, "block_size": block} if block else {"axis": 1}
        nodes.append(helper.make_node("DequantizeLinear", names, [f"w{i}"], **blocked))
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, (rows, depth)))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, (rows, columns)))
        spread = [
            np.repeat(each, block, axis=0)[:depth] if block else np.broadcast_to(each, codes.shape) for each in (zero, scale)
        ]
        weights.append((codes, *spread))
    graph = helper.make_graph(nodes, "low bits", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), weights


DTYPES = [("int4", False), ("uint4", True), ("int4", True), ("int8", False), ("uint8", True)]


def require_bound(y: Any, x: Any, weight: tuple[Any, ...], more: int) -> None:
    """(depth + 8) roundings of the sum of |x| ((|code| + |zero point|) scale + |minimum|).

    Codes and zero points count as `more` more. `weight`: codes, zero points, scales, and minima, if it has some.
    """
    codes, zero, scale, *minima = weight
    minimum = minima[0].astype(np.float64) if minima else 0.0
    exact = x.astype(np.float64) @ ((codes - zero) * scale.astype(np.float64) + minimum)
    size = np.abs(x).astype(np.float64) @ (
        (np.abs(codes + more) + np.abs(zero + more)) * scale.astype(np.float64) + np.abs(minimum)
    )
    assert (np.abs(y - exact) <= (x.shape[1] + 8) * 2.0**-24 * size).all()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize(("dtype", "zeros"), DTYPES)
def test_error_bound(dtype: str, zeros: bool, place: tuple[str, MemoryPath], tmp_path: Path) -> None:
    device, path = place
    _check(dtype, zeros, 1, {"device": device, "memory_path": path}, device, tmp_path)


@pytest.mark.parametrize("place", OF_A_GPU, ids=str)
@pytest.mark.parametrize(
    ("target", "path", "rows", "dtype", "zeros"),
    [
        ("nvidia", "buffer", 1, "uint4", True),
        ("nvidia", "texture", 2, "int4", True),
        ("nvidia", "buffer", 3, "int8", False),
        ("nvidia", "texture", 8, "uint8", True),
        ("nvidia", "buffer", 32, "int4", True),
        ("nvidia", "texture", 32, "uint4", True),
        ("nvidia", "buffer", 32, "uint8", True),
        ("adreno750", "texture", 1, "int4", False),
        ("mali-g710", "texture", 8, "uint4", True),
        ("mali-g710", "buffer", 1, "int8", False),
    ],
)
def test_error_bound_of_a_gpu_s_kernels(
    target: str, path: MemoryPath, rows: int, dtype: str, zeros: bool, place: tuple[str, MemoryPath, str], tmp_path: Path
) -> None:
    """Few rows, whose work-items share the depth; and many, for which NVIDIA's weights are dequantised in local memory."""
    program = _check(dtype, zeros, rows, {"device": target, "memory_path": path, "build": False}, place[0], tmp_path)
    few = sum("matmul_sliced" in launch.kernel for launch in program.launches)
    staged = sum(launch.shape.k_block > 0 for launch in program.launches)
    # In two cases neither the depth nor a block is a multiple of the steps that a work-item multiplies.
    assert few == (len(CASES) - 2 if rows <= 8 else 0)
    assert staged == (len(CASES) - few if target == "nvidia" else 0)


def _check(dtype: str, zeros: bool, rows: int, options: dict[str, Any], device: str, folder: Path) -> Program:
    """Compile the products, and require their error bounds; the program."""
    model, weights = model_of(dtype, zeros, rows)
    onnx.save(model, folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "b.flashmem", **options)
    more = 8 if dtype == "int4" else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashmemWarning)  # compiled for another device
        session = flashmem.Session(bundle, device=device)
    with session:
        for kind in ("normal", "around 1e3", "positive"):
            xs = [floats(rows, depth, kind=kind) for depth, _, _ in CASES]  # type: ignore[arg-type]
            ys = session.run(None, {f"x{i}": x for i, x in enumerate(xs)})
            for y, x, weight in zip(ys, xs, weights, strict=True):
                require_bound(y, x, weight, more)
    return bundle.program


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_mode_has_the_same_exact_answer(place: tuple[str, MemoryPath], precision: str, tmp_path: Path) -> None:
    """Small integers times codes and powers of two are exact in any order; NaN and infinity reach every column."""
    device, path = place
    depth, columns = 128, 96
    codes, zero = draw("uint4", (depth, columns), 1), draw("uint4", (depth // 32, columns), 2)
    scale = 0.5 ** np.random.default_rng(3).integers(0, 4, (depth // 32, columns)).astype(np.float32)
    constants = [
        helper.make_tensor("codes", TensorProto.UINT4, codes.shape, codes.reshape(-1)),
        numpy_helper.from_array(scale.astype(np.float32), "scale"),
        helper.make_tensor("zero", TensorProto.UINT4, zero.shape, zero.reshape(-1)),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["w"], axis=0, block_size=32),
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (1, depth)), ("y", (1, columns)))]
    graph = helper.make_graph(nodes, "modes", info[:1], info[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    wanted: Any = {"device": device, "memory_path": path, "precision": precision}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b.flashmem", **wanted)
    x = np.random.default_rng(4).integers(0, 9, (1, depth)).astype(np.float32)
    weight = (codes - np.repeat(zero, 32, axis=0)) * np.repeat(scale, 32, axis=0)
    for mode in find_descriptor(device).modes[path]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            [y] = session.run(None, {"x": x})
            np.testing.assert_array_equal(y, (x.astype(np.float64) @ weight).astype(np.float32))
            odd = x.copy()
            odd[0, 5] = np.nan
            [y] = session.run(None, {"x": odd})
            assert np.isnan(y).all()
            odd[0, 5] = np.inf
            [y] = session.run(None, {"x": odd})
            assert not np.isfinite(y).any()
