"""Quantised weights by tensor cores, on CPUs: error bounds against float64, as of products in float.

Once with their own indices, as in `test_warps`, and once as CPUs compute these kernels.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import FlashmemWarning
from flashmem.base.paths import VARIABLE
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import TF32, Workload
from flashmem.compiler.kernels.contraction.configs import MOST_PARTIAL
from flashmem.compiler.kernels.contraction.tensor_cores import CodesContraction
from flashmem.program.kernel_text import kernel_texts, uses_tensor_cores
from flashmem.program.program import Program
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import load_descriptor
from tests.compiler.lowering.test_low_bits import draw, require_bound
from tests.support.inputs import floats
from tests.support.only_config import only_config
from tests.support.warp_instructions import with_warps

HERE = sorted(list_devices(), key=lambda device: (not device.mma, device.descriptor_name))
SHIPPED = [config for config in listed_configs(load_descriptor("nvidia")) if isinstance(config, CodesContraction)]
SMALL = [
    CodesContraction("one", 2, (8, 4), k_block=32),
    CodesContraction("parts", 2, (8, 4), k_block=64, slice_k=2, split_k=2),
    CodesContraction("steps", 2, (8, 8), k_block=64, split_k=3),
    CodesContraction("rows", 4, (16, 4), k_block=32),
]
DEVICE = next((device.descriptor_name for device in HERE if not device.mma and device.kind == "cpu"), "")

TYPES = [
    ("int4", ""), ("uint4", "zero"), ("int4", "zero"), ("int8", ""), ("int8", "zero"), ("uint8", "zero"), ("uint8", ""),
    ("uint4", "minimum"), ("uint8", "minimum"),
]  # fmt: skip
"""Types of codes, and what they have beside scales: minima are those of MatMulNBits with zero points that are floats."""

CASES = ((192, 96, 0), (256, 70, 32), (224, 40, 0), (192, 33, 64), (256, 140, 128))
"""Depth, columns, block (0: one scale for each column); no block of columns is whole."""

DEEP = ((1056, 88, 32),)
"""The same, for configs of which many groups share the depth."""


Case = tuple[int, int, int]


def model(dtype: str, beside: str, rows: int, cases: tuple[Case, ...] = CASES) -> tuple[onnx.ModelProto, list[tuple[Any, ...]]]:
    """A product for each case, and (codes, zero points, scales, minima) of each step of depth and column."""
    kind = getattr(TensorProto, dtype.upper())
    nodes, constants, inputs, outputs, weights = [], [], [], [], []
    for i, (depth, columns, block) in enumerate(cases):
        random, parts = np.random.default_rng(i), (-(-depth // block), columns) if block else (columns,)
        codes, zero = draw(dtype, (depth, columns), i), draw(dtype, parts, i + 50) * (beside == "zero")
        scale, minimum = random.uniform(0.01, 0.2, parts).astype(np.float32), np.zeros(parts, np.float32)
        inputs.append(helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, (rows, depth)))
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, (rows, columns)))
        names = [f"codes{i}", f"scale{i}", f"zero{i}"]
        if beside == "minimum":  # exact in half, as are scales
            scale, points = 0.5 ** random.integers(3, 7, parts).astype(np.float32), random.integers(-40, 40, parts) / 4
            minimum = (-points * scale).astype(np.float32)
            nodes.append(_nbits([f"x{i}", *names, f"y{i}"], dtype, depth, columns, block))
            constants.append(numpy_helper.from_array(_packed(dtype, codes, block), names[0]))
            constants += [
                numpy_helper.from_array(each.T.astype(np.float32).reshape(-1), name)
                for name, each in zip(names[1:], (scale, points), strict=True)
            ]
        else:
            constants.append(helper.make_tensor(names[0], kind, codes.shape, codes.reshape(-1)))
            constants.append(numpy_helper.from_array(scale, names[1]))
            if beside:
                constants.append(helper.make_tensor(names[2], kind, zero.shape, zero.reshape(-1)))
            blocked = {"axis": 0, "block_size": block} if block else {"axis": 1}
            nodes.append(helper.make_node("DequantizeLinear", names if beside else names[:2], [f"w{i}"], **blocked))
            nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"y{i}"]))
        spread = [
            np.repeat(each, block, axis=0)[:depth] if block else np.broadcast_to(each, codes.shape)
            for each in (zero, scale, minimum)
        ]
        weights.append((codes, *spread))
    graph = helper.make_graph(nodes, "codes", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), weights


def _nbits(names: list[str], dtype: str, depth: int, columns: int, block: int) -> onnx.NodeProto:
    *given, made = names
    bits = int(dtype[-1])
    return helper.make_node(
        "MatMulNBits", given, [made], domain="com.microsoft", K=depth, N=columns, bits=bits, block_size=block
    )


def _packed(dtype: str, codes: Any, block: int) -> Any:
    """Codes [depth, columns] as MatMulNBits has them: [columns, blocks, bytes of a block], the first nibble low."""
    each = codes.T.astype(np.uint8).reshape(codes.shape[1], -1, block)
    return each if dtype == "uint8" else each[..., ::2] | each[..., 1::2] << 4


def check(
    config: CodesContraction,
    dtype: str,
    beside: str,
    rows: int,
    device: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: tuple[Case, ...] = CASES,
) -> Program:
    """Compile the products with `config` alone for their weights, and require their error bounds; the program."""
    only_config(monkeypatch, "matmul", config)
    cases = tuple(case for case in cases if case[2] or beside != "minimum")
    cases = tuple(case for case in cases if config.fits(Workload("matmul", "buffer", rows, *case[:2], storage=dtype)))
    proto, weights = model(dtype, beside, rows, cases)
    onnx.save(proto, folder / "m.onnx")
    wanted: Any = {"device": "nvidia", "memory_path": "buffer", "build": False}
    bundle = flashmem.compile(folder / "m.onnx", folder / "b", **wanted)
    texts = kernel_texts(bundle.source.plain)
    products = [launch for launch in bundle.program.launches if launch.shape.family != "join_sums"]
    assert cases and all(uses_tensor_cores(texts[launch.kernel]) for launch in products)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlashmemWarning)  # compiled for another device
        session = flashmem.Session(bundle, device=device)
    with session:
        for kind in ("normal", "around 1e3", "positive"):
            xs = [floats(rows, depth, kind=kind) for depth, _, _ in cases]  # type: ignore[arg-type]
            for y, x, weight in zip(session.run(None, {f"x{i}": x for i, x in enumerate(xs)}), xs, weights, strict=True):
                require_bound(y, x, weight, 8 if dtype == "int4" else 128 if dtype == "uint8" else 0)
    return bundle.program


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_error_bound(config: CodesContraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every listed config, with one of the types each, and depths that it takes."""
    dtype, beside = TYPES[SHIPPED.index(config) % len(TYPES)]
    check(config, dtype, beside, 37, HERE[0].descriptor_name, tmp_path, monkeypatch, CASES + DEEP)


@pytest.mark.skipif(not DEVICE, reason="no CPU here")
@pytest.mark.parametrize(
    ("kind", "config"),
    list(zip(TYPES, itertools.cycle(SMALL), strict=False)),
    ids=lambda each: each.name if isinstance(each, CodesContraction) else " ".join(each),
)
def test_error_bound_by_warps(
    kind: tuple[str, str], config: CodesContraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every type of codes with one of the configs: compilers of CPUs are slow with so many barriers."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("flashmem.runtime.opencl.device.with_tensor_cores", with_warps)
    check(config, *kind, 21, DEVICE, tmp_path, monkeypatch, CASES[1:4])


def test_which_products_they_compute() -> None:
    deep = Workload("matmul", "buffer", 128, 8192, 2048, storage="int8")
    for config in SHIPPED:
        assert config.fits(deep) and config.needs == {"mma"} and config.local_bytes <= 48 << 10
        for changes in ({"depth": 8208}, {"path": "texture"}, {"storage": "float16"}, {"storage": TF32}, {"family": "conv"}):
            assert not config.fits(replace(deep, **changes)), changes  # type: ignore[arg-type]
        assert config.fits(replace(deep, rows=MOST_PARTIAL // 4096)) == (config.split_k == 1)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("rows", [1, 32, 128])
def test_groups_share_the_depth_where_memory_is_not_limited(rows: int, limited: bool, tmp_path: Path) -> None:
    codes = helper.make_tensor("codes", TensorProto.INT8, (4096, 4096), bytes(4096 * 4096), raw=True)
    scale = numpy_helper.from_array(np.ones(4096, np.float32), "scale")
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (rows, 4096)) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "codes", info[:1], info[1:], [codes, scale])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    wanted: Any = {"device": "nvidia", "memory_path": "buffer", "build": False, "budget": "64MB" if limited else None}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", **wanted)
    texts = kernel_texts(bundle.source.plain)
    products = [launch for launch in bundle.program.launches if launch.shape.family != "join_sums"]
    assert {uses_tensor_cores(texts[launch.kernel]) for launch in products} == {rows > 1}
    assert (len(products) < len(bundle.program.launches)) == (rows > 1 and not limited)
