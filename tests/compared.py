"""Models of many nodes, each an output, compared with a reference: one program for each device compiles them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import flashmem
from flashmem.errors import UnsupportedModelError
from flashmem.runtime.opencl import list_devices

Array = NDArray[Any]
_NAMES = [device.descriptor_name for device in list_devices()]

PLACES = [(name, path) for name in _NAMES for path in ("buffer", "texture")]
"""Every device on every memory path, for nodes with weights."""

DEVICES = [(name, ("buffer", "texture")[index % 2]) for index, name in enumerate(_NAMES)]
"""Every device once, for nodes that read no weights."""


@dataclass
class Nodes:
    """Nodes under construction; inputs are run-time data, constants initializers."""

    opset: int = 20
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, data: Any) -> str:
        """The name of run-time data."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.asarray(data)
        return name

    def constant(self, data: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def node(self, op: str, *inputs: str, dtypes: Sequence[str] = ("float32",), **attributes: Any) -> list[str]:
        """A node whose outputs, of these types, are outputs of the model; their names."""
        names = [f"{op}{len(self.nodes)}.{i}" for i in range(len(dtypes))]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        for name, dtype in zip(names, dtypes, strict=True):
            self.outputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))
        return names

    def proto(self) -> onnx.ModelProto:
        """The model."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for name, data in self.feeds.items()
        ]
        graph = helper.make_graph(self.nodes, "nodes", inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


def by_runtime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """What ONNX Runtime answers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    answers: list[Array] = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))
    return answers


def by_reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """What the reference evaluator of the onnx package answers."""
    return list(ReferenceEvaluator(model).run(None, dict(feeds)))


def answers_of(model: onnx.ModelProto, feeds: Mapping[str, Array], place: tuple[str, str], folder: Path) -> list[Array]:
    """What flashmem answers on a device and a memory path."""
    device, path = place
    onnx.save(model, folder / "model.onnx")
    bundle = flashmem.compile(folder / "model.onnx", folder / "b.flashmem", device=device, memory_path=path)  # type: ignore[arg-type]
    with flashmem.Session(bundle, device=device) as session:
        return list(session.run(None, dict(feeds)))


def compare(
    nodes: Nodes,
    place: tuple[str, str],
    folder: Path,
    reference: Callable[[onnx.ModelProto, Mapping[str, Array]], Sequence[Array]] = by_runtime,
    tolerance: float = 1e-5,
) -> None:
    """AssertionError unless every output is the reference's, floats within `tolerance` of the largest element."""
    model = nodes.proto()
    answers, expected = answers_of(model, nodes.feeds, place, folder), reference(model, nodes.feeds)
    for info, answer, wanted in zip(model.graph.output, answers, expected, strict=True):
        assert answer.dtype == np.asarray(wanted).dtype and answer.shape == np.asarray(wanted).shape, info.name
        if answer.dtype.kind != "f":
            np.testing.assert_array_equal(answer, wanted, err_msg=info.name)
            continue
        largest = float(np.nanmax(np.abs(wanted), initial=1e-6))
        np.testing.assert_allclose(answer, wanted, rtol=tolerance, atol=tolerance * largest, err_msg=info.name)


def refusal(nodes: Nodes, folder: Path) -> str:
    """The sentence with which the model is refused."""
    onnx.save(nodes.proto(), folder / "refused.onnx")
    with pytest.raises(UnsupportedModelError) as refused:
        flashmem.compile(folder / "refused.onnx", folder / "refused.flashmem", device="generic-cpu")
    return str(refused.value)
