"""Kernels for tensor cores with their own indices, on CPUs: instructions of warps are functions, and answers those of float64.

Elsewhere on CPUs these kernels compute with other indices (`test_tensor_cores`, `test_tensor_attention`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.base.paths import VARIABLE
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.compiler.kernels.contraction.tensor_cores import TensorContraction, Tf32Contraction
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.program.kernel_text import uses_tensor_cores
from tests.compiler.lowering.test_tensor_attention import Halves, causal
from tests.compiler.lowering.test_tensor_cores import HERE, PRECISIONS
from tests.support.compared import Nodes, require_right
from tests.support.only_config import only_config
from tests.support.warp_instructions import with_warps

ATTENTION = [
    TensorAttention("small", 16, 16, pipeline=2),
    TensorAttention("tiles", 64, 16, tiles=2, pipeline=3),
    TensorAttention("parts", 16, 32, parts=2, pipeline=2),
]
PRODUCTS: list[TensorContraction] = [
    TensorContraction("halves", 1, 8, (32, 4), k_block=32, pipeline=2, split_k=2),
    TensorContraction("parts", 1, 16, (16, 2), k_block=32, pipeline=3, slice_k=2),
    Tf32Contraction("floats", 2, 8, (8, 4), k_block=16, pipeline=3, slice_k=2, split_k=3),
]
DEVICE = next((device.descriptor_name for device in HERE if not device.mma and device.kind == "cpu"), "")

pytestmark = pytest.mark.skipif(not DEVICE, reason="no CPU here")


@pytest.fixture(autouse=True)
def warps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs are built with such functions, and not taken from a cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr("flashmem.runtime.opencl.device.with_tensor_cores", with_warps)


def attention() -> Halves:
    """Bands and masks; no size is a multiple of a block."""
    m = Halves()
    m.attention(1, 40, 70, 16, 16, 0.4, known=causal(40, 70))
    m.attention(1, 75, 75, 16, 16, -0.3, known=causal(75, 75) & (np.arange(75) > np.arange(75)[:, None] - 30))
    m.attention(1, 75, 60, 16, 16, 0.5, known=causal(25, 60) & (np.arange(60) > np.arange(25)[:, None]), sharing=3)
    m.attention(1, 20, 90, 16, 16, 0.2, mask=causal(20, 90))
    return m


@pytest.mark.parametrize("config", ATTENTION, ids=lambda config: config.name)
def test_attention(config: TensorAttention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_config(monkeypatch, "attention", config)
    m = attention()
    onnx.save(m.proto(), tmp_path / "m.onnx")
    wanted: Any = {"device": DEVICE, "memory_path": "buffer", "precision": "fp16", "build": False}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", **wanted)
    assert uses_tensor_cores(bundle.source.plain)
    with flashmem.Session(bundle, device=DEVICE) as session:
        answers = session.run(None, m.feeds)
    for answer, right, error in zip(answers, m.wanted, m.errors, strict=True):
        np.testing.assert_allclose(answer, right, rtol=0, atol=error)


@pytest.mark.parametrize("config", PRODUCTS, ids=lambda config: config.name)
def test_products(config: TensorContraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSelector, "config", lambda *asked, **given: config)
    monkeypatch.setattr("flashmem.options.check_precision", lambda *given: None)
    nodes, random = Nodes(), np.random.default_rng(2)
    data, weight = (random.uniform(-0.5, 1.5, shape).astype(np.float16).astype(np.float32) for shape in ((37, 136), (136, 44)))
    [stored] = nodes.node("Abs", nodes.input(data))
    nodes.outputs.pop()
    nodes.node("MatMul", stored, nodes.constant(weight))
    proto = nodes.proto()
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    wanted: Any = {"device": DEVICE, "memory_path": "buffer", "precision": PRECISIONS[config.storage], "build": False}
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", **wanted)
    assert uses_tensor_cores(bundle.source.plain)
    with flashmem.Session(bundle, device=DEVICE) as session:
        require_right(proto, nodes.feeds, session.run(None, nodes.feeds))
