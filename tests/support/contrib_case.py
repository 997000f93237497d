"""A contrib operator of ONNX Runtime with inputs: the unit of the tests of its expansion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]

random = np.random.default_rng(7)


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """ONNX Runtime's answer, without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))  # type: ignore[no-any-return]


class Case:
    """A model of one node: run-time inputs, and constants; None for an omitted one."""

    def __init__(
        self,
        op: str,
        run_time: Sequence[Array | None],
        constants: Sequence[Array | None] = (),
        *,
        outputs: Sequence[int] = (0,),
        expected: Callable[[], Sequence[Array]] | None = None,
        model_opset: int = 21,
        domain: str = "com.microsoft",
        scores: bool = False,
        rows: Sequence[slice] | None = None,
        order: Sequence[int] | None = None,
        **attributes: Any,
    ) -> None:
        """`expected` computes the answer (default: ONNX Runtime); `rows` are the defined parts of the first output.

        `order`: of the inputs, among the run-time ones and then the constants.
        """
        self.op, self.expected, self.opset, self.rows = op, expected, model_opset, rows
        inputs = {f"x{i}": np.asarray(array) for i, array in enumerate(run_time) if array is not None}
        constants_ = {f"c{i}": np.asarray(array) for i, array in enumerate(constants) if array is not None}
        names = [f"x{i}" if array is not None else "" for i, array in enumerate(run_time)]
        names += [f"c{i}" if array is not None else "" for i, array in enumerate(constants)]
        names = names if order is None else [names[i] for i in order]
        made = [f"y{i}" if i in outputs else "" for i in range(max(outputs) + 1)]
        self.node = helper.make_node(op, names, made, name="n", domain=domain, **attributes)
        self.feeds = inputs
        self.initializers = [numpy_helper.from_array(array, name) for name, array in constants_.items()]
        self.inputs = [_info(name, array) for name, array in inputs.items()]
        self.outputs = [helper.make_empty_tensor_value_info(f"y{i}") for i in outputs]
        if scores:  # ONNX Runtime does not infer their type
            self.outputs[-1] = helper.make_tensor_value_info(f"y{outputs[-1]}", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([self.node], "g", self.inputs, self.outputs, self.initializers)
        self.model = helper.make_model(graph, opset_imports=imports(model_opset), ir_version=10)

    def reference(self) -> Sequence[Array]:
        """The right answer."""
        return run(self.model, self.feeds) if self.expected is None else self.expected()


def imports(opset: int) -> list[onnx.OperatorSetIdProto]:
    """ONNX's operators of that set, and ONNX Runtime's."""
    return [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]


def _info(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def floats(*shape: int, scale: float = 1.0) -> Array:
    """Normal numbers."""
    return (scale * random.standard_normal(shape)).astype(np.float32)


def ids(high: int, *shape: int) -> Array:
    """int32 below `high`."""
    return random.integers(0, high, shape).astype(np.int32)


def u8(*shape: int) -> Array:
    """Any uint8."""
    return random.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> Array:
    """Any int8."""
    return random.integers(-128, 128, shape).astype(np.int8)


def scale(*shape: int) -> Array:
    """A scale of quantisation."""
    return (0.02 + 0.02 * random.random(shape)).astype(np.float32)


def numbers(*values: int) -> Array:
    """int32."""
    return np.array(values, np.int32)


def places(*shape: int) -> Array:
    """Positions, as int64."""
    return random.integers(0, 20, shape)
