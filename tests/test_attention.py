"""Fused attention against ONNX Runtime: every form on every device, and that scores are never in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_cases import FORMS, Model, read_elsewhere
from compared import DEVICES, by_runtime

import flashmem
from flashmem.graph.ir import Graph
from flashmem.graph.onnx_import import import_model
from flashmem.graph.operators import why_unsupported
from flashmem.graph.passes import prepare
from flashmem.program import Program

DATA = Path(__file__).parent / "data"


def graph_of(model: Model, folder: Path) -> Graph:
    onnx.save(model.proto(), folder / "graph.onnx")
    return prepare(import_model(folder / "graph.onnx", {}, why_unsupported))


def operators(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_one_operator_that_reads_its_parts_where_they_lie(name: str, tmp_path: Path) -> None:
    model = Model()
    FORMS[name](model)
    found = operators(graph_of(model, tmp_path))
    assert found.count("FusedAttention") == 1
    left = {"Conv", "Transpose"} if name == "images" else set()  # of the convolution's input, and the scaled values
    assert set(found) - {"FusedAttention", "Reshape"} <= left


@pytest.mark.parametrize(("name", "model"), read_elsewhere())
def test_scores_that_others_read_stay(name: str, model: Model, tmp_path: Path) -> None:
    assert "FusedAttention" not in operators(graph_of(model, tmp_path))
    _compare(model, DEVICES[0][0], DEVICES[0][0], "buffer", tmp_path)


def _compare(model: Model, compiled_for: str, device: str, path: str, folder: Path) -> Program:
    onnx.save(model.proto(), folder / "model.onnx")
    bundle = flashmem.compile(folder / "model.onnx", folder / "b.flashmem", device=compiled_for, memory_path=path)  # type: ignore[arg-type]
    with flashmem.Session(bundle, device=device) as session:
        answers = session.run(None, model.feeds)
    for name, answer, wanted in zip(model.answers, answers, by_runtime(model.proto(), model.feeds), strict=True):
        largest = float(np.nanmax(np.abs(wanted)))
        np.testing.assert_allclose(answer, wanted, rtol=1e-5, atol=1e-5 * largest, err_msg=name)
    return bundle.program


@pytest.mark.parametrize("kernels", ["its own", "a GPU's"])
@pytest.mark.parametrize(("device", "path"), DEVICES)
def test_answers_are_those_of_onnx_runtime(device: str, path: str, kernels: str, tmp_path: Path) -> None:
    model = Model()
    for form in FORMS.values():
        form(model)
    _compare(model, device if kernels == "its own" else "nvidia", device, path, tmp_path)
