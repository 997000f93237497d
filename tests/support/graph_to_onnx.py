"""Runs graphs in ONNX Runtime: the reference for the importer's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import Graph


def run(model: onnx.ModelProto | str, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs by name, computed by ONNX Runtime without optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def draw(graph: Graph, seed: int, high: int) -> dict[str, NDArray[Any]]:
    """Inputs for `graph`: normal numbers, or integers below `high`."""
    random = np.random.default_rng(seed)
    feeds = {}
    for port in graph.inputs:
        dtype = np.dtype(port.dtype)
        numbers = random.standard_normal(port.value.shape) if dtype.kind == "f" else random.integers(0, high, port.value.shape)
        feeds[port.name] = numbers.astype(dtype)
    return feeds
