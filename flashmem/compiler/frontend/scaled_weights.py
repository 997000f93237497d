"""Recognition of manually dequantised weights: integers, cast and multiplied by a scale, become a DequantizeLinear.

Files with 8-bit weights and without quantised operators have this form. Otherwise folding would convert the integers to floats,
and every run would multiply them. The file on disk would be four times as large, and a whole weight would be among the
activations. The result keeps its bits, since DequantizeLinear without a zero point is the same product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

_CODES = {ir.DataType.INT8, ir.DataType.UINT8}
_AXIS_SINCE = 13  # before this operator set a DequantizeLinear has one scale
_NONE = -1


class RecogniseDequantizePass(ir.passes.InPlacePass):
    """Replaces Mul(Cast(weight), scale), if the weight is in a file and the scale has one element, or varies along one axis."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Walk over the graph once."""
        opset = model.opset_imports.get("", 0)
        modified = False
        for node in model.graph:
            if node.op_type != "Mul" or node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
                continue
            for value, scale in (node.inputs, node.inputs[::-1]):
                codes = _codes(value)
                axis = None if codes is None or scale is None else _axis(codes, scale)
                if codes is None or scale is None or axis is None or (axis != _NONE and opset < _AXIS_SINCE):
                    continue
                _replace(model.graph, node, codes, scale, axis)
                modified = True
                break
        return ir.passes.PassResult(model, modified)


def _codes(value: ir.Value | None) -> ir.Value | None:
    """The weight of which `value` is a cast, or None."""
    cast = None if value is None else value.producer()
    if cast is None or cast.op_type != "Cast" or cast.attributes.get_int("to", 0) != ir.DataType.FLOAT:
        return None
    codes = cast.inputs[0]
    tensor = None if codes is None else codes.const_value
    return codes if isinstance(tensor, ir.ExternalTensor) and tensor.dtype in _CODES else None


def _axis(codes: ir.Value, scale: ir.Value) -> int | None:
    """The axis of `codes` along which `scale` varies, `_NONE` for a single element; None if it is no scale of `codes`."""
    if codes.const_value is None or scale.const_value is None or scale.const_value.dtype != ir.DataType.FLOAT:
        return None
    shape = codes.const_value.shape.numpy()
    given = scale.const_value.shape.numpy()
    if len(given) > len(shape):
        return None
    aligned = (1,) * (len(shape) - len(given)) + tuple(given)
    axes = [axis for axis, size in enumerate(aligned) if size != 1]
    if not axes:
        return _NONE
    return axes[0] if len(axes) == 1 and aligned[axes[0]] == shape[axes[0]] else None


def _replace(graph: ir.Graph, node: ir.Node, codes: ir.Value, scale: ir.Value, axis: int) -> None:
    """Replace `node`, a Mul, by a DequantizeLinear, and drop the Cast before it if nothing else reads it."""
    assert codes.const_value is not None and scale.const_value is not None
    elements = np.array(scale.const_value.numpy(), np.float32).reshape(() if axis == _NONE else -1)
    flat = _initializer(graph, f"{scale.name}_{codes.name}", elements)
    made = ir.node("DequantizeLinear", [codes, flat], {} if axis == _NONE else {"axis": axis}, name=node.name)
    old = node.outputs[0]
    new = made.outputs[0]
    new.name = old.name
    new.type = ir.TensorType(ir.DataType.FLOAT)
    new.shape = _shape(codes.const_value.shape.numpy())
    casts = [value.producer() for value in node.inputs if value is not None]
    graph.insert_before(node, made)
    old.replace_all_uses_with(new)
    graph.remove(node, safe=True)
    for cast in casts:
        if cast is not None and cast.op_type == "Cast" and not cast.outputs[0].uses() and not cast.outputs[0].is_graph_output():
            graph.remove(cast, safe=True)


def _initializer(graph: ir.Graph, name: str, data: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> ir.Value:
    """A new initializer of `graph`, whose name begins with `name`."""
    while name in graph.initializers:
        name += "_"
    made = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=_shape(data.shape), const_value=ir.tensor(data))
    graph.register_initializer(made)
    return made


def _shape(sizes: Sequence[int]) -> ir.Shape:
    return ir.Shape(list(sizes))
