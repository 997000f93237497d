"""A chain of products with small weights, each of which a budget may stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem.base.errors import BudgetError

LAYERS, WIDTH = 6, 192


def smallest_budget(model: Path, folder: Path, **options: Any) -> int:
    """The smallest budget of `model` with these options."""
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(model, folder / "none.flashmem", budget=1, **options)
    return refused.value.smallest_bytes


def write_chain(path: Path) -> list[NDArray[np.float32]]:
    """A chain of products of any number of rows, with its weights."""
    random = np.random.default_rng(5)
    weights = [(random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(LAYERS)]
    nodes, value = [], "x"
    for number in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [value, f"w{number}"], [f"p{number}"]))
        nodes.append(helper.make_node("Tanh", [f"p{number}"], [value := f"t{number}"]))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", value)]
    held = [numpy_helper.from_array(array, f"w{number}") for number, array in enumerate(weights)]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return weights


def chained(x: NDArray[np.float32], weights: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """The answer for `x` in float64."""
    value = x.astype(np.float64)
    for weight in weights:
        value = np.tanh(value @ weight)
    return value
