"""Graphs written as ONNX files, with random weights for known architectures: models of real size, without PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.base.files import written_whole
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Placeholder, Value
from flashmem.tools.zoo.graphs import zoo_graph

_INSIDE = 10**9
"""Most bytes of weights in one file: a message of protobuf holds two gigabytes."""

_SMALL = 1024
"""Bytes of a tensor from which on it lies outside. Shapes have fewer: inference of shapes reads them."""


def export_architecture(name: str, folder: Path, *, size: int | None = None, seed: int = 0) -> Path:
    """Write an architecture to `model.onnx` in `folder`, and an example of every input to `inputs.npz`; the model's path.
    Weights above a gigabyte are in `model.onnx.data`.

    Raises:
        UserError: no such architecture, or a size that it cannot take.
    """
    graph = zoo_graph(name, size)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    inputs: dict[str, Any] = {port.name: _example(port, random) for port in graph.inputs}
    with written_whole(folder / "inputs.npz") as file:
        np.savez(file, **inputs)
    path = folder / "model.onnx"
    nbytes = sum(value.size * np.dtype(value.dtype).itemsize for value in graph.constants())
    if nbytes <= _INSIDE:
        write_with_random_weights(graph, path, seed)
        return path
    with written_whole(folder / "model.onnx.data") as file:
        model = graph_to_onnx(graph, _Outside(graph, seed, file, "model.onnx.data").tensor)
    with written_whole(path) as file:
        file.write(model.SerializeToString())
    return path


def write_random(name: str, path: Path, seed: int = 0) -> None:
    """Write the architecture `name` to `path`, with weights drawn from `seed` so that its outputs depend on its inputs.

    Raises:
        UserError: no such architecture.
    """
    write_with_random_weights(zoo_graph(name), path, seed)


def write_with_random_weights(graph: Graph, path: Path, seed: int = 0) -> None:
    """Write `graph` to `path`. Its placeholders become weights drawn from `seed`."""
    drawn = _Drawn(graph, seed)
    model = graph_to_onnx(graph, lambda value, name: numpy_helper.from_array(drawn.array(value), name))
    onnx.checker.check_model(model)
    with written_whole(path) as file:
        file.write(model.SerializeToString())


class _Drawn:
    """The arrays of a graph's constants; placeholders become weights."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._users = _users(graph)

    def array(self, value: Value) -> NDArray[Any]:
        """The data of a constant."""
        assert value.constant is not None
        if isinstance(value.constant, Placeholder):
            return _weight(value, self._users[value], self._random)
        return np.array(value.constant.array())


class _Outside:
    """Tensors whose data are in a file beside the model, each written once it is drawn."""

    def __init__(self, graph: Graph, seed: int, file: IO[bytes], location: str) -> None:
        self._drawn = _Drawn(graph, seed)
        self._file = file
        self._location = location

    def tensor(self, value: Value, name: str) -> onnx.TensorProto:
        """The tensor of a constant."""
        array = self._drawn.array(value)
        if array.nbytes < _SMALL:
            return numpy_helper.from_array(array, name)
        tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        tensor.data_location = onnx.TensorProto.EXTERNAL
        at = self._file.tell()
        for key, said in (("location", self._location), ("offset", at), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(said))
        self._file.write(array.tobytes())
        return tensor


def _example(port: GraphPort, random: np.random.Generator) -> NDArray[Any]:
    """An example of an input: token ids that every vocabulary has, or numbers."""
    if port.dtype == "int64":
        return random.integers(0, 1000, port.value.shape)
    return random.standard_normal(port.value.shape, np.float32)


def _store(value: Value, name: str) -> onnx.TensorProto:
    assert value.constant is not None
    return numpy_helper.from_array(np.array(value.constant.array()), name)


def graph_to_onnx(graph: Graph, tensor: Callable[[Value, str], onnx.TensorProto] = _store) -> onnx.ModelProto:
    """Convert `graph` to a model; `tensor` makes one of a constant and a name, by default with the data inside."""
    names: dict[Value, str] = {port.value: port.name for port in (*graph.inputs, *graph.outputs)}

    def name(value: Value | None) -> str:
        return "" if value is None else names.setdefault(value, f"v{len(names)}_{value.name}")

    constants = [tensor(value, name(value)) for value in graph.constants() if value.constant]
    nodes = []
    for node in graph.nodes:
        attributes = {
            key: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            for key, value in node.attributes.items()
        }
        inputs = [name(v) for v in node.inputs]
        outputs = [name(v) for v in node.outputs]
        nodes.append(helper.make_node(node.op, inputs, outputs, name=node.name, **attributes))
    return helper.make_model(
        helper.make_graph(nodes, "graph", [_info(p) for p in graph.inputs], [_info(p) for p in graph.outputs], constants),
        opset_imports=[helper.make_opsetid("", graph.opset)],
        ir_version=10,
    )


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
