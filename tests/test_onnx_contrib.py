"""Operators of ONNX Runtime's own, expanded into ONNX's: against ONNX Runtime, which runs both, and against numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import flashmem
from flashmem.errors import UnsupportedModelError, UserError
from flashmem.graph import contrib
from flashmem.graph.ir import FileConstant
from flashmem.graph.onnx_cleanup import clean_up
from flashmem.graph.onnx_import import import_model
from flashmem.graph.operators import is_native

Array = NDArray[Any]

rng = np.random.default_rng(7)


def floats(*shape: int, scale: float = 1.0) -> Array:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def ids(high: int, *shape: int) -> Array:
    return rng.integers(0, high, shape).astype(np.int32)


def u8(*shape: int, high: int = 256) -> Array:
    return rng.integers(0, high, shape).astype(np.uint8)


def i8(*shape: int) -> Array:
    return rng.integers(-128, 128, shape).astype(np.int8)


def f32(value: float) -> Array:
    return np.float32(value)  # type: ignore[return-value]


class Case:
    """A node of ONNX Runtime's: inputs that are given in a run, constants, and inputs that are left out (None)."""

    def __init__(
        self,
        op: str,
        run_time: Sequence[Array | None],
        constants: Sequence[Array | None] = (),
        outputs: Sequence[int] = (0,),
        expected: Callable[..., Sequence[Array]] | None = None,
        opset: int = 21,
        domain: str = "com.microsoft",
        atol: float = 2e-5,
        **attributes: Any,
    ) -> None:
        self.op, self.expected, self.opset, self.atol, self.domain = op, expected, opset, atol, domain
        self.feeds = {f"x{i}": array for i, array in enumerate(run_time) if array is not None}
        self.constants = {f"c{i}": array for i, array in enumerate(constants) if array is not None}
        names = [f"x{i}" if array is not None else "" for i, array in enumerate(run_time)]
        names += [f"c{i}" if array is not None else "" for i, array in enumerate(constants)]
        made = [f"y{i}" if i in outputs else "" for i in range(max(outputs) + 1)]
        node = helper.make_node(op, names, made, name="n", domain=domain, **attributes)
        inputs = [_info(name, array) for name, array in self.feeds.items()]
        results = [helper.make_empty_tensor_value_info(f"y{i}") for i in outputs]
        if op == "MultiHeadAttention" and 3 in outputs:
            results[-1] = helper.make_tensor_value_info("y3", 1, None)
        constants_ = [numpy_helper.from_array(np.asarray(array), name) for name, array in self.constants.items()]
        graph = helper.make_graph([node], "g", inputs, results, constants_)
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        self.model = helper.make_model(graph, opset_imports=imports, ir_version=10)

    def reference(self) -> Sequence[Array]:
        """ONNX Runtime's answer, or the one that this case computes."""
        if self.expected is not None:
            return self.expected(*self.feeds.values(), *self.constants.values())
        return run(self.model, self.feeds)

    def __repr__(self) -> str:
        return self.op


def _info(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Sequence[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))  # type: ignore[no-any-return]


def expanded(case: Case) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    contrib.mark(proto)
    for output in proto.graph.output:
        output.type.Clear()
    model = ir.to_proto(clean_up(proto, is_native))
    assert {node.domain for node in model.graph.node} <= {""}, [node.op_type for node in model.graph.node]
    return model
