"""Graphs written as ONNX files, with random weights for known architectures: models of real size, without PyTorch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.base.files import written_whole
from flashmem.compiler.ir.graph import ArrayConstant, Graph, GraphPort, Node, Placeholder, Value
from flashmem.tools.zoo.graphs import zoo_graph


def write_random(name: str, path: Path, seed: int = 0) -> None:
    """Write the architecture `name` to `path`, with weights drawn from `seed` so that its outputs depend on its inputs.

    Raises:
        UserError: no such architecture.
    """
    write_with_random_weights(zoo_graph(name), path, seed)


def write_with_random_weights(graph: Graph, path: Path, seed: int = 0) -> None:
    """Write `graph` to `path`. Its placeholders become weights drawn from `seed`."""
    random = np.random.default_rng(seed)
    users = _users(graph)
    for value in graph.constants():
        if isinstance(value.constant, Placeholder):
            value.constant = ArrayConstant(_weight(value, users[value], random))
    with written_whole(path) as file:
        file.write(graph_to_onnx(graph).SerializeToString())


def graph_to_onnx(graph: Graph) -> onnx.ModelProto:
    """Convert `graph` to a model with all weights inside; constants keep their stored types."""
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
        inputs = [name(v) for v in node.inputs]
        outputs = [name(v) for v in node.outputs]
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


def _users(graph: Graph) -> dict[Value, Node]:
    """The last user of each value."""
    return {value: node for node in graph.nodes for value in node.inputs if value is not None}


def _weight(value: Value, user: Node, random: np.random.Generator) -> NDArray[np.generic]:
    """Random weights that keep activations near one: scaled by the length of the sum (He et al., ICCV 2015)."""
    shape = value.shape
    drawn = random.standard_normal(shape, np.float32)
    if len(shape) == 1:  # scales and biases
        return drawn * np.float32(0.1) + np.float32(user.op == "LayerNormalization" and value.name.endswith("weight"))
    if user.op == "Conv" or (user.op == "Gemm" and user.attributes.get("transB")):
        return drawn * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    if user.op == "MatMul":
        return drawn * np.float32(math.sqrt(1 / shape[0]))
    return drawn * np.float32(math.sqrt(1 / shape[-1]))
