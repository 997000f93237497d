"""A model whose later runs use another kernel, and one launch instead of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.kernels.contraction.configs import Contraction, StagedContraction
from flashmem.compiler.selection.selector import KernelRequest, KernelSelector
from tests.support.compared import Nodes

Wide = tuple[Path, dict[str, Any], list[Any]]
"""A model, its inputs, and the expected answers."""


def parted(panel: int) -> StagedContraction:
    """A config whose panels have `panel` columns, and which sums the depth in four parts."""
    return StagedContraction("parted", 4, 8, (2, panel // 8), k_block=16, two_stage=True, slice_k=4, families=("matmul",))


def wide_model(folder: Path) -> Wide:
    """Two products: the first has weights of two slices, the second of one. Also returns inputs and expected answers."""
    nodes, random = Nodes(), np.random.default_rng(3)
    weight = random.standard_normal((512, 4096), np.float32) / 16
    [wide] = nodes.node("MatMul", nodes.input(random.standard_normal((19, 512), np.float32)), nodes.constant(weight))
    nodes.node("MatMul", wide, nodes.constant(random.standard_normal((4096, 36), np.float32) / 64))
    model = nodes.proto()
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, nodes.feeds)
    return folder / "m.onnx", nodes.feeds, expected


def with_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on later runs use such a kernel for the second product, with the panels of the first runs' kernel."""

    def sooner(selector: KernelSelector, request: KernelRequest, first: KernelConfig) -> KernelConfig:
        if request.workload.depth != 4096:
            return first
        assert isinstance(first, Contraction)
        return parted(first.panel)

    monkeypatch.setattr(KernelSelector, "_sooner", sooner)


def close_to(answers: list[Any], expected: list[Any]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, wanted, atol=1e-5 * np.ptp(wanted))


def equal(answers: list[Any], others: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(answers, others, strict=True))
