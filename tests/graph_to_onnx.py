"""Writes a `Graph` back as ONNX, so that ONNX Runtime can say what it computes: the reference for the importer's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.graph.ir import Graph, GraphPort, Value


def graph_to_onnx(graph: Graph) -> onnx.ModelProto:
    """`graph` as a model with all weights inside; constants keep the types they are stored in."""
    names: dict[Value, str] = {port.value: port.name for port in (*graph.inputs, *graph.outputs)}

    def name(value: Value | None) -> str:
        return "" if value is None else names.setdefault(value, f"v{len(names)}_{value.name}")

    constants = [numpy_helper.from_array(np.array(v.constant.array()), name(v)) for v in graph.constants() if v.constant]
    nodes = []
    for node in graph.nodes:
        attributes = {
            key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            for key, value in node.attributes.items()
        }
        inputs, outputs = [name(v) for v in node.inputs], [name(v) for v in node.outputs]
        nodes.append(helper.make_node(node.op, inputs, outputs, name=node.name, **attributes))
    model = helper.make_model(
        helper.make_graph(nodes, "graph", [_info(p) for p in graph.inputs], [_info(p) for p in graph.outputs], constants),
        opset_imports=[helper.make_opsetid("", graph.opset)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    return model


def _info(port: GraphPort) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype)), port.value.shape)


def run(model: onnx.ModelProto | str, feeds: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs by name, computed by ONNX Runtime as the model is written (no optimisation)."""
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
