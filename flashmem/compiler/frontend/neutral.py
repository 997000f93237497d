"""Removal of operators without effect: x + 0, x * 1, a Where with a constant condition, a change to the same shape.

Exporters write few of these, but ONNX's own definitions of larger operators contain many: Attention adds a mask of zeros and
clears rows that nothing masks. The result keeps its bits, except that -0 + 0 becomes -0.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_LARGEST = 1 << 20
"""The most elements of a constant that is checked. Weights in files are never read."""

_NEUTRAL_RIGHT = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
_NEUTRAL_LEFT = {"Add": 0, "Mul": 1}
_SHAPE_ONLY = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Expand"}


class RemoveNeutralPass(ir.passes.InPlacePass):
    """Replaces the output of an operator without effect by its input, if type and shape are equal."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Walk over the graph in order, so that one walk removes chains."""
        modified = False
        for node in model.graph:
            if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
                continue
            same = _same_as(node)
            if same is not None and _alike(same, node.outputs[0]):
                node.outputs[0].replace_all_uses_with(same)
                model.graph.remove(node, safe=True)
                modified = True
        return ir.passes.PassResult(model, modified)


def _same_as(node: ir.Node) -> ir.Value | None:
    """The input that has the same elements as the output of `node`, or None."""
    inputs = node.inputs
    if node.op_type in _SHAPE_ONLY:
        return inputs[0]
    if node.op_type in _NEUTRAL_RIGHT and _is_all(inputs[1], _NEUTRAL_RIGHT[node.op_type]):
        return inputs[0]
    if node.op_type in _NEUTRAL_LEFT and _is_all(inputs[0], _NEUTRAL_LEFT[node.op_type]):
        return inputs[1]
    if node.op_type == "Where":
        if _is_all(inputs[0], 1):
            return inputs[1]
        if _is_all(inputs[0], 0):
            return inputs[2]
    return None


def _is_all(value: ir.Value | None, element: int) -> bool:
    """Whether `value` is a constant whose elements are all `element`."""
    tensor = None if value is None else value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or not 0 < tensor.size <= _LARGEST:
        return False
    data: NDArray[np.generic] = tensor.numpy()
    return bool(np.all(data == element))


def _alike(one: ir.Value, other: ir.Value) -> bool:
    if one.shape is None or other.shape is None or not one.shape.is_static():
        return False
    return one.dtype == other.dtype and one.shape == other.shape
